"""Which model a plan means: its shape, where that is known from, and what vLLM is told to load.

A plan needs config.json alone, so it works before anything is downloaded: shapes of a few models
come with kvcliff (``presets/models``: architecture numbers only).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.plan.lookup import find_model, hub_id, shape_names, shape_of
from harness.plan.plan import Weights
from servers.tinymodel import write_dummy_model, write_tiny_model
from sim.errors import SpecError
from sim.models.config import language_part, read_json

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
_SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a plan, found.

    ``name``: as the plan says. ``config``: the file that fixes its shape. ``identity``: bytes that
    are equal for equal shapes, so that a plan keeps its id when the model is downloaded meanwhile.
    ``serve``: vLLM's ``--model``, an absolute folder or a hub id that vLLM will download.
    ``source`` says where the shape came from; ``missing`` what a folder lacks to be loaded.
    """

    name: str
    config: Path
    identity: bytes
    serve: str
    source: str
    weights: Weights = "auto"
    missing: str | None = None

    @property
    def is_download(self) -> bool:
        """Whether vLLM has to download it first."""
        return not Path(self.serve).is_absolute()

    def read_config(self) -> dict[str, Any]:
        """config.json, of a multimodal model its language part."""
        return dict(language_part(read_json(self.config)))

    @property
    def vocab_size(self) -> int | None:
        """How many token ids it has; None when its config does not say."""
        size = self.read_config().get("vocab_size")
        return size if type(size) is int else None


def find(name: str, *, weights: Weights, cache_dir: Path) -> Model:
    """The model ``name``: ``tiny``, a folder, or a hub id; nothing is downloaded.

    A folder wins over a hub id of that name, a downloaded model over a shape that came with
    kvcliff. With ``dummy`` weights vLLM is given a folder that needs no network, written below
    ``cache_dir`` where it has to be. InputError for a model whose shape cannot be known.
    """
    if name == "tiny":
        folder = write_tiny_model(cache_dir / "models")
        content = (folder / "config.json").read_bytes()
        source = "kvcliff's own tiny model"
        return Model(name, folder / "config.json", content, str(folder), source, weights)
    shape = shape_of(name)
    if shape is not None and weights == "dummy":
        return _weightless(name, shape, "kvcliff's shape file", cache_dir)
    full = name if shape is None else hub_id(name)
    try:
        folder = find_model(full).resolve()
    except SpecError as error:
        if shape is not None:
            source = f"kvcliff's shape file, because {full} is not downloaded"
            return Model(name, shape, shape.read_bytes(), full, source)
        raise InputError(f"model.path: {error}", hint=_hint(name)) from None
    return _in_folder(full, folder, shape, weights, cache_dir)


def check_vocab(model: Model, vocab: tuple[int, int] | None) -> tuple[int, int]:
    """The half-open range of token ids prompts are drawn from: ``vocab``, if the model has them.

    By default the middle of the vocabulary: special tokens sit at its ends.
    """
    size = model.vocab_size
    if vocab is None:
        if size is None or size < 8:
            raise InputError(
                f"{model.config}: no usable vocab_size", hint="set workload.vocab in the plan"
            )
        return (size // 8, size - size // 8)
    if size is not None and not 0 <= vocab[0] < vocab[1] <= size:
        raise InputError(
            f"workload.vocab is [{vocab[0]}, {vocab[1]}), the model's token ids are [0, {size})"
        )
    return vocab


def _in_folder(
    name: str, folder: Path, shape: Path | None, weights: Weights, cache_dir: Path
) -> Model:
    """The model in a folder of this machine; ``shape``: what came with kvcliff for this hub id."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"model.path {name!r} has no config.json", hint=_hint(name))
    try:
        read_json(config)
    except SpecError as error:
        raise InputError(f"model.path {name!r}: {error}") from None
    source = str(config)
    if weights == "dummy":
        if any((folder / file).is_file() for file in _TOKENIZER_FILES):
            return Model(name, config, config.read_bytes(), str(folder), source, weights)
        return _weightless(name, config, source, cache_dir)
    is_hub_id = not Path(name).expanduser().exists()
    missing = _missing_weights(folder)
    identity = config.read_bytes()
    if shape is not None and _agree(shape, config):
        identity = shape.read_bytes()
    if missing and is_hub_id:
        return Model(name, config, identity, name, f"{source} (not downloaded: {missing})")
    return Model(name, config, identity, str(folder), source, missing=missing)


def _weightless(name: str, config: Path, source: str, cache_dir: Path) -> Model:
    """``config`` with a tokenizer of kvcliff's own, in a folder that vLLM loads offline."""
    content = config.read_bytes()
    try:
        folder = write_dummy_model(content, cache_dir / "models")
    except SpecError as error:
        raise InputError(f"model.path {name!r}: {error}") from None
    return Model(name, folder / "config.json", content, str(folder), source, "dummy")


def _missing_weights(folder: Path) -> str | None:
    """What of the weights is not there, e.g. after a download cut short; None: all is."""
    index = folder / _SHARD_INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            return f"usable {_SHARD_INDEX}"
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        return missing[0] if missing else None
    has_any = any(any(folder.glob(f"*{end}")) for end in (".safetensors", ".bin", ".pt", ".gguf"))
    return None if has_any else "weights (*.safetensors)"


def _agree(shape: Path, config: Path) -> bool:
    """Whether a config contradicts nothing of the shape file."""
    told, ours = (json.loads(path.read_text(encoding="utf-8")) for path in (config, shape))
    return all(told.get(field, value) == value for field, value in ours.items())


def _hint(name: str) -> str:
    known = ", ".join(shape_names())
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is None:
        return f"give `tiny`, a folder with config.json and weights, or a hub id, e.g. of {known}"
    return (
        f"give `tiny`, a folder with config.json and weights, one of {known}, "
        f"or download it first: for a plan `hf download {name} config.json` is enough"
    )
