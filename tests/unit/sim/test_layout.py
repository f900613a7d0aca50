import json

import pytest

from sim.layout import KvGroup, KvLayout

# The values that matter of each model's published config.json.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {  # says neither its heads, nor their size, nor which layers are full
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
INDEXED = {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
PER_LAYER = 2 * 4 * 8 * 2  # K and V, 4 heads of 8, 2 bytes


@pytest.fixture
def layout(tmp_path):
    def read(config, kv_dtype="bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return KvLayout.from_config(tmp_path, kv_dtype)

    return read


def sizes(found):
    return [(g.kind, g.layers, g.bytes_per_token, g.window_tokens) for g in found.groups]


def test_deepseek_v3_keeps_one_latent_a_layer_70272_bytes_a_token(layout):
    # 61 layers * (512 + 64) values * 2 bytes: not doubled, and not times 128 heads.
    found = layout(DEEPSEEK_V3)
    assert found.groups == (KvGroup(kind="mla", layers=61, bytes_per_token=70_272),)
    assert "MLA" in str(found.why_not_predictable)


def test_deepseek_v3_in_fp8_keeps_half(layout):
    assert layout(DEEPSEEK_V3, "fp8").groups[0].bytes_per_token == 35_136


def test_an_indexer_keeps_a_key_of_its_own_beside_the_latent(layout):
    # 61 * (576 * 2 + 128 fp8 values + one float32 scale): the key is fp8 whatever the latent is.
    found = layout(DEEPSEEK_V3 | INDEXED)
    assert found.groups[0].bytes_per_token == 78_324
    assert found.unknown == ()


def test_of_a_sparse_latent_in_fp8_the_format_is_said(layout):
    found = layout(DEEPSEEK_V3 | INDEXED, "fp8")
    assert found.groups[0].bytes_per_token == 61 * (576 + 132)
    assert any("FlashMLA keeps 656 bytes" in text for text in found.unknown)
    packed = layout(DEEPSEEK_V3 | INDEXED, "fp8_ds_mla")
    assert packed.groups[0].bytes_per_token == 61 * (656 + 132)
    assert packed.unknown == ()


@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),  # GLM-5.2: 0, 1, 2, 6, 10, …, 74
        ({"index_topk_freq": 1}, 78),
        ({"index_topk_pattern": "FS" * 39}, 39),
    ],
)
def test_layers_that_use_anothers_index_keep_no_key(layout, fields, indexed):
    config = DEEPSEEK_V3 | INDEXED | {"num_hidden_layers": 78} | fields
    assert layout(config).groups[0].bytes_per_token == 78 * 1152 + indexed * 132


def test_gemma3_1b_has_a_full_layer_in_six(layout):
    # 26 layers: 6, 12, 18, 24 are full. 2 * 1 head * 256 * 2 bytes = 1,024 a layer.
    assert sizes(layout(GEMMA3_1B)) == [
        ("sliding_window", 22, 22_528, 512),
        ("full_attention", 4, 4_096, None),
    ]


def test_gemma3_4b_takes_what_its_config_leaves_out_from_its_class(layout):
    # 34 layers, 5 of them full (6, 12, …, 30); 2 * 4 heads * 256 * 2 bytes = 4,096 a layer.
    assert sizes(layout(GEMMA3_4B)) == [
        ("sliding_window", 29, 118_784, 1024),
        ("full_attention", 5, 20_480, None),
    ]


def test_gpt_oss_20b_alternates_full_and_sliding_layers(layout):
    # 2 * 8 heads * 64 * 2 bytes = 2,048 a layer, 12 of each.
    assert sizes(layout(GPT_OSS_20B)) == [
        ("sliding_window", 12, 24_576, 128),
        ("full_attention", 12, 24_576, None),
    ]


def test_cohere2_takes_its_full_layer_in_four_from_its_class(layout):
    # transformers' Cohere2Config; 2 * 8 heads * 128 * 2 bytes = 4,096 a layer, 24 of 32 sliding.
    command_r7b = {
        "model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "float16",
    }  # fmt: skip
    assert sizes(layout(command_r7b)) == [
        ("sliding_window", 24, 98_304, 4097),  # vLLM's commandr.py keeps one more
        ("full_attention", 8, 32_768, None),
    ]


def test_qwen3_next_keeps_tokens_in_12_layers_and_a_state_in_36(layout):
    # Full: 2 * 2 heads * 256 * 2 bytes * 12. State: ((2*128*16 + 128*32) * 3 + 32*128*128)
    # = 24,576 + 524,288 values * 2 bytes * 36.
    found = layout(QWEN3_NEXT)
    assert found.groups == (
        KvGroup(kind="state", layers=36, state_bytes=39_518_208),
        KvGroup(kind="full_attention", layers=12, bytes_per_token=24_576, kv_heads=(2,) * 12),
    )
    assert "hybrid" in (found.why_not_predictable or "")


def test_a_state_dtype_of_its_own_counts_for_the_recurrent_part(layout):
    # 36 * (24,576 * 2 + 524,288 * 4)
    assert layout(QWEN3_NEXT | {"mamba_ssm_dtype": "float32"}).groups[0].state_bytes == 77_266_944


def test_a_state_of_unknown_size_is_said_and_not_guessed(layout):
    found = layout(PLAIN | {"attn_layer_period": 4, "attn_layer_offset": 1})
    assert sizes(found) == [("state", 3, None, None), ("full_attention", 1, PER_LAYER, None)]
    assert found.groups[0].state_bytes is None
    assert any("size of a recurrent state" in text for text in found.unknown)


@pytest.mark.parametrize(
    ("fields", "full_layers"),
    [
        ({"hybrid_override_pattern": "M*-E"}, 1),
        ({"attn_type_list": [0, 1, 1, 0]}, 2),
        ({"attn_layer_indices": [3], "mamba_d_state": 16}, 1),
        ({"layers_block_type": ["mamba", "attention", "mamba", "attention"]}, 2),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, 3),
    ],
)
def test_each_familys_own_words_for_its_layers_are_understood(layout, fields, full_layers):
    groups = {group.kind: group.layers for group in layout(PLAIN | fields).groups}
    assert groups["full_attention"] == full_layers
    assert len(groups) == 2


def test_layers_that_share_anothers_kv_hold_none(layout):
    # As Gemma 3n: the last layers read what earlier ones keep.
    kinds = ["sliding_attention", "full_attention"] * 2
    found = layout(PLAIN | {"layer_types": kinds, "sliding_window": 16, "num_kv_shared_layers": 2})
    assert sizes(found) == [
        ("sliding_window", 1, PER_LAYER, 16),
        ("full_attention", 1, PER_LAYER, None),
    ]
    assert any("share another layer's KV" in text for text in found.unknown)


def test_shared_layers_alone_already_keep_a_model_from_exact_prediction(layout):
    found = layout(PLAIN | {"num_kv_shared_layers": 1})
    assert sizes(found) == [("full_attention", 3, 3 * PER_LAYER, None)]
    assert "share another layer's KV" in str(found.why_not_predictable)


def test_a_plain_model_is_predictable_and_nothing_is_unknown(layout):
    found = layout(PLAIN)
    assert found.why_not_predictable is None
    assert found.unknown == ()


def test_a_window_of_unknown_size_is_said(layout):
    found = layout(PLAIN | {"layer_types": ["sliding_attention"] * 4})
    assert any("how many tokens" in text for text in found.unknown)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "1 layers and has 4"),
        ({"layer_types": ["hybrid"] * 4}, "hybrid"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers=1099511627776; 10,000 is the most"),
        ({"layer_types": "full"}, "a list is needed"),
        ({"num_kv_shared_layers": 4}, "4 of 4 layers"),
        ({"hybrid_override_pattern": "----"}, "no layer keeps KV"),
        ({"attention_chunk_size": 8}, "no layer_types"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "not supported"),
        ({"ssm_cfg": {"d_state": 16}}, "no layer with a recurrent state"),
    ],
)
def test_layers_nobody_can_name_are_refused(layout, fields, message):
    with pytest.raises(ValueError, match=message):
        layout(PLAIN | fields)


@pytest.mark.parametrize(
    ("workers", "worker_bytes"),
    [(1, 24_576), (2, 12_288), (4, 12_288), (8, 12_288)],  # 2 KV heads: repeated beyond 2 ranks
)
def test_ranks_share_the_heads_or_repeat_them(layout, workers, worker_bytes):
    assert layout(QWEN3_NEXT).groups[1].worker_bytes_per_token(workers) == worker_bytes


def test_every_rank_keeps_the_whole_latent(layout):
    assert layout(DEEPSEEK_V3).groups[0].worker_bytes_per_token(8) == 70_272


def test_heads_that_ranks_cannot_share_are_refused(layout):
    with pytest.raises(ValueError, match="4 KV heads cannot be shared by 3"):
        layout(PLAIN).groups[0].worker_bytes_per_token(3)
    with pytest.raises(ValueError, match="keep no tokens"):
        layout(QWEN3_NEXT).groups[0].worker_bytes_per_token(2)
