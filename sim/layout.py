"""What a model keeps per token and sequence, group of layers by group, from its config.json.

A group is what vLLM manages by one rule: full attention, a sliding window, chunked attention, MLA's
latent, a recurrent state. What a config does not tell is said in ``KvLayout.unknown``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sim.errors import SpecError

Kind = Literal["full_attention", "sliding_window", "chunked_attention", "mla", "state"]

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

_MOST_LAYERS = 10_000  # they are listed one by one; no model has a tenth as many

# layer_types as transformers 5 and older configs spell them; "none" keeps nothing between tokens.
_KIND_OF: dict[str, Kind | Literal["none"]] = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_attention",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "moe": "none",
    "mlp": "none",
}

# Set by models with recurrent layers, also where each layer has both kinds (Falcon-H1).
_RECURRENT_FIELDS = ("mamba_", "ssm_", "linear_num_", "rwkv_")

_NEMOTRON = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}

# Fields set only by models whose KV this module cannot size (names as in Hugging Face configs of
# T5, Gemma 4, Hunyuan, DeepSeek-V4, Kimi-Linear, GPT-BigCode and Falcon).
_REFUSED_WHEN_SET = {
    "is_encoder_decoder": "cross-attention keeps KV of the encoder too",
    "global_head_dim": "full and sliding layers have heads of different size",
    "num_global_key_value_heads": "full and sliding layers have different KV head counts",
    "use_cla": "layers share KV across layers (CLA)",
    "linear_attn_config": "layers of MLA and of linear attention are listed in their own way",
    "compress_ratios": "layers keep compressed KV, each its own share",
    "multi_query": "the KV head count is not in num_key_value_heads",
    "num_kv_heads": "the KV head count is not in num_key_value_heads",
}

# What these models' config.json may leave to their class (transformers 5, configuration_*.py).
_CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2, "sliding_window": 4096},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
        "sliding_window": 4096,
    },
    "gpt_oss": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4, "sliding_window": 4096},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep KV by one rule; bytes are of all its ``layers``, summed over ranks.

    ``bytes_per_token`` counts tokens the group still keeps: at most ``window_tokens`` of them where
    that is not None. For a ``state`` group it is None: such layers keep ``state_bytes`` a sequence,
    however long (None: the config does not tell, see ``KvLayout.unknown``). ``kv_heads`` is None
    where nothing is kept by head.
    """

    kind: Kind
    layers: int
    bytes_per_token: int | None = None
    window_tokens: int | None = None
    state_bytes: int | None = None
    kv_heads: int | None = None

    def worker_bytes_per_token(self, workers: int) -> int:
        """Bytes each of ``workers`` tensor-parallel ranks keeps of one token.

        Heads are divided, or repeated where there are fewer of them than ranks; a latent is kept
        whole by every rank. Raises SpecError for a number of ranks vLLM refuses and for states.
        """
        if self.bytes_per_token is None:
            raise SpecError(f"{self.kind} layers keep no tokens")
        if self.kv_heads is None:
            return self.bytes_per_token
        if self.kv_heads % workers and workers % self.kv_heads:
            raise SpecError(
                f"{self.kv_heads} KV heads cannot be shared by {workers} tensor-parallel ranks"
            )
        return self.bytes_per_token // self.kv_heads * max(1, self.kv_heads // workers)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Every group of a model, in the order its first layer appears, and what stayed unknown.

    ``attention_heads``: query heads of a layer, None where the config does not tell.
    """

    source: Path
    groups: tuple[KvGroup, ...]
    unknown: tuple[str, ...] = ()
    attention_heads: int | None = None

    @classmethod
    def from_config(cls, path: Path, kv_dtype: str) -> "KvLayout":
        """Read ``path`` as ``KvGeometry.from_config`` does, for any model this module knows.

        Raises SpecError where not even the groups can be told; OSError when there is no file.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SpecError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise SpecError(f"{file} holds a {type(config).__name__}, not a model config")
        text = config.get("text_config")
        text = text if isinstance(text, dict) else config
        text = _CLASS_DEFAULTS.get(str(text.get("model_type")), {}) | text
        return _Reader(text, config, file).layout(kv_dtype)

    @property
    def is_predictable(self) -> bool:
        """Whether token sources can be predicted exactly: one full-attention group, all known."""
        return self.why_not_predictable is None

    @property
    def why_not_predictable(self) -> str | None:
        """Why not, in words; None when ``is_predictable``."""
        kinds = [group.kind for group in self.groups]
        if len(kinds) != 1:
            return (
                f"a hybrid model of {len(kinds)} kinds of layers ({', '.join(kinds)}): vLLM keeps "
                "a block pool rule for each; predicted to the token are models of one "
                "full_attention group"
            )
        if kinds[0] != "full_attention":
            why = f"every layer is {_WORDS[kinds[0]]}; predicted to the token is full_attention"
            return "; ".join([why, *self.unknown])
        if self.unknown:
            return "; ".join(self.unknown)
        return None

    def check_workers(self, workers: int) -> None:
        """Raise SpecError for a number of tensor-parallel ranks vLLM refuses for this model.

        ``ModelConfig.verify_with_parallel_config`` of vLLM 0.32: the heads must be divisible.
        """
        if self.attention_heads is not None and self.attention_heads % workers:
            raise SpecError(
                f"{self.attention_heads} attention heads cannot be shared by {workers} "
                "tensor-parallel ranks"
            )

    def bytes_for(self, n_tokens: int) -> int | None:
        """Bytes the groups keep of one sequence of ``n_tokens``; None when a size is unknown.

        vLLM's pages are not modelled: they round up, and a sliding window needs a block more.
        """
        total = 0
        for group in self.groups:
            kept = n_tokens if group.window_tokens is None else min(n_tokens, group.window_tokens)
            size = group.state_bytes if group.kind == "state" else group.bytes_per_token
            if size is None:
                return None
            total += size if group.kind == "state" else size * kept
        return total


_WORDS: dict[Kind, str] = {
    "full_attention": "full attention",
    "sliding_window": "sliding-window attention, which does not keep every token",
    "chunked_attention": "chunked attention, which keeps a local window only",
    "mla": "MLA, which keeps one compressed latent and no heads",
    "state": "a recurrent state, which keeps no tokens",
}


@dataclass(frozen=True, slots=True)
class _Reader:
    """One config: ``text`` is the language model's part of ``config``; errors name ``file``."""

    text: Mapping[str, Any]
    config: Mapping[str, Any]
    file: Path

    def layout(self, kv_dtype: str) -> KvLayout:
        self._refuse_unknown()
        value_bytes = self._dtype_bytes(kv_dtype)
        unknown: list[str] = []
        kinds = self._own_kinds(self._kinds(), unknown)
        groups = []
        for kind in dict.fromkeys(kinds):
            layers = kinds.count(kind)
            if kind == "state":
                groups.append(KvGroup(kind=kind, layers=layers, state_bytes=self._state(layers)))
                unknown.append(self._about_state(groups[-1]))
                continue
            window = self._window(kind)
            if window is None and kind in ("sliding_window", "chunked_attention"):
                unknown.append(f"{kind}: the config does not say how many tokens it keeps")
            groups.append(
                KvGroup(
                    kind=kind,
                    layers=layers,
                    bytes_per_token=layers * self._values_per_layer(kind) * value_bytes,
                    window_tokens=window,
                    kv_heads=None if kind == "mla" else self._kv_heads(),
                )
            )
        if self.text.get("index_topk"):
            unknown.append("index_topk: the sparse indexer keeps a cache of its own, not counted")
        if not groups:
            raise SpecError(f"{self.file}: no layer keeps KV")
        heads = None
        if self.text.get("num_attention_heads") is not None:
            heads = self._size("num_attention_heads")
        return KvLayout(self.file, tuple(groups), tuple(unknown), heads)

    def _refuse_unknown(self) -> None:
        text = self.text
        for field, reason in _REFUSED_WHEN_SET.items():
            named = field in ("multi_query", "num_kv_heads") and text.get("num_key_value_heads")
            if text.get(field) and not named:
                raise SpecError(
                    f"{self.file} sets {field}={text[field]!r}: {reason}; not supported"
                )
        v_head_dim = text.get("v_head_dim")
        if not text.get("kv_lora_rank") and v_head_dim not in (None, text.get("head_dim")):
            raise SpecError(f"{self.file} has v_head_dim={v_head_dim!r}, not that of K")

    def _kinds(self) -> list[Kind | Literal["none"]]:
        """What each layer keeps, first layer first."""
        text, layers = self.text, self._size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise SpecError(
                f"{self.file} has num_hidden_layers={layers}; {_MOST_LAYERS:,} is the most"
            )
        named = self._named_layers(layers)
        if len(named) != layers:
            raise SpecError(
                f"{self.file} names the kind of {len(named)} layers and has {layers} of them"
            )
        strange = sorted({str(name) for name in named if name not in _KIND_OF})
        if strange:
            raise SpecError(
                f"{self.file} has layers of {strange}, whose KV is not known here; "
                f"known: {sorted(_KIND_OF)}"
            )
        kinds = [_KIND_OF[name] for name in named]
        recurrent = [field for field in text if field.startswith(_RECURRENT_FIELDS)]
        if recurrent and "state" not in kinds:
            raise SpecError(
                f"{self.file} sets {recurrent[0]} and names no layer with a recurrent state: which "
                "layers keep what is not known"
            )
        if text.get("kv_lora_rank"):
            return ["mla" if kind == "full_attention" else kind for kind in kinds]
        return kinds

    def _named_layers(self, layers: int) -> Sequence[str]:
        """The kind of every layer in a config's own words, from whichever field has it."""
        text = self.text
        for field in ("layer_types", "layers_block_type"):
            if text.get(field):
                return [str(kind) for kind in self._list(field)]
        if text.get("hybrid_override_pattern"):  # Nemotron-H
            return [_NEMOTRON.get(letter, letter) for letter in text["hybrid_override_pattern"]]
        if text.get("attn_type_list"):  # MiniMax
            return ["full_attention" if full else "mamba" for full in self._list("attn_type_list")]
        if text.get("attn_layer_indices"):  # Bamba
            indices = self._list("attn_layer_indices")
            return _every(layers, lambda i: i in indices, "mamba")
        if text.get("attn_layer_period"):  # Jamba
            period, offset = self._size("attn_layer_period"), text.get("attn_layer_offset") or 0
            return _every(layers, lambda i: i % period == offset, "mamba")
        if text.get("full_attention_interval"):  # Qwen3-Next
            interval = self._size("full_attention_interval")
            return _every(layers, lambda i: (i + 1) % interval == 0, "linear_attention")
        if text.get("attention_chunk_size"):
            raise SpecError(
                f"{self.file} sets attention_chunk_size and no layer_types: which layers have "
                "chunked attention is not known"
            )
        return self._windowed_layers(layers)

    def _windowed_layers(self, layers: int) -> Sequence[str]:
        text = self.text
        # Qwen configs carry a window and switch it off; Mistral's has no switch and means it.
        if not text.get("sliding_window") or not text.get("use_sliding_window", True):
            return ["full_attention"] * layers
        if text.get("sliding_window_pattern"):  # Gemma 2 and 3
            pattern = self._size("sliding_window_pattern")
            return _every(layers, lambda i: (i + 1) % pattern == 0, "sliding_attention")
        if text.get("max_window_layers") is not None:  # Qwen2: the window starts at this layer
            first = self._size("max_window_layers", least=0)
            return _every(layers, lambda i: i < first, "sliding_attention")
        return ["sliding_attention"] * layers

    def _own_kinds(self, kinds: list[Kind | Literal["none"]], unknown: list[str]) -> list[Kind]:
        """Kinds of the layers that hold KV of their own; the last ones may read another's."""
        shared = 0
        if self.text.get("num_kv_shared_layers"):
            shared = self._size("num_kv_shared_layers")
        if shared >= len(kinds):
            raise SpecError(f"{self.file} has num_kv_shared_layers={shared} of {len(kinds)} layers")
        if shared:
            unknown.append(
                f"the last {shared} layers share another layer's KV and hold none; whether the "
                "host tier copies it once is not established"
            )
        return [kind for kind in kinds[: len(kinds) - shared] if kind != "none"]

    def _values_per_layer(self, kind: Kind) -> int:
        """Numbers one token leaves in one layer."""
        if kind == "mla":  # one latent and one rotary key, shared by all heads; not doubled
            return self._size("kv_lora_rank") + self._size("qk_rope_head_dim")
        return 2 * self._kv_heads() * self._head_dim()  # 2: one K and one V

    def _kv_heads(self) -> int:
        heads = self._size("num_attention_heads")
        if self.text.get("num_key_value_heads") is None:
            return heads
        kv_heads = self._size("num_key_value_heads")
        if heads % kv_heads:  # vLLM's Attention layer asserts it
            raise SpecError(
                f"{self.file} has num_key_value_heads={kv_heads}, which do not divide its "
                f"{heads} attention heads: every KV head serves as many of them"
            )
        return kv_heads

    def _window(self, kind: Kind) -> int | None:
        field = {"sliding_window": "sliding_window", "chunked_attention": "attention_chunk_size"}
        if kind not in field or self.text.get(field[kind]) is None:
            return None
        return self._size(field[kind])

    def _state(self, layers: int) -> int | None:
        """Bytes of a gated-delta-net state a sequence (vLLM ``gated_delta_net_state_shape``)."""
        fields = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads")
        if any(self.text.get(f"linear_{field}") is None for field in (*fields, "conv_kernel_dim")):
            return None
        k_dim, k_heads, v_dim, v_heads = (self._size(f"linear_{field}") for field in fields)
        convolution = (2 * k_dim * k_heads + v_dim * v_heads) * (
            self._size("linear_conv_kernel_dim") - 1
        )
        own = self._own_dtype()
        recurrent = str(self.text.get("mamba_ssm_dtype") or own)  # Qwen3.5 names it apart
        if own not in _DTYPE_BYTES or recurrent not in _DTYPE_BYTES:
            return None
        return layers * (
            convolution * _DTYPE_BYTES[own] + v_heads * v_dim * k_dim * _DTYPE_BYTES[recurrent]
        )

    def _about_state(self, group: KvGroup) -> str:
        if group.state_bytes is None:
            return "state: the config does not tell this module the size of a recurrent state"
        return (
            "state: sized in the model's own dtype; vLLM pads it to a page of the attention "
            "layers, and --mamba-cache-dtype changes it"
        )

    def _size(self, field: str, *, least: int = 1) -> int:
        value = self.text.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SpecError(
                f"{self.file} has {field}={value!r}; a whole number of at least {least} is needed"
            )
        return value

    def _list(self, field: str) -> list[Any]:
        value = self.text[field]
        if not isinstance(value, list):
            raise SpecError(f"{self.file} has {field}={value!r}; a list is needed")
        return value

    def _head_dim(self) -> int:
        heads = self._size("num_attention_heads")
        if self.text.get("head_dim") is not None:
            return self._size("head_dim")
        hidden = self._size("hidden_size")
        if hidden % heads:
            raise SpecError(
                f"{self.file} has no head_dim, and hidden_size {hidden} is not a multiple of "
                f"{heads} heads"
            )
        return hidden // heads

    def _own_dtype(self) -> str:
        """The dtype the config names, or an empty string."""
        named = (
            found.get(field)
            for found in (self.text, self.config)
            for field in ("dtype", "torch_dtype")
        )
        return next((str(value) for value in named if value), "")

    def _refuse_quantized_kv(self) -> None:
        # vLLM 0.32 takes "auto" for what such a checkpoint declares (attention.py and
        # torch_utils.get_kv_cache_quant_algo_string): fp8, or a packed format.
        scheme = self.config.get("quantization_config")
        for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if isinstance(scheme, dict) and scheme.get(field):
                raise SpecError(
                    f"{self.file} declares quantization_config.{field}={scheme[field]!r}, so "
                    "vLLM's 'auto' is not the model's dtype: name the KV dtype"
                )

    def _dtype_bytes(self, kv_dtype: str) -> int:
        name = kv_dtype
        if kv_dtype == "auto":
            self._refuse_quantized_kv()
            name = self._own_dtype()
            if name in ("", "float32"):
                raise SpecError(
                    f"{self.file} says dtype {name or 'nothing'}, so vLLM's 'auto' depends on the "
                    "machine: name the KV dtype"
                )
        if name not in _DTYPE_BYTES:
            raise SpecError(f"KV dtype {name!r} is not known; known: {sorted(_DTYPE_BYTES)}")
        return _DTYPE_BYTES[name]


def _every(layers: int, is_full: Callable[[int], bool], otherwise: str) -> list[str]:
    return ["full_attention" if is_full(i) else otherwise for i in range(layers)]
