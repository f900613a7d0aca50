"""On the box: unpack, try the kernels, measure, bring back. One command, a deadline, resumable.

``python3 KIT/box.py run --out OUT`` measures baseline against LMCache's server as A B B A and a
control; when a tier does not start it falls down to LMCache in process and vLLM's own offloading.
``start`` only sees which arms start and serve. Whatever happens, and after every step, OUT holds
``steps.json`` and ``runs.tar.gz``: journals, logs and everything else that was measured so far. The
same command again goes on where the last one ended.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from .attempt import STOP_S, bounded, is_whole, measure, newest_run, summarize
from .plans import ARMS, SHAPES, paired_plan, single_plan, write_model
from .steps import StepError, Steps, Work, stamp, write_whole
from .unpack import read_kit, unpack
from .wheels import KitError

_ABOUT: Final = (
    "Unpack the kit, try its kernels, measure, bring back; the same command goes on where it ended."
)
KIT: Final = Path(__file__).resolve().parents[2]
# Kept back from the deadline: stopping the servers, the tables, the archive.
_RESERVE_S: Final = STOP_S + 15
_LEAST_ATTEMPT_S: Final = 30
# The smoke test takes about 10 s on an H200 and the tables of a run a few: bounded so that one that
# hangs costs a part of the time, not all of it.
_SMOKE_S: Final = 120.0
_SUMMARIZE_S: Final = 30.0
# What scripts/pcie_probe.py says it needs, and half as much again.
_PROBE_S: Final = 90
# Where container images put a driver that the loader does not know of.
_DRIVER_ROOTS: Final = ("/usr/local/nvidia", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")


class Box:
    """One invocation: its folders, its environment for what it starts, and its clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.options = options
        self.out: Path = options.out.resolve()
        self.work: Path = options.work.resolve()
        for folder in (self.out, self.work, self.work / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.site = self.work / "site"
        self.steps = Steps(self.work / "steps.json", say=_say, began=self.began)
        self.env = _environment(self.site, self.work)

    def left_s(self) -> float:
        """Seconds until measuring must end."""
        spent = time.monotonic() - self.began
        return float(self.options.deadline) - _RESERVE_S - spent

    def log(self, name: str) -> Path:
        """The file that takes the output of step ``name``."""
        return self.work / "logs" / f"{name}.log"

    def bring_back(self) -> None:
        """Copy all that was found so far to OUT; what is there is replaced whole.

        Never raises: a full disk must not keep the next step from being tried.
        """
        try:
            self._bring_back()
        except OSError as error:
            _say(f"error: not brought back: {error}")

    def _bring_back(self) -> None:
        steps = self.work / "steps.json"
        if steps.exists():
            write_whole(self.out / "steps.json", steps.read_bytes())
        archive = self.out / "runs.tar.gz"
        draft = archive.with_name(".runs.tar.gz")
        with tarfile.open(draft, "w:gz", compresslevel=6) as tar:
            for name in ("steps.json", "logs", "plans", "results", "probe.json"):
                if (self.work / name).exists():
                    tar.add(self.work / name, arcname=name)
            tar.add(KIT / "kit.json", arcname="kit.json")
        draft.replace(archive)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: measured (``start``: every arm served); 1: not; 2: wrong usage; 130: stopped."""
    options = _parsed(argv)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        kit = read_kit(KIT)
        box = Box(options)
    except (KitError, OSError) as error:
        _say(f"error: {error}")
        return 1
    try:
        prepare(box, kit)
        return 0 if COMMANDS[options.command](box) else 1
    except KitError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        return 130
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cost the archive
        box.bring_back()
        _say(f"after {time.monotonic() - box.began:.0f} s: {box.out / 'runs.tar.gz'}")


def prepare(box: Box, kit: dict[str, Any]) -> None:
    """Unpack; note what the box is; see whether the carried kernels run, which is only noted."""
    parts = [part["sha256"] for part in kit["parts"]]
    box.steps.do("unpack", lambda: unpack(KIT, box.site), inputs=parts, makes=(box.site,))
    box.steps.do("machine", machine)
    write_model(box.work / "model", box.options.shape)
    if box.options.command == "run":
        _tried(box, "smoke", lambda: _smoke(box), inputs=parts)


def run_paired(box: Box) -> bool:
    """Measure the first host tier that starts, then copy speeds; whether a tier was measured."""
    was_measured = _first_that_starts(box)
    probe = KIT / "scripts" / "pcie_probe.py"
    if probe.exists() and box.left_s() > _PROBE_S:
        _tried(box, "probe", lambda: _probe(box, probe), inputs=box.options.shape)
    return was_measured


def _first_that_starts(box: Box) -> bool:
    for arm in box.options.arms:
        if box.left_s() < _LEAST_ATTEMPT_S:
            _say(f"{arm}: not tried, {box.left_s():.0f} s are left")
            return False
        found = _attempt(box, arm)
        if found["rows"].get(arm):
            return True
    return False


def start_each(box: Box) -> bool:
    """One short session of every arm by itself; whether all of them served."""
    served = []
    for arm in ("baseline", *box.options.arms):
        plan = single_plan(arm, model=box.work / "model", start_s=box.options.start)
        served.append(is_whole(_measured(box, f"start-{arm}", plan)))
    return all(served)


COMMANDS: Final = {"run": run_paired, "start": start_each}


def machine() -> dict[str, Any]:
    """What differs from ``box.txt``, the box the kit was made for, and what nvidia-smi says."""
    pins = (Path(__file__).parent / "box.txt").read_text(encoding="utf-8").splitlines()
    names = [pin.partition("==") for pin in pins if pin and not pin.startswith("#")]
    unlike = {}
    for name, _, wanted in names:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != (wanted or found) or found == "missing":
            unlike[name] = f"{found}, expected {wanted or 'any'}"
    return {"cores": os.cpu_count(), "unlike_box_txt": unlike, "gpus": _gpus()}


def driver_folder(roots: Iterable[str] = _DRIVER_ROOTS) -> str | None:
    """The folder to add to the loader's path so that it finds the driver; None: it does, or none.

    Engines load libcuda.so.1 by name; an image may keep it where only nvidia-smi looks.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        found = (path for root in roots for path in sorted(Path(root).rglob("libcuda.so.1")))
        first = next(found, None)
        return str(first.parent) if first else None
    return None


def _attempt(box: Box, arm: str) -> dict[str, Any]:
    """The paired experiment with ``arm``: once, and once more when servers died in its middle."""
    plan = paired_plan(
        arm, model=box.work / "model", start_s=box.options.start, control=box.options.control
    )
    found = _measured(box, f"run-{arm}", plan)
    if not is_whole(found) and found["rows"].get(arm):
        if box.left_s() > _LEAST_ATTEMPT_S:
            found = _measured(box, f"run-{arm}", plan)
        summarize(
            _results(box, f"run-{arm}", plan),
            env=box.env,
            log=box.log(f"run-{arm}"),
            seconds=min(_SUMMARIZE_S, box.left_s() + _RESERVE_S),
        )
    return found


def _measured(box: Box, name: str, plan: str) -> dict[str, Any]:
    """Step ``name``: kvcliff with ``plan``; done once it ran to the end, whatever it found."""
    path = box.work / "plans" / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(plan, encoding="utf-8")
    results = _results(box, name, plan)
    found: dict[str, Any] = {}

    def work() -> dict[str, Any]:
        found.update(measure(path, results, env=box.env, log=box.log(name), seconds=box.left_s()))
        if not is_whole(found):
            raise StepError(found)
        return found

    done = _tried(box, name, work, inputs=plan)
    run = newest_run(results)
    _say(f"{name}: rows {(found or done or {}).get('rows')} in {run}")
    return found or done or {"exit_code": None, "rows": {}}


def _results(box: Box, name: str, plan: str) -> Path:
    """Where the runs of ``plan`` go: a changed plan must not go on with an old one's run."""
    return box.work / "results" / f"{name}-{stamp(plan)[:6]}"


def _tried(box: Box, name: str, work: Work, *, inputs: object) -> dict[str, Any] | None:
    """A step whose failure is written down and ends nothing; OUT is brought up to date."""
    try:
        return box.steps.do(name, work, inputs=inputs)
    except (StepError, OSError, json.JSONDecodeError):
        return None
    finally:
        box.bring_back()


def _smoke(box: Box) -> dict[str, Any]:
    log = box.log("smoke")
    log.unlink(missing_ok=True)
    words = [sys.executable, "-P", "-m", "scripts.gpu_kit.smoke"]
    code = bounded(words, env=box.env, log=log, seconds=min(_SMOKE_S, box.left_s()))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    checks = [json.loads(line) for line in lines if line.startswith('{"check"')]
    found = {"exit_code": code, "checks": checks}
    if code != 0:
        raise StepError(found)
    return found


def _probe(box: Box, probe: Path) -> dict[str, Any]:
    found = box.work / "probe.json"
    config = box.work / "model" / "config.json"
    words = [sys.executable, "-P", str(probe), str(found), "--config", str(config)]
    code = bounded(words, env=box.env, log=box.log("probe"), seconds=box.left_s())
    if code != 0:
        raise StepError({"exit_code": code})
    return {"file": found.name}


def _gpus() -> list[str]:
    fields = "name,driver_version,memory.total,memory.used,clocks.sm,pcie.link.gen.current"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {error}"]
    return done.stdout.splitlines()


def _environment(site: Path, work: Path) -> dict[str, str]:
    """The environment of what is started: the kit first on Python's path, caches in ``work``."""
    path = [str(KIT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "XDG_CACHE_HOME": str(work / "cache"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its default imports a package that is not carried
        "DO_NOT_TRACK": "1",
    }
    if folder := driver_folder():
        known = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        env["LD_LIBRARY_PATH"] = os.pathsep.join([folder, *known])
    return env


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="box.py", description=_ABOUT)
    parser.add_argument(
        "command", choices=sorted(COMMANDS), help="run: measure; start: see which arms start"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what is brought back")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvcliff-kit"), help="folder to unpack and run in"
    )
    parser.add_argument("--deadline", type=int, default=480, help="seconds in all [480]")
    parser.add_argument("--start", type=int, default=150, help="longest start of a server [150]")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="in this order")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="Qwen3's size [8b]")
    parser.add_argument(
        "--no-control", dest="control", action="store_false", help="leave out the control"
    )
    return parser.parse_args(argv)


def _on_sigterm(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, flush=True)
