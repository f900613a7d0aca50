import json
from pathlib import Path

import pytest

from harness.plan.lookup import config_of, find_model, shape_names
from sim.geometry import KvGeometry

# 2 (K and V) * 28 layers * 8 heads * 128 * 2 bytes = 114,688 a token
QWEN3_06B = {
    "model_type": "qwen3", "head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path):
    """A cache folder with one downloaded model of two snapshots; ``refs/main`` names the second."""
    repository = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B"
    for commit, layers in (("aaa", 1), ("bbb", 28)):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(QWEN3_06B | {"num_hidden_layers": layers}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb")
    return repository


def test_a_hub_id_means_the_downloaded_snapshot_of_main(hub):
    found = find_model("Qwen/Qwen3-0.6B", {"HF_HOME": str(hub.parents[1])})
    assert found == hub / "snapshots" / "bbb"
    assert KvGeometry.from_config(found, "bfloat16") == KvGeometry(114_688)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_the_hub_cache_may_be_named_by_other_variables(hub, variable, tmp_path):
    where = hub.parent
    if variable == "XDG_CACHE_HOME":
        (tmp_path / "huggingface").symlink_to(hub.parents[1])
        where = tmp_path
    found = find_model("Qwen/Qwen3-0.6B", {variable: str(where)})
    assert found.name == "bbb"


def test_a_model_that_is_not_downloaded_is_refused_with_the_place_looked_at(hub):
    with pytest.raises(ValueError, match=r"not downloaded: .*models--Qwen--Qwen3-8B"):
        find_model("Qwen/Qwen3-8B", {"HF_HOME": str(hub.parents[1])})


def test_snapshots_without_a_reference_are_not_guessed_among(hub):
    (hub / "refs" / "main").unlink()
    with pytest.raises(ValueError, match=r"2 snapshots.*aaa, bbb"):
        find_model("Qwen/Qwen3-0.6B", {"HF_HOME": str(hub.parents[1])})


def test_a_path_that_exists_wins_over_a_hub_id(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    found = find_model("Qwen/Qwen3-0.6B", {"HF_HOME": str(hub.parents[1])})
    assert found.resolve() == tmp_path / "Qwen" / "Qwen3-0.6B"


@pytest.mark.parametrize("name", ["", "..a/b/c", "a b", "/no/such/folder"])
def test_a_name_that_is_neither_path_nor_hub_id_is_refused(name):
    with pytest.raises(ValueError, match="neither a path"):
        find_model(name, {})


def test_the_shapes_that_come_with_kvcliff_are_these():
    assert shape_names() == [
        "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen3-8B"])
def test_a_shape_that_comes_with_kvcliff_is_found_by_hub_id_and_by_its_name(
    name, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert KvGeometry.from_config(config_of(name), "auto") == KvGeometry(147_456)


def test_a_path_wins_over_a_shape_and_a_download_too(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.parent))
    monkeypatch.chdir(tmp_path)
    assert config_of("Qwen3-0.6B") == hub / "snapshots" / "bbb"
    (tmp_path / "Qwen3-0.6B").mkdir()
    assert config_of("Qwen3-0.6B") == Path("Qwen3-0.6B")


def test_a_model_nobody_knows_is_refused_with_those_that_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"not downloaded.*kvcliff knows .*Qwen/Qwen3-8B"):
        config_of("org/other")
