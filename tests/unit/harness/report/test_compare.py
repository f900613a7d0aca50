from pathlib import Path

import pytest

from harness.errors import InputError
from harness.files import load_json, write_json
from harness.record.folder import RunFolder
from harness.report.compare import compare, comparison_rows
from harness.verdict.publish import publish
from tests.folder import Ttft, helps, write_run


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
    assert (change.change, change.low, change.high) == (2.0, 2.0, 2.0)
    assert change.says == "changed"


def test_sessions_that_overlap_show_no_change(tmp_path: Path) -> None:
    first = published(tmp_path, "a", lambda p, a, s, d: 100.0 + 10 * p)  # baseline 110, 140
    later = published(tmp_path, "b", lambda p, a, s, d: 110.0 + 10 * p)  # baseline 120, 150
    change = compare([first, later]).passes["pass1-cold"]["baseline"][0]
    assert (change.change, change.low) == (135 / 125, 120 / 140)
    assert change.says == "no change shown"


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


def test_another_engine_version_is_refused(tmp_path: Path) -> None:
    first, later = published(tmp_path, "a"), published(tmp_path, "b")
    file = later / "summary.json"
    file.write_text(file.read_text(encoding="utf-8").replace("0.32.0", "0.33.0"), encoding="utf-8")
    with pytest.raises(InputError, match=r"server.baseline.vllm_version: a has '0.32.0', b has"):
        compare([first, later])


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
