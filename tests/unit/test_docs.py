import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.plan.plan import Plan
from tests.places import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_what_the_documents_quote_is_what_the_committed_run_and_the_code_say() -> None:
    assert checked(ROOT) == (0, "")


def test_every_field_of_a_plan_is_in_the_readme() -> None:
    section = text("README.md").split("## Plan files")[1].split("\n## ")[0]
    fields = {
        field.alias or name
        for model in (Plan, *(f.annotation for f in Plan.model_fields.values()))
        for name, field in getattr(model, "model_fields", {}).items()
    }
    assert len(fields) > 20
    named = set(re.findall(r"`(?:[a-z]+\.)?([a-z_]+)`", section))
    fields -= {name for name in Plan.model_fields if name in section}
    assert sorted(fields - named) == []


def test_every_command_is_in_the_readme() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    commands = re.findall(r"^  ([a-z]+)  ", done.stdout.split("Commands:")[1], re.M)
    assert len(commands) >= 5
    for command in commands:
        assert f"`kvcliff {command}" in text("README.md")


def test_every_path_in_the_architecture_exists() -> None:
    page = text("ARCHITECTURE.md")
    named = set(re.findall(r"(?:harness|sim|servers|scripts|tests)/[\w./-]*\w/?", page))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_linked_file_exists(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text(name)) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text("README.md"), re.M))
    assert {"demo", "test", "setup"} <= named <= targets


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in Path(ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_documents_are_checked_against_the_tree_they_stand_in(tmp_path: Path) -> None:
    # Not against an installed copy: a description changed in this tree alone makes them stale.
    names = ("harness", "servers", "sim", "scripts", "README.md")
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    others = shutil.ignore_patterns("matrix", "*.png")
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=others)
    assert checked(tmp_path) == (0, "")
    row = tmp_path / "harness" / "record" / "row.py"
    old = row.read_text(encoding="utf-8")
    row.write_text(old.replace('description="', 'description="In this tree: ', 1), encoding="utf-8")
    assert checked(tmp_path) == (
        1,
        "out of date: results/README.md\nout of date: results/journal.schema.json\n",
    )


def checked(root: Path) -> tuple[int, str]:
    """Exit code and stderr of ``docs.py --check`` of the tree at ``root``."""
    command = [sys.executable, str(root / "scripts" / "docs.py"), "--check"]
    done = subprocess.run(command, cwd=root.parent, capture_output=True, text=True)
    return done.returncode, done.stderr
