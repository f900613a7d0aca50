import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.errors import InputError
from harness.plan import models
from harness.plan.experiment import resolve
from harness.plan.files import parse_plan
from sim.geometry import KvGeometry
from tests.factory import PLAN_TOML

QWEN = "Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def find(name: str, tmp_path: Path, weights: models.Weights = "auto") -> models.Model:
    return models.find(name, weights=weights, cache_dir=tmp_path / "cache")


def shape(name: str = QWEN) -> dict[str, object]:
    content: dict[str, object] = json.loads(
        find(name, Path("/nowhere")).config.read_text(encoding="utf-8")
    )
    return content


def downloaded(hub: Path, *files: str, **changed: object) -> Path:
    """A snapshot of QWEN with its config and ``files``."""
    folder = hub / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    config = shape() | changed | {"transformers_version": "4.51.0"}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in files:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        # K and V x layers x KV heads x head size x 2 bytes of bfloat16
        ("Qwen/Qwen2.5-1.5B-Instruct", 2 * 28 * 2 * 128 * 2),  # 28,672
        ("Qwen/Qwen3-0.6B", 2 * 28 * 8 * 128 * 2),  # 114,688
        ("Qwen/Qwen3-8B", 2 * 36 * 8 * 128 * 2),  # 147,456
    ],
)
def test_a_well_known_model_is_sized_without_a_download(tmp_path, name, n_bytes):
    model = find(name, tmp_path)
    assert KvGeometry.from_config(model.config, "bfloat16").bytes_per_token == n_bytes
    assert n_bytes in (28_672, 114_688, 147_456)
    assert (model.serve, model.is_download, model.missing) == (name, True, None)
    assert model.source == f"kvcliff's shape file, because {name} is not downloaded"
    assert not (tmp_path / "cache").exists()


def test_a_plan_may_say_the_last_part_of_a_hub_id_whose_shape_is_known(tmp_path):
    model = find("Qwen3-0.6B", tmp_path)
    assert (model.name, model.serve) == ("Qwen3-0.6B", QWEN)
    assert model.identity == find(QWEN, tmp_path).identity


def test_another_model_that_is_not_downloaded_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(
        InputError, match=r"'org/other' is not a path, and not downloaded"
    ) as caught:
        find("org/other", tmp_path)
    assert "hf download org/other config.json" in str(caught.value.hint)
    assert "Qwen/Qwen3-8B" in str(caught.value.hint)


def test_a_downloaded_model_is_served_from_its_folder_and_keeps_the_plans_identity(tmp_path, hub):
    before = find(QWEN, tmp_path)
    folder = downloaded(hub, "model.safetensors")
    after = find(QWEN, tmp_path)
    assert (after.serve, after.is_download) == (str(folder), False)
    assert after.config == folder / "config.json"
    assert after.source == str(folder / "config.json")
    assert after.identity == before.identity


def test_a_download_of_another_shape_than_the_shape_file_is_another_model(tmp_path, hub):
    before = find(QWEN, tmp_path)
    downloaded(hub, "model.safetensors", num_hidden_layers=27)
    after = find(QWEN, tmp_path)
    assert after.identity != before.identity
    # 27 layers of 4,096 bytes
    assert KvGeometry.from_config(after.config, "bfloat16").bytes_per_token == 27 * 4096


def test_a_download_that_was_cut_short_is_left_to_vllm(tmp_path, hub):
    folder = downloaded(hub, "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    model = find(QWEN, tmp_path)
    assert (model.serve, model.is_download) == (QWEN, True)
    assert "model-00002-of-00002.safetensors" in model.source


def test_a_folder_without_weights_can_be_planned_and_says_what_it_lacks(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape()))
    model = find("mine", tmp_path)
    assert (model.serve, model.missing) == (str(folder), "weights (*.safetensors)")


def test_a_folder_wins_over_the_shape_file_of_that_name(tmp_path):
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    config = json.dumps(shape() | {"num_hidden_layers": 1})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"")
    model = find(QWEN, tmp_path)
    assert (model.serve, model.identity) == (str(folder), (folder / "config.json").read_bytes())


def test_dummy_weights_need_a_folder_with_shape_and_tokenizer_and_no_network(tmp_path):
    model = find(QWEN, tmp_path, "dummy")
    assert not model.is_download
    folder = Path(model.serve)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == shape()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Every id of the output layer has a word, the last one too: a client sees each token.
    assert [tokenizer.decode([i]) for i in (0, 17, 151_935)] == ["t000", "t017", "t151935"]
    assert tokenizer.get_vocab_size() == 151_936
    assert model.identity == find(QWEN, tmp_path).identity


def test_a_config_alone_is_enough_for_dummy_weights(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape() | {"vocab_size": 64}))
    model = find("mine", tmp_path, "dummy")
    assert Path(model.serve).parent == tmp_path / "cache" / "models"
    assert model.missing is None
    (folder / "tokenizer.json").write_text("{}")
    assert find("mine", tmp_path, "dummy").serve == str(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list, not a model config"),
        (None, "has no config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path, config, message):
    (tmp_path / "mine").mkdir()
    if config is not None:
        (tmp_path / "mine" / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        find("mine", tmp_path)


def test_dummy_weights_of_a_config_without_vocabulary_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="vocab_size=None: no tokenizer can be written"):
        find("mine", tmp_path, "dummy")


@pytest.mark.parametrize("name", ["/nowhere", "", "a/b/c", "../.."])
def test_nobody_is_told_to_download_what_is_no_hub_id(name, tmp_path):
    with pytest.raises(InputError) as caught:
        find(name, tmp_path)
    assert "hf download" not in str(caught.value.hint)
    assert "Qwen/Qwen3-8B" in str(caught.value.hint)


def test_token_ids_come_from_the_middle_of_the_vocabulary(tmp_path):
    model = find(QWEN, tmp_path)
    assert models.check_vocab(model, None) == (18_992, 132_944)  # 151,936 / 8, and less that
    assert models.check_vocab(model, (5, 151_936)) == (5, 151_936)
    with pytest.raises(InputError, match=r"ids are \[0, 151936\)"):
        models.check_vocab(model, (5, 151_937))


def test_dummy_weights_change_a_plans_id_and_vllms_load_format(tmp_path):
    def resolved(model: str):
        plan = parse_plan((PLAN_TOML + f"[model]\n{model}\n").encode(), where="p")
        return resolve(plan, cache_dir=tmp_path)

    real, dummy = resolved('path = "tiny"'), resolved('weights = "dummy"')
    assert real.plan_id != dummy.plan_id
    assert real.arms["baseline"].server.load_format == "auto"
    assert dummy.arms["baseline"].server.load_format == "dummy"


def test_a_plan_for_a_gpu_names_the_hub_model_and_leaves_the_network_on(tmp_path):
    text = PLAN_TOML.replace('"fake"', '"gpu"')
    plan = parse_plan((text + f'[model]\npath = "{QWEN}"\n').encode(), where="p")
    assert resolve(plan, cache_dir=tmp_path).arms["baseline"].server.model == QWEN
