import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.forecast.latency import read_probe, shapes_of
from harness.forecast.preview import preview
from harness.plan.experiment import resolve
from harness.plan.files import load_plan
from sim.latency.model import fit
from tests.factory import make_plan

SHAPE_8B = {
    "layers": 36, "hidden": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8,
    "head_dim": 128,
}  # fmt: skip


def probe(**changed: Any) -> dict[str, Any]:
    """A probe of Qwen3-8B: 1 ms + 20 µs a token + 1 ns a pair; 100 µs and 25 GB/s a pinned copy."""
    return {
        "schema": 1,
        "kind": "kvcliff-probe",
        "created": "2026-11-29T12:00:00+00:00",
        "machine": {"device": "cuda", "gpu": "NVIDIA H200", "torch": "2.13.0"},
        "shape": SHAPE_8B,
        "copies": [
            {"bytes": n, "pinned": pinned, "direction": way, "median_s": slow * (1e-4 + n / 25e9)}
            for n in (2**14, 2**20, 2**25)
            for pinned, way, slow in ((True, "h2d", 1), (False, "h2d", 5), (True, "d2h", 9))
        ],
        "prefill": [
            {"new": n, "cached": c, "median_s": 1e-3 + 20e-6 * n + 1e-9 * n * (c + n / 2)}
            for c in (0, 2048, 8192)
            for n in (64, 256, 1024, 4096, 16384)
        ],
        **changed,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def to_file(content: Any) -> Path:
        path = tmp_path / "probe.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def at(name: str, by: Path | None = None) -> dict[str, Any]:
        return preview(resolve(load_plan(name), cache_dir=tmp_path), probe=by)

    return at


def median_ms(content: dict[str, Any], arm: str, name: str) -> float:
    found: float = content["expected"]["passes"][name]["arms"][arm]["p50_ms"]
    return found


def test_without_a_probe_times_follow_from_arithmetic_at_the_stated_rates(look):
    # A miss computes 6,164 tokens: 2 x 6.9458 G x 6,164 + 589,824 x 6,164² / 2 = 96.83 TFLOP, at
    # 55 % of 989 TFLOP/s 178.0 ms, and 10 ms a request.
    content = look("big-8b")
    assert median_ms(content, "baseline", "pass2-replay") == pytest.approx(188.0, abs=0.1)
    # A load: 24 chunks of 36 MiB at 50 GB/s 18.1 ms, 0.5 ms each 12 ms, 20 tokens computed after
    # 6,144: 0.6 ms; and 10 ms.
    assert median_ms(content, "lmcache", "pass2-replay") == pytest.approx(40.8, abs=0.1)
    assert content["expected"]["passes"]["pass2-replay"]["ratio"] == pytest.approx(4.61, abs=0.01)
    # Both arms compute the first pass: what storing costs is not expected.
    assert content["expected"]["passes"]["pass1-cold"]["ratio"] == 1.0


def test_an_expectation_says_that_it_is_an_estimate_and_from_what(look):
    expected = look("lab-1.5b")["expected"]
    assert expected["is_estimate"] is True
    assert "a prior for a data-centre GPU, not for this machine" in expected["from"]
    assert "989 TFLOP/s at 55%, 50 GB/s" in expected["from"]


def test_the_duration_counts_starts_pinning_weights_and_requests(look):
    # 5 starts of 75 s; 3 tiers of 1.5 GiB at 0.5 s a GiB; 5 x 3.09 GB of weights at 1 GB/s;
    # about 4 s of requests: 375 + 2.3 + 15.4 + 4 = 397 s.
    estimate = look("lab-1.5b")["estimate"]
    assert estimate.startswith("about 7 min (5 server starts, 439,521 prompt tokens to compute)")
    assert estimate.endswith("an estimate; before it the download of at least 3.1 GB")


def test_a_probe_takes_the_place_of_the_prior(look, write):
    content = look("big-8b", write(probe()))
    # 1 + 6,164 x 0.02 + 1e-6 x 18,997,448 = 143.28 ms, and 10 ms a request.
    miss = 10 + 1 + 123.28 + 18.997
    assert median_ms(content, "baseline", "pass2-replay") == pytest.approx(miss, abs=0.01)
    # 905,969,664 bytes at 25 GB/s 36.239 ms, 24 copies of 0.1 ms, 20 tokens after 6,144: 0.4 ms
    # and 0.123 ms of pairs. Pinned copies to the device alone count.
    load = 10 + 1 + 36.239 + 2.4 + 0.4 + 0.123
    assert median_ms(content, "lmcache", "pass2-replay") == pytest.approx(load, abs=0.01)
    assert "NVIDIA H200" in content["expected"]["from"]
    assert "pinned copies 25 GB/s and 100 µs a chunk" in content["expected"]["from"]
    assert content["expected"]["is_beyond_probe"] is False


def test_prompts_beyond_what_was_probed_are_said_to_be_extrapolated(look, write):
    short = [row for row in probe()["prefill"] if row["new"] < 4096]
    assert look("big-8b", write(probe(prefill=short)))["expected"]["is_beyond_probe"] is True


def test_a_probe_of_another_model_is_refused_with_the_command_for_this_one(look, write):
    with pytest.raises(InputError, match=r"layers=36 .*the plan's model has layers=28") as caught:
        look("lab-1.5b", write(probe()))
    assert "pcie_probe.py OUT.json --config" in str(caught.value.hint)
    assert "Qwen--Qwen2.5-1.5B-Instruct.json" in str(caught.value.hint)


def test_a_dry_run_is_no_probe_of_a_gpu(look, write):
    dry = probe(machine={"device": "cpu", "gpu": None, "torch": "2.13.0"})
    with pytest.raises(InputError, match="a dry run on a CPU; it says nothing about a GPU"):
        look("big-8b", write(dry))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "got \\[\\]"),
        ('{"schema": 1, "schema": 1}', "key 'schema' appears twice"),
        (probe(kind="other"), "kind: .*'kvcliff-probe', got 'other'"),
        (probe(schema=2), "schema: .*less than or equal to 1, got 2"),
        (probe(shape=SHAPE_8B | {"heads": 0}), "shape.heads: .*got 0"),
        (probe(prefill=[]), "prefill: .*at least 4"),
        (probe(prefill=[{"new": 64, "cached": 0, "median_s": -1}] * 4), "prefill.0.median_s"),
        # Less than a clock can tell, and the fit would divide by its square.
        (probe(prefill=[{"new": 64, "cached": 0, "median_s": 1e-300}] * 4), "prefill.0.median_s"),
        (json.dumps(probe()).replace("0.001", "NaN"), "NaN is not a number JSON has"),
        (probe(copies=probe()["copies"][:1]), "copies: .*at least 2"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_with_the_field(write, content, message):
    with pytest.raises(InputError, match=message) as caught:
        read_probe(write(content))
    assert "probe.json" in str(caught.value)


def test_a_probe_without_copies_to_the_device_of_two_sizes_is_refused(look, write):
    one = [row for row in probe()["copies"] if row["direction"] == "d2h" or row["bytes"] == 2**20]
    with pytest.raises(InputError, match="fewer than two sizes"):
        look("big-8b", write(probe(copies=one)))


def test_a_probe_with_prefill_of_too_few_sizes_is_refused(look, write):
    same = probe()["prefill"][:3] + [probe()["prefill"][0]] * 9
    with pytest.raises(InputError, match=r"probe\.json has prefill of fewer than 4 sizes"):
        look("big-8b", write(probe(prefill=same)))


def test_a_missing_probe_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none\.json"):
        read_probe(tmp_path / "none.json")


def test_other_builds_have_no_prior(tmp_path):
    content = preview(resolve(make_plan(), cache_dir=tmp_path))
    assert content["expected"] is None
    assert "server starts" in content["estimate"]


def test_the_labs_partial_document_is_predicted_near_the_time_it_took_elsewhere(tmp_path: Path):
    # Measured elsewhere, with the lab's workload on a GPU: 576 ms where all 5,011 tokens of a prompt
    # were computed, about 30 ms where a document was a GPU hit, and 438 ms for the one document of
    # the reverse pass that was a GPU hit in part. Two kinds of prompts give a constant and a slope:
    # 30 - 35 x 546 / 4,976 = 26.2 ms, and 546 / 4,976 = 0.1097 ms a token.
    lab = resolve(load_plan("lab-1.5b"), cache_dir=tmp_path)
    shapes = shapes_of(lab, lab.predictions(lab.arms["baseline"]))
    *replayed, partial = shapes[-20:-5]
    assert [shape.computed for shape in replayed] == [5_011] * 10 + [35] * 4
    assert (partial.computed, partial.cached) == (3_811, 1_200)
    model = fit([(shape, 0.576 if shape.computed == 5_011 else 0.030) for shape in replayed])
    predicted_ms = 1e3 * model.predict(partial).ttft_s
    assert predicted_ms == pytest.approx(26.16 + 3_811 * 0.10973, abs=0.1)  # 444.3
    assert predicted_ms == pytest.approx(438, rel=0.02)
