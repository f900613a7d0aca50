"""What the installed vLLM keeps for a config.json: its own model, built without memory, is asked.

The model's layers are made on torch's "meta" device and each says its ``KVCacheSpec``. Three
things a CPU build cannot do are left out: sparse attention is asked as dense (the indexer's cache
is its own layer), nothing is moved off the meta device, and classes are inspected in this process.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tests.shapes import Shape, write

_MOE = {  # any model of experts: the group of ranks experts are spread over is made for one only
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 128,
    "intermediate_size": 64, "max_position_embeddings": 512, "num_local_experts": 2,
    "num_experts_per_tok": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
_KINDS = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_attention",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "state",
}


def answer(shape: Shape) -> dict[str, Any]:
    """``shape``: a config and what lies beside it, as in ``tests/data/shapes.json``.

    ``ask`` "convertor": for an architecture this vLLM has no more, by its convertor's numbers;
    another word: the class that runs the language part, where the whole cannot be built here.
    """
    start()
    _register(shape["config"])
    ask = shape.get("ask")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, shape["config"], shape.get("hf_quant_config"))
        whole = _of_convertor(folder)
    if ask == "convertor":
        groups = _by_convertor(whole)
    else:
        part = _language_part(shape["config"], ask) if ask else shape["config"]
        groups = _by_layers(part, whole["kv_dtype"])
    return whole | {"asked": ask or "model", "groups": groups}


@functools.cache
def start() -> None:
    """Import vLLM and make its one-rank process groups."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_PLUGINS": ""}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    of("transformers").logging.set_verbosity_error()
    _leave_out_what_a_cpu_cannot()
    state, torch = of("vllm.distributed"), of("torch")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, _MOE, None)
        with of("vllm.config").set_current_vllm_config(_engine_config(folder)):
            store = f"file://{tempfile.mktemp()}"
            state.init_distributed_environment(1, 0, store, 0, "gloo")
            state.ensure_model_parallel_initialized(1, 1)
    torch.set_default_dtype(torch.float32)


def of(module: str) -> Any:
    return importlib.import_module(module)


def _leave_out_what_a_cpu_cannot() -> None:
    registry, torch = of("vllm.model_executor.models.registry"), of("torch")
    registry._run_in_subprocess = lambda inspect_class: inspect_class()
    platform = of("vllm.platforms.cpu").CpuPlatform
    select = platform.get_attn_backend_cls.__func__

    def dense(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> Any:
        return select(
            cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads
        )

    platform.get_attn_backend_cls = classmethod(dense)
    torch.nn.Module.to = lambda self, *args, **kwargs: self
    values = torch.Tensor.tolist
    torch.Tensor.tolist = lambda self: [0.0] * self.numel() if self.is_meta else values(self)


def _engine_config(folder: str) -> Any:
    return (
        of("vllm.engine.arg_utils")
        .EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            block_size=128,
        )
        .create_engine_config()
    )


def _of_convertor(folder: str) -> dict[str, Any]:
    """What vLLM reads of the config before any model is built, and the KV dtype it resolves."""
    found = of("vllm.transformers_utils.config")
    module = of("vllm.transformers_utils.model_arch_config_convertor")
    config = found.get_config(folder, False)
    cls = module.MODEL_ARCH_CONFIG_CONVERTORS.get(
        config.model_type, module.ModelArchConfigConvertorBase
    )
    said = cls(config, found.get_hf_text_config(config)).convert()
    dtypes = of("vllm.utils.torch_utils")
    kv_dtype = dtypes.resolve_kv_cache_dtype_string("auto", SimpleNamespace(hf_config=config))
    scheme = said.quantization_config or {}
    if kv_dtype == "auto" and scheme.get("quant_method") == "compressed-tensors":
        tensors = of(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
        )
        if tensors.CompressedTensorsConfig.from_config(scheme).kv_cache_scheme is not None:
            kv_dtype = "fp8"  # Attention.__init__
    longest = said.derived_max_model_len_and_key[0]
    return {
        "kv_heads": said.total_num_kv_heads,
        "head_size": said.head_size,
        "layers": said.total_num_hidden_layers,
        "is_mla": said.is_deepseek_mla,
        "kv_dtype": kv_dtype,
        "longest": None if longest == math.inf else int(longest),
    }


def _by_convertor(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = of("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=1, num_kv_heads=said["kv_heads"], head_size=said["head_size"],
        dtype=of("torch").bfloat16,
    )  # fmt: skip
    return _summed({f"layer {i}": spec for i in range(said["layers"])}, said["kv_dtype"])


def _by_layers(config: Mapping[str, Any], kv_dtype: str) -> list[dict[str, Any]]:
    """Every layer of the model this config makes, asked for its own KV."""
    torch = of("torch")
    with tempfile.TemporaryDirectory() as folder:
        # Weights in formats a CPU has no kernel for do not change what attention keeps.
        write(folder, _without(config, ("quantization_config", "compression_config")), None)
        engine = _engine_config(folder)
        with of("vllm.config").set_current_vllm_config(engine):
            torch.set_default_dtype(engine.model_config.dtype)
            try:
                with torch.device("meta"):
                    of("vllm.model_executor.model_loader.utils").initialize_model(engine)
            finally:
                torch.set_default_dtype(torch.float32)
            specs = of("vllm.v1.worker.gpu.attn_utils").get_kv_cache_spec(engine)
    return _summed(specs, kv_dtype)


def _without(config: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {
        field: _without(value, fields) if isinstance(value, dict) else value
        for field, value in config.items()
        if field not in fields
    }


def _summed(specs: Mapping[str, Any], kv_dtype: str) -> list[dict[str, Any]]:
    """Groups in order of their first layer; an indexer's key counts to its model's latent."""
    groups: dict[str, dict[str, Any]] = {}
    for spec in specs.values():
        kind = _KINDS[type(spec).__name__]
        window = getattr(spec, "sliding_window", None) or getattr(
            spec, "attention_chunk_size", None
        )
        group = groups.setdefault(kind, {"kind": kind, "layers": 0, "window": window})
        if kind == "state":
            group["layers"] += 1
            continue
        is_index = getattr(getattr(spec, "cache_role", None), "value", None) == "indexer"
        if kv_dtype != "auto" and not is_index:
            dtypes = of("vllm.utils.torch_utils").STR_DTYPE_TO_TORCH_DTYPE
            spec = dataclasses.replace(spec, dtype=dtypes[kv_dtype])
        group["layers"] += not is_index
        size = spec.page_size_bytes // spec.block_size
        group["bytes_per_token"] = group.get("bytes_per_token", 0) + size
    return list(groups.values())


def _language_part(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _register(config)
        write(folder, config, None)
        found = of("vllm.transformers_utils.config")
        text = found.get_hf_text_config(found.get_config(folder, False))
    return {"tie_word_embeddings": False, **text.to_dict(), "architectures": [architecture]}


def _register(config: Mapping[str, Any]) -> None:
    """Stand-ins for classes that come with a checkpoint: every field as it is."""
    transformers = of("transformers")
    known = {*transformers.CONFIG_MAPPING, *of("vllm.transformers_utils.config")._CONFIG_REGISTRY}
    for part in _parts(config):
        kind = part.get("model_type")
        if kind and kind not in known:
            transformers.AutoConfig.register(kind, _stand_in(kind, part), exist_ok=True)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _stand_in(kind: str, part: Mapping[str, Any]) -> Any:
    transformers = of("transformers")
    base = transformers.LlamaConfig if kind == "nemotron-nas" else transformers.PreTrainedConfig
    renamed = "num_layers" in part and "num_hidden_layers" not in part

    def init(self: Any, **fields: Any) -> None:
        blocks = fields.pop("block_configs", None)
        for name in ("llm_config", "text_config", "language_config"):
            if isinstance(nested := fields.get(name), dict) and "model_type" in nested:
                fields[name] = transformers.AutoConfig.for_model(**nested)
        base.__init__(self, **fields)
        if blocks is not None:
            self.block_configs = json.loads(json.dumps(blocks), object_hook=_Attributes)

    names = {"num_hidden_layers": "num_layers"} if renamed else {}
    return type(
        f"Plain_{kind}", (base,), {"model_type": kind, "__init__": init, "attribute_map": names}
    )


class _Attributes(dict[str, Any]):
    """A block of DeciLMConfig: its keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
