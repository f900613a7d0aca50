"""What the installed config classes say of fields a config.json leaves out: sim/models/classes.json.

Only of language models the installed vLLM runs, and only of fields that decide what they keep.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from sim.models.config import LANGUAGE_PARTS, NAMES
from tests.live.shapes.layers import of, start

_FIELDS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "sliding_window", "attention_chunk_size", "num_kv_shared_layers",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk",
    "index_head_dim", "max_position_embeddings", "use_sliding_window", "max_window_layers",
)  # fmt: skip
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_INDEXED = {"indexed_attention"}  # MLA whose layers have a sparse indexer


def classes() -> dict[str, Any]:
    """``values`` and ``layer_types`` by model_type; ``language_part``: the one nested in another.

    ``recurrent``: model_types that keep more than KV.
    """
    start()
    parts = dict(_language_parts())
    values, patterns, recurrent = {}, {}, []
    for kind, cls in sorted(_language_models(parts).items()):
        kinds = _layer_types(cls)
        if _keeps_states(kind) or not {*kinds} <= _ATTENTION | _INDEXED:
            recurrent.append(kind)
        found = dict(_values(cls, _declared(cls)))
        if not {"num_hidden_layers", "num_attention_heads"} <= found.keys():
            continue
        values[kind] = found
        is_windowed = {"sliding_window", "attention_chunk_size"} & found.keys()
        if kinds and is_windowed and {*kinds} <= _ATTENTION and "use_sliding_window" not in found:
            patterns[kind] = _period(kinds)
    nested = {whole: kind for whole, kind in sorted(parts.items()) if kind in values}
    return {
        "language_part": nested, "layer_types": patterns, "recurrent": recurrent, "values": values,
    }  # fmt: skip


def _all() -> dict[str, Any]:
    mapping, own = (
        of("transformers").CONFIG_MAPPING,
        of("vllm.transformers_utils.config")._CONFIG_REGISTRY,
    )
    return {kind: own[kind] if kind in own else mapping[kind] for kind in {*mapping, *own}}


def _supported(*tables: str) -> set[str]:
    """model_types of these tables of transformers whose class vLLM runs, and vLLM's own."""
    archs = of("vllm.model_executor.models.registry").ModelRegistry.get_supported_archs()
    auto = of("transformers.models.auto.modeling_auto")
    return {
        kind
        for table in tables
        for kind, arch in getattr(auto, table).items()
        if (arch if isinstance(arch, str) else arch[0]) in archs
    } | {*of("vllm.transformers_utils.config")._CONFIG_REGISTRY}


def _language_parts() -> Iterator[tuple[str, str]]:
    """model_types that nest a language model, and that model's type."""
    runs = _supported(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
    )
    for kind, cls in _all().items():
        nested = getattr(cls, "sub_configs", None) or {}
        for name in LANGUAGE_PARTS:
            text = getattr(nested.get(name), "model_type", "")
            if text and (kind in runs or "thinker" in kind or text in runs):
                yield kind, text


def _language_models(parts: dict[str, str]) -> dict[str, Any]:
    known = _all()
    for whole, kind in parts.items():
        nested = known[whole].sub_configs.values()
        known.setdefault(kind, next(c for c in nested if getattr(c, "model_type", "") == kind))
    wanted = _supported("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") | {*parts.values()}
    return {kind: known[kind] for kind in wanted}


def _declared(cls: Any) -> dict[str, Any]:
    """Default of each field a class is made from, its parents' first."""
    found: dict[str, Any] = {}
    missing = (dataclasses.MISSING, inspect.Parameter.empty)
    for part in reversed(cls.__mro__):
        named = {
            field.name: field.default
            for field in vars(part).get("__dataclass_fields__", {}).values()
        }
        if "__init__" in vars(part):
            given = inspect.signature(part.__init__).parameters
            named |= {name: parameter.default for name, parameter in given.items()}
        found |= {name: default for name, default in named.items() if default not in missing}
    return found


def _values(cls: Any, declared: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    renamed = getattr(cls, "attribute_map", None) or {}
    for field in _FIELDS:
        names = (renamed.get(field, field), *NAMES.get(field, ()))
        value = next((declared[name] for name in names if name in declared), None)
        is_off = value is False and field == "use_sliding_window"
        if is_off or (type(value) is int and value):
            yield field, value


def _layer_types(cls: Any) -> list[str]:
    """Kinds of layers the class makes where a config names none; empty where it makes none."""
    for fields in ({"num_hidden_layers": 48}, {}):
        try:
            config = cls(**fields)
            return list(getattr(config, "layer_types", None) or [])
        except Exception:  # noqa: BLE001 - a class may say anything of a model with its defaults
            continue
    return []


def _period(kinds: list[str]) -> list[str]:
    return next(
        kinds[:n] for n in range(1, len(kinds) + 1)
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )  # fmt: skip


def _keeps_states(kind: str) -> bool:
    """Whether vLLM calls the model hybrid, or one without attention."""
    auto, registry = (
        of("transformers.models.auto.modeling_auto"),
        of("vllm.model_executor.models.registry"),
    )
    arch = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    arch = arch if arch is None or isinstance(arch, str) else arch[0]
    model = registry.ModelRegistry._try_load_model_cls(arch) if arch else None
    interfaces = of("vllm.model_executor.models.interfaces")
    return model is not None and bool(
        interfaces.is_hybrid(model) or interfaces.is_attention_free(model)
    )
