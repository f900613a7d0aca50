import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "sim": {"sim"},
    "servers": {"servers", "sim"},
    "harness": {"harness", "servers", "sim"},
}


def imported(file: Path) -> set[str]:
    """Top-level packages ``file`` imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert len(found) > 3
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    for file in files(package):
        ours = imported(file) & {"harness", "servers", "sim", "scripts", "tests"}
        assert ours <= MAY_IMPORT[package], file


def test_sim_needs_the_standard_library_only() -> None:
    # sim/curves/ walks traces of billions of tokens: numpy, and numba where there is one.
    for file in files("sim"):
        extra = {"numpy", "numba"} if "curves" in file.parts else set()
        assert imported(file) - {"sim", "kvsim"} - extra <= sys.stdlib_module_names, file


def test_no_module_needs_an_engine_to_be_imported() -> None:
    # A journal is checked on any laptop; engines are processes we talk to over HTTP.
    for package in MAY_IMPORT:
        for file in files(package):
            assert not imported(file) & {"vllm", "lmcache", "torch", "transformers"}, file


def test_only_the_console_prints() -> None:
    for package in ("harness", "servers"):
        for file in files(package):
            if file.name == "console.py":
                continue
            calls = [
                node
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ]
            assert calls == [], file
