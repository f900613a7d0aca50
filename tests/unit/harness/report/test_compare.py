import json
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.files import load_json, write_json
from harness.record.folder import RunFolder
from harness.report.compare import Samples, changes, compare, comparison_rows
from harness.verdict.publish import publish
from tests.command import kvcliff
from tests.folder import Ttft, helps, write_run
from tests.places import ROOT


def published(results: Path, name: str, ttft: Ttft = helps) -> Path:
    folder = write_run(results, name, ttft)
    publish(RunFolder(folder))
    return folder


def edit(run: Path, *path: str, value: object) -> None:
    file = run / "summary.json"
    content = load_json(file.read_bytes(), where=str(file))
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    write_json(file, content)


def test_a_run_twice_as_slow_has_changed_by_2(tmp_path: Path) -> None:
    first = published(tmp_path, "a")
    later = published(tmp_path, "b", lambda p, a, s, d: 2 * helps(p, a, s, d))
    change = compare([first, later]).passes["pass2-replay"]["baseline"][0]
    assert (change.change, change.low, change.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (change.says, change.p) == ("changed", 0.0)


def test_sessions_that_overlap_show_no_change(tmp_path: Path) -> None:
    first = published(tmp_path, "a", lambda p, a, s, d: 100.0 + 10 * p)  # baseline 110, 140
    later = published(tmp_path, "b", lambda p, a, s, d: 110.0 + 10 * p)  # baseline 120, 150
    change = compare([first, later]).passes["pass1-cold"]["baseline"][0]
    # Means of the logs: sqrt(110 x 140) = 124.1 and sqrt(120 x 150) = 134.2; Welch's error of their
    # difference 0.1643, and t 4.32 of 1.99 degrees of freedom.
    assert (change.first.p50_ms, change.later.p50_ms) == pytest.approx((124.1, 134.16), abs=0.01)
    assert change.change == pytest.approx(1.0811, abs=1e-4)
    assert (change.low, change.high) == pytest.approx((0.531, 2.199), abs=0.003)
    assert change.says == "no change shown"


def test_p_values_are_those_of_all_cells_together() -> None:
    # Welch with 2 degrees of freedom: of t = 10 twice 0.00985 / 2, so 0.00985; of t = 3, 0.0955. By
    # Holm the smaller counts twice, and the larger is no smaller than it: 0.0197 and 0.0955.
    def by(t: float) -> tuple[list[float], list[float]]:
        return [-0.1, 0.1], [t * 0.1 * 2**0.5 - 0.1, t * 0.1 * 2**0.5 + 0.1]

    found = changes({("p", "a"): [Samples("r", *by(3))], ("p", "b"): [Samples("r", *by(10))]})
    (smaller,), (larger,) = found["p", "b"], found["p", "a"]
    assert (smaller.p, larger.p) == pytest.approx((0.0197, 0.0955), abs=1e-4)
    assert (smaller.says, larger.says) == ("changed", "no change shown")


def test_one_session_a_side_is_too_few_to_say_anything() -> None:
    (found,) = changes({("p", "a"): [Samples("r", [0.0], [1.0, 1.1])]})["p", "a"]
    assert (found.says, found.p, found.low) == ("too few sessions", None, None)
    assert found.change == pytest.approx(2.858, abs=0.001)  # e^1.05


def test_a_comparison_errs_in_at_most_5_percent_of_tables_and_gains_with_each_session() -> None:
    table = json.loads((ROOT / "results" / "operating.json").read_text(encoding="utf-8"))
    compared = table["compare"]
    assert all(share <= 0.05 + 0.015 for share in compared["unchanged"].values())
    shares = list(compared["1.2 times slower"].values())
    assert shares == sorted(shares)
    assert shares[-1] >= 0.95


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("environment", "cpu"), "another CPU", "environment.cpu: a has 'a CPU', b has 'another"),
        (("environment", "gpus"), ["H200"], "environment.gpus: a has None, b has ['H200']"),
        (("plan", "server", "block_size"), 16, "plan.server.block_size: a has 32, b has 16"),
        (
            ("plan", "arms", "lmcache", "tier"),
            "native",
            "plan.arms.lmcache.tier: a has 'lmcache-mp', b has 'native'",
        ),
        (("plan", "model", "path"), "other", "plan.model.path: a has 'tiny', b has 'other'"),
    ],
)
def test_what_must_not_be_compared_is_refused_naming_both_values(
    tmp_path: Path, path: tuple[str, ...], value: object, named: str
) -> None:
    first, later = published(tmp_path, "a"), published(tmp_path, "b")
    edit(later, *path, value=value)
    with pytest.raises(InputError) as error:
        compare([first, later])
    assert named in str(error.value)


def test_another_engine_version_is_refused_unless_it_is_what_is_compared(tmp_path: Path) -> None:
    first, later = published(tmp_path, "a"), published(tmp_path, "b")
    file = later / "summary.json"
    file.write_text(file.read_text(encoding="utf-8").replace("0.32.0", "0.33.0"), encoding="utf-8")
    with pytest.raises(InputError, match=r"server.baseline.vllm_version: a has '0.32.0', b has"):
        compare([first, later])
    with pytest.raises(InputError, match=r"server.baseline.vllm_version"):
        compare([first, later], across="machine")
    across = compare([first, later], across="engines").across
    assert across["server.baseline.vllm_version"] == ["0.32.0", "0.33.0"]


def test_a_factor_in_which_runs_do_not_differ_is_named(tmp_path: Path) -> None:
    runs = [published(tmp_path, name) for name in "ab"]
    with pytest.raises(InputError, match="do not differ in host-size"):
        compare(runs, across="host-size")


@pytest.mark.parametrize(("by", "code"), [(2.0, 1), (0.5, 0), (1.0, 0)])
def test_a_gate_fails_on_a_run_that_has_become_slower(tmp_path: Path, by: float, code: int) -> None:
    runs = [
        write_run(tmp_path, "a"),
        write_run(tmp_path, "b", lambda p, a, s, d: by * helps(p, a, s, d)),
    ]
    assert kvcliff("compare", *map(str, runs), "--fail-on", "worse:1.05") == code


def test_a_gate_that_is_no_factor_says_what_is_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    assert kvcliff("compare", "a", "b", "--fail-on", "slower") == 2
    assert "worse:1 to worse:1000" in capfd.readouterr().err


def test_an_arm_that_is_absent_in_one_run_has_no_change(tmp_path: Path) -> None:
    first, later = published(tmp_path, "a"), published(tmp_path, "b")
    file = later / "summary.json"
    content = load_json(file.read_bytes(), where="summary")
    del content["passes"]["pass2-replay"]["arms"]["lmcache"]
    write_json(file, content)
    compared = compare([first, later])
    change = compared.passes["pass2-replay"]["lmcache"][0]
    assert (change.change, change.says) == (None, "no sessions")
    cells = [row for row in comparison_rows(compared) if row[:2] == ("pass2-replay", "lmcache")]
    assert cells == [("pass2-replay", "lmcache", "2", "10.0 (2)", "–", "–", "–", "no sessions")]


def test_one_run_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two or more"):
        compare([published(tmp_path, "a")])


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = published(tmp_path, "a")
    with pytest.raises(InputError, match="a is given twice"):
        compare([run, run])
