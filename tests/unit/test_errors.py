"""A bug of our own must not be taken for wrong input: what may stand between it and the top."""

import ast
from collections.abc import Iterator

from tests.places import ROOT

OURS = ("harness", "servers", "sim", "scripts")
TREES = {
    str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8"))
    for folder in OURS
    for file in sorted((ROOT / folder).rglob("*.py"))
}
# The command line shows it as a bug, exit code 70. Each check of the smoke test is by itself: any
# failure is that check's result, and exit code 1.
MAY_CATCH_ALL = {"harness/cli.py", "scripts/gpu_kit/smoke.py"}


def handlers() -> Iterator[tuple[str, ast.Try, ast.ExceptHandler, set[str]]]:
    """Every ``except`` with its file and the names it catches; none: everything."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            for handler in node.handlers if isinstance(node, ast.Try) else ():
                caught = ast.walk(handler.type) if handler.type is not None else ()
                yield file, node, handler, {c.id for c in caught if isinstance(c, ast.Name)}


def our_functions(tree: ast.Module) -> set[str]:
    """Names of functions and modules of ours: defined in ``tree``, or imported from our packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            is_ours = node.level > 0 or (node.module or "").split(".")[0] in OURS
            names |= {alias.asname or alias.name for alias in node.names} if is_ours else set()
    return {name for name in names if not name.lstrip("_")[:1].isupper()}  # classes hold values


def called(body: list[ast.stmt]) -> set[str]:
    """Names called in ``body``; of ``name.method()``, ``name``, and of ``self.method()``, ``method``."""
    names = set()
    for call in (node for part in body for node in ast.walk(part)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            names.add(call.func.id)
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name):
                names.add(call.func.attr if owner.id in ("self", "cls") else owner.id)
    return names


def test_only_what_others_code_says_of_wrong_input_is_a_plain_value_error() -> None:
    # int(), json and numpy say ValueError of what they are given, and a bug of ours does, too: where
    # a function of ours is called, a class of our own says which of the two it was.
    guarded = [
        (file, handler.lineno, sorted(ours))
        for file, node, handler, caught in handlers()
        if "ValueError" in caught and (ours := called(node.body) & our_functions(TREES[file]))
    ]
    assert guarded == []
    assert sum("ValueError" in caught for *_, caught in handlers()) > 10


def test_nothing_goes_on_after_an_error_it_does_not_know() -> None:
    wide = {"Exception", "BaseException"}
    went_on = {
        file
        for file, _, handler, caught in handlers()
        if (not caught or caught & wide) and not isinstance(handler.body[-1], ast.Raise)
    }
    assert went_on == MAY_CATCH_ALL
