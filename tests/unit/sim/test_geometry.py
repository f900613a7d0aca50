import json

import pytest

from sim.geometry import KvGeometry, host_bytes

# The values that matter of each model's published config.json.
QWEN3_06B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN25_15B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
MLA = {"model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
PLAIN = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.fixture
def geometry(tmp_path):
    def read(config, kv_dtype="bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return KvGeometry.from_config(tmp_path, kv_dtype)

    return read


def test_qwen3_06b_keeps_114688_bytes_a_token(geometry):
    # 2 (K and V) * 28 layers * 8 heads * 128 * 2 bytes; head_dim is not hidden/heads = 64.
    assert geometry(QWEN3_06B) == KvGeometry(114_688)


def test_qwen25_15b_keeps_28672_bytes_a_token(geometry):
    # 2 * 28 * 2 heads * (1536 / 12 = 128) * 2 bytes; its window is switched off.
    assert geometry(QWEN25_15B) == KvGeometry(28_672)


def test_llama_31_8b_keeps_131072_bytes_a_token(geometry):
    # 2 * 32 layers * 8 heads * (4096 / 32 = 128) * 2 bytes.
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    assert geometry(llama, "auto") == KvGeometry(131_072)


def test_an_fp8_cache_halves_a_bfloat16_model(geometry):
    assert geometry(QWEN3_06B, "fp8") == KvGeometry(57_344)


def test_the_labs_4864_tokens_of_qwen25_15b_are_0_1299_gib():
    # 4,864 * 28,672 = 139,460,608 bytes.
    assert round(KvGeometry(28_672).gib(4_864), 4) == 0.1299


def test_kv_heads_default_to_the_attention_heads(geometry):
    assert geometry(PLAIN) == KvGeometry(2 * 2 * 4 * 8 * 2)  # MHA: 4 heads of 32/4


def test_one_kv_head_is_mqa(geometry):
    assert geometry(PLAIN | {"num_key_value_heads": 1}) == KvGeometry(2 * 2 * 1 * 8 * 2)


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_kv_heads_that_do_not_divide_the_attention_heads_are_refused(geometry, kv_heads):
    # vLLM's Attention layer asserts that each serves as many of the 4.
    with pytest.raises(ValueError, match=f"num_key_value_heads={kv_heads}, which do not divide"):
        geometry(PLAIN | {"num_key_value_heads": kv_heads})


def test_a_null_head_dim_falls_back_to_hidden_size_over_heads(geometry):
    assert geometry(PLAIN | {"head_dim": None}) == KvGeometry(2 * 2 * 4 * 8 * 2)


def test_sizes_nested_in_text_config_are_found(geometry):
    nested = {"model_type": "qwen2_5_vl", "text_config": QWEN25_15B, "hidden_size": 1}
    assert geometry(nested) == KvGeometry(28_672)


def test_a_path_may_be_the_config_file_itself(tmp_path):
    file = tmp_path / "model-config.json"
    file.write_text(json.dumps(QWEN25_15B))
    assert KvGeometry.from_config(file, "bfloat16") == KvGeometry(28_672)


@pytest.mark.parametrize(
    ("kv_dtype", "size"),
    [("float32", 512), ("float16", 256), ("half", 256), ("bfloat16", 256), ("fp8", 128)],
)
def test_the_cache_dtype_decides_the_bytes(geometry, kv_dtype, size):
    assert geometry(PLAIN, kv_dtype) == KvGeometry(size)  # 2 * 2 layers * 4 heads * 8 = 128 values


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_auto_takes_the_configs_own_dtype(geometry, field):
    assert geometry(PLAIN | {field: "float16"}, "auto") == KvGeometry(256)


@pytest.mark.parametrize("dtype", [{}, {"torch_dtype": "float32"}, {"dtype": "torch.float16"}])
def test_auto_is_two_bytes_where_vllm_casts_down_to_what_the_machine_has(geometry, dtype):
    # bfloat16 or float16: which, depends on the machine; their size does not.
    assert geometry(PLAIN | dtype, "auto") == KvGeometry(256)


def test_auto_follows_the_dtype_the_server_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"torch_dtype": "bfloat16"}))
    told = KvGeometry.from_config(tmp_path, "auto", model_dtype="float32")
    assert told == KvGeometry(512)  # 4 bytes: nothing casts down what is asked for


def test_an_unknown_cache_dtype_is_refused(geometry):
    with pytest.raises(ValueError, match="int3"):
        geometry(PLAIN, "int3")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (MLA, "MLA, which keeps one compressed latent"),
        (MLA | {"model_type": "plm"}, "kv_lora_rank.* model_type 'plm' is not known"),
        ({"sliding_window": 4096, "max_position_embeddings": 4097}, "sliding-window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "hybrid .*sliding_window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "hybrid .*state"),
        ({"layer_types": ["linear_attention"] * 2}, "recurrent state"),
        ({"attention_chunk_size": 8192}, "chunked"),
        ({"full_attention_interval": 2}, "hybrid"),
        ({"attn_layer_period": 8}, "hybrid"),
        ({"hybrid_override_pattern": "M*"}, "hybrid"),
        ({"num_kv_shared_layers": 1}, "share"),
        ({"mamba_d_state": 256}, "recurrent"),
        ({"global_head_dim": 512}, "different size"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"multi_query": True}, "num_key_value_heads"),
        ({"head_dim": 8, "v_head_dim": 16}, "v_head_dim"),
    ],
)
def test_a_model_that_is_not_plain_full_attention_is_refused_with_its_reason(
    geometry, extra, message
):
    with pytest.raises(ValueError, match=message):
        geometry(PLAIN | extra)


def test_refusal_looks_into_text_config_too(geometry):
    with pytest.raises(ValueError, match="MLA"):
        geometry({"text_config": PLAIN | MLA})


def test_layer_types_that_are_all_full_attention_are_accepted(geometry):
    assert geometry(PLAIN | {"layer_types": ["full_attention"] * 2}) == KvGeometry(256)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [None, 0, "28", 2.5, True])
def test_a_missing_or_senseless_size_is_named(geometry, field, value):
    with pytest.raises(ValueError, match=field):
        geometry(PLAIN | {field: value})


def test_a_hidden_size_that_heads_do_not_divide_is_refused(geometry):
    with pytest.raises(ValueError, match="33 is not a multiple of 4"):
        geometry(PLAIN | {"hidden_size": 33})


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        KvGeometry.from_config(tmp_path, "bfloat16")


def test_host_chunks_are_whole_and_rounded_up_to_lmcaches_4096_bytes():
    # 100 bytes * 41 tokens = 4,100 bytes -> 8,192 aligned; 1 MiB / 8,192 = 128 (not 255).
    assert KvGeometry(100).chunk_bytes(41) == 4_100
    assert KvGeometry(100).host_chunks(1 / 1024, 41) == 128


def test_host_chunks_of_qwen25_15b_in_one_gib():
    # 28,672 * 256 = 7,340,032 bytes, a multiple of 4,096; 2**30 / 7,340,032 = 146.3.
    assert KvGeometry(28_672).host_chunks(1, 256) == 146


def test_host_bytes_are_cut_to_whole_bytes_of_binary_gib():
    assert host_bytes(0.5) == 536_870_912
    assert host_bytes(0.1) == 107_374_182  # 107,374,182.4


def test_a_geometry_of_no_bytes_does_not_exist():
    with pytest.raises(ValueError, match="0 bytes"):
        KvGeometry(0)
