"""Weights and arithmetic of a dense decoder, from its config.json: what prefill costs.

For gated feed-forward layers around full attention, as Llama, Mistral and Qwen 2 to 3 have them.
Other models (experts, shared layers, recurrent states) are not counted here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNTED = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
)  # fmt: skip
_QKV_BIAS = ("qwen2",)
_HEAD_NORMS = ("qwen3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    """The sizes that decide what a layer costs; ``is_tied``: input and output share embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    n_small: int  # biases and norms: of the weights, never of the arithmetic

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DenseShape | None":
        """The shape in a config.json; None for a model that is not counted here."""
        kind = config.get("model_type")
        sizes = [size for name in _SIZES if type(size := config.get(name)) is int and size > 0]
        if kind not in _COUNTED or len(sizes) < len(_SIZES):
            return None
        layers, hidden, intermediate, heads, vocab = sizes
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        per_layer = 2 * hidden
        if kind in _QKV_BIAS:
            per_layer += (heads + 2 * kv_heads) * head_dim
        if kind in _HEAD_NORMS:
            per_layer += 2 * head_dim
        return cls(
            layers=layers, hidden=hidden, intermediate=intermediate, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, vocab=vocab,
            is_tied=bool(config.get("tie_word_embeddings")), n_small=layers * per_layer + hidden,
        )  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers' matrices: each token is multiplied with every one once."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.layer_parameters + embeddings + self.n_small

    @property
    def flop_per_token(self) -> int:
        """Floating-point operations of the matrices for one prompt token (2 a parameter)."""
        return 2 * self.layer_parameters

    @property
    def flop_per_pair(self) -> int:
        """Operations of attention for one (query, key) pair: Q·K and P·V, 2 each, all layers."""
        return 4 * self.heads * self.head_dim * self.layers
