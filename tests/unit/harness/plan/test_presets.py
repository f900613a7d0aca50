import importlib.metadata
import json
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from harness.forecast.preview import preview
from harness.plan.experiment import resolve
from harness.plan.files import load_plan
from harness.plan.presets import preset_names
from tests.command import kvcliff

GPU_PRESETS = ["big-8b", "gpu-control", "guide-0.6b", "host-cliff", "lab-1.5b"]
Look = Callable[[str], dict[str, Any]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Previews on a machine with nothing: no vLLM of any build, no downloaded model."""

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return lambda name: preview(resolve(load_plan(name), cache_dir=tmp_path))


def runs(content: dict[str, Any], arm: str, pass_name: str) -> list[tuple[int, str]]:
    """Documents in the order they are read, by where their KV is predicted to come from."""
    return [(run["documents"], run["source"]) for run in content["documents"][arm][pass_name]]


def tokens(content: dict[str, Any], arm: str, pass_name: str) -> tuple[int, int, int]:
    cell = content["predicted"][arm][pass_name]
    return (cell["computed"], cell["gpu_hit"], cell["host_loaded"])


def test_the_gpu_presets_are_these_and_the_demo_is_the_only_other():
    assert preset_names() == sorted([*GPU_PRESETS, "demo"])


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_gpu_preset_is_previewed_on_a_machine_without_vllm_gpu_or_model(look: Look, name: str):
    content = look(name)
    assert content["plan_id"].startswith(f"{name}-")
    assert content["model"]["is_download"] is True
    assert content["model"]["shape_from"].startswith("kvcliff's shape file")
    for arm, commands in content["commands"].items():
        [vllm] = commands
        assert vllm[vllm.index("--model") + 1] == content["model"]["path"]
        assert "--kv-transfer-config" in vllm or arm == "baseline"
        assert content["environments"][arm][0].get("HF_HUB_OFFLINE") is None
    assert content["memory"]["baseline"]["gpu_bytes"] > 2**30
    assert " min " in content["estimate"]


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_begins_by_saying_what_it_is_for(name: str):
    text = (resources.files("harness") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert tomllib.loads(text)["name"] == name


def test_the_lab_replays_nothing_without_a_tier_and_everything_from_the_host_with_one(look: Look):
    # 5,011 tokens a prompt; 19 chunks of 256 are 4,864, and 147 are computed each time.
    content = look("lab-1.5b")
    assert tokens(content, "baseline", "pass2-replay") == (50_110, 0, 0)
    assert tokens(content, "lmcache", "pass2-replay") == (1_470, 0, 48_640)
    assert runs(content, "baseline", "pass2-replay") == [(10, "recomputed")]
    assert runs(content, "lmcache", "pass2-replay") == [(10, "host")]


def test_the_labs_reverse_pass_hits_four_documents_and_part_of_the_fifth(look: Look):
    # A request takes 315 blocks of 16 for 5,026 tokens: 314 are whole and stay, the last is reused
    # by the next request. Of 1,344 usable ones, documents 9 to 6 keep 4 x 314 = 1,256 and one is
    # that reused block: 87 are left to document 5. Each of the four hits its 311 whole document
    # blocks (4,976 tokens) and takes 4 new ones for its new question and its output: the reused one
    # and three of document 5's last. 87 - 12 = 75 blocks, 1,200 tokens, are hit of document 5.
    content = look("lab-1.5b")
    four_hits = 4 * 4_976
    assert runs(content, "baseline", "pass3-reverse") == [
        (4, "gpu"), (1, "gpu+recomputed"), (5, "recomputed"),
    ]  # fmt: skip
    assert tokens(content, "baseline", "pass3-reverse") == (
        4 * 35 + (5_011 - 1_200) + 5 * 5_011, four_hits + 1_200, 0,
    )  # fmt: skip
    assert runs(content, "lmcache", "pass3-reverse") == [(4, "gpu"), (1, "gpu+host"), (5, "host")]
    assert tokens(content, "lmcache", "pass3-reverse") == (
        4 * 35 + 6 * 147, four_hits + 1_200, (4_864 - 1_200) + 5 * 4_864,
    )  # fmt: skip


def test_the_labs_tiers_are_those_that_were_measured_elsewhere(look: Look):
    content = look("lab-1.5b")
    server = load_plan("lab-1.5b").server
    assert server.num_gpu_blocks * server.block_size == 21_520  # as vLLM logs it
    work = load_plan("lab-1.5b").workload
    assert work.document_tokens + work.question_tokens == 5_011
    # 1.5 GiB / (256 x 28,672 bytes = 7 MiB) = 219.4
    assert content["tiers"]["lmcache"]["host_tokens"] == 219 * 256
    assert content["cliff"]["host"]["full_from"]["chunks"] == 190
    assert content["warnings"] == []


def test_the_labs_memory_adds_up_by_arm(look: Look):
    memory = look("lab-1.5b")["memory"]
    assert memory["baseline"]["tier_bytes"] == 0
    assert memory["lmcache"]["tier_bytes"] == 3 * 2**29
    # 1,345 and 3,400 blocks of 16 tokens of 28,672 bytes
    assert memory["lmcache"]["pool_bytes"] == 617_021_440
    assert memory["control"]["pool_bytes"] == 1_559_756_800
    # 1.54 G parameters of 2 bytes
    assert memory["baseline"]["weights_bytes"] == pytest.approx(2 * 1_543_714_304, rel=1e-3)
    gpu = {arm: needs["gpu_bytes"] for arm, needs in memory.items()}
    assert gpu["baseline"] == gpu["lmcache"]
    assert gpu["control"] - gpu["baseline"] == 1_559_756_800 - 617_021_440
    assert memory["lmcache"]["host_bytes"] - memory["baseline"]["host_bytes"] == 3 * 2**29


def test_the_guide_measures_78_requests_on_five_servers(look: Look):
    # 6 documents x 3 passes x 4 sessions, and 2 documents x 3 passes of the control; one warm-up each.
    content = look("guide-0.6b")
    assert content["sessions"] == [
        "01-baseline", "02-lmcache", "03-lmcache", "04-baseline", "05-control",
    ]  # fmt: skip
    assert content["requests"] == {"measured": 78, "sent": 83}
    assert content["model"]["bytes_per_token"] == 114_688
    assert tokens(content, "baseline", "pass2-replay") == (6 * 4_116, 0, 0)
    assert tokens(content, "lmcache", "pass2-replay") == (6 * 20, 0, 6 * 4_096)
    assert runs(content, "lmcache", "pass3-reverse") == [(2, "gpu"), (1, "gpu+host"), (3, "host")]
    # The control's two documents fit the very same GPU tier.
    assert tokens(content, "control", "pass2-replay") == (2 * 20, 2 * 4_096, 0)
    assert content["tiers"]["control"]["gpu_tokens"] == content["tiers"]["lmcache"]["gpu_tokens"]
    assert content["warnings"] == []


def test_the_gpu_control_leaves_the_host_nothing_to_load(look: Look):
    content = look("gpu-control")
    for pass_name in ("pass2-replay", "pass3-reverse"):
        assert tokens(content, "lmcache", pass_name) == (6 * 20, 6 * 4_096, 0)
    [warning] = content["warnings"]
    assert "predicted to load nothing from the host" in warning


def test_beyond_the_host_cliff_a_replay_in_order_finds_nothing_anywhere(look: Look):
    # 0.8 GiB / 7 MiB = 117 chunks of 190; LRU has dropped each document when its turn comes.
    content = look("host-cliff")
    assert content["tiers"]["lmcache"]["host_tokens"] == 117 * 256
    assert tokens(content, "lmcache", "pass2-replay") == (50_110, 0, 0)
    assert content["predicted"]["lmcache"]["pass3-reverse"]["host_loaded"] > 0
    [warning] = content["warnings"]
    assert "all of them from 190 chunks on" in warning


def test_the_big_models_documents_are_864_mib_and_all_in_the_host_tier(look: Look):
    content = look("big-8b")
    assert content["model"]["bytes_per_token"] == 147_456
    assert content["cliff"]["host"]["full_from"] == {
        "chunks": 384, "tokens": 16 * 6_144, "gib": 16 * 864 / 1024,
    }  # fmt: skip
    assert tokens(content, "baseline", "pass2-replay") == (16 * 6_164, 0, 0)
    assert tokens(content, "lmcache", "pass2-replay") == (16 * 20, 0, 16 * 6_144)
    assert content["warnings"] == []


@pytest.mark.usefixtures("look")
def test_plan_prints_the_labs_story_without_gpu_vllm_or_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kvcliff("plan", "lab-1.5b") == 0
    said = " ".join(capsys.readouterr().out.split())  # tables wrap where the terminal ends
    for text in (
        "150 requests measured (155 with the warm-up) in 5 sessions",
        "kvcliff's shape file, because Qwen/Qwen2.5-1.5B-Instruct is not downloaded",
        "4 GPU hit · 1 part GPU hit, rest recomputed · 5 recomputed",
        "4 GPU hit · 1 part GPU hit, rest host-loaded · 5 host-loaded",
        "Expected TTFT in ms, median of a pass: an estimate, nothing is measured",
        "expected by a prior for a data-centre GPU, not for this machine",
        "LMCACHE_MAX_LOCAL_CPU_SIZE=1.5",
        "estimated duration: about 7 min",
    ):
        assert text in said


@pytest.mark.usefixtures("look")
def test_dummy_weights_need_no_download_and_belong_to_the_run_that_is_resumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kvcliff("plan", "big-8b", "--dummy-weights", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["model"]["weights"], content["model"]["is_download"]) == ("dummy", False)
    assert "download" not in content["estimate"]
    assert kvcliff("run", "--resume", "there", "--dummy-weights") == 2
    assert "leave out PLAN and --results, and --dummy-weights" in capsys.readouterr().err
