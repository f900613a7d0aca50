"""README.md, docs/ and the pages beside them: what they quote, name, link and let a reader type."""

import argparse
import contextlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness.cli import COMMANDS, command_line
from harness.errors import KvcliffError
from harness.forecast.deployment_file import Deployment
from harness.forecast.requests import PredictSpec
from harness.plan.files import load_plan, parse_plan
from harness.plan.plan import BUILT_IN_ARMS
from harness.plan.presets import preset_names
from scripts.gpu_kit import box, pack
from sim.curves.formats import FORMATS
from sim.tiers.spec import COMPARED_ENGINES, OLDEST_ENGINE
from tests.places import ROOT

GUIDE = ("README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
"""What a user reads."""
PAGES = (
    *GUIDE, "ARCHITECTURE.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md", "tests/FAULTS.md",
    "results/README.md", "results/LOG.md",
)  # fmt: skip
PARSERS: Any = typer.main.get_command(command_line(COMMANDS))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    return text(name).split(f"\n## {heading}\n")[1].split("\n## ")[0]


# --- what is quoted


def test_what_the_documents_quote_is_what_the_committed_run_and_the_code_say() -> None:
    assert checked(ROOT) == (0, "")


def test_the_documents_are_checked_against_the_tree_they_stand_in(tmp_path: Path) -> None:
    # Not against an installed copy: a description changed in this tree alone makes them stale.
    for name in ("harness", "servers", "sim", "scripts", "docs", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    others = shutil.ignore_patterns("matrix", "*.png")
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=others)
    row = tmp_path / "harness" / "record" / "row.py"
    old = row.read_text(encoding="utf-8")
    row.write_text(old.replace('description="', 'description="In this tree: ', 1), encoding="utf-8")
    assert checked(tmp_path) == (
        1,
        "".join(
            f"out of date: results/{name}\n"
            for name in ("README.md", "journal.schema.json", "reconcile.schema.json")
        ),
    )


def checked(root: Path) -> tuple[int, str]:
    """Exit code and stderr of ``docs.py --check`` of the tree at ``root``."""
    command = [sys.executable, str(root / "scripts" / "docs.py"), "--check"]
    done = subprocess.run(command, cwd=root.parent, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_the_pictures_beside_the_result_are_of_the_run_it_quotes() -> None:
    (run,) = re.findall(r"<!-- result of (\S+),", text("README.md"))
    for page in ("README.md", "docs/results.md"):
        pictures = re.findall(r"\((?:\.\./)?results/([^/)]*)/report-\w+\.png\)", text(page))
        assert set(pictures) == {run}


# --- what is named


def test_every_field_of_a_plan_is_in_the_guide() -> None:
    named = set(re.findall(r"^\| `([\w.]+)` \|", section("docs/plan-files.md", "Fields"), re.M))
    demo = tomllib.loads(load_plan("demo").to_toml())  # defaults written out
    fields = {
        f"{name}.{inner}" if isinstance(value, dict) else name
        for name, value in demo.items()
        for inner in (value if isinstance(value, dict) else ("",))
    }
    assert len(fields) > 20
    assert sorted(fields - named) == []
    assert {"arms.NAME.tier", "decision.pass", "workload.vocab"} <= named


@pytest.mark.parametrize(
    ("heading", "model", "elsewhere"),
    [
        ("Why does this deployment hit nothing?", Deployment, set()),
        (
            "Where do the tokens of these requests come from?",
            PredictSpec,
            {
                "engine",
                "block_size",
                "host",
                "watermark",
                "evict_ratio",
                "policy",
                "model",
                "kv_dtype",
            },
        ),
    ],
)
def test_the_fields_of_a_description_are_in_the_guide_with_their_defaults(
    heading: str, model: type[BaseModel], elsewhere: set[str]
) -> None:
    page = section("docs/predictions.md", heading)
    said = {
        name: default
        for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) ?\| .* \|$", page, re.M)
        for name, default in zip_longest(
            names.split(", "), defaults.split(", ") if "[" not in defaults else [defaults]
        )
    }
    fields = {name: field for name, field in model.model_fields.items() if name not in elsewhere}
    assert said == {f"`{name}`": default_of(field) for name, field in fields.items()}


def default_of(field: FieldInfo) -> str:
    """A field's default as the guide writes it."""
    if field.is_required():
        return "needed"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def test_the_readme_has_the_exit_code_of_every_error() -> None:
    (said,) = re.findall(r"Exit codes: (.*?)\. ?$", text("README.md"), re.M | re.S)
    codes = {int(code) for code in re.findall(r"(?:^|· )(\d+) ", said)}
    errors = (KvcliffError, *KvcliffError.__subclasses__())
    assert {0, 130} | {error.exit_code for error in errors} <= codes


def test_every_treatment_is_in_the_guide_and_no_other() -> None:
    page = section("docs/arms.md", "Treatments")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.M)) == BUILT_IN_ARMS.keys()


def test_the_arms_of_the_guide_work_in_a_plan() -> None:
    first, second = re.findall(r"^```toml\n(.*?)^```", text("docs/arms.md"), re.M | re.S)
    order, arm = first.split("\n\n")
    demo = re.sub(r"order = \[[^\]]*\]", order, text("harness/presets/demo.toml"))
    plan = parse_plan(f"{demo}{arm}{second}".encode(), where="p")
    assert plan.treatment == "triton"
    assert plan.arm("triton").tier == "lmcache-mp"
    assert plan.arm("mine").connector_class == "OffloadingConnector"


def test_the_versions_in_the_guide_are_those_that_are_installed_and_packed() -> None:
    vllm, lmcache = re.findall(r'"(?:vllm|lmcache)==([\d.]+)"', text("pyproject.toml"))[-2:]
    assert f"vLLM {vllm} with LMCache {lmcache}" in text("README.md")
    page = " ".join(text("docs/gpu-boxes.md").split())
    assert f"beside vLLM {pack.VLLM} and LMCache {pack.LMCACHES[-1]}" in page
    assert f"at most {pack.LIMIT_BYTES >> 20} MiB" in page


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(text("README.md").splitlines()) <= 150


def test_the_versions_of_vllm_that_are_predicted_are_in_the_guide() -> None:
    page = " ".join(text("docs/predictions.md").split())
    compared = json.loads(text("results/versions.json"))["comparisons"]
    minors = sorted({int(re.findall(r"==0\.(\d+)", one["wheel"])[0]) for one in compared})
    assert tuple((0, minor) for minor in minors) == COMPARED_ENGINES
    *others, last = (f"0.{minor}" for minor in minors)
    versions = f"{', '.join(others)} and {last}"
    assert f"Versions {versions} have been compared" in page
    assert f"one before 0.{OLDEST_ENGINE[1]} is refused" in page
    assert f"compared with vLLM {versions}" in " ".join(text("README.md").split())


def test_every_preset_walks_as_the_guide_says() -> None:
    assert "forward, forward again, and in reverse" in text("docs/presets.md")
    walks = {name: load_plan(name).workload.passes for name in preset_names()}
    assert walks == dict.fromkeys(walks, ("fwd", "fwd", "rev"))


def test_every_format_of_a_trace_is_in_the_guide() -> None:
    page = text("docs/traces.md")
    assert [one.name for one in FORMATS if one.name.split()[0] not in page] == []


def test_the_matrix_has_as_many_plans_as_the_readme_says() -> None:
    plans = list((ROOT / "harness/presets/matrix").glob("*.toml"))
    assert f"{len(plans)} plans on the same engines" in text("README.md")


def test_every_command_is_in_the_readme() -> None:
    assert len(COMMANDS) > 10
    readme = text("README.md")
    assert [name for name in COMMANDS if f"`kvcliff {name}" not in readme] == []


def test_every_path_in_the_architecture_exists() -> None:
    page = text("ARCHITECTURE.md")
    named = set(re.findall(r"(?:harness|sim|servers|scripts|tests)/[\w./-]*\w/?", page))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_make_target_in_the_guide_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.M))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`|make_)make ([a-z]+)(?:$|`| )", text(page), re.M)
    }
    assert {"demo", "test", "setup"} <= named <= targets


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in Path(ROOT / ".ci" / "run").read_text(encoding="utf-8")


# --- what is linked


def test_the_readme_links_every_page_of_the_guide() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", text("README.md")))
    assert [page for page in GUIDE[1:] if page not in linked] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text(page)) if "://" not in link]
    assert [link for link in links if not resolves(page, link)] == []


def resolves(page: str, link: str) -> bool:
    """Whether a relative link of ``page`` leads somewhere, its anchor included."""
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """The names a Markdown page's headings have in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_that_leads_nowhere_is_seen() -> None:
    assert resolves("docs/findings.md", "../README.md#two-commands")
    assert not resolves("docs/findings.md", "../README.md#no-such-heading")
    assert not resolves("docs/findings.md", "README.md")


# --- what is typed


def command_lines(page: str) -> list[str]:
    """Every command a page shows: lines of its ``sh`` blocks, and ``kvcliff …`` between backticks.

    A block's lines are joined where one ends in a backslash; what follows ``#`` is said, not typed.
    """
    content = text(page)
    blocks = re.findall(r"^```sh\n(.*?)^```", content, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", content, flags=re.M | re.S)
    spans = re.findall(r"`((?:\.venv/bin/)?(?:kvcliff|python\S*) [^`]+)`", prose)
    lines += [span for span in spans if span.split()[1:] not in [[name] for name in COMMANDS]]
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("page", [*GUIDE, "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_command_line_that_is_shown_parses(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in command_lines(page):
        assert_parses(line, monkeypatch)


def assert_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless the command that ``line`` starts takes its words."""
    program, *words = shlex.split(re.sub(r"[\[\]…]", "", line), comments=True)
    if program.endswith("kvcliff"):
        name, *rest = words
        with contextlib.suppress(typer.Exit):  # --help
            PARSERS.commands[name].make_context(name, rest)
    elif "python" in program:
        assert_script_parses(words, monkeypatch)
    else:
        assert program in ("make", "cp"), line


class Parsed(Exception):  # noqa: N818
    """The words of a script were taken."""


def assert_script_parses(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as far as its parser."""
    parse = argparse.ArgumentParser.parse_known_args

    def stop(*arguments: Any, **named: Any) -> None:
        _, unknown = parse(*arguments, **named)
        assert unknown == []
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.syspath_prepend(ROOT)
    is_module = words[0] == "-m"
    name, *rest = words[1:] if is_module else words
    monkeypatch.setattr(sys, "argv", [name, *rest])
    monkeypatch.delitem(sys.modules, f"{name}.__main__", raising=False)  # of another test
    with pytest.raises(Parsed):  # noqa: PT012
        if name == "kit/box.py":  # what a packed kit's one command calls
            box.main(rest)
        elif is_module:
            runpy.run_module(name, run_name="__main__")
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")


@pytest.mark.parametrize(
    "line",
    [
        "kvcliff plan --no-such",
        "kvcliff compare",
        "kvcliff curve T --target much",
        "python scripts/docs.py --no",
    ],
)
def test_a_command_line_that_does_not_parse_is_seen(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((typer.TyperException, SystemExit, AssertionError)):
        assert_parses(line, monkeypatch)


@pytest.mark.parametrize("page", GUIDE)
def test_every_block_says_what_it_is_written_in(page: str) -> None:
    # A command in a block without a language would be typed by readers and parsed by no test.
    fences = re.findall(r"^```(.*)$", text(page), re.M)
    assert set(fences[::2]) <= {"sh", "toml", "json", "text"}
    assert set(fences[1::2]) <= {""}
