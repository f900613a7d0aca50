"""What every test is held to: it states something, stands alone, and cites a fault that is listed."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.places import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
STATEMENTS = {"raises", "fail", "warns"}
MAKERS = {"Row", "PredictedRow", "make_row", "tier_row", "make_prediction", "make_record"}


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for file in FILES:
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def states_something(test: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (
            isinstance(node, ast.Call)
            and (called(node) in STATEMENTS or called(node).startswith("assert_"))
        )
        for node in ast.walk(test)
    )


def at_import(node: ast.AST) -> Iterator[ast.Call]:
    """Calls made when a module is imported: not those inside functions, but their decorators'."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in child.decorator_list:
                yield from at_import(ast.Expression(decorator))
        elif not isinstance(child, ast.Lambda):
            if isinstance(child, ast.Call):
                yield child
            yield from at_import(child)


def test_every_test_states_something() -> None:
    tests = [
        (file, node)
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"
    ]
    assert len(tests) > 1000
    assert [f"{file}: {test.name}" for file, test in tests if not states_something(test)] == []


def test_no_two_test_modules_have_one_name() -> None:
    # pytest would collect the first alone and stop, but only where both folders are asked for.
    names = [file.name for file in FILES if file.name.startswith("test_")]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_no_file_of_tests_imports_another_test_module() -> None:
    # What two of them need lies in conftest, factory, folder, gpus or places.
    imported = [
        (file, name)
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            *(alias.name for alias in node.names),
            *((getattr(node, "module", None) or "").split(".")),
        )
    ]
    assert ("tests/unit/test_suite.py", "places") in {(str(file), name) for file, name in imported}
    wrong = [f"{file}: {name}" for file, name in imported if is_test_module(name)]
    assert wrong == []


def is_test_module(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last.startswith("test_") and any(file.stem == last for file in FILES)


def test_no_test_imports_a_private_name() -> None:
    names = [
        (file, alias.name)
        for file, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(names) > 1000
    assert [f"{file}: {name}" for file, name in names if re.match("_(?!_)", name)] == []


def test_no_row_is_made_when_a_module_is_imported() -> None:
    # One wrong field would be an error of collection, which hides every other test's result.
    made = [f"{file}: {called(call)}" for file, tree in parsed() for call in at_import(tree)]
    assert len(made) > 100
    assert [text for text in made if text.split(": ")[1] in MAKERS] == []


def test_every_fault_that_is_listed_is_cited_by_a_test_and_every_cited_one_is_listed() -> None:
    page = (ROOT / "tests" / "FAULTS.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (A[0-9]+) \|", page, re.M))
    assert len(listed) > 50
    assert set(cited()) == listed


def cited() -> Iterator[str]:
    """Tags of faults in the comments of tests."""
    for file in FILES:
        with file.open("rb") as lines:
            for token in tokenize.tokenize(lines.readline):
                if token.type == tokenize.COMMENT:
                    yield from re.findall(r"\bA[0-9]{1,2}\b", token.string)
