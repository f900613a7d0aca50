"""Public models' config.json fields (tests/data/shapes.json), and what is read of them."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.errors import SpecError
from sim.layout import KvLayout
from sim.models.config import ModelConfig
from tests.places import ROOT

SHAPES = ROOT / "tests" / "data" / "shapes.json"
RESULTS = ROOT / "results" / "shapes.json"

Shape = Mapping[str, Any]


def read_shapes() -> dict[str, Shape]:
    """The committed configs by name."""
    shapes: dict[str, Shape] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


def ours(shape: Shape) -> dict[str, Any]:
    """What we read of a shape; ``refused``: why not."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, shape["config"], shape.get("hf_quant_config"))
        try:
            layout = KvLayout.from_config(Path(folder), "auto")
        except SpecError as error:
            return {"refused": str(error).replace(f"{folder}/", "")}
        config = ModelConfig.read(Path(folder))
        heads = None if config.is_mla else next(n for n in config.kv_heads() if n)
    groups = [
        {"kind": g.kind, "layers": g.layers, "bytes_per_token": g.bytes_per_token, "window": g.window_tokens}
        for g in layout.groups
    ]  # fmt: skip
    why = layout.why_not_predictable
    return {"kv_heads": heads, "groups": groups, "not_predicted_because": why}


def is_equal(found: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether both keep the same; a refusal is right for a model that keeps states."""
    groups = [_plain(group, theirs["longest"], len(theirs["groups"])) for group in theirs["groups"]]
    if "refused" in found:
        return any(group["kind"] == "state" for group in groups)
    if theirs["is_mla"] != (found["kv_heads"] is None):
        return False
    has_heads = found["kv_heads"] in (None, theirs["kv_heads"])
    return has_heads and found["groups"] == groups


def _plain(group: Mapping[str, Any], longest: int | None, n_groups: int) -> dict[str, Any]:
    """A window that no sequence outgrows is none, where it is the only rule."""
    window = group["window"]
    is_only = n_groups == 1 and group["kind"] == "sliding_window"
    is_covered = is_only and longest is not None and window >= longest
    plain = {"bytes_per_token": None, **group}
    return plain | {"kind": "full_attention"} if is_covered else plain


def write(folder: str, config: Mapping[str, Any], quant: Mapping[str, Any] | None) -> None:
    """The files of a checkpoint that say its shape."""
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if quant is not None:
        (Path(folder) / "hf_quant_config.json").write_text(json.dumps(quant), encoding="utf-8")
