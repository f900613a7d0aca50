"""Where the dtype of the KV cache is looked for."""

import json

import pytest

from sim.layout import KvLayout

# 2 * 32 layers * 8 heads * 128: 65,536 values a token.
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELOPT = {"producer": {"name": "modelopt"}}
FP8 = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.fixture
def size(tmp_path):
    def read(config, beside=None, kv_dtype="auto"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | config))
        if beside is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        return KvLayout.from_config(tmp_path, kv_dtype).groups[0].bytes_per_token

    return read


def nested(kv):
    return MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": kv}}


def test_a_file_beside_the_config_declares_the_kv_of_older_modelopt(size):
    assert size({}, nested("FP8")) == 65_536
    assert size({}, nested(None)) == 131_072


@pytest.mark.parametrize(
    "scheme",
    [
        nested("FP8"),
        {"quant_method": "modelopt", "kv_cache_scheme": FP8},
        {"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8},
        {"quant_method": "compressed_tensors", "kv_cache_scheme": FP8},
    ],
)
def test_a_scheme_in_the_config_declares_it(size, scheme):
    assert size({"quantization_config": scheme}) == 65_536
    assert size({"quantization_config": scheme}, kv_dtype="bfloat16") == 131_072


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"},  # vLLM warns, and keeps bf16
        {"quant_method": "modelopt", "kv_cache_scheme": FP8 | {"dynamic": True}},
        {"quant_method": "fp8", "kv_cache_scheme": "FP8"},  # of a method vLLM does not ask
        {"quant_method": "awq", "bits": 4},
    ],
)
def test_weights_alone_do_not_change_the_kv(size, scheme):
    assert size({"quantization_config": scheme}) == 131_072


def test_compressed_tensors_may_stand_in_the_language_part(size):
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}
    text = LLAMA_8B | {"quantization_config": scheme}
    assert size({"model_type": "kimi_k25", "text_config": text}) == 65_536
    assert size({"compression_config": scheme}) == 65_536


def test_a_packed_format_is_refused_by_name(size):
    with pytest.raises(ValueError, match=r"NVFP4 KV cache.*name the KV dtype"):
        size({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}})


def test_gpt_oss_names_no_dtype_and_keeps_two_bytes_a_value(tmp_path):
    # 12 of each: 2 * 8 heads * 64 * 2 bytes = 2,048 a layer.
    gpt_oss = {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss))
    found = KvLayout.from_config(tmp_path, "auto")
    assert [(group.kind, group.bytes_per_token) for group in found.groups] == [
        ("sliding_window", 24_576), ("full_attention", 24_576),
    ]  # fmt: skip
