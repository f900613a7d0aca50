import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

# Prints on stderr what of its words was imported when the command line after them has ended.
PROGRAM = """
import json, sys
costly = sys.argv.pop(1).split()
from harness.cli import main
try:
    main()
finally:
    print(json.dumps(sorted(set(costly) & set(sys.modules))), file=sys.stderr)
"""
COSTLY = "httpx jinja2 numpy pandas prometheus_client pyarrow safetensors scipy vl_convert"


def imported_by(*words: str, cache: Path, costly: str = COSTLY) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, costly, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.parametrize("words", [("--version",), ("--help",)])
def test_naming_the_commands_loads_nothing_that_one_of_them_needs(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    wings = "harness.plan.plan harness.forecast.preview harness.verdict.publish harness.traces.load"
    found = imported_by(*words, cache=tmp_path, costly=f"{COSTLY} pydantic psutil {wings}")
    assert found == []


def test_a_plan_loads_no_library_it_does_not_use(tmp_path: Path) -> None:
    # The first one writes the tiny model's weights. Both ask scipy for the power of the plan's pairs.
    assert imported_by("plan", "demo", cache=tmp_path) == ["numpy", "safetensors", "scipy"]
    assert imported_by("plan", "demo", cache=tmp_path) == ["numpy", "scipy"]
