import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from servers.gpu.devices import Device
from servers.gpu.facts import GpuMemory, GpuState
from servers.gpu.samples import GpuSamples, sampled, session_changes, session_warnings
from sim.units import MIB
from tests.factory import SERVERS, find, make_plan, run_of, sound_rows
from tests.gpus import UUID_A, UUID_C, device, gpu

CARD = Device(
    replace(
        gpu(0, UUID_A),
        pcie_generation_max=5,
        pcie_width_max=16,
        sm_mhz_max=1980,
        name="NVIDIA H200",
    )
)
IDLE = GpuState(
    GpuMemory(100 * MIB, 10 * MIB, 90 * MIB), sm_mhz=345, memory_mhz=2619, temperature_c=31,
    power_w=76.5, throttle=("gpu_idle",), pcie_generation=1, pcie_width=16,
)  # fmt: skip
BUSY = replace(
    IDLE, sm_mhz=1980, temperature_c=64, power_w=655.25, throttle=("sw_power_cap",),
    pcie_generation=5,
)  # fmt: skip
HOT = replace(BUSY, sm_mhz=1410, temperature_c=88, throttle=("sw_power_cap", "hw_thermal_slowdown"))
UNKNOWN = GpuState()


def record_of(*states: GpuState, card: Device = CARD) -> dict[str, Any]:
    """A record whose session read ``states`` in turn, the first at start, the second when ready."""
    left = list(states)
    samples = GpuSamples([card], lambda: {card.uuid: left.pop(0)})
    samples.mark("start")
    samples.mark("ready")
    while len(left) > 1:
        samples.take_sample()
    samples.mark("end")
    record = samples.record()
    assert record is not None
    return record


def test_a_record_has_the_moments_and_the_extent_of_each_number_under_load() -> None:
    record = record_of(IDLE, IDLE, BUSY, UNKNOWN, HOT, BUSY)
    (card,) = record["devices"]
    assert (card["uuid"], card["name"], card["pcie_generation_max"]) == (UUID_A, "NVIDIA H200", 5)
    assert card["start"]["power_w"] == 76.5
    assert card["end"]["memory"]["used_bytes"] == 10 * MIB
    # From ready on: IDLE, BUSY, UNKNOWN, HOT, BUSY; the one before the servers is not load.
    assert card["under_load"] == {
        "n_samples": 5, "sm_mhz": [345, 1980], "memory_mhz": [2619, 2619],
        "temperature_c": [31, 88], "power_w": [76.5, 655.25], "pcie_generation": [1, 5],
        "pcie_width": [16, 16], "n_throttle": 4,
        "throttle": {"gpu_idle": 1, "hw_thermal_slowdown": 1, "sw_power_cap": 3},
    }  # fmt: skip
    assert json.loads(json.dumps(record)) == json.loads(json.dumps(record, allow_nan=False))
    assert [device["uuid"] for device in record["devices"]] == [UUID_A]


def test_a_gpu_that_says_nothing_has_null_for_every_number_and_no_warning() -> None:
    record = record_of(*[UNKNOWN] * 8)
    load = record["devices"][0]["under_load"]
    assert {name for name, value in load.items() if value is None} == {
        "sm_mhz", "memory_mhz", "temperature_c", "power_w", "pcie_generation", "pcie_width",
    }  # fmt: skip
    assert (load["n_throttle"], load["throttle"], record["warnings"]) == (0, {}, [])


def test_readings_before_the_servers_are_ready_are_not_load() -> None:
    samples = GpuSamples([CARD], lambda: {UUID_A: HOT})
    samples.take_sample()
    samples.mark("ready")
    samples.mark("end")
    samples.take_sample()
    record = samples.record()
    assert record is not None
    assert record["devices"][0]["under_load"]["n_samples"] == 2


@pytest.mark.parametrize(
    ("states", "warnings"),
    [
        # An idle card lowers its link's generation, and prefill meets the power limit: both normal.
        ([IDLE, IDLE, BUSY, BUSY, BUSY, IDLE], []),
        (
            [IDLE, IDLE, HOT, BUSY, HOT, IDLE],
            [
                "GPU 0 (GPU-8932f937) was slowed by hw_thermal_slowdown in 2 of 5 samples "
                "(SM clock 345 to 1980 MHz of 1980)"
            ],
        ),
        (
            [replace(BUSY, pcie_generation=3)] * 7,
            ["GPU 0 (GPU-8932f937): its PCIe link never rose above generation 3 of 5"],
        ),
        # Four readings under load are too few to say that it never rises.
        ([IDLE, IDLE, IDLE, IDLE, IDLE], []),
        (
            [BUSY, BUSY, BUSY, replace(BUSY, pcie_width=8), BUSY, BUSY],
            ["GPU 0 (GPU-8932f937): its PCIe link had 8 to 16 lanes of 16"],
        ),
        ([replace(BUSY, pcie_generation=None, pcie_width=None, throttle=None)] * 7, []),
    ],
)
def test_warnings_of_a_session(states: list[GpuState], warnings: list[str]) -> None:
    record = record_of(*states)
    assert record["warnings"] == warnings
    assert session_warnings(record["devices"][0]) == warnings


def test_what_differs_between_sessions_is_named_with_both_values() -> None:
    slow = record_of(*[replace(BUSY, pcie_generation=4)] * 7)
    fast = record_of(*[BUSY] * 7)
    hot = record_of(*[HOT] * 7)
    assert session_changes({"01-baseline": fast, "02-lmcache": fast}) == []
    assert session_changes({"01-baseline": fast, "02-lmcache": slow}) == [
        "GPU 0 (GPU-8932f937): PCIe generation is not the same in all sessions: "
        "01-baseline 5, 02-lmcache 4"
    ]
    assert session_changes({"01-baseline": hot, "02-lmcache": fast}) == [
        "GPU 0 (GPU-8932f937): throttling is not the same in all sessions: "
        "01-baseline hw_thermal_slowdown, 02-lmcache none"
    ]


def test_sessions_that_do_not_know_are_not_compared() -> None:
    unknown, fast = record_of(*[UNKNOWN] * 7), record_of(*[BUSY] * 7)
    few = record_of(*[replace(BUSY, pcie_generation=1)] * 3)
    assert session_changes({"01": unknown, "02": fast, "03": few}) == []


def test_a_thread_samples_between_ready_and_end_and_ends_with_the_block() -> None:
    enough = threading.Event()
    states = iter([IDLE, BUSY])
    n_read = 0

    def read() -> dict[str, GpuState]:
        nonlocal n_read
        n_read += 1
        if n_read == 12:
            enough.set()
        return {UUID_A: next(states, HOT)}

    with sampled([CARD], read=read, period_s=0.001) as samples:
        samples.mark("ready")
        assert enough.wait(timeout=30)
        samples.mark("end")
    assert "gpu-samples" not in {thread.name for thread in threading.enumerate()}
    record = samples.record()
    assert record is not None
    load = record["devices"][0]["under_load"]
    assert record["devices"][0]["start"]["sm_mhz"] == 345
    assert load["n_samples"] >= 11
    assert load["sm_mhz"] == [1410, 1980]


def test_the_thread_ends_when_the_session_fails() -> None:
    with pytest.raises(KeyError), sampled([CARD], read=lambda: {UUID_A: IDLE}, period_s=0.001):
        raise KeyError
    assert "gpu-samples" not in {thread.name for thread in threading.enumerate()}


def test_without_a_gpu_there_is_no_thread_and_no_record() -> None:
    with sampled([]) as samples:
        samples.mark("ready")
        assert "gpu-samples" not in {thread.name for thread in threading.enumerate()}
        samples.mark("end")
    assert samples.record() is None


# --- as findings


def with_gpu(**records: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The sessions of a sound run, with GPU records by name ("s01_baseline")."""
    named = {name[1:].replace("_", "-"): record for name, record in records.items()}
    return {name: {**SERVERS[name], "gpu": record} for name, record in named.items()}


def test_a_hot_card_and_a_changed_link_are_findings_and_fail_nothing() -> None:
    slow = replace(HOT, pcie_generation=4)
    facts = with_gpu(s01_baseline=record_of(*[BUSY] * 7), s02_lmcache=record_of(*[slow] * 7))
    findings = [f for f in find(run_of(sound_rows(), facts=facts)) if f.code == "gpu-throttled"]
    assert {f.severity for f in findings} == {"warning"}
    assert [f.message.partition(" (SM")[0] for f in findings] == [
        "02-lmcache: GPU 0 (GPU-8932f937) was slowed by hw_thermal_slowdown in 6 of 6 samples",
        "02-lmcache: GPU 0 (GPU-8932f937): its PCIe link never rose above generation 4 of 5",
        "GPU 0 (GPU-8932f937): PCIe generation is not the same in all sessions: "
        "01-baseline 5, 02-lmcache 4",
        "GPU 0 (GPU-8932f937): throttling is not the same in all sessions: "
        "01-baseline none, 02-lmcache hw_thermal_slowdown",
    ]


def test_sessions_on_different_gpus_are_not_one_experiment() -> None:
    # A59
    other = record_of(*[BUSY] * 7, card=device(1, UUID_C))
    facts = with_gpu(s01_baseline=record_of(*[BUSY] * 7), s02_lmcache=other)
    (finding,) = [f for f in find(run_of(sound_rows(), facts=facts)) if f.severity == "error"]
    assert finding.code == "servers-differ"
    assert f"01-baseline {UUID_A}, 02-lmcache {UUID_C}" in finding.message


def test_runs_without_a_gpu_record_have_no_such_finding() -> None:
    facts = with_gpu(s01_baseline=None, s02_lmcache=None)
    assert find(run_of(sound_rows(), facts=facts)) == find(run_of(sound_rows()))


def test_a_control_whose_kv_capacity_differs_from_the_first_controls_is_found() -> None:
    order = 'order = ["baseline", "lmcache", "lmcache", "baseline", "control", "control"]'
    plan = make_plan(order=order, more="[control]\nnum_gpu_blocks = 99")
    first = SERVERS["05-control"]["facts"]
    run = run_of(sound_rows(), facts={"06-control": {"facts": {**first, "num_gpu_blocks": 98}}})
    assert [f.message for f in find(replace(run, plan=plan))] == [
        "num_gpu_blocks is not the same in all sessions: 05-control 99, 06-control 98"
    ]
