from pathlib import Path

import pytest
from safetensors.numpy import load_file

from servers.tinymodel import CONFIG, write_tiny_model
from sim.dense import DenseShape

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151_936,
    "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_15B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "vocab_size": 151_936,
    "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"), [(QWEN3_8B, 8_190_735_360), (QWEN25_15B, 1_543_714_304)]
)
def test_parameters_are_those_of_the_published_checkpoints(config, published):
    shape = DenseShape.from_config(config)
    assert shape is not None
    assert shape.parameters == published


def test_parameters_of_the_tiny_model_are_its_weights(tmp_path: Path):
    shape = DenseShape.from_config(CONFIG)
    assert shape is not None
    weights = load_file(write_tiny_model(tmp_path) / "model.safetensors")
    assert shape.parameters == sum(weight.size for weight in weights.values())


def test_prefill_multiplies_every_matrix_once_and_every_pair_twice():
    # A layer: 4,096 x (32 + 8 + 8 + 32) x 128 and 3 x 4,096 x 12,288; 36 of them; 2 a parameter.
    matrices = 2 * 36 * (4096 * 80 * 128 + 3 * 4096 * 12_288)
    # 4 x 32 heads x 128 x 36 layers a pair; 10 tokens after 100: 10 x (100 + 5) pairs.
    pairs = 4 * 32 * 128 * 36 * 1050
    shape = DenseShape.from_config(QWEN3_8B)
    assert shape is not None
    assert 10 * shape.flop_per_token + 1050 * shape.flop_per_pair == 10 * matrices + pairs
    # What a document of big-8b costs: about 96 TFLOP.
    document = 6144 * shape.flop_per_token + 6144 * 6144 / 2 * shape.flop_per_pair
    assert document == pytest.approx(96.5e12, rel=1e-3)


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen3_moe"},
        {"model_type": None},
        {"hidden_size": None},
        {"vocab_size": "151936"},
        {"num_hidden_layers": 0},
    ],
)
def test_a_model_that_is_not_counted_has_no_shape(changed):
    assert DenseShape.from_config(QWEN3_8B | changed) is None
