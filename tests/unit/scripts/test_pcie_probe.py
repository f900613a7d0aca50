import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import pcie_probe
from sim.latency.model import Shape, fit
from tests.places import ROOT

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def run(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    # The file alone, as it is copied to a machine: no checkout on the path.
    script = str(ROOT / "scripts" / "pcie_probe.py")
    return subprocess.run(
        [sys.executable, "-P", script, *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@pytest.mark.live  # needs torch, which the engines bring
def test_a_dry_run_on_the_cpu_measures_every_size_and_kind(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    done = run("p.json", "--device", "cpu", "--config", "config.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("CPU, a dry run, torch ")
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["shape"] == {
        "layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "head_dim": 16,
    }  # fmt: skip
    # 2 x 3 layers x 2 heads x 16 x 4 bytes of float32 a token, 256 of them
    assert found["chunk"] == {"tokens": 256, "bytes": 768 * 256}
    sizes = {(row["bytes"], row["direction"], row["pinned"]) for row in found["copies"]}
    expected = {16 * 1024, 768 * 256, 2**18, 2**20, 2**22}
    assert sizes == {(n, way, False) for n in expected for way in ("h2d", "d2h")}
    tried = [(row["new"], row["cached"]) for row in found["prefill"]]
    assert tried == [(n, c) for c in (0, 128) for n in (16, 64, 128, 256)]
    for row in [*found["copies"], *found["prefill"]]:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
    assert found["machine"]["gpu"] is None
    assert [path.name for path in tmp_path.iterdir() if "probe" in path.name] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "the following arguments are required: out"),
        (["p.json", "--device", "tpu"], 2, "invalid choice: 'tpu'"),
        (["p.json", "--chunk-tokens", "0"], 2, "'0' is not a whole number from 1"),
        (["p.json", "--config", "none.json"], 2, "cannot read none.json"),
        (["p.json", "--config", "bad.json"], 2, "bad.json is no config.json of a decoder"),
        (["p.json", "--config", "list.json"], 2, "list.json is no config.json of a decoder"),
        (["p.json", "--config", "odd.json"], 2, "odd.json has sizes no decoder has"),
        (["there.json", "--device", "cpu"], 2, "there.json exists already"),
        (["no/folder/p.json", "--device", "cpu"], 2, "there is no folder no/folder"),
    ],
)
def test_wrong_usage_is_said_in_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], code: int, said: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"hidden_size": 64}')
    Path("list.json").write_text("[1]")
    Path("odd.json").write_text(json.dumps(SMALL | {"num_key_value_heads": 3}))
    Path("there.json").write_text("mine")
    try:
        found: Any = pcie_probe.main(words)
    except SystemExit as stopped:  # argparse's own way out
        found = stopped.code
    captured = capsys.readouterr()
    assert found == code
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert Path("there.json").read_text() == "mine"
    assert not Path("p.json").exists()


def rows(*, a: float, b: float, g: float) -> list[dict[str, Any]]:
    return [
        {"new": n, "cached": c, "median_s": a + b * n + g * n * (c + n / 2)}
        for c in (0, 2048, 8192)
        for n in (64, 256, 1024, 4096, 16384)
    ]


def test_the_prefill_fit_finds_the_three_coefficients_that_made_the_times():
    found = pcie_probe.fit_prefill(rows(a=2e-3, b=3e-5, g=4e-10))
    assert found is not None
    assert list(found) == ["a_s", "b_s_per_token", "g_s_per_pair"]
    assert list(found.values()) == pytest.approx([2e-3, 3e-5, 4e-10], rel=1e-6)


def test_the_probes_own_fit_and_the_latency_models_agree_on_noisy_times():
    noisy = [
        row | {"median_s": row["median_s"] * (1 + 0.05 * math.sin(i))}
        for i, row in enumerate(rows(a=2e-3, b=3e-5, g=4e-10))
    ]
    ours = pcie_probe.fit_prefill(noisy)
    model = fit((Shape(r["new"], r["cached"]), r["median_s"]) for r in noisy)
    theirs = {c.name: c.used for c in model.coefficients}
    assert ours is not None
    # Errors relative to the measured times here, to the fitted ones there: near, at 5 % noise.
    assert ours["b_s_per_token"] == pytest.approx(theirs["per_token"], rel=0.05)
    assert ours["g_s_per_pair"] == pytest.approx(theirs["per_pair"], rel=0.05)


def test_no_coefficient_is_below_zero():
    # Times that fall with the size: a line through them has a negative slope.
    found = pcie_probe.least_squares([(1.0, x) for x in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0])
    assert found[1] == 0
    assert found[0] > 0


def test_the_copy_fit_tells_latency_from_bandwidth_for_each_kind():
    copies = [
        {"bytes": n, "pinned": pinned, "direction": "h2d", "median_s": latency + n / rate}
        for pinned, latency, rate in ((True, 1e-5, 50e9), (False, 3e-5, 8e9))
        for n in (2**14, 2**20, 2**25)
    ]
    pageable, pinned = pcie_probe.fit_copies(copies)
    assert (pinned["pinned"], pageable["pinned"]) == (True, False)
    assert pinned["latency_s"] == pytest.approx(1e-5)
    assert pinned["bytes_per_s"] == pytest.approx(50e9)
    assert pageable["latency_s"] == pytest.approx(3e-5)
    assert pageable["bytes_per_s"] == pytest.approx(8e9)
