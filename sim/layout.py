"""What a model keeps per token and sequence, group of layers by group, from its config.json.

A group is what vLLM manages by one rule: full attention, a sliding window, chunked attention, MLA's
latent, a recurrent state. What a config does not tell is said in ``KvLayout.unknown``.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from sim.errors import SpecError
from sim.models.config import ModelConfig
from sim.models.dtype import bytes_of, own_dtype, value_bytes
from sim.models.layers import Kind, indexed_layers, kinds_of, shared_layers

# Fields set only by models whose KV this module cannot size (names as in Hugging Face configs of
# T5, Gemma 4, Step 3.5, MiMo-V2, Hunyuan, Kimi-Linear, DeepSeek-V4).
_REFUSED_WHEN_SET = {
    "is_encoder_decoder": "cross-attention keeps KV of the encoder too",
    "global_head_dim": "full and sliding layers have heads of different size",
    "num_global_key_value_heads": "full and sliding layers have different KV head counts",
    "attention_other_setting": "full and sliding layers have different KV head counts",
    "swa_num_key_value_heads": "full and sliding layers have different KV head counts",
    "use_cla": "layers share KV across layers (CLA)",
    "linear_attn_config": "layers of MLA and of linear attention are listed in their own way",
    "compress_ratios": "layers keep compressed KV, each its own share",
    "sparse_attention_config": "an indexer keeps keys of its own",
    "per_layer_config": "each layer has sizes of its own",
}

# Classes whose layers keep more than, or other than, keys and values of equal size (vLLM 0.32).
REFUSED_TYPES = (
    "bailing_hybrid", "deepseek_v4", "deepseek_v41", "diffusion_gemma_text", "dots3_note",
    "gemma4_text", "gemma4_unified_text", "glm5_next", "glm5_next_text", "hrm_text", "hy_v4",
    "inkling_model", "inkling_text", "iquestloopcoder", "k3_dspark", "kimi_linear", "mimo_v2",
    "mimo_v2_flash", "minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text", "plamo3",
    "qwen4_exp_text", "step3p5", "step3p7", "zaya",
)  # fmt: skip

_DS_MLA = "fp8_ds_mla"
_DS_MLA_BYTES = 656  # 512 fp8 values, 4 float32 scales, 64 bfloat16: MLAAttention, vLLM 0.32
_INDEX_SCALE_OF = 128  # fp8 values of an index key share a float32: Indexer in deepseek_v2.py


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep KV by one rule; bytes are of all its ``layers``, summed over ranks.

    ``bytes_per_token`` counts tokens the group still keeps: at most ``window_tokens`` of them where
    that is not None. For a ``state`` group it is None: such layers keep ``state_bytes`` a sequence,
    however long (None: the config does not tell, see ``KvLayout.unknown``). ``kv_heads``: of each
    layer; None where nothing is kept by head.
    """

    kind: Kind
    layers: int
    bytes_per_token: int | None = None
    window_tokens: int | None = None
    state_bytes: int | None = None
    kv_heads: tuple[int, ...] | None = None

    def worker_bytes_per_token(self, workers: int) -> int:
        """Bytes each of ``workers`` tensor-parallel ranks keeps of one token.

        Heads are divided, or repeated where there are fewer of them than ranks; a latent is kept
        whole by every rank. Raises SpecError for a number of ranks vLLM refuses and for states.
        """
        if self.bytes_per_token is None:
            raise SpecError(f"{self.kind} layers keep no tokens")
        if self.kv_heads is None:
            return self.bytes_per_token
        for heads in self.kv_heads:
            if heads % workers and workers % heads:
                raise SpecError(
                    f"{heads} KV heads cannot be shared by {workers} tensor-parallel ranks"
                )
        head_bytes = self.bytes_per_token // sum(self.kv_heads)
        return head_bytes * sum(max(1, heads // workers) for heads in self.kv_heads)


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
    def from_config(
        cls,
        path: Path,
        kv_dtype: str,
        *,
        model_dtype: str = "auto",
        max_model_len: int | None = None,
    ) -> "KvLayout":
        """Read ``path`` as ``KvGeometry.from_config`` does, for any model this module knows.

        Raises SpecError where not even the groups can be told; OSError when there is no file.
        """
        config = ModelConfig.read(path)
        _refuse_unknown(config)
        groups, unknown = _groups(config, kv_dtype, model_dtype)
        if not groups:
            raise SpecError(f"{config.file}: no layer keeps KV")
        heads = config.text.get("num_attention_heads")
        longest = config.longest_tokens if max_model_len is None else max_model_len
        return cls(
            source=config.file,
            groups=tuple(_as_full(groups, longest)),
            unknown=tuple(unknown),
            attention_heads=None if heads is None else config.size("num_attention_heads"),
        )

    @property
    def why_not_predictable(self) -> str | None:
        """Why token sources cannot be predicted exactly, in words; None when they can be.

        They can for one group of full attention with nothing unknown.
        """
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


_WORDS: dict[Kind, str] = {
    "full_attention": "full attention",
    "sliding_window": "sliding-window attention, which does not keep every token",
    "chunked_attention": "chunked attention, which keeps a local window only",
    "mla": "MLA, which keeps one compressed latent and no heads",
    "state": "a recurrent state, which keeps no tokens",
}


def _refuse_unknown(config: ModelConfig) -> None:
    text = config.text
    if config.model_type in REFUSED_TYPES:
        raise SpecError(
            f"{config.file} is a {config.model_type}: what its layers keep is not known here"
        )
    for field, reason in _REFUSED_WHEN_SET.items():
        if text.get(field):
            raise SpecError(f"{config.file} sets {field}={text[field]!r}: {reason}; not supported")
    v_head_dim = text.get("v_head_dim")
    if v_head_dim and not text.get("kv_lora_rank") and v_head_dim != text.get("head_dim"):
        raise SpecError(f"{config.file} has v_head_dim={v_head_dim!r}, not that of K")


def _groups(
    config: ModelConfig, kv_dtype: str, model_dtype: str
) -> tuple[list[KvGroup], list[str]]:
    """The groups by kind, and what is not known of them."""
    if config.text.get("index_topk") and not config.is_mla:
        raise SpecError(
            f"{config.file} sets index_topk and is no MLA: what its indexer keeps is not known here"
        )
    kinds, shared, unknown = kinds_of(config), shared_layers(config), list[str]()
    if shared:
        unknown.append(
            f"the last {shared} layers share another layer's KV and hold none; whether the host "
            "tier copies it once is not established"
        )
    # Heads of each layer that holds KV of its own, by kind; a state and a latent have none.
    heads_of: dict[Kind, list[int]] = {}
    has_heads = any(kind not in ("mla", "state", "none") for kind in kinds)
    heads = config.kv_heads() if has_heads else (1,) * len(kinds)
    for kind, n in list(zip(kinds, heads, strict=True))[: len(kinds) - shared]:
        if kind != "none" and n:
            heads_of.setdefault(kind, []).append(n)
    groups = []
    for kind, each in heads_of.items():
        if kind == "state":
            groups.append(_state_group(config, len(each), unknown))
        elif kind == "mla":
            groups.append(_latent_group(config, len(each), kv_dtype, model_dtype, unknown))
        else:
            groups.append(
                _head_group(config, kind, each, value_bytes(config, kv_dtype, model_dtype))
            )
            if groups[-1].window_tokens is None and kind != "full_attention":
                unknown.append(f"{kind}: the config does not say how many tokens it keeps")
    return groups, unknown


def _as_full(groups: list[KvGroup], longest: int | None) -> list[KvGroup]:
    """A window no sequence outgrows is no window: vLLM finds and frees blocks as without it."""
    only = groups[0]
    if len(groups) > 1 or only.kind != "sliding_window" or only.window_tokens is None:
        return groups
    if longest is None or only.window_tokens < longest:
        return groups
    return [replace(only, kind="full_attention")]


def _head_group(config: ModelConfig, kind: Kind, heads: list[int], size: int) -> KvGroup:
    if config.keeps_whole_heads:
        of_head = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
    else:
        of_head = config.head_dim
    field = {"sliding_window": "sliding_window", "chunked_attention": "attention_chunk_size"}
    window = None
    if kind in field and config.text.get(field[kind]) is not None:
        window = config.size(field[kind]) + config.more_window_tokens(kind)
    return KvGroup(
        kind=kind,
        layers=len(heads),
        bytes_per_token=2 * sum(heads) * of_head * size,  # 2: one K and one V
        window_tokens=window,
        kv_heads=tuple(heads),
    )


def _latent_group(
    config: ModelConfig, layers: int, kv_dtype: str, model_dtype: str, unknown: list[str]
) -> KvGroup:
    """One latent and one rotary key a layer, shared by all heads, and an indexer's key."""
    indexed = indexed_layers(config)
    if kv_dtype == _DS_MLA and indexed:
        latent = _DS_MLA_BYTES
    else:
        size = value_bytes(config, kv_dtype, model_dtype)
        latent = (config.size("kv_lora_rank") + config.size("qk_rope_head_dim")) * size
        if indexed and size == 1:
            unknown.append(
                f"a sparse MLA in fp8: FlashMLA keeps {_DS_MLA_BYTES} bytes a token and layer, not "
                f"{latent}; name the KV dtype {_DS_MLA} where it runs"
            )
    if config.model_type == "glm_moe_dsa" and kv_dtype == "auto" and latent != _DS_MLA_BYTES:
        unknown.append("on a GPU of capability 10.x vLLM keeps this model's latent in fp8_e4m3")
    key = 0
    if indexed:
        values = config.size("index_head_dim")
        key = values + values // _INDEX_SCALE_OF * 4  # fp8 in vLLM, whatever the latent is in
    return KvGroup(kind="mla", layers=layers, bytes_per_token=layers * latent + indexed * key)


def _state_group(config: ModelConfig, layers: int, unknown: list[str]) -> KvGroup:
    size = _state_bytes(config)
    if size is None:
        unknown.append("state: the config does not tell this module the size of a recurrent state")
    else:
        unknown.append(
            "state: sized in the model's own dtype; vLLM pads it to a page of the attention "
            "layers, and --mamba-cache-dtype changes it"
        )
    return KvGroup(kind="state", layers=layers, state_bytes=None if size is None else layers * size)


def _state_bytes(config: ModelConfig) -> int | None:
    """Bytes of one gated-delta-net state (vLLM ``gated_delta_net_state_shape``)."""
    fields = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads")
    if any(config.text.get(f"linear_{field}") is None for field in (*fields, "conv_kernel_dim")):
        return None
    k_dim, k_heads, v_dim, v_heads = (config.size(f"linear_{field}") for field in fields)
    kernel = config.size("linear_conv_kernel_dim")
    convolution = (2 * k_dim * k_heads + v_dim * v_heads) * (kernel - 1)
    own = own_dtype(config)
    own_bytes = bytes_of(own)
    recurrent_bytes = bytes_of(str(config.text.get("mamba_ssm_dtype") or own))  # Qwen3.5 names it
    if own_bytes is None or recurrent_bytes is None:
        return None
    return convolution * own_bytes + v_heads * v_dim * k_dim * recurrent_bytes
