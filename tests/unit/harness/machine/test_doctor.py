import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.machine import doctor
from harness.machine import engines as installed
from harness.machine import gpus as doctor_gpu
from harness.machine.check import Check
from harness.machine.doctor import check_machine
from harness.machine.memory import Needs
from harness.record.folder import RunFolder
from servers.arms import Arm, ServerSpec
from servers.gpu.facts import Gpu, GpuMemory, GpuProcess, GpuState, MigInstance, Survey
from servers.processes import Ledger, identify
from sim.units import GIB
from tests.factory import PLAN_TOML
from tests.gpus import MIG_1, UUID_A, UUID_C, gpu

STATE = GpuState(
    GpuMemory(140 * GIB, GIB // 2, 140 * GIB - GIB // 2), sm_mhz=1980, memory_mhz=3201,
    temperature_c=31, power_w=76.5, throttle=("gpu_idle",), pcie_generation=5, pcie_width=16,
)  # fmt: skip
H200 = gpu(
    0, UUID_A, name="NVIDIA H200", pci_bus_id="00000000:3B:00.0", compute_capability="9.0",
    pcie_generation_max=5, pcie_width_max=16, sm_mhz_max=1980, memory_mhz_max=3201,
    power_limit_w=700.0, ecc_enabled=True, persistence_enabled=True, processes=(), state=STATE,
)  # fmt: skip
ARM = Arm("baseline", ServerSpec("gpu", "/m", 16, 100, 512, 512, "bfloat16"))
NEEDS = Needs(GIB, GIB, 16 * GIB, 8 * GIB, gpu_bytes=20 * GIB, gpu_share=0.92)


def checks(
    *gpus: Gpu,
    arms: tuple[Arm, ...] = (ARM,),
    needs: Needs | None = NEEDS,
    **environ: str,
) -> dict[str, Check]:
    found = Survey("nvml", gpus, driver="580.65.06", cuda="13.0")
    answers = doctor_gpu.check_gpus(found, build="gpu", arms=arms, needs=needs, environ=environ)
    return {check.what: check for check in answers}


def the_check(what: str, *gpus: Gpu, **given: Any) -> Check:
    return checks(*gpus, **given)[f"GPU 0 (GPU-8932f937): {what}"]


def holding(used: int | None, processes: tuple[GpuProcess, ...] | None = ()) -> Gpu:
    """The H200 with ``used`` GiB in use; None: it does not say."""
    memory = GpuMemory() if used is None else GpuMemory(140 * GIB, used * GIB, (140 - used) * GIB)
    return replace(H200, processes=processes, state=replace(STATE, memory=memory))


def in_state(**changed: Any) -> Gpu:
    return replace(H200, state=replace(STATE, **changed))


def test_a_gpu_with_nothing_against_it_is_all_ok_with_numbers() -> None:
    found = checks(H200)
    assert {check.status for check in found.values()} == {"ok"}
    assert found["driver"].found == "580.65.06, CUDA up to 13.0"
    assert found["GPU"].found == (
        f"1 of 1 in use (CUDA_VISIBLE_DEVICES not set, by nvml): NVIDIA H200 {UUID_A}"
    )
    texts = {what.removeprefix("GPU 0 (GPU-8932f937): "): c.found for what, c in found.items()}
    assert texts["facts"] == "0 unreadable"
    # 92 % of 140 GiB.
    assert texts["memory"] == (
        "139.5 of 140.0 GiB free; the plan needs 20.0 GiB, vLLM starts with no less than 128.8 free"
    )
    assert texts["PCIe"] == "generation 5 of 5, 16 lanes of 16"
    assert texts["clocks"] == ("SM 1980 of 1980 MHz, 31 °C, 76.5 of 700 W; held down by: gpu_idle")


@pytest.mark.parametrize(
    ("card", "status", "text"),
    [
        (holding(0), "ok", "140.0 of 140.0 GiB free"),
        # 129 GiB are free and 128.8 are asked for: it starts, but not alone on the card.
        (holding(11, (GpuProcess(77, 11 * GIB),)), "warning", "by pid 77 11.0 GiB"),
        (holding(12, (GpuProcess(None, None),)), "error", "by a process not visible here unknown"),
        (holding(12, ()), "error", "by no process that is visible from here"),
        (holding(12, None), "error", "by no process that is visible from here"),
        (holding(None), "warning", "free memory unknown; the plan needs 20.0 GiB"),
    ],
)
def test_free_gpu_memory_against_what_the_plan_needs(card: Gpu, status: str, text: str) -> None:
    found = the_check("memory", card)
    assert found.status == status
    assert text in found.found
    assert (found.remedy is None) == (status == "ok")


def test_a_plan_larger_than_the_gpu_is_told_so_however_free_it_is() -> None:
    found = the_check("memory", holding(0), needs=replace(NEEDS, gpu_bytes=141 * GIB))
    assert found.status == "error"
    assert "a smaller model" in (found.remedy or "")


def test_weights_of_unknown_size_are_said_to_be_missing_from_the_need() -> None:
    found = the_check("memory", H200, needs=replace(NEEDS, weights_bytes=None))
    assert "20.0 GiB and weights of unknown size" in found.found


@pytest.mark.parametrize(
    ("card", "status", "text"),
    [
        (in_state(pcie_width=8), "warning", "generation 5 of 5, 8 lanes of 16"),
        (in_state(pcie_generation=1), "ok", "an idle card lowers it"),
        (in_state(pcie_generation=None, pcie_width=None), "ok", "generation unknown of 5, unknown"),
        (replace(H200, pcie_width_max=None), "ok", "16 lanes of unknown"),
    ],
)
def test_the_pcie_link(card: Gpu, status: str, text: str) -> None:
    found = the_check("PCIe", card)
    assert (found.status, text in found.found) == (status, True)


@pytest.mark.parametrize(
    ("throttle", "status", "text"),
    [
        ((), "ok", "held down by: none"),
        (("sw_power_cap",), "ok", "held down by: sw_power_cap"),
        (("hw_thermal_slowdown",), "warning", "held down by: hw_thermal_slowdown"),
        (None, "ok", "held down by: unknown"),
    ],
)
def test_clocks_and_throttling(throttle: tuple[str, ...] | None, status: str, text: str) -> None:
    found = the_check("clocks", in_state(throttle=throttle))
    assert (found.status, text in found.found) == (status, True)


@pytest.mark.parametrize(
    ("card", "status", "text"),
    [
        (replace(H200, ecc_enabled=None), "ok", "1 unreadable: ecc_enabled"),
        (in_state(throttle=None), "warning", "1 unreadable: throttle"),
        (holding(None), "warning", "3 unreadable: total_bytes, used_bytes, free_bytes"),
    ],
)
def test_facts_that_cannot_be_read_are_named(card: Gpu, status: str, text: str) -> None:
    found = the_check("facts", card)
    assert (found.status, found.found) == (status, text)


OTHER = replace(H200, index=1, uuid=UUID_C)
SPLIT = replace(H200, mig_enabled=True, mig=(MigInstance(MIG_1, None, GpuMemory(20 * GIB)),))


@pytest.mark.parametrize(
    ("gpus", "named", "status", "text", "remedy"),
    [
        ((H200, OTHER), "1", "ok", f"1 of 2 in use (CUDA_VISIBLE_DEVICES='1', by nvml): NVIDIA "
         f"H200 {UUID_C}", ""),
        ((H200, OTHER), "GPU-c0ffee00", "warning", "does not start with a shortened UUID",
         f"export CUDA_VISIBLE_DEVICES={UUID_C}"),
        ((H200,), UUID_A, "ok", UUID_A, ""),
        ((SPLIT,), MIG_1, "warning", f"{MIG_1} (MIG instance of {UUID_A})", "whole GPU"),
        ((H200,), "7", "error", "names '7', which is none of the 1 GPUs", "there are: 0 = "),
        ((H200,), "", "error", "shows 0 of 1", "unset CUDA_VISIBLE_DEVICES"),
        ((replace(H200, mig_enabled=None),), "0", "ok", "(MIG unknown)", ""),
    ],
)  # fmt: skip
def test_which_gpus_are_in_use(
    gpus: tuple[Gpu, ...], named: str, status: str, text: str, remedy: str
) -> None:
    # A59
    found = checks(*gpus, CUDA_VISIBLE_DEVICES=named)["GPU"]
    assert found.status == status
    assert text in found.found
    assert remedy in (found.remedy or "")


def test_only_the_gpus_in_use_are_looked_at() -> None:
    assert not any("GPU 1" in what for what in checks(H200, OTHER))


def test_arms_on_different_gpus_are_refused() -> None:
    own = replace(ARM, name="own", env={"CUDA_VISIBLE_DEVICES": "1"})
    found = checks(H200, OTHER, arms=(ARM, own))["GPU"]
    assert found.status == "error"
    assert f"baseline on {UUID_A}; own on {UUID_C}" in found.found


@pytest.mark.parametrize(
    ("gpus", "build", "status", "text"),
    [
        ((), "cpu", "ok", "none (no driver): the CPU build is used"),
        ((), "gpu", "error", "none that can be asked: no driver"),
        ((H200,), "cpu", "warning", f"1: NVIDIA H200 {UUID_A}, but the CPU build is installed"),
        ((H200,), None, "ok", f"1: NVIDIA H200 {UUID_A}"),
    ],
)
def test_build_and_gpu_must_go_together(
    gpus: tuple[Gpu, ...], build: Any, status: str, text: str
) -> None:
    found = Survey(None, gpus, why_not=None if gpus else "no driver")
    answers = doctor_gpu.check_gpus(found, build=build, arms=(), needs=None, environ={})
    last = list(answers)[-1]
    assert (last.what, last.status) == ("GPU", status)
    assert text in last.found


# --- the whole


NO_GPU = Survey(None, why_not="no driver")


def machine(tmp_path: Path, plan: Path) -> dict[str, dict[str, Any]]:
    answers = check_machine(tmp_path, str(plan), found=NO_GPU)
    return {answer["what"]: answer for answer in answers}


@pytest.fixture
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU build were installed; nothing of it is asked but its versions."""
    found = installed.Versions("cpu", "0.32.0", "0.5.6", "2.13.0+cpu", "2.13.0+cpu", None)
    monkeypatch.setattr(doctor, "installed_build", lambda: "cpu")
    monkeypatch.setattr(installed, "versions", lambda build: found)
    monkeypatch.setattr(installed, "missing_series", lambda: (13, []))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(PLAN_TOML.replace('build = "fake"', 'build = "cpu"'), encoding="utf-8")
    return path


@pytest.mark.usefixtures("_engines")
def test_every_check_says_what_was_found_and_what_to_do_unless_it_is_ok(
    tmp_path: Path, plan_file: Path
) -> None:
    found = machine(tmp_path, plan_file)
    assert {
        "engines", "counters", "plan", "GPU", "memory", "/dev/shm", "ports", "disk", "idle",
        "left-over servers", "other engines",
    } == set(found)  # fmt: skip
    assert all(check["found"] for check in found.values())
    assert all(check["remedy"] for check in found.values() if check["status"] != "ok")
    assert "0.1 of it for the host tier" in found["memory"]["found"]
    assert found["plan"]["found"] == "two-docs: 4 sessions on the cpu build"


@pytest.mark.usefixtures("_engines")
def test_a_host_tier_larger_than_the_memory_is_an_error(tmp_path: Path, plan_file: Path) -> None:
    text = plan_file.read_text(encoding="utf-8").replace("gib = 0.1", "gib = 60000")
    plan_file.write_text(text, encoding="utf-8")
    found = machine(tmp_path, plan_file)["memory"]
    assert found["status"] == "error"
    assert "60000.0 of it for the host tier" in found["found"]


@pytest.mark.usefixtures("_engines")
def test_a_plan_for_the_other_build_or_without_its_model_is_an_error(
    tmp_path: Path, plan_file: Path
) -> None:
    text = plan_file.read_text(encoding="utf-8")
    plan_file.write_text(text.replace('build = "cpu"', 'build = "gpu"'), encoding="utf-8")
    assert "the cpu build is installed" in machine(tmp_path, plan_file)["plan"]["found"]
    plan_file.write_text(text + '[model]\npath = "no/such-model"\n', encoding="utf-8")
    found = machine(tmp_path, plan_file)
    assert found["plan"]["status"] == "error"
    assert "no/such-model" in found["plan"]["found"]
    assert found["GPU"]["status"] == "ok"  # the rest is looked at all the same


@pytest.mark.usefixtures("_engines")
def test_a_plan_that_cannot_be_read_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the plan"):
        check_machine(tmp_path, "nowhere.toml", found=NO_GPU)


@pytest.mark.usefixtures("_engines")
def test_missing_series_are_an_error_that_names_them(
    tmp_path: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "missing_series", lambda: (13, ["vllm:request_success_total"]))
    found = machine(tmp_path, plan_file)["counters"]
    assert found["status"] == "error"
    assert "1 of 13" in found["found"]
    assert "vllm:request_success_total" in found["found"]


@pytest.mark.usefixtures("_engines")
def test_servers_of_a_run_that_is_being_measured_are_not_left_over(
    tmp_path: Path, plan_file: Path
) -> None:
    run = RunFolder(tmp_path / "20260101T000000Z-x")
    run.path.mkdir()
    (run.path / "plan.toml").write_text("", encoding="utf-8")
    ourselves = identify(os.getpid())
    assert ourselves is not None
    Ledger(run.ledger, session="01-baseline", work="kvc-x").started(ourselves, "vllm")

    with run.lock():
        measured = machine(tmp_path, plan_file)["left-over servers"]
    killed = machine(tmp_path, plan_file)["left-over servers"]

    assert (measured["status"], measured["remedy"]) == ("error", "wait for that run to end")
    assert measured["found"] == f"none, but {run.name} is being measured"
    assert (killed["status"], killed["remedy"]) == ("error", "kvcliff run --end-leftovers")
    assert killed["found"] == f"1: pids {os.getpid()}"


class FakeProcess:
    """A process as psutil shows it."""

    def __init__(self, name: str, *words: str) -> None:
        self._name, self._words = name, list(words)

    def name(self) -> str:
        """The kernel's name of it, of at most 15 characters."""
        return self._name

    def cmdline(self) -> list[str]:
        """Its argv."""
        return self._words


@pytest.mark.parametrize(
    ("process", "is_engine"),
    [
        # A51: the kernel cuts VLLM::EngineCore to 15 characters.
        (FakeProcess("VLLM::EngineCor", "VLLM::EngineCore"), True),
        (FakeProcess("python3", "VLLM::Worker_TP1"), True),
        (FakeProcess("vllm", "/opt/bin/python", "/opt/bin/vllm", "serve", "m"), True),
        (FakeProcess("python3", "python3", "-m", "vllm.entrypoints.openai.api_server"), True),
        (FakeProcess("python3", "python3", "-m", "lmcache.cli.main", "server"), True),
        (FakeProcess("lmcache", "/opt/bin/python", "/opt/bin/lmcache", "server"), True),
        (FakeProcess("vim", "vim", "vllm-notes.txt"), False),
        (FakeProcess("bash", "bash", "-c", "vllm serve m"), False),
        (FakeProcess("kthreadd"), False),
    ],
)
def test_engines_of_others_are_known_by_what_they_run(process: Any, is_engine: bool) -> None:
    assert doctor._is_engine(process) is is_engine
