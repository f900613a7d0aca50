"""The fields of a model's config.json, found where vLLM finds them and named as it names them.

vLLM reads config.json through a class of transformers or of its own: the class knows other names
for a field, and what a missing one means. ``classes.json`` holds those values of the installed
classes (``python -m tests.live.shapes --classes`` writes it).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sim.errors import SpecError

# Where a model of text and more keeps its language part.
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

# attribute_map of the classes; KV heads: get_total_num_kv_heads, vLLM 0.32, in its order.
NAMES = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "head_dim": ("head_dim", "hidden_size_per_head"),
    "num_key_value_heads": (
        "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num",
        "num_attention_groups",
    ),
}  # fmt: skip

_MULTI_QUERY = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")

# is_deepseek_mla of vLLM 0.32, less drafts and those whose layers keep more than that: these
# classes keep the latent, and an index where they say index_topk, and nothing else.
MLA_TYPES = (
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "kimi_k2", "longcat_flash", "pangu_ultra_moe",
)  # fmt: skip

# derive_max_model_len_and_key and _get_and_verify_max_len of vLLM 0.32.
_LONGEST = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_ROPE_THAT_KEEPS_LENGTH = ("su", "longrope", "llama3")

_MOST_LAYERS = 10_000  # they are listed one by one; no model has a tenth as many

# Words of a field that may say how many KV heads there are, and the fields known not to.
_OF_HEADS = ("head", "group", "kv")
_NOT_KV_HEADS = {
    *(name for names in NAMES.values() for name in names),
    "kv_lora_rank", "kv_channels", "num_kv_shared_layers", "n_group", "topk_group", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "index_head_dim", "index_n_heads",
    "attention_head_size", "rotary_head_dim",
}  # fmt: skip
_NOT_KV_HEADS_PREFIXES = (
    "mamba_", "linear_", "ssm_", "rwkv_", "encoder_", "decoder_", "vision_", "lm_head",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``text``: the language part of ``whole`` with ``NAMES`` and its class's values for what it
    leaves out; errors name ``file``."""

    file: Path
    whole: Mapping[str, Any]
    text: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "ModelConfig":
        """``path``: a config.json or its folder. SpecError for what is none; OSError without it."""
        file = path / "config.json" if path.is_dir() else path
        whole = read_json(file)
        part = language_part(whole)
        return cls(file, whole, _of_class(part) | _renamed(part) | {"model_type": _class_of(part)})

    @property
    def model_type(self) -> str:
        """The class of the language part; an empty string where nothing says it."""
        return str(self.text.get("model_type") or "")

    def size(self, field: str, *, least: int = 1) -> int:
        """A whole number of at least ``least``; SpecError names the field."""
        return self._whole(field, self.text.get(field), least)

    def items(self, field: str) -> list[Any]:
        """A list; SpecError names the field."""
        value = self.text.get(field)
        if not isinstance(value, list):
            raise SpecError(f"{self.file} has {field}={value!r}; a list is needed")
        return value

    @property
    def is_recurrent(self) -> bool:
        """Whether vLLM calls the class hybrid, or one without attention."""
        return self.model_type in _classes()["recurrent"]

    @property
    def pattern(self) -> Sequence[str]:
        """Kinds of layers the class repeats where a config names none; empty where it has none."""
        names: Sequence[str] = _classes()["layer_types"].get(self.model_type, ())
        return names

    @property
    def is_mla(self) -> bool:
        """Whether vLLM keeps one latent a token and layer; SpecError where that is not known."""
        if not self.text.get("kv_lora_rank") or self.keeps_whole_heads:
            return False
        if self.model_type in MLA_TYPES:
            return True
        raise SpecError(
            f"{self.file} sets kv_lora_rank, and what vLLM keeps of model_type "
            f"{self.model_type!r} is not known here; known as MLA: {sorted(MLA_TYPES)}"
        )

    @property
    def keeps_whole_heads(self) -> bool:
        """Whether keys and values made from a latent are kept, each padded to a key's size."""
        is_causal = self.text.get("is_causal", True)
        return bool(self.text.get("kv_lora_rank")) and (
            self.model_type == "minicpm3" or (self.model_type in MLA_TYPES and not is_causal)
        )

    @property
    def layers(self) -> int:
        """Layers of attention or of what stands in its place."""
        if self.text.get("num_hidden_layers") is None and self.text.get("layers_block_type"):
            return len(self.items("layers_block_type"))  # Nemotron-H names them and counts none
        layers = self.size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise SpecError(
                f"{self.file} has num_hidden_layers={layers}; {_MOST_LAYERS:,} is the most"
            )
        # LongCat's num_layers hold two of attention each; num_hidden_layers counts those.
        is_paired = self.model_type == "longcat_flash" and "num_hidden_layers" not in self.whole
        return 2 * layers if is_paired else layers

    @property
    def longest_tokens(self) -> int | None:
        """vLLM's max_model_len where nobody gives one; None where it is not told or stretched."""
        rope = self.text.get("rope_scaling") or self.text.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        kind = rope.get("rope_type") or rope.get("type")
        if rope.get("factor", 1) != 1 and kind not in _ROPE_THAT_KEEPS_LENGTH:
            return None
        if type(limit := self.text.get("model_max_length")) is int:
            return limit
        told = [self.text.get(field) for field in _LONGEST]
        return min((length for length in told if type(length) is int), default=None)

    def more_window_tokens(self, kind: str) -> int:
        """Tokens vLLM's attention keeps beside the window a config says (``commandr.py``)."""
        return int(kind == "sliding_window" and self.model_type in ("cohere2", "cohere2_moe"))

    @property
    def head_dim(self) -> int:
        """Values of one head, as vLLM's ``get_head_size`` says it."""
        if self.text.get("head_dim"):
            return self.size("head_dim")
        heads, hidden = self.size("num_attention_heads"), self.size("hidden_size")
        if hidden % heads:
            raise SpecError(
                f"{self.file} has no head_dim, and hidden_size {hidden} is not a multiple of "
                f"{heads} heads"
            )
        return hidden // heads

    def kv_heads(self) -> tuple[int, ...]:
        """KV heads of each layer; 0 where a layer has no attention (``block_configs``)."""
        if not self.text.get("block_configs"):
            return (self._kv_heads(),) * self.layers
        heads, blocks = self.size("num_attention_heads"), self.items("block_configs")
        if len(blocks) != self.layers:
            raise SpecError(f"{self.file} has {len(blocks)} block_configs and {self.layers} layers")
        return tuple(self._kv_heads_of(block, heads) for block in blocks)

    def _kv_heads(self) -> int:
        heads, text = self.size("num_attention_heads"), self.text
        if self._is_multi_query:
            return 1
        if text.get("multi_query_attention") is False:  # ChatGLM
            return heads
        if text.get("num_key_value_heads") is None:
            nested = text.get("attn_config")  # DBRX, MPT
            if isinstance(nested, dict) and nested.get("kv_n_heads") is not None:
                return self._dividing("attn_config.kv_n_heads", nested["kv_n_heads"], heads)
            self._refuse_other_names()
            return heads
        return self._dividing("num_key_value_heads", text["num_key_value_heads"], heads)

    @property
    def _is_multi_query(self) -> bool:
        """Whether one KV head serves all: by a flag, not by a count (falcon.py of vLLM 0.32)."""
        text, has_flag = self.text, self.model_type in _MULTI_QUERY
        if text.get("multi_query") and not has_flag and text.get("num_key_value_heads") is None:
            raise SpecError(
                f"{self.file} sets multi_query={text['multi_query']!r} and no num_key_value_heads: "
                "how many KV heads it has is not known; not supported"
            )
        is_new = text.get("new_decoder_architecture") or (
            self.model_type.startswith("RefinedWeb") and text.get("hidden_size") == 8192
        )
        # The classes' own flag is True; a config that counts KV heads means them.
        by_default = text.get("num_key_value_heads") is None
        return has_flag and not is_new and bool(text.get("multi_query", by_default))

    def _kv_heads_of(self, block: Any, heads: int) -> int:
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise SpecError(f"{self.file} has a block_configs entry that says no attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            return 0
        field = "block_configs.attention.n_heads_in_group"
        return heads // self._dividing(field, attention.get("n_heads_in_group"), heads)

    def _dividing(self, field: str, value: Any, heads: int) -> int:
        kv_heads = self._whole(field, value, 1)
        if heads % kv_heads:  # vLLM's Attention layer asserts it
            raise SpecError(
                f"{self.file} has {field}={kv_heads}, which do not divide its {heads} attention "
                "heads: every KV head serves as many of them"
            )
        return kv_heads

    def _refuse_other_names(self) -> None:
        """SpecError for a count that may be the KV heads' under a name nobody here knows."""
        for field, value in self.text.items():
            is_count = isinstance(value, int | list | dict) and not isinstance(value, bool)
            is_known = field in _NOT_KV_HEADS or field.startswith(_NOT_KV_HEADS_PREFIXES)
            is_of_heads = any(word in field.replace("qkv", "") for word in _OF_HEADS)
            if value and is_count and is_of_heads and not is_known:
                raise SpecError(
                    f"{self.file} has no num_key_value_heads, and a field {field}={value!r} that "
                    "may mean it: not known here; say num_key_value_heads in a copy of the config"
                )

    def _whole(self, field: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SpecError(
                f"{self.file} has {field}={value!r}; a whole number of at least {least} is needed"
            )
        return value


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; SpecError where it is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SpecError(f"{file} holds a {type(content).__name__}, not a model config")
    return content


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is about text: all of it, or what it nests."""
    for name in LANGUAGE_PARTS:
        if isinstance(config.get(name), dict) and config[name]:
            part = language_part(config[name])
            return part if part.get("model_type") else {**part, "model_type": _class_of(config)}
    return config


def _renamed(part: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        given = [name for name in names if name in part]
        if given:
            found[field] = next((part[name] for name in given if part[name] is not None), None)
    return {**part, **found}


def _class_of(part: Mapping[str, Any]) -> str:
    """The class of a language part; one of text and more in one (Qwen2-VL's once) is split."""
    kind = str(part.get("model_type") or "")
    return str(_classes()["language_part"].get(kind, kind))


def _of_class(part: Mapping[str, Any]) -> dict[str, Any]:
    """What the part's class says of fields a config leaves out."""
    return dict(_classes()["values"].get(_class_of(part), {}))


@cache
def _classes() -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("sim.models").joinpath("classes.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content
