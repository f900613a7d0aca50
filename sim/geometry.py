"""Bytes of KV per token, from a model's own config.json: no framework, no download.

Full attention with one KV head count in every layer (MHA, GQA, MQA) only. Anything that keeps
less, or something else, per token is refused: a wrong size would misplace every capacity.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.tiers import align_up

GIB = 2**30

_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

# Fields that are set only by models whose KV is not one K and one V per layer and token
# (names as in Hugging Face configs of DeepSeek-V2/V3, Llama 4, Gemma 3n, Jamba, Bamba, Qwen3-Next,
# Nemotron-H, MiniMax and T5).
_REFUSED_WHEN_SET = {
    "kv_lora_rank": "MLA keeps a compressed latent, not heads",
    "attention_chunk_size": "chunked attention keeps only a local window in some layers",
    "num_kv_shared_layers": "some layers share another layer's KV",
    "attn_layer_period": "only some layers have attention (hybrid)",
    "attn_layer_indices": "only some layers have attention (hybrid)",
    "full_attention_interval": "only some layers have full attention (hybrid)",
    "hybrid_override_pattern": "only some layers have attention (hybrid)",
    "layers_block_type": "layers differ in kind (hybrid)",
    "attn_type_list": "layers differ in kind (hybrid)",
    "is_encoder_decoder": "cross-attention keeps KV of the encoder too",
    "multi_query": "the KV head count is not in num_key_value_heads",
    "num_kv_heads": "the KV head count is not in num_key_value_heads",
}


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Size of one token's KV, all layers, summed over tensor-parallel ranks, in bytes."""

    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1:
            raise ValueError(f"{self.bytes_per_token} bytes of KV per token; at least 1 is needed")

    @classmethod
    def from_config(cls, path: Path, kv_dtype: str) -> "KvGeometry":
        """Read ``path``, a config.json or the folder holding one.

        ``kv_dtype`` is what the cache is kept in ("bfloat16", "fp8", …); "auto" takes the config's
        own dtype, unless that is float32, which vLLM's "auto" casts down. Raises ValueError for a
        model that is not plain full attention or a config with a size missing; OSError when there
        is no file.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{file} holds a {type(config).__name__}, not a model config")
        text = config.get("text_config")
        text = text if isinstance(text, dict) else config
        _refuse_other_attention(text, file)
        heads = _size(text, "num_attention_heads", file)
        kv_heads = heads
        if text.get("num_key_value_heads") is not None:
            kv_heads = _size(text, "num_key_value_heads", file)
        layers = _size(text, "num_hidden_layers", file)
        per_head = _head_dim(text, heads, file) * _dtype_bytes(kv_dtype, text, config, file)
        return cls(2 * layers * kv_heads * per_head)  # 2: one K and one V

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Bytes of one LMCache chunk, all layers in one object, before alignment."""
        return self.bytes_per_token * chunk_tokens

    def host_chunks(self, gib: float, chunk_tokens: int) -> int:
        """Chunks a host store of ``gib`` GiB holds; each takes a multiple of 4,096 bytes."""
        return host_bytes(gib) // align_up(self.chunk_bytes(chunk_tokens))

    def gib(self, n_tokens: int) -> float:
        """GiB of KV that ``n_tokens`` tokens need."""
        return n_tokens * self.bytes_per_token / GIB


def host_bytes(gib: float) -> int:
    """Bytes LMCache reserves for ``--l1-size-gb gib``; its "GB" is 2**30, cut to whole bytes."""
    return int(gib * GIB)


def _refuse_other_attention(text: Mapping[str, Any], file: Path) -> None:
    for field, reason in _REFUSED_WHEN_SET.items():
        if text.get(field) and not _names_kv_heads_too(text, field):
            raise ValueError(f"{file} sets {field}={text[field]!r}: {reason}; not supported")
    kinds = {kind for kind in text.get("layer_types") or () if kind != "full_attention"}
    if kinds:
        raise ValueError(f"{file} has layers of {sorted(kinds)}; only full_attention is supported")
    # Qwen configs carry a window and switch it off; Mistral's has no switch and means it.
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        raise ValueError(
            f"{file} sets sliding_window={text['sliding_window']!r}: sliding-window attention "
            "does not keep every token; not supported"
        )
    if text.get("v_head_dim") not in (None, text.get("head_dim")):
        raise ValueError(f"{file} has v_head_dim={text['v_head_dim']!r}, not that of K")


def _names_kv_heads_too(text: Mapping[str, Any], field: str) -> bool:
    return field in ("multi_query", "num_kv_heads") and text.get("num_key_value_heads") is not None


def _size(text: Mapping[str, Any], field: str, file: Path) -> int:
    value = text.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file} has {field}={value!r}; a whole number of at least 1 is needed")
    return value


def _head_dim(text: Mapping[str, Any], heads: int, file: Path) -> int:
    if text.get("head_dim") is not None:
        return _size(text, "head_dim", file)
    hidden = _size(text, "hidden_size", file)
    if hidden % heads:
        raise ValueError(
            f"{file} has no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads"
        )
    return hidden // heads


def _dtype_bytes(
    kv_dtype: str, text: Mapping[str, Any], config: Mapping[str, Any], file: Path
) -> int:
    name = kv_dtype
    if kv_dtype == "auto":
        fields = (
            found.get(field) for found in (text, config) for field in ("dtype", "torch_dtype")
        )
        name = next((str(value) for value in fields if value), "")
        if name in ("", "float32"):
            raise ValueError(
                f"{file} says dtype {name or 'nothing'}, so vLLM's 'auto' depends on the machine: "
                "name the KV dtype"
            )
    if name not in _DTYPE_BYTES:
        raise ValueError(f"KV dtype {name!r} is not known; known: {sorted(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]
