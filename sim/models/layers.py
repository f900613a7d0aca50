"""What each layer of a model keeps between tokens, from its config.json."""

from collections.abc import Callable, Sequence
from typing import Literal

from sim.errors import SpecError
from sim.models.config import ModelConfig

Kind = Literal["full_attention", "sliding_window", "chunked_attention", "mla", "state"]
LayerKind = Kind | Literal["none"]

# layer_types as transformers 5 and older configs spell them; "none" keeps nothing between tokens.
_KIND_OF: dict[str, LayerKind] = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "indexed_attention": "full_attention",  # an MLA with an indexer, as is the next
    "deepseek_sparse_attention": "full_attention",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_attention",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "moe": "none",
    "mlp": "none",
}

# Set by models with recurrent layers, also where each layer has both kinds (Falcon-H1).
_RECURRENT_FIELDS = ("mamba_", "ssm_", "linear_num_", "rwkv_", "state_size")

# What a config may name its layers in; the classes of hybrid models have no safe default.
_NAMING_FIELDS = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list",
    "attn_layer_indices", "attn_layer_period", "full_attention_interval",
)  # fmt: skip

_NEMOTRON = {"*": "full_attention", "M": "mamba", "-": "mlp", "E": "moe"}


def kinds_of(config: ModelConfig) -> list[LayerKind]:
    """What each layer keeps, first layer first; those that read another's KV keep their kind."""
    recurrent = next((field for field in config.text if field.startswith(_RECURRENT_FIELDS)), None)
    names_layers = any(config.text.get(field) for field in _NAMING_FIELDS)
    if config.is_recurrent and not names_layers:
        raise SpecError(
            f"{config.file} is a {config.model_type}, which keeps a recurrent state, and names no "
            "layer with one: which layers keep what is not known"
        )
    layers = config.layers
    named = _named(config, layers)
    if len(named) != layers:
        raise SpecError(
            f"{config.file} names the kind of {len(named)} layers and has {layers} of them"
        )
    strange = sorted({str(name) for name in named if name not in _KIND_OF})
    if strange:
        raise SpecError(
            f"{config.file} has layers of {strange}, whose KV is not known here; "
            f"known: {sorted(_KIND_OF)}"
        )
    kinds = [_KIND_OF[name] for name in named]
    if recurrent and "state" not in kinds:
        raise SpecError(
            f"{config.file} sets {recurrent} and names no layer with a recurrent state: which "
            "layers keep what is not known"
        )
    if config.is_mla:
        return ["mla" if kind == "full_attention" else kind for kind in kinds]
    return kinds


def shared_layers(config: ModelConfig) -> int:
    """How many of the last layers read what earlier ones keep, and hold nothing themselves."""
    if not config.text.get("num_kv_shared_layers"):
        return 0
    shared, layers = config.size("num_kv_shared_layers"), config.layers
    if shared >= layers:
        raise SpecError(f"{config.file} has num_kv_shared_layers={shared} of {layers} layers")
    return shared


def _named(config: ModelConfig, layers: int) -> Sequence[str]:
    """The kind of every layer in a config's own words, from whichever field has it."""
    text = config.text
    for field in ("layer_types", "layers_block_type"):
        if text.get(field):
            return [str(kind) for kind in config.items(field)]
    if text.get("hybrid_override_pattern"):  # Nemotron-H
        return [_NEMOTRON.get(letter, letter) for letter in text["hybrid_override_pattern"]]
    if text.get("attn_type_list"):  # MiniMax
        return ["full_attention" if full else "mamba" for full in config.items("attn_type_list")]
    if text.get("attn_layer_indices"):  # Bamba
        indices = config.items("attn_layer_indices")
        return _every(layers, lambda i: i in indices, "mamba")
    if text.get("attn_layer_period"):  # Jamba
        period, offset = config.size("attn_layer_period"), text.get("attn_layer_offset") or 0
        return _every(layers, lambda i: i % period == offset, "mamba")
    if text.get("full_attention_interval"):  # Qwen3-Next
        interval = config.size("full_attention_interval")
        return _every(layers, lambda i: (i + 1) % interval == 0, "linear_attention")
    if text.get("attention_chunk_size"):
        return _chunked(config, layers)
    return _windowed(config, layers)


def _chunked(config: ModelConfig, layers: int) -> Sequence[str]:
    if config.text.get("no_rope_layers"):  # Llama 4: 0 marks a layer without RoPE, which is full
        return [
            "chunked_attention" if rope else "full_attention"
            for rope in config.items("no_rope_layers")
        ]
    if config.pattern:
        return _repeated(config.pattern, layers)
    raise SpecError(
        f"{config.file} sets attention_chunk_size and no layer_types: which layers have "
        "chunked attention is not known"
    )


def _windowed(config: ModelConfig, layers: int) -> Sequence[str]:
    text = config.text
    # Qwen configs carry a window and switch it off; Mistral's has no switch and means it.
    if not text.get("sliding_window") or not text.get("use_sliding_window", True):
        return ["full_attention"] * layers
    if text.get("sliding_window_pattern"):  # Gemma 2 and 3
        pattern = config.size("sliding_window_pattern")
        return _every(layers, lambda i: (i + 1) % pattern == 0, "sliding_attention")
    if text.get("max_window_layers") is not None:  # Qwen2: the window starts at this layer
        first = config.size("max_window_layers", least=0)
        return _every(layers, lambda i: i < first, "sliding_attention")
    return _repeated(config.pattern or ["sliding_attention"], layers)


def _repeated(pattern: Sequence[str], layers: int) -> list[str]:
    return [pattern[i % len(pattern)] for i in range(layers)]


def _every(layers: int, is_full: Callable[[int], bool], otherwise: str) -> list[str]:
    return ["full_attention" if is_full(i) else otherwise for i in range(layers)]


def indexed_layers(config: ModelConfig) -> int:
    """Layers with a sparse indexer, which keeps a key of its own; the others use its choice.

    DeepSeek-V3.2's in each layer, GLM-5.2's in one of ``index_topk_freq`` (vLLM's deepseek_v2.py).
    """
    text, layers = config.text, config.layers
    if text.get("index_topk") is None:
        return 0
    if isinstance(pattern := text.get("index_topk_pattern"), str | list):
        return layers - pattern[:layers].count("S")
    every = config.size("index_topk_freq") if "index_topk_freq" in text else 1
    offset = (
        config.size("index_skip_topk_offset", least=0) if "index_skip_topk_offset" in text else 2
    )
    return sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))
