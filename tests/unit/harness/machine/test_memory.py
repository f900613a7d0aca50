from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.machine.memory import Needs, needs_of
from harness.plan.experiment import Experiment, resolve
from harness.plan.files import load_plan
from sim.units import GIB


def needs(tmp_path: Path, preset: str, **changed: Any) -> Needs:
    return needs_of(changed_arms(resolve(load_plan(preset), cache_dir=tmp_path), **changed))


def changed_arms(experiment: Experiment, **changed: Any) -> Experiment:
    sessions = tuple(replace(s, arm=replace(s.arm, **changed)) for s in experiment.sessions)
    return replace(experiment, sessions=sessions)


@pytest.mark.usefixtures("_no_hub")
def test_a_gpu_plan_needs_weights_pool_and_work_on_the_gpu_and_the_tier_pinned_in_memory(
    tmp_path: Path,
) -> None:
    # Qwen2.5-1.5B: 1,543,714,304 parameters of 2 bytes. KV: 28 layers x 2 x 2 heads x 128 x 2 bytes
    # = 28,672 a token; the control has the largest pool, 3,400 blocks of 16 tokens.
    found = needs(tmp_path, "lab-1.5b")
    assert found.weights_bytes == 2 * 1_543_714_304
    assert found.pool_bytes == 3400 * 16 * 28_672
    assert found.tier_bytes == 3 * GIB // 2
    assert found.gpu_bytes == found.weights_bytes + found.pool_bytes + 3 * GIB
    assert found.host_bytes == 6 * GIB + found.tier_bytes
    assert found.gpu_share == 0.92


@pytest.mark.usefixtures("_no_hub")
def test_two_gpus_share_weights_and_pool(tmp_path: Path) -> None:
    one = needs(tmp_path, "lab-1.5b")
    two = needs(tmp_path, "lab-1.5b", flags=("--tensor-parallel-size", "2"))
    assert one.gpu_bytes is not None
    assert two.gpu_bytes == (one.gpu_bytes - 3 * GIB) // 2 + 3 * GIB


@pytest.mark.usefixtures("_no_hub")
@pytest.mark.parametrize(
    ("flags", "share"),
    [
        (("--gpu-memory-utilization", "0.5"), 0.5),
        (("--gpu-memory-utilization=0.4",), 0.4),
        (("--gpu-memory-utilization", "half"), 0.92),
        (("--gpu_memory_utilization", "0.5"), 0.5),
        (("--gpu-memory-utilization=0.4", "--gpu-memory-utilization=0.3"), 0.3),
        (("--gpu-memory-utilization", "nan"), 0.92),
        (("--gpu-memory-utilization", "0"), 0.92),
        (("--gpu-memory-utilization",), 0.92),
    ],
)
def test_the_share_vllm_must_find_free_is_the_arms_own(
    tmp_path: Path, flags: tuple[str, ...], share: float
) -> None:
    assert needs(tmp_path, "lab-1.5b", flags=flags).gpu_share == share


def test_on_a_cpu_everything_lies_in_host_memory(tmp_path: Path) -> None:
    plan = load_plan("demo")
    plan = plan.model_copy(update={"server": plan.server.model_copy(update={"build": "cpu"})})
    found = needs_of(resolve(plan, cache_dir=tmp_path))
    assert (found.gpu_bytes, found.gpu_share) == (None, None)
    assert found.weights_bytes is not None
    assert found.host_bytes == 4 * GIB + found.tier_bytes + found.pool_bytes + found.weights_bytes


@pytest.fixture
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
