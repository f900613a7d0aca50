import ast
import sys
from pathlib import Path

import pytest

from tests.places import ROOT, modules

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


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    for file in modules(package):
        ours = imported(file) & {"harness", "servers", "sim", "scripts", "tests"}
        assert ours <= MAY_IMPORT[package], file


# Top last: a wing of harness/ imports only what stands before it, and the floor below the wings.
FLOOR = ("errors", "files", "words_and_colours", "charting", "terminal", "console")
WINGS = (
    "plan", "counters", "record", "machine", "measure", "forecast", "verdict", "report", "traces",
    "commands",
)  # fmt: skip
ORDER = (*FLOOR, *WINGS, "cli")


def wing_of(dotted: str) -> str:
    """The folder or floor module of ``harness`` that a module lies in."""
    return dotted.split(".")[1]


def harness_imports(file: Path) -> set[str]:
    """Every ``harness.*`` module ``file`` imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.startswith("harness."))
        elif isinstance(node, ast.ImportFrom) and node.module == "harness":
            found.update(f"harness.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness."):
            found.add(node.module or "")
    return found


def test_the_wings_of_the_harness_are_these() -> None:
    folders = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    assert folders == set(WINGS)


def test_a_wing_imports_only_what_stands_below_it() -> None:
    forbidden = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules("harness")
        if file.name != "__init__.py" or file.parent.name != "harness"
        for name in sorted(harness_imports(file))
        if ORDER.index(wing_of(name)) > ORDER.index(file.relative_to(ROOT).with_suffix("").parts[1])
    ]
    assert forbidden == []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_no_module_imports_itself_through_others(package: str) -> None:
    graph = {dotted(file): module_imports(file, package) for file in modules(package)}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


def dotted(file: Path) -> str:
    """The module's name as an import says it."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_imports(file: Path, package: str) -> set[str]:
    """Modules of ``package`` that ``file`` imports anywhere, a function's own imports included."""
    known = {dotted(other) for other in modules(package)}
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found.update(inner or {node.module})
    return found


def test_sim_needs_the_standard_library_only() -> None:
    # sim/curves/ walks traces of billions of tokens: numpy, and numba where there is one.
    for file in modules("sim"):
        extra = {"numpy", "numba"} if "curves" in file.parts else set()
        assert imported(file) - {"sim", "kvsim"} - extra <= sys.stdlib_module_names, file


def test_no_module_needs_an_engine_to_be_imported() -> None:
    # A journal is checked on any laptop; engines are processes we talk to over HTTP.
    for package in MAY_IMPORT:
        for file in modules(package):
            assert not imported(file) & {"vllm", "lmcache", "torch", "transformers"}, file


def test_only_the_console_prints() -> None:
    for package in ("harness", "servers"):
        for file in modules(package):
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
