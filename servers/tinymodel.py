"""Models written here, so that real engines run anywhere, offline.

A small Qwen3 of seeded random weights; and folders without weights, for ``--load-format dummy``.
The small one keeps 12,288 bytes of KV per token (float32), which puts a host load and a GPU hit
clearly apart from recomputation on a CPU. Its weights are drawn with a standard deviation that
makes the outputs depend on the prompt: with vLLM's dummy weights (about 1e-3) every log-probability
is -ln(vocab) and "the arms answer alike" would prove nothing.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sim.errors import SpecError

VOCAB_SIZE: Final = 512
WEIGHT_SEED: Final = 20260101
# 0.08: measured with vLLM 0.32 on these sizes, 13-16 distinct greedy tokens of 16 and a first-token
# log-probability that moves by 0.08-1.06 with the document, against 8e-6 of float32 noise.
WEIGHT_STD: Final = 0.08

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 384,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


def tiny_shape() -> bytes:
    """The small one's config.json."""
    return _json(CONFIG)


def write_tiny_model(folder: Path) -> Path:
    """The model's own folder below ``folder``, written if it is not there yet.

    Its name carries a hash of everything that shapes the content, so a changed recipe never meets
    an old file. The folder appears whole or not at all; two processes may write it at once.
    Raises OSError when ``folder`` cannot be written.
    """

    def write(draft: Path) -> None:
        from servers.tinyweights import save_weights  # numpy, for the one time it is written

        _write_shape(draft, tiny_shape(), VOCAB_SIZE, CONFIG["max_position_embeddings"])
        save_weights(draft / "model.safetensors", CONFIG, seed=WEIGHT_SEED, std=WEIGHT_STD)

    return _appear(folder / f"tiny-qwen3-{recipe_version()}", write)


def write_dummy_model(config: bytes, folder: Path) -> Path:
    """A model folder below ``folder`` of this config.json, with a tokenizer and no weights.

    It is enough for ``--load-format dummy``: vLLM reads only shape and tokenizer. The tokenizer has
    a word for every id of ``vocab_size``. Raises SpecError for a config without one, OSError when
    ``folder`` cannot be written.
    """
    content = json.loads(config)
    vocab_size = content.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise SpecError(f"config.json has vocab_size={vocab_size!r}: no tokenizer can be written")
    # The first words of the tokenizer stand for all of it: their form is the same for every size.
    recipe = config + json.dumps([tokenizer_json(2), _tokenizer_config(0)]).encode()
    name = f"dummy-{hashlib.sha256(recipe).hexdigest()[:12]}"
    # transformers takes a tokenizer without a length for an endless one.
    longest = content.get("max_position_embeddings") or 2**31
    return _appear(folder / name, lambda draft: _write_shape(draft, config, vocab_size, longest))


def _appear(final: Path, write: Callable[[Path], None]) -> Path:
    """``final``, made whole by ``write`` in a folder beside it if it is not there yet."""
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=final.parent))
    try:
        write(draft)
        for path in draft.iterdir():
            # A crash after the rename must not leave a complete-looking folder of empty files.
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # mkdtemp made it private; the model is no secret and a second user may share the cache.
        draft.chmod(0o755)
        try:
            draft.rename(final)
        except OSError:
            # Another process finished first: renaming onto its non-empty folder fails.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def recipe_version() -> str:
    """Twelve hex digits over configuration, tokenizer and the way the weights are drawn."""
    recipe = {
        "config": CONFIG,
        "tokenizer": tokenizer_json(),
        "tokenizer_config": _tokenizer_config(CONFIG["max_position_embeddings"]),
        "weights": ["numpy PCG64 standard_normal float32", WEIGHT_SEED, WEIGHT_STD],
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def tokenizer_json(vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """A word-level ``tokenizer.json``: tokens ``t000`` … are visible ASCII, decoded one by one.

    A byte-level vocabulary would make most random tokens halves of UTF-8 characters, whose first
    stream events carry no text, so a client could see the first token too late. No token is
    "special", because special tokens are left out of the text.
    """
    words = [f"t{token:03d}" for token in range(vocab_size)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[0],
        },
    }


def _tokenizer_config(longest: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }


def _write_shape(folder: Path, config: bytes, vocab_size: int, longest: int) -> None:
    (folder / "config.json").write_bytes(config)
    (folder / "tokenizer.json").write_bytes(_json(tokenizer_json(vocab_size)))
    (folder / "tokenizer_config.json").write_bytes(_json(_tokenizer_config(longest)))


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
