"""Each name and class by which public models say their sizes, with values worked by hand."""

import json

import pytest

from sim.layout import KvLayout
from sim.models.config import ModelConfig

FALCON = {
    "model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128,
    "hidden_size": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron-nas", "num_hidden_layers": 2, "num_attention_heads": 64,
    "hidden_size": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
GROUPED = {"attention": {"n_heads_in_group": 8, "no_op": False}}
WITHOUT = {"attention": {"n_heads_in_group": None, "no_op": True}}
PLAIN = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
PER_LAYER = 2 * 4 * 8 * 2  # K and V, 4 heads of 8, 2 bytes


@pytest.fixture
def layout(tmp_path):
    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return KvLayout.from_config(tmp_path, "auto")

    return read


@pytest.fixture
def size(layout):
    def read(config):
        return sum(group.bytes_per_token for group in layout(config).groups)

    return read


def test_chatglm_says_its_kv_heads_in_multi_query_group_num(size):
    # 40 layers * 2 (K and V) * 2 heads * 128 * 2 bytes
    glm4 = {
        "model_type": "chatglm", "num_layers": 40, "num_attention_heads": 32, "hidden_size": 4096,
        "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
        "add_qkv_bias": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert size(glm4) == 40_960
    assert size(glm4 | {"multi_query_attention": False}) == 16 * 40_960


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 8),  # 40B
        ({"n_head_kv": 8}, 8),
        ({"n_head_kv": 8, "multi_query": True, "model_type": "RefinedWeb"}, 8),
        ({"multi_query": True}, 1),  # 7B
        ({}, 1),  # the class's own flag
        ({"multi_query": False}, 128),
    ],
)
def test_falcon_says_its_kv_heads_by_count_or_by_flag(size, fields, heads):
    assert size(FALCON | fields) == 60 * 2 * heads * 64 * 2
    assert 60 * 2 * 8 * 64 * 2 == 122_880


def test_step3_says_them_in_num_attention_groups(size):
    # 61 layers * 2 * 1 head * 256 * 2 bytes
    step3 = {
        "model_type": "step3_text", "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_attention_groups": 1, "head_dim": 256, "hidden_size": 7168, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert size(step3) == 62_464


def test_block_configs_say_them_layer_by_layer(layout, size):
    # One layer of two keeps KV: 2 * (64 / 8) heads * 128 * 2 bytes.
    assert size(NEMOTRON | {"block_configs": [GROUPED, WITHOUT]}) == 4_096
    half = {"attention": {"n_heads_in_group": 16, "no_op": False}}
    found = layout(NEMOTRON | {"block_configs": [GROUPED, half]}).groups[0]
    assert (found.bytes_per_token, found.kv_heads) == (6_144, (8, 4))
    # 8 ranks: a head of the first layer each, and one of the other's four, twice.
    assert found.worker_bytes_per_token(8) == 2 * 512


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([GROUPED], "1 block_configs and 2 layers"),
        ([GROUPED, {"block_type": "moe"}], "says no attention"),
        ([GROUPED, {"attention": {"n_heads_in_group": 7}}], "do not divide"),
        ([GROUPED, {"attention": {}}], "n_heads_in_group=None"),
    ],
)
def test_blocks_that_do_not_say_each_layers_heads_are_refused(size, blocks, message):
    with pytest.raises(ValueError, match=message):
        size(NEMOTRON | {"block_configs": blocks})


@pytest.mark.parametrize("field", ["no_op", "replace_with_linear"])
def test_a_block_without_attention_keeps_nothing(size, field):
    block = {"attention": {"n_heads_in_group": 8, field: True}}
    assert size(NEMOTRON | {"block_configs": [GROUPED, block]}) == 4_096


def test_minicpm3_has_a_latent_and_keeps_whole_heads(size):
    # 62 layers * 2 * 40 heads * (64 + 32) * 2 bytes: vLLM pads values to the size of keys.
    minicpm3 = {
        "model_type": "minicpm3", "num_hidden_layers": 62, "num_attention_heads": 40,
        "num_key_value_heads": 40, "hidden_size": 2560, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert size(minicpm3) == 952_320
    # So do embedding models that look both ways: MLA's kernels are causal (vLLM's use_mla).
    assert size(minicpm3 | {"model_type": "deepseek_v3", "is_causal": False}) == 952_320


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_a_language_part_is_found_under_its_names(size, name):
    assert size({"model_type": "some_vl", "hidden_size": 1, name: LLAMA_8B}) == 131_072


def test_a_language_part_may_be_nested_twice(size):
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": LLAMA_8B}
    assert size({"model_type": "qwen2_5_omni", "thinker_config": thinker}) == 131_072
    assert size({"model_type": "qwen2_5_omni", "thinker_config": LLAMA_8B}) == 131_072


def test_a_language_part_without_a_class_takes_that_of_the_whole(size):
    # gemma3's is gemma3_text: heads of 256, 4 of them; 2 * 4 * 256 * 2 bytes a layer.
    assert size({"model_type": "gemma3", "text_config": {"num_hidden_layers": 6}}) == 6 * 4_096


@pytest.mark.parametrize("name", ["num_layers", "n_layers", "n_layer"])
def test_layers_are_counted_by_other_names(size, name):
    config = {field: value for field, value in PLAIN.items() if field != "num_hidden_layers"}
    assert size(config | {name: 4}) == 4 * PER_LAYER


def test_gpt2_says_every_size_by_a_name_of_its_own(size):
    # 2 * 12 heads * 64 * 2 bytes * 12 layers
    assert size({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}) == 36_864


def test_dbrx_says_its_kv_heads_in_attn_config(size):
    # 2 * 8 heads * 128 * 2 bytes * 40 layers
    dbrx = {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144}
    assert size(dbrx | {"attn_config": {"kv_n_heads": 8}}) == 163_840


def test_what_a_config_leaves_out_is_what_its_class_says(size):
    # LLaVA-1.5's text_config names a llama and no size: 2 * 32 heads * 128 * 2 bytes * 32 layers.
    assert size({"model_type": "llava", "text_config": {"model_type": "llama"}}) == 524_288
    # Pixtral's leaves out 32 heads and 8 KV heads.
    mistral = {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128,
               "num_hidden_layers": 40, "sliding_window": None}  # fmt: skip
    assert size({"model_type": "llava", "text_config": mistral}) == 163_840


def test_longcat_has_two_attention_layers_in_each_of_its_own(size):
    longcat = {
        "model_type": "longcat_flash", "num_layers": 28, "num_attention_heads": 64,
        "hidden_size": 6144, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    assert size(longcat) == 56 * (512 + 64) * 2
    assert size(longcat | {"num_hidden_layers": 56}) == 56 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_query_groups", 2), ("n_kv", 2), ("kv_head_count", [1, 2]), ("attn_heads", {"k": 1})],
)
def test_a_field_that_may_mean_the_kv_heads_is_refused_by_name(size, field, value):
    with pytest.raises(ValueError, match=f"no num_key_value_heads, and a field {field}="):
        size(PLAIN | {field: value})
    assert size(PLAIN | {field: value, "num_key_value_heads": 4}) == 4 * PER_LAYER


@pytest.mark.parametrize(
    "field", ["add_qkv_bias", "lm_head_size", "n_group", "kv_channels", "vision_heads"]
)
def test_a_field_that_cannot_mean_them_is_not(size, field):
    assert size(PLAIN | {field: 1}) == 4 * PER_LAYER


def test_a_model_of_unknown_class_whose_latent_is_not_known_is_refused(size):
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
    with pytest.raises(ValueError, match="model_type 'plm' is not known here"):
        size(PLAIN | latent | {"model_type": "plm"})
    assert size(PLAIN | latent | {"model_type": "deepseek_v3"}) == 4 * 24 * 2


def test_a_hybrid_class_that_names_no_layer_is_refused(size):
    with pytest.raises(ValueError, match="falcon_h1, which keeps a recurrent state"):
        size(PLAIN | {"model_type": "falcon_h1"})


@pytest.mark.parametrize(
    ("window", "longest", "kind"),
    [
        (262_144, {"max_position_embeddings": 131_072}, "full_attention"),  # Phi-3-mini-128k
        (2_047, {"max_position_embeddings": 4_096}, "sliding_window"),  # Phi-3-mini-4k
        (4_096, {"seq_length": 4_096}, "full_attention"),
        (4_096, {}, "sliding_window"),
        (
            4_096,
            {"max_position_embeddings": 4_096, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "sliding_window",
        ),
    ],
)
def test_a_window_that_no_sequence_outgrows_is_none(layout, window, longest, kind):
    found = layout(PLAIN | {"sliding_window": window} | longest)
    assert (found.groups[0].kind, found.groups[0].window_tokens) == (kind, window)


def test_the_servers_longest_sequence_decides_before_the_configs(tmp_path):
    mistral = PLAIN | {"sliding_window": 4_096, "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    asked = KvLayout.from_config(tmp_path, "auto", max_model_len=4_096)
    assert asked.why_not_predictable is None
    longer = KvLayout.from_config(tmp_path, "auto", max_model_len=4_097)
    assert "sliding-window" in str(longer.why_not_predictable)


def test_sizes_are_read_once_for_all_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 25}))
    config = ModelConfig.read(tmp_path)
    assert (config.size("num_attention_heads"), config.size("hidden_size")) == (25, 768)
