"""A packed kit on a likeness of the box without a GPU: as far as the first call that needs one."""

import json
import os
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_kit.pack import LIMIT_BYTES, check_size
from scripts.gpu_kit.plans import ARMS
from servers.arms import Arm, ServerSpec
from servers.command import render
from servers.ports import free_ports
from servers.tiers.base import HostTier

pytestmark = [pytest.mark.kit, pytest.mark.alone, pytest.mark.timeout(1800)]

STUBS = Path(__file__).parent / "stub"
HOW = (
    "needs a packed kit and a venv like the box (6 GB, about ten minutes): "
    "python -m scripts.gpu_kit pack --out KIT && python3.12 -m venv BOX && "
    "BOX/bin/pip install -r scripts/gpu_kit/box.txt && "
    "KVCLIFF_KIT=$PWD/KIT KVCLIFF_KIT_VENV=$PWD/BOX pytest -m kit"
)
# What vLLM 0.26's worker says when it first asks CUDA for its devices and there is none
# (vllm/v1/worker/gpu_worker.py, init_device).
FIRST_CUDA_CALL = "is out of bounds for 0 devices"


@dataclass(frozen=True)
class Box:
    """A kit unpacked in a folder of its own, the Python of the likeness, and its environment."""

    kit: Path
    work: Path
    python: Path
    env: dict[str, str]

    def run(self, command: str, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
        """The box's one command; its exit code and the steps it brought back."""
        done = subprocess.run(
            [self.python, self.kit / "box.py", command, "--out", out, "--work", self.work, *words],
            env=self.env,
        )
        steps: dict[str, Any] = json.loads((out / "steps.json").read_text())["steps"]
        return done.returncode, steps

    @property
    def site(self) -> Path:
        return self.work / "site"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    kit, venv = os.environ.get("KVCLIFF_KIT"), os.environ.get("KVCLIFF_KIT_VENV")
    if not kit or not venv:
        pytest.skip(HOW)
    if not shutil.which("gcc"):
        pytest.skip("needs gcc for a stand-in of the driver: install gcc")
    folder = tmp_path_factory.mktemp("box")
    shutil.copytree(kit, folder / "kit")
    drivers = folder / "drivers"
    drivers.mkdir()
    for source, library in (("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library}"]
        words = ["gcc", *flags, "-o", str(drivers / library), str(STUBS / source)]
        subprocess.run(words, check=True)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LD_LIBRARY_PATH": str(drivers)}
    yield Box(folder / "kit", folder / "work", Path(venv).absolute() / "bin" / "python", env)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def started(box: Box, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    """Every arm was started once: exit code, steps, and the folder that was brought back."""
    out = tmp_path_factory.mktemp("out")
    return *box.run("start", out, "--deadline", "1600", "--start", "300"), out


def brought_back(out: Path) -> dict[str, str]:
    """Text of every file in the archive, by its name."""
    with tarfile.open(out / "runs.tar.gz") as archive:
        files = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
        return {name: f.read().decode(errors="replace") for name, f in files.items() if f}


def test_the_kit_fits_and_is_for_what_the_box_has(box: Box) -> None:
    assert check_size(box.kit) <= LIMIT_BYTES
    content = json.loads((box.kit / "kit.json").read_text())
    assert (content["vllm"], content["python"], content["gpu_arch"]) == ("0.26.0", "3.12", 90)


def test_every_arm_comes_as_far_as_the_first_call_that_needs_a_gpu(
    started: tuple[int, dict[str, Any], Path],
) -> None:
    code, steps, out = started
    assert code == 1  # none served
    assert steps["unpack"]["status"] == "done"
    files = brought_back(out)
    for arm in ("baseline", *ARMS):
        assert steps[f"start-{arm}"]["status"] == "failed"
        logs = [
            text
            for name, text in files.items()
            if re.fullmatch(rf"results/start-{arm}-\w{{6}}/[^/]+/server-01-{arm}-vllm\.log", name)
        ]
        assert len(logs) == 1, arm
        assert FIRST_CUDA_CALL in logs[0], arm
        assert any(FIRST_CUDA_CALL in line for line in steps[f"start-{arm}"]["result"]["why"])


def test_the_run_falls_down_through_the_tiers_and_brings_back_what_it_found(
    box: Box, started: tuple[int, dict[str, Any], Path], tmp_path: Path
) -> None:
    code, steps = box.run("run", tmp_path, "--arms", "lmcache", "native", "--deadline", "900")
    assert code == 1
    before = started[1]["unpack"]
    assert steps["unpack"] == before  # not done again
    for arm in ("lmcache", "native"):
        result = steps[f"run-{arm}"]["result"]
        assert (result["exit_code"], result["rows"]) == (3, {})
    smoke = {c["check"]: c["ok"] for c in steps["smoke"]["result"]["checks"]}
    assert smoke == {
        "gpu": False,
        "vllm platform": False,  # Triton finds no active driver
        "rms_norm": False,
        "silu_and_mul": False,
        "flash attention 3": False,
        "lmcache extension": True,
        "connectors": True,
    }
    names = set(brought_back(tmp_path))
    assert {"kit.json", "steps.json", "logs/smoke.log", "plans/run-lmcache.toml"} <= names


def test_a_deadline_ends_the_run_and_what_was_found_is_there(
    box: Box, started: tuple[int, dict[str, Any], Path], tmp_path: Path
) -> None:
    # 50 s are kept back for stopping and packing and 30 s are the least for an attempt.
    code, steps = box.run("run", tmp_path, "--arms", "lmcache-mp", "--deadline", "60")
    assert code == 1
    assert "run-lmcache-mp" not in steps
    assert "start-lmcache-mp" in brought_back(tmp_path)["steps.json"]


def test_lmcaches_server_answers_as_kvcliff_asks(
    box: Box, started: tuple[int, dict[str, Any], Path], tmp_path: Path
) -> None:
    assert started[1]["unpack"]["status"] == "done"
    ports = free_ports(with_connector=True, with_http=True)
    server = ServerSpec("gpu", "/model", 16, 64, 512, 512, "bfloat16")
    command = render(
        Arm("lmcache-mp", server, HostTier(gib=1.0)),
        ports=ports,
        model_name="m",
        work_dir=tmp_path,
        cache_dir=tmp_path,
        inherited=box.env | {"PYTHONPATH": str(box.site)},
    )[1]
    process = subprocess.Popen(
        [box.python, *command.argv[1:]],
        env=dict(command.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:  # pytest-timeout is the deadline
            if "Uvicorn running on" in line:
                break
        base = f"http://127.0.0.1:{ports.lmcache_http}"
        answers = {}
        for path in ("healthcheck", "status", "config", "lmc_version", "metrics"):
            with urllib.request.urlopen(f"{base}/{path}", timeout=10) as answer:
                answers[path] = answer.read().decode()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert json.loads(answers["healthcheck"])["status"] == "healthy"
    assert "lmcache" in answers["metrics"]
    assert json.loads(answers["config"])["mp"]["chunk_size"] == 256
    assert json.loads(answers["lmc_version"]) == "0.5.3"
    assert json.loads(answers["status"])


@pytest.mark.parametrize(
    "library",
    [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "lmcache/c_ops.cpython-312-x86_64-linux-gnu.so",
    ],
)
def test_nvidias_own_tool_reads_the_pruned_libraries(
    box: Box, started: tuple[int, dict[str, Any], Path], library: str
) -> None:
    assert started[1]["unpack"]["status"] == "done"
    tools = list(box.python.parents[1].glob("lib/*/site-packages/triton/backends/nvidia/bin"))
    listed = subprocess.run(
        [tools[0] / "cuobjdump", "--list-elf", "--list-ptx", box.site / library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    archs = Counter(re.findall(r"\.(sm_\d+)a?\.cubin", listed))
    assert archs["sm_90"] > 0
    assert len(archs) <= 2  # and at most one filler
    assert ".ptx" not in listed
