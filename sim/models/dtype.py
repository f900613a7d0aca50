"""How many bytes one value of the KV cache takes: the KV dtype, looked for where vLLM looks."""

from typing import Any

from sim.errors import SpecError
from sim.models.config import ModelConfig, language_part, read_json

_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

# vLLM casts float32, and a dtype nobody names, to what the machine computes best in: bfloat16 or
# float16 (Platform.supported_dtypes), two bytes on every machine it runs on.
_CAST_DOWN = ("", "float32", "float")


def value_bytes(config: ModelConfig, kv_dtype: str, model_dtype: str = "auto") -> int:
    """Bytes of one value. ``model_dtype``: vLLM's ``--dtype``, what "auto" falls back on.

    "auto" is what the checkpoint declares for its KV, else the dtype the model runs in. SpecError
    for a dtype that is not so many bytes a value.
    """
    name = kv_dtype
    if kv_dtype == "auto":
        name = declared_kv_dtype(config) or model_dtype
    if name == "auto":
        name = own_dtype(config)
        name = "float16" if name in _CAST_DOWN else name
    if name not in _BYTES:
        raise SpecError(f"KV dtype {name!r} is not known; known: {sorted(_BYTES)}")
    return _BYTES[name]


def bytes_of(name: str) -> int | None:
    """Bytes of a value of dtype ``name``; None where it is not known."""
    return _BYTES.get(name)


def own_dtype(config: ModelConfig) -> str:
    """The dtype the config names, the whole model's first; or an empty string."""
    named = (
        found.get(field)
        for found in (config.whole, config.text)
        for field in ("dtype", "torch_dtype")
    )
    return next((str(value).removeprefix("torch.") for value in named if value), "")


def declared_kv_dtype(config: ModelConfig) -> str | None:
    """The KV dtype a quantized checkpoint declares; None where vLLM keeps the model's.

    ``resolve_kv_cache_dtype_string`` (ModelOpt) and ``Attention.__init__`` (compressed-tensors) of
    vLLM 0.32. Other methods may name a scheme too; vLLM does not read it.
    """
    whole = config.whole.get("quantization_config")
    if whole is None:
        beside = config.file.parent / "hf_quant_config.json"
        whole = read_json(beside) if beside.is_file() else None
    if isinstance(whole, dict) and _method(whole).startswith("modelopt"):
        return _of_modelopt(config, whole)
    nested = language_part(config.whole).get("quantization_config")
    scheme = whole or nested or config.whole.get("compression_config")
    if isinstance(scheme, dict) and _method(scheme) == "compressed-tensors":
        return "fp8" if scheme.get("kv_cache_scheme") else None
    return None


def _method(scheme: dict[str, Any]) -> str:
    nested = scheme.get("quantization")
    producer = scheme.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if is_modelopt and isinstance(nested, dict) and nested.get("quant_algo"):
        return "modelopt"
    return str(scheme.get("quant_method") or "").lower().replace("_", "-")


def _of_modelopt(config: ModelConfig, scheme: dict[str, Any]) -> str | None:
    nested = scheme.get("quantization")
    places = [nested, scheme] if isinstance(nested, dict) else [scheme]
    algo: Any = None
    for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
        algo = algo or next((place[field] for place in places if place.get(field)), None)
    if isinstance(algo, dict):
        bits, is_float = algo.get("num_bits"), algo.get("type") == "float"
        is_static = algo.get("dynamic") is False
        algo = "nvfp4" if is_float and bits == 4 else algo
        algo = "fp8" if is_float and bits == 8 and is_static else algo
    if isinstance(algo, str) and algo.lower() == "fp8":
        return "fp8_e4m3"
    if isinstance(algo, str) and algo.lower() == "nvfp4":
        raise SpecError(
            f"{config.file} declares an NVFP4 KV cache, whose packed size is not known here: name "
            "the KV dtype"
        )
    return None  # vLLM warns of any other and keeps the model's dtype
