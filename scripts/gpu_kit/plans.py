"""The plan and the model folder of the experiment on the box, as kvcliff reads them."""

import json
from pathlib import Path
from string import Template
from typing import Final

VOCAB_SIZE: Final = 32_768
"""Fewer words than Qwen3 has: its tokenizer is written on the spot and read at every start. The
layers, and so the KV and nearly all of the work per token, are the real model's."""

SHAPES: Final = {"8b": "Qwen--Qwen3-8B.json", "0.6b": "Qwen--Qwen3-0.6B.json"}
"""Files of ``harness/presets/models``."""

ARMS: Final = ("lmcache-mp", "lmcache", "native")
"""Host tiers in the order they are tried: most to least that can go wrong at their start."""

_HERE: Final = Path(__file__).resolve().parent


def write_model(folder: Path, shape: str) -> Path:
    """A model folder with a config.json of ``shape`` and no weights."""
    known = _HERE.parents[1] / "harness" / "presets" / "models" / SHAPES[shape]
    config = json.loads(known.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}, indent=1))
    return folder


def paired_plan(arm: str, *, model: Path, start_s: int, control: bool = True) -> str:
    """TOML: baseline and ``arm`` as A B B A, then the control that must load nothing."""
    order = ["baseline", arm, arm, "baseline", *(["control"] if control else [])]
    return _filled(
        arm, order, model=model, documents=8, passes="fwd fwd rev", gib=12.0, start_s=start_s
    )


def single_plan(arm: str, *, model: Path, start_s: int) -> str:
    """TOML: one short session of ``arm`` (or of the baseline), to see that it starts and serves."""
    return _filled(arm, [arm], model=model, documents=1, passes="fwd fwd", gib=4.0, start_s=start_s)


def _filled(
    arm: str,
    order: list[str],
    *,
    model: Path,
    documents: int,
    passes: str,
    gib: float,
    start_s: int,
) -> str:
    template = Template((_HERE / "experiment.toml").read_text(encoding="utf-8"))
    return template.substitute(
        arm=arm,
        order=_quoted(order),
        model=model,
        documents=documents,
        passes=_quoted(passes.split()),
        gib=gib,
        start_s=start_s,
    )


def _quoted(words: list[str]) -> str:
    return ", ".join(json.dumps(word) for word in words)
