"""What is read of public models' config.json against the layers the installed vLLM makes of it."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sim.layout import REFUSED_TYPES
from sim.models.config import MLA_TYPES
from tests.live.differential.claims import needs
from tests.places import ROOT

pytestmark = [*needs("vllm"), pytest.mark.timeout(900)]


def run(*arguments: str) -> None:
    """In a process of its own: vLLM is made to build models without memory there."""
    command = [sys.executable, "-m", "tests.live.shapes", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_the_committed_comparison_is_that_of_the_installed_vllm(tmp_path: Path) -> None:
    run("--out", str(tmp_path / "shapes.json"))
    found = json.loads((tmp_path / "shapes.json").read_text(encoding="utf-8"))
    assert len(found["rows"]) >= 60
    assert found["different"] == []
    committed = json.loads((ROOT / "results" / "shapes.json").read_text(encoding="utf-8"))
    assert found["rows"] == committed["rows"]


def test_the_values_of_classes_are_those_of_the_installed_ones(tmp_path: Path) -> None:
    run("--classes", "--out", str(tmp_path / "classes.json"))
    committed = ROOT / "sim" / "models" / "classes.json"
    assert (tmp_path / "classes.json").read_text(encoding="utf-8") == committed.read_text(
        encoding="utf-8"
    )


def test_our_list_of_mla_is_vllms() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.config")  # first: the two import each other
        module = importlib.import_module("vllm.transformers_utils.model_arch_config_convertor")
    constants = module.ModelArchConfigConvertorBase.is_deepseek_mla.__code__.co_consts
    theirs = {name for names in constants if isinstance(names, tuple) for name in names}
    assert theirs >= set(MLA_TYPES)
    others = theirs - {*MLA_TYPES, *REFUSED_TYPES}
    assert sorted(name for name in others if not name.endswith("_mtp")) == []
