import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servers.arms import Arm, ServerSpec
from servers.errors import LaunchError
from servers.gpu import facts as gpu_facts
from servers.gpu.devices import (
    Device,
    devices_of,
    parallel_size,
    state_reader,
    survey,
    visible_devices,
)
from servers.gpu.facts import (
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuState,
    MigInstance,
    Survey,
    reason_words,
)
from servers.gpu.nvidia_smi import parse_list, parse_table
from servers.gpu.nvml import nvml
from sim.units import MIB
from tests.gpus import (
    H200,
    MIG_1,
    MIG_2,
    NO_SMI,
    UUID_A,
    UUID_B,
    UUID_C,
    FakeNvml,
    FakeSmi,
    card,
    device,
    gpu,
    memory,
)
from tests.places import DATA, ROOT

NOT_SUPPORTED = FakeNvml.NVMLError("Not Supported")
NO_PERMISSION = FakeNvml.NVMLError("Insufficient Permissions")
LOST = FakeNvml.NVMLError("GPU is lost")
UNKNOWN_32, UNKNOWN_64 = 2**32 - 1, 2**64 - 1


def surveyed(*cards: dict[str, Any], **system: Any) -> Survey:
    return survey(FakeNvml(cards, system=system), NO_SMI)


def only(*cards: dict[str, Any]) -> Gpu:
    (found,) = surveyed(*cards).gpus
    return found


# --- NVML


def test_nvml_tells_every_fact_of_a_gpu() -> None:
    found = survey(H200, NO_SMI)
    assert (found.source, found.driver, found.cuda) == ("nvml", "580.65.06", "13.0")
    assert found.gpus == (
        Gpu(
            index=0, uuid=UUID_A, name="NVIDIA H200", pci_bus_id="00000000:3B:00.0",
            compute_capability="9.0", mig_enabled=False, mig=(),
            pcie_generation_max=5, pcie_width_max=16, sm_mhz_max=1980, memory_mhz_max=3201,
            power_limit_w=700.0, ecc_enabled=True, persistence_enabled=True, processes=(),
            state=GpuState(
                GpuMemory(143_771 * MIB, 600 * MIB, 143_171 * MIB), sm_mhz=345, memory_mhz=3201,
                temperature_c=31, power_w=76.543, throttle=("gpu_idle",),
                pcie_generation=5, pcie_width=16,
            ),
        ),
    )  # fmt: skip
    assert found.gpus[0].unread() == []


def test_only_getters_are_called_and_nvml_is_closed_again() -> None:
    library = FakeNvml([card(MigMode=[1, 1], MaxMigDeviceCount=1, instances=[{"UUID": MIG_1}])])
    survey(library, NO_SMI)
    assert len(library.called) > 20
    changing = [name for name in library.called if "Set" in name or "Reset" in name]
    assert changing == []
    assert (library.called[0], library.called[-1]) == ("nvmlInit", "nvmlShutdown")


@pytest.mark.parametrize(
    ("answers", "unread"),
    [
        ({"MemoryInfo": NOT_SUPPORTED}, ["total_bytes", "used_bytes", "free_bytes"]),
        ({"MemoryInfo": NO_PERMISSION}, ["total_bytes", "used_bytes", "free_bytes"]),
        ({"MemoryInfo": memory(0, 0)}, ["total_bytes", "used_bytes", "free_bytes"]),
        (
            {"MemoryInfo": SimpleNamespace(total=80 * MIB, used=UNKNOWN_64, free=UNKNOWN_64)},
            ["used_bytes", "free_bytes"],
        ),
        ({"CurrentClocksEventReasons": NOT_SUPPORTED}, ["throttle"]),
        ({"TemperatureV": UNKNOWN_32}, ["temperature_c"]),
        ({"PowerUsage": NOT_SUPPORTED}, ["power_w"]),
        ({"PowerUsage": UNKNOWN_32}, ["power_w"]),
        ({"CurrPcieLinkGeneration": 0}, ["pcie_generation"]),
        ({"CurrPcieLinkWidth": NOT_SUPPORTED}, ["pcie_width"]),
        ({("ClockInfo", 1): 0}, ["sm_mhz"]),
        ({"MigMode": NOT_SUPPORTED}, ["mig_enabled"]),  # most cards have none
        ({"EccMode": NOT_SUPPORTED}, ["ecc_enabled"]),
        ({"PersistenceMode": NO_PERMISSION}, ["persistence_enabled"]),
        ({"ComputeRunningProcesses": NO_PERMISSION}, ["processes"]),
        (
            {"ComputeRunningProcesses": FakeNvml.NVMLLibraryMismatchError("old driver")},
            ["processes"],
        ),
        ({"PciInfo": NOT_SUPPORTED}, ["pci_bus_id"]),
        ({"UUID": LOST}, ["uuid"]),
        ({"Name": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")}, ["name"]),
    ],
)
def test_what_nvml_refuses_is_unknown_and_never_zero(
    answers: dict[Any, Any], unread: list[str]
) -> None:
    # A58
    found = only({**card(), **answers})
    assert found.unread() == unread


def test_a_gpu_that_cannot_be_opened_stays_in_the_list_with_nothing_known() -> None:
    found = surveyed(card(), card(Handle=LOST))
    assert [g.uuid for g in found.gpus] == [UUID_A, None]
    assert found.gpus[1].state == GpuState()


def test_old_drivers_are_asked_by_the_old_names() -> None:
    old = card(
        CurrentClocksEventReasons=NOT_SUPPORTED,
        CurrentClocksThrottleReasons=0x44,
        TemperatureV=NOT_SUPPORTED,
        Temperature=77,
        UUID=UUID_A.encode(),
    )
    library = FakeNvml([old], absent=["nvmlDeviceGetCurrentClocksEventReasons"])
    (found,) = survey(library, NO_SMI).gpus
    assert found.state.throttle == ("sw_power_cap", "hw_thermal_slowdown")
    assert (found.state.temperature_c, found.uuid) == (77, UUID_A)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (0x1, ("gpu_idle",)),
        (0x4C, ("sw_power_cap", "hw_slowdown", "hw_thermal_slowdown")),
        (0x1000, ("bit_0x1000",)),
    ],
)
def test_throttle_reasons_are_words(bits: int, words: tuple[str, ...]) -> None:
    assert reason_words(bits) == words


def test_gpus_are_numbered_by_pci_bus_as_cuda_is_told_to() -> None:
    # A59: NVML lists the card on bus C1 first; hexadecimal, so 0A comes before C1.
    found = surveyed(
        card(UUID=UUID_C, PciInfo=SimpleNamespace(busId="00000000:C1:00.0")),
        card(UUID=UUID_A, PciInfo=SimpleNamespace(busId="00000000:0A:00.0")),
    )
    assert [(g.index, g.uuid) for g in found.gpus] == [(0, UUID_A), (1, UUID_C)]


def test_gpus_keep_the_drivers_order_where_a_bus_id_is_unknown() -> None:
    found = surveyed(card(UUID=UUID_C, PciInfo=NOT_SUPPORTED), card(UUID=UUID_A))
    assert [g.uuid for g in found.gpus] == [UUID_C, UUID_A]


def test_a_pid_that_is_not_visible_here_is_unknown_and_its_memory_is_kept() -> None:
    # A58: in a container NVML gives pids of the host, or none at all. No pid is above 2**22.
    seen = SimpleNamespace(pid=1, usedGpuMemory=5 * MIB)
    elsewhere = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)
    found = only(card(ComputeRunningProcesses=[seen, elsewhere]))
    assert found.processes is not None
    assert [(p.pid, p.used_bytes) for p in found.processes] == [(1, 5 * MIB), (None, None)]


def test_a_mig_instance_has_its_own_memory_not_its_gpus() -> None:
    # A59
    instance = {
        "UUID": MIG_1, "MemoryInfo": memory(20_000, 30), "GpuInstanceId": 3, "ComputeInstanceId": 0,
    }  # fmt: skip
    parent = card(
        MigMode=[1, 1], MaxMigDeviceCount=7, instances=[instance], MemoryInfo=NO_PERMISSION
    )
    library = FakeNvml([parent])
    (found,) = survey(library, NO_SMI).gpus
    expected = GpuMemory(20_000 * MIB, 30 * MIB, 19_970 * MIB)
    assert found.mig == (MigInstance(MIG_1, f"MIG-{UUID_A}/3/0", expected),)
    with state_reader([Device(found, found.mig[0])], library, NO_SMI) as read:
        assert read()[MIG_1].memory == expected
        assert read()[MIG_1].temperature_c == 31


# --- nvidia-smi


def smi(**changed: str | None) -> FakeSmi:
    """nvidia-smi of one H200, as its 580 driver prints it; ``changed`` by a word of the query."""
    answers = {
        "memory.total": f"{UUID_A}, 143771, 600, 143171\n",
        "clocks.sm": f"{UUID_A}, 345, 3201, 31, 76.54, 5, 16\n",
        "pci.bus_id": f"{UUID_A}, 00000000:3B:00.0, 1980, 3201, 5, 16, 700.00, Enabled, Enabled\n",
        "name": f"{UUID_A}, NVIDIA H200\n",
        "driver_version": f"{UUID_A}, 580.65.06\n",
        "compute_cap": f"{UUID_A}, 9.0\n",
        "mig.mode": f"{UUID_A}, Disabled\n",
        "clocks_event": f"{UUID_A}, 0x0000000000000001\n",
        "compute-apps": "",
        "-L": f"GPU 0: NVIDIA H200 (UUID: {UUID_A})\n",
        "--version": "NVIDIA-SMI version  : 580.65.06\nCUDA Version        : 13.0\n",
    }
    renamed = {name.replace("_dot_", ".").replace("__", "-"): t for name, t in changed.items()}
    return FakeSmi({**answers, **renamed})


NVML_GONE = FakeNvml(system={"Init": FakeNvml.NVMLError("NVML Shared Library Not Found")})


def test_nvidia_smi_tells_the_same_as_nvml() -> None:
    found = survey(NVML_GONE, smi())
    assert found.source == "nvidia-smi"
    same = replace(found, source="nvml")
    state = replace(found.gpus[0].state, power_w=76.543)
    assert replace(same, gpus=(replace(found.gpus[0], state=state),)) == survey(H200, NO_SMI)


def test_without_nvml_and_nvidia_smi_there_is_no_gpu_and_a_reason() -> None:
    found = survey(NVML_GONE, NO_SMI)
    assert (found.source, found.gpus) == (None, ())
    assert "NVML Shared Library Not Found" in (found.why_not or "")


@pytest.mark.parametrize(
    "cell",
    [
        "[N/A]", "N/A", "[Not Supported]", "[Insufficient Permissions]", "[Unknown Error]",
        "[GPU requires reset]", "ERR!", "600 MiB", "600.0", "-1", "0x258", "", "\uff16\uff10\uff10", "1e3",
    ],
)  # fmt: skip
def test_a_cell_that_is_no_plain_number_is_unknown_and_never_zero(cell: str) -> None:
    # A58
    (found,) = survey(NVML_GONE, smi(memory_dot_total=f"{UUID_A}, 143771, {cell}, 1\n")).gpus
    assert found.state.memory == GpuMemory(143_771 * MIB, None, MIB)


@pytest.mark.parametrize("cell", ["[N/A]", "[Insufficient Permissions]", "N/A", "ERR!", ""])
def test_a_driver_version_that_is_a_message_is_unknown(cell: str) -> None:
    # A58
    assert survey(NVML_GONE, smi(driver_version=f"{UUID_A}, {cell}\n")).driver is None


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (f"{UUID_A}, 1, 2\n{UUID_C}, 3, 4\n", {UUID_A: ["1", "2"], UUID_C: ["3", "4"]}),
        (f"  {UUID_A}  ,1,2\r\n\n", {UUID_A: ["1", "2"]}),
        (f"{MIG_1}, 1, 2", {MIG_1: ["1", "2"]}),
        # A decimal comma shifts every later cell: nothing of such a line is believed.
        (f"{UUID_A}, 62,31, 2\n", {UUID_A: []}),
        (f"{UUID_A}, 1\n", {UUID_A: []}),
        ("No devices were found\n", {}),
        ("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.\n", {}),
        ("uuid, a, b\n", {}),
        ("", {}),
    ],
)
def test_lines_of_nvidia_smi(text: str, rows: dict[str, list[str]]) -> None:
    # A58
    table = parse_table(text, ("a", "b"))
    assert {uuid: list(row.values()) for uuid, row in table.items()} == rows


def test_a_query_the_driver_does_not_know_costs_its_own_facts_only() -> None:
    # One unknown field fails the whole query: "Field "compute_cap" is not a valid field to query."
    asked = smi(compute_cap=None, clocks_event=None)
    asked.answers = {**asked.answers, "clocks_throttle": f"{UUID_A}, 0x0000000000000004\n"}
    (found,) = survey(NVML_GONE, asked).gpus
    assert found.unread() == ["compute_capability"]
    assert found.state.throttle == ("sw_power_cap",)


def test_a_name_may_hold_a_comma() -> None:
    (found,) = survey(NVML_GONE, smi(name=f"{UUID_A}, Card, special\n")).gpus
    assert found.name == "Card, special"


def test_mig_instances_are_read_from_the_list_and_their_memory_is_unknown() -> None:
    # A58, A59
    text = (
        f"GPU 0: NVIDIA H200 (UUID: {UUID_A})\n"
        f"  MIG 3g.71gb     Device  0: (UUID: {MIG_1})\n"
        f"  MIG 3g.71gb     Device  1: (UUID: {MIG_2})\n"
        f"GPU 1: NVIDIA H200 (UUID: {UUID_C})\n"
    )
    assert parse_list(text) == {UUID_A: (MigInstance(MIG_1), MigInstance(MIG_2)), UUID_C: ()}
    asked = smi(mig_dot_mode=f"{UUID_A}, Enabled\n")
    asked.answers = {**asked.answers, "-L": text}
    (found,) = survey(NVML_GONE, asked).gpus
    assert found.mig == (MigInstance(MIG_1), MigInstance(MIG_2))
    assert found.mig[0].memory == GpuMemory()
    with state_reader([Device(found, found.mig[0])], NVML_GONE, asked) as read:
        assert read() == {MIG_1: GpuState()}


def test_processes_of_nvidia_smi_may_be_invisible() -> None:
    # A58
    apps = f"{UUID_A}, 1, 5\n{UUID_A}, [N/A], [N/A]\nsome message\n"
    asked = smi()
    asked.answers = {**asked.answers, "compute-apps": apps}
    (found,) = survey(NVML_GONE, asked).gpus
    assert found.processes is not None
    assert [(p.pid, p.used_bytes) for p in found.processes] == [(1, 5 * MIB), (None, None)]


def test_states_can_be_read_without_nvml() -> None:
    with state_reader([device(0, UUID_A), device(1, UUID_C)], NVML_GONE, smi()) as read:
        states = read()
    assert states[UUID_A].memory.used_bytes == 600 * MIB
    assert states[UUID_C] == GpuState()


# --- CUDA_VISIBLE_DEVICES

THREE = (gpu(0, UUID_A), gpu(1, UUID_B), gpu(2, UUID_C))


@pytest.mark.parametrize(
    ("named", "uuids"),
    [
        (None, [UUID_A, UUID_B, UUID_C]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [UUID_C]),
        ("2,0", [UUID_C, UUID_A]),
        (" 1 , 0 ", [UUID_B, UUID_A]),
        ("0,2,-1,1", [UUID_A, UUID_C]),  # the CUDA guide's own example
        (UUID_B, [UUID_B]),
        (UUID_C[:12], [UUID_C]),  # GPU- and 8 digits
        ("GPU-C0FFEE00", [UUID_C]),
        (f"{UUID_C[:12]},0", [UUID_C, UUID_A]),
    ],
)
def test_cuda_visible_devices_names_gpus_by_number_and_by_uuid(
    named: str | None, uuids: list[str]
) -> None:
    # A59
    assert [found.uuid for found in visible_devices(named, THREE)] == uuids


@pytest.mark.parametrize(
    ("named", "message", "hint"),
    [
        ("3", "names '3', which is none of the 3 GPUs", f"2 = {UUID_C}"),
        ("-2", "names '-2'", f"0 = {UUID_A}"),
        ("0,,1", "names ''", "0 = "),
        ("0,1,", "names ''", "0 = "),
        ("1gpu", "names '1gpu'", "0 = "),
        ("0x1", "names '0x1'", "0 = "),
        ("all", "names 'all'", "0 = "),
        ("0,0", r"names GPU 0 \(GPU-8932f937\) twice", "once"),
        (f"0,{UUID_A[:12]}", r"names GPU 0 \(GPU-8932f937\) twice", "once"),
        ("GPU-8932", "'GPU-8932', and 2 GPUs start so", UUID_B),
        ("GPU-", "'GPU-', and 3 GPUs start so", UUID_B),
        ("GPU-ffffffff", "names 'GPU-ffffffff', which is none", UUID_A),
        ("c0ffee00", "names 'c0ffee00', which is none", "write GPU-c0ffee00"),
        (MIG_1, "which is no MIG instance", "there are: none"),
    ],
)
def test_an_entry_cuda_would_pass_over_in_silence_is_refused(
    named: str, message: str, hint: str
) -> None:
    # A59
    with pytest.raises(LaunchError, match=message) as caught:
        visible_devices(named, THREE)
    assert hint in caught.value.hint


SPLIT = replace(
    gpu(0, UUID_A),
    mig_enabled=True,
    mig=(MigInstance(MIG_1, f"MIG-{UUID_A}/3/0"), MigInstance(MIG_2, f"MIG-{UUID_A}/4/0")),
)
WHOLE = gpu(1, UUID_C)
ONE_SLICE = replace(SPLIT, mig=(MigInstance(MIG_1),))
EMPTY = replace(SPLIT, mig=())
UNREADABLE = replace(SPLIT, mig=None)


@pytest.mark.parametrize(
    ("named", "gpus", "uuid"),
    [
        (MIG_2, (SPLIT, WHOLE), MIG_2),
        (MIG_2.upper(), (SPLIT, WHOLE), MIG_2),
        (f"MIG-{UUID_A}/4/0", (SPLIT, WHOLE), MIG_2),
        ("1", (SPLIT, WHOLE), UUID_C),
        ("0", (ONE_SLICE, WHOLE), MIG_1),
        (UUID_A, (ONE_SLICE, WHOLE), MIG_1),
        (None, (ONE_SLICE, WHOLE), MIG_1),
    ],
)
def test_a_mig_instance_is_identified_by_its_own_uuid(
    named: str | None, gpus: tuple[Gpu, ...], uuid: str
) -> None:
    # A59
    assert [found.uuid for found in visible_devices(named, gpus)] == [uuid]


@pytest.mark.parametrize(
    ("named", "gpus", "message", "hint"),
    [
        ("0", (SPLIT, WHOLE), "in MIG mode with 2 instances", MIG_2),
        ("0", (EMPTY,), "in MIG mode with 0 instances", "create an instance"),
        ("0", (UNREADABLE,), "in MIG mode with unreadable instances", "create an instance"),
        (None, (SPLIT, WHOLE), "not set and there are 2 MIG instances", MIG_1),
        (MIG_1[:12], (SPLIT,), "which is no MIG instance", MIG_1),
        (MIG_1, (UNREADABLE,), "does not list its MIG instances", "nvidia-smi -L"),
        ("0", (gpu(0, None),), "GPU 0 has no readable UUID", "nvidia-smi -L"),
    ],
)
def test_a_gpu_no_server_could_run_on_as_named_is_refused(
    named: str | None, gpus: tuple[Gpu, ...], message: str, hint: str
) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        visible_devices(named, gpus)
    assert hint in caught.value.hint


# --- which of them a launch uses

SPEC = ServerSpec("gpu", "/m", 16, 100, 512, 512, "bfloat16")
ARM = Arm("baseline", SPEC)
FOUND = Survey("nvml", THREE)


@pytest.mark.parametrize(
    ("arm", "environ", "uuids"),
    [
        (ARM, {}, [UUID_A]),  # one process, one GPU: the others are not ours
        (ARM, {"CUDA_VISIBLE_DEVICES": "2,1"}, [UUID_C]),
        (replace(ARM, flags=("--tensor-parallel-size", "2")), {}, [UUID_A, UUID_B]),
        (replace(ARM, flags=("-tp=2",)), {"CUDA_VISIBLE_DEVICES": "2,0"}, [UUID_C, UUID_A]),
        (replace(ARM, env={"CUDA_VISIBLE_DEVICES": "1"}), {"CUDA_VISIBLE_DEVICES": "0"}, [UUID_B]),
        (replace(ARM, server=replace(SPEC, build="cpu")), {"CUDA_VISIBLE_DEVICES": "9"}, []),
    ],
)
def test_a_launch_uses_the_first_gpus_it_sees_as_many_as_it_is_parallel(
    arm: Arm, environ: dict[str, str], uuids: list[str]
) -> None:
    assert [found.uuid for found in devices_of(arm, environ, FOUND)] == uuids


def test_a_launch_that_sees_too_few_gpus_is_refused() -> None:
    with pytest.raises(LaunchError, match="needs 1 GPUs, CUDA_VISIBLE_DEVICES='' shows 0 of 3"):
        devices_of(ARM, {"CUDA_VISIBLE_DEVICES": ""}, FOUND)
    with pytest.raises(LaunchError, match="needs 4 GPUs, CUDA_VISIBLE_DEVICES=None shows 3 of 3"):
        devices_of(replace(ARM, flags=("-tp", "4")), {}, FOUND)


def test_where_no_gpu_can_be_listed_nothing_is_known_and_nothing_refused() -> None:
    assert devices_of(ARM, {"CUDA_VISIBLE_DEVICES": "0"}, Survey(None)) == []


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ((), 1),
        (("--tensor-parallel-size=2", "-pp", "3"), 6),
        (("--tensor-parallel-size", "two"), 1),  # vLLM will say what is wrong
        (("--data-parallel-size", "2", "--seed", "3"), 2),
        (("--tensor_parallel_size", "2"), 2),  # vLLM takes `_` for `-`
        (("--tensor-parallel-size", "2", "-tp", "4"), 4),  # the last one counts
        (("-pcp", "2", "-tp", "2"), 4),
        (("-tp", "0"), 1),
        (("-tp", "9" * 5000), 1),
    ],
)
def test_parallel_sizes_multiply(flags: tuple[str, ...], size: int) -> None:
    assert parallel_size(flags) == size


def test_the_real_library_without_a_driver_is_no_gpu_and_no_error() -> None:
    # Whatever this machine has: the survey answers, and says why when there is none.
    found = survey()
    assert found.gpus or found.why_not


def test_every_function_asked_of_nvml_is_one_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    parent = card(MigMode=[1, 1], MaxMigDeviceCount=1, instances=[{"UUID": MIG_1}])
    library = FakeNvml([parent, card(CurrentClocksEventReasons=NOT_SUPPORTED)])
    with nvml(library) as reader:
        found = reader.survey()
        reader.state(UUID_A, MIG_1)
    assert found.gpus[0].mig
    assert sorted({name for name in library.called if not hasattr(pynvml, name)}) == []


def test_the_real_pynvml_over_a_stub_of_the_driver_tells_the_same(tmp_path: Path) -> None:
    # The stand-in above is as good as our idea of pynvml; this is pynvml and its C structures.
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc) for a stub of libnvidia-ml.so.1")
    stub = tmp_path / "libnvidia-ml.so.1"
    source = DATA / "stubs" / "nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", stub, source], check=True)
    code = "from servers.gpu.devices import survey; print(repr(survey()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name: getattr(gpu_facts, name) for name in vars(gpu_facts) if name[0].isupper()}
    found: Survey = eval(done.stdout, names)
    expected = survey(H200, NO_SMI)
    assert found.gpus[0].processes == (GpuProcess(1, None),)
    assert replace(found, gpus=(replace(found.gpus[0], processes=()),)) == expected
    assert found.gpus[1] == Gpu(1, UUID_C, mig=())
