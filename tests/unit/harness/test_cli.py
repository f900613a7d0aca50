import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from harness import cli
from harness.errors import InputError
from servers.processes import Ledger, identify
from tests.command import kvcliff
from tests.factory import PLAN_TOML
from tests.places import ROOT


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run", "--res", "x"], "No such option: --res"),
        (["run", "--results", "a", "--results", "b"], "--results is given 2 times"),
        (["run", "--results=a", "--results=b"], "--results is given 2 times"),
        (["plan", "--json", "--json"], "--json is given 2 times"),
        (["curve", "t", "--gpu", "1", "--at", "2"], "--gpu is given 2 times"),
        (["--version", "--version"], "--version is given 2 times"),
        (["plan", "a.toml", "b.toml"], "unexpected extra argument"),
        (["reconcile"], "Missing argument"),
        (["plan", "nope.toml"], "cannot read the plan 'nope.toml'"),
        (["run", "nope"], "presets: big-8b, demo"),
        (["reconcile", "nowhere"], "nowhere is not a run folder"),
        (["summarize", "nowhere"], "nowhere is not a run folder"),
        (["run", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["run", "demo", "--resume", "nowhere"], "--resume goes on with its run's own plan"),
        (["run", "--results", "r", "--resume", "nowhere"], "leave out PLAN and --results"),
        (
            ["plan", "demo", "--deployment", "d.toml"],
            "leave out PLAN, --probe, --like and --dummy-weights",
        ),
        (["plan", "--deployment", "d.toml", "--probe", "p"], "is a question of its own"),
    ],
)
def test_wrong_usage_exits_2_with_a_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    # A72
    assert kvcliff(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_command_declares_by_itself_which_of_its_options_may_be_repeated() -> None:
    got = []

    def tag(
        label: Annotated[list[str] | None, typer.Option()] = None,
        colour: Annotated[str, typer.Option()] = "red",
    ) -> None:
        """Stick labels on."""
        got.append((label, colour))

    app = cli.command_line({"tag": tag})
    app(args=["tag", "--label", "a", "--label=b", "--colour", "blue"], standalone_mode=False)
    assert got == [(["a", "b"], "blue")]
    with pytest.raises(InputError, match="--colour is given 3 times"):
        app(args=["tag", *["--colour", "red"] * 2, "--colour=red"], standalone_mode=False)
    assert len(got) == 1


def test_an_option_takes_the_same_kind_of_value_in_every_command() -> None:
    group: Any = get_command(cli.command_line(cli.COMMANDS))
    kinds: dict[str, set[tuple[str, bool, bool]]] = {}
    for command in group.commands.values():
        for option in (p for p in command.params if p.param_type_name == "option"):
            for name in option.opts:
                kind = (repr(option.bare_type), option.is_flag, option.multiple)
                kinds.setdefault(name, set()).add(kind)
    assert len(kinds) > 20
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("line", "completed"),
    [("kvcliff ", list(cli.COMMANDS)), ("kvcliff plan --d", ["--deployment", "--dummy-weights"])],
)
def test_a_shell_completes_commands_and_options(line: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()"],
        env=os.environ | words | {"_KVCLIFF_COMPLETE": "complete_bash"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == completed


def test_plan_starts_nothing_and_predicts_the_cliff_of_the_demo(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # 10 documents of 2,048 + 20 tokens in a GPU tier of 291 usable blocks of 32: pass 2 computes
    # every token of the baseline and 20 a request of the tier arm. In the reverse pass four
    # documents of 64 blocks are whole (8,192 tokens) and 34 blocks of the fifth are left (1,088):
    # 291 - 4 * 64 - 1 un-hashed tail.
    assert kvcliff("plan", "demo", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["predicted"]["baseline"]["pass2-replay"] == {
        "computed": 20_680, "gpu_hit": 0, "host_loaded": 0
    }  # fmt: skip
    assert content["predicted"]["lmcache-mp"]["pass2-replay"] == {
        "computed": 200, "gpu_hit": 0, "host_loaded": 20_480
    }  # fmt: skip
    assert content["predicted"]["lmcache-mp"]["pass3-reverse"]["gpu_hit"] == 8_192 + 1_088
    assert content["warnings"] == []
    assert list(tmp_path.glob("results/*")) == []


def test_plan_warns_when_no_effect_of_the_tier_is_possible(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # A43: both documents fit the GPU tier.
    (tmp_path / "fits.toml").write_text(
        PLAN_TOML.replace("num_gpu_blocks = 18", "num_gpu_blocks = 99")
    )
    assert kvcliff("plan", "fits.toml") == 0
    assert "predicted to load nothing from the host" in capsys.readouterr().err


def test_a_broken_plan_file_is_named_with_its_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text(PLAN_TOML.replace("documents = 2", "documents = -2"))
    assert kvcliff("plan", "my.toml") == 2
    assert "my.toml: workload.documents" in capsys.readouterr().err


def test_doctor_fails_on_a_left_over_server_and_names_its_pid(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ours = identify(os.getpid())
    assert ours is not None
    (tmp_path / "results" / "killed").mkdir(parents=True)
    ledger = Ledger(
        tmp_path / "results" / "killed" / "processes.jsonl", session="01-baseline", work="kvc-x"
    )
    ledger.started(ours, "vllm")
    assert kvcliff("doctor", "--json") == 3
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert len(checks) >= 6
    assert str(os.getpid()) in checks["left-over servers"]["found"]
    assert checks["left-over servers"]["remedy"] == "kvcliff run --end-leftovers"


def test_a_results_folder_that_cannot_be_made_is_an_environment_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "my.toml").write_text(PLAN_TOML)
    assert kvcliff("run", "my.toml", "--results", "file/results") == 3
    captured = capsys.readouterr()
    assert "Not a directory" in captured.err
    assert "Traceback" not in captured.err


def test_verbose_shows_where_an_error_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvcliff("-v", "plan", "nope.toml") == 2
    assert "Traceback" in capsys.readouterr().err


def planted(*_: object, **__: object) -> None:
    raise ValueError("planted")


SPEC = {"engine": "0.32.0", "block_size": 4, "num_gpu_blocks": 9, "max_batched_tokens": 64}
TRACE_ROW = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("words", "in_code", "where"),
    [
        (["describe", "t.jsonl"], "sim.curves.formats.moment", "sim/curves/formats.py"),
        (["predict", "s.json", "r.jsonl"], "sim.predict.reusable_blocks", "sim/predict.py"),
        (["plan", "demo"], "sim.predict.reusable_blocks", "sim/predict.py"),
    ],
)
def test_a_bug_of_ours_is_shown_as_one_and_not_as_wrong_input(
    words: list[str], in_code: str, where: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "t.jsonl").write_text(json.dumps(TRACE_ROW) + "\n")
    (tmp_path / "s.json").write_text(json.dumps(SPEC))
    (tmp_path / "r.jsonl").write_text('{"prompt": [1, 2], "output_len": 1}\n')
    assert kvcliff(*words) == 0
    capsys.readouterr()
    monkeypatch.setattr(in_code, planted)
    assert kvcliff(*words) == 70
    said = capsys.readouterr().err
    assert "a fault of kvcliff's own, not of what it was given: ValueError: planted" in said
    assert re.search(rf"  at {where}:[1-9][0-9]*, in _", said)
    assert f"→ kvcliff -v {' '.join(words)}" in said
    assert "Traceback" not in said
    assert kvcliff("-v", *words) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_line_of_a_trace_that_cannot_be_read_is_named_with_its_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [TRACE_ROW, {**TRACE_ROW, "input_length": "many"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert kvcliff("describe", "t.jsonl") == 2
    said = capsys.readouterr().err
    assert "t.jsonl:2: field 'input_length' is 'many'; a whole number is needed" in said


def test_the_trace_commands_answer_in_the_published_fields(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Blocks 1 2 | 1 2 | 3 | 1 2. Capacity 2: the second request hits both, 3 then evicts the tail
    # block 2, so the last one hits only block 1. Capacity 3 and more: nothing is evicted.
    rows = [[1, 2], [1, 2], [3], [1, 2]]
    (tmp_path / "t.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": i * 1000, "input_length": 512 * len(ids),
                        "output_length": 1, "hash_ids": ids}) + "\n"
            for i, ids in enumerate(rows)
        )
    )  # fmt: skip
    assert kvcliff("curve", "t.jsonl", "--gpu", "1,2,3", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    counts = ("requests", "accesses", "distinct_blocks", "block_size")
    assert [content[name] for name in counts] == [4, 7, 3, 512]
    points = [(point["gpu_blocks"], point["hit_blocks"]) for point in content["points"]]
    assert points == [(1, 1), (2, 3), (3, 4)]
    assert kvcliff("surface", "t.jsonl", "--gpu", "2", "--host", "9", "--json") == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert (point["hit_blocks"], point["host_loaded_blocks"]) == (3, 1)
    assert kvcliff("compile", "t.jsonl", "t.kvtrace.npz") == 0
    assert kvcliff("describe", "t.kvtrace.npz", "--json") == 0
    assert kvcliff("curve", "t.jsonl", "--plot", "cliff.gif") == 2
    assert kvcliff("curve", "t.jsonl", "--target", "0.5", "--target", "0.95", "--json") == 0
    capsys.readouterr()
    for words in (("--block-tokens", "0"), ("--mark", "-3"), ("--target", "2")):
        assert kvcliff("curve", "t.jsonl", *words) == 2
    assert kvcliff("convert", "t.jsonl", "out.jsonl", "--chunk-tokens", "-1") == 2
    assert not (tmp_path / "out.jsonl").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_made_is_an_environment_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kvcliff("plan") == 3
    assert "XDG_CACHE_HOME" in capsys.readouterr().err


def test_predict_says_why_a_line_is_refused_and_what_is_assumed_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = {"engine": "0.40.0", "block_size": 4, "num_gpu_blocks": 4, "max_batched_tokens": 64}
    good, large = {"prompt": [1], "output_len": 1}, {"prompt": [1] * 40, "output_len": 1}
    (tmp_path / "s.json").write_text(json.dumps(spec))
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, (good, large, good))))
    assert kvcliff("predict", "s.json", "r.jsonl") == 1
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert ["computed" in row for row in rows] == [True, False, True]
    assert "10 blocks" in rows[1]["error"]
    assert "rules of 0.33 assumed" in captured.err
    assert "not predicted: 1 of the requests" in captured.err
    (tmp_path / "r.jsonl").write_text(json.dumps(good))
    assert kvcliff("predict", "s.json", "r.jsonl") == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (None, "run is not a run folder"),
        ("", "run is not a run folder"),
        ("journal-01-baseline.jsonl", "run is not a run folder"),
    ],
)
def test_latency_says_what_it_misses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: str | None, said: str
) -> None:
    if make is not None:
        (tmp_path / "run").mkdir()
        if make:
            (tmp_path / "run" / make).write_bytes(b"")
    assert kvcliff("latency", "run") == 2
    assert said in capsys.readouterr().err


def test_a_plan_with_nothing_to_load_shows_no_size_that_serves_it_in_full(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Documents of 200 tokens, chunks of 256: no host tier of any size loads anything.
    text = PLAN_TOML.replace("document_tokens = 512", "document_tokens = 200")
    (tmp_path / "my.toml").write_text(text)
    assert kvcliff("plan", "my.toml") == 0
    out = capsys.readouterr().out
    assert "nothing to serve" in " ".join(out.split())
    assert "0 chunks, 0 tokens" not in out
