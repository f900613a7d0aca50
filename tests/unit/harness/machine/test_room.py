import json
import shutil
from pathlib import Path

import pytest

from harness.errors import InputError, MachineError
from harness.machine.room import check_disk, check_gpu, check_room
from harness.plan.experiment import Experiment, resolve
from harness.plan.files import parse_plan
from servers.errors import LaunchError
from servers.gpu.devices import Device
from servers.gpu.facts import Gpu, GpuMemory, GpuState, MigInstance
from servers.tinymodel import CONFIG
from tests.factory import PLAN_TOML

GIB = 2**30


def experiment(tmp_path: Path, model: str = "", **replaced: str) -> Experiment:
    text = PLAN_TOML.replace('"fake"', '"cpu"')
    for before, after in replaced.items():
        text = text.replace(before, after)
    return resolve(parse_plan((text + model).encode(), where="p"), cache_dir=tmp_path)


def card(total: int | None) -> Device:
    memory = GpuMemory(total_bytes=total)
    return Device(Gpu(index=0, uuid="GPU-1", state=GpuState(memory=memory)))


def test_a_host_tier_larger_than_the_memory_stops_the_run_before_anything_starts(tmp_path: Path):
    check_room(experiment(tmp_path))
    with pytest.raises(LaunchError, match="host tier of 60000 GiB"):
        check_room(experiment(tmp_path, **{"gib = 0.1": "gib = 60000.0"}))


def test_a_folder_without_weights_stops_the_run_and_names_the_way_out(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    asked = experiment(tmp_path, f'[model]\npath = "{folder}"\n')
    with pytest.raises(InputError, match=r"has no weights \(\*\.safetensors\)") as caught:
        check_room(asked)
    assert "--dummy-weights" in str(caught.value.hint)
    check_room(experiment(tmp_path, f'[model]\npath = "{folder}"\nweights = "dummy"\n'))


def test_a_card_that_cannot_hold_weights_and_pool_is_named_with_both_sizes():
    check_gpu([card(8 * GIB)], 8 * GIB)
    with pytest.raises(MachineError, match=r"take 9\.0 GiB; GPU 0 \(GPU-1\) has 8\.0 GiB"):
        check_gpu([card(8 * GIB)], 9 * GIB)
    check_gpu([card(8 * GIB), card(8 * GIB)], 9 * GIB)


def test_a_mig_instance_counts_with_its_own_memory():
    instance = MigInstance("MIG-1", memory=GpuMemory(total_bytes=4 * GIB))
    with pytest.raises(MachineError, match=r"has 4\.0 GiB"):
        check_gpu([Device(card(80 * GIB).gpu, instance)], 5 * GIB)


def test_a_card_whose_memory_nobody_tells_is_not_judged():
    check_gpu([card(None)], 10**15)
    check_gpu([card(8 * GIB), card(None)], 10**15)
    check_gpu([], 10**15)
    with pytest.raises(MachineError, match=r"has 8\.0 GiB"):
        check_gpu([card(8 * GIB)], 10**15)


def test_a_download_that_does_not_fit_the_hub_cache_is_said_before_it_begins(tmp_path: Path):
    cache = tmp_path / "not" / "there" / "yet"
    check_disk(cache, 1)
    with pytest.raises(MachineError, match=r"to download, .* GiB free") as caught:
        check_disk(cache, shutil.disk_usage(tmp_path).free * 2)
    assert "HF_HOME" in str(caught.value.hint)
