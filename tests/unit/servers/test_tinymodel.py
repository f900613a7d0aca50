"""The tiny model: whole or absent, the same everywhere, and a tokenizer whose tokens are visible."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from servers import tinymodel, tinyweights
from servers.tinymodel import VOCAB_SIZE, WEIGHT_STD, write_tiny_model
from sim.geometry import KvGeometry


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models"))


def test_every_token_is_visible_ascii_and_decodes_alone(model: Path):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
    assert len(set(texts)) == VOCAB_SIZE
    for text in texts:
        assert text
        assert text.isascii()
        assert text.isprintable()
        assert not text.isspace()


def test_text_and_ids_translate_both_ways(model: Path):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("t000 t017 t511").ids == [0, 17, 511]
    assert tokenizer.decode([0, 17, 511]) == "t000 t017 t511"


def test_one_token_keeps_12288_bytes_of_kv(model: Path):
    # 2 (K and V) x 4 layers x 6 heads x 64 x 4 bytes
    assert KvGeometry.from_config(model, "float32").bytes_per_token == 12288


def test_weights_have_the_shapes_of_the_config_and_the_wanted_spread(model: Path):
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # 11 tensors a layer, and embedding, last norm, head
    assert len(weights) == 4 * 11 + 3
    head = weights["lm_head.weight"]
    assert head.shape == (512, 384)
    assert head.dtype == np.float32
    assert float(head.std()) == pytest.approx(WEIGHT_STD, rel=0.01)
    assert weights["model.layers.3.mlp.down_proj.weight"].shape == (384, 2048)
    assert config["num_hidden_layers"] == 4


def test_a_second_call_writes_nothing(model: Path):
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert write_tiny_model(model.parent) == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_the_same_recipe_gives_the_same_bytes(model: Path, tmp_path: Path):
    other = write_tiny_model(tmp_path)
    assert other.name == model.name
    for path in model.iterdir():
        assert (other / path.name).read_bytes() == path.read_bytes()


def test_another_recipe_gets_another_folder(monkeypatch: pytest.MonkeyPatch):
    before = tinymodel.recipe_version()
    monkeypatch.setattr(tinymodel, "WEIGHT_SEED", 1)
    assert tinymodel.recipe_version() != before


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def disk_full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tinyweights, "save_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_tiny_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_end_with_one_whole_model(model: Path, tmp_path: Path):
    results: list[Path] = []
    writers = [
        threading.Thread(target=lambda: results.append(write_tiny_model(tmp_path)))
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert results == [tmp_path / model.name] * 2
    assert [path.name for path in tmp_path.iterdir()] == [model.name]
    assert len(list(results[0].iterdir())) == 4
