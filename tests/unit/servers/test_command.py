"""Command lines and environments: goldens, one factor between arms, nothing inherited by accident.

After a wanted change: ``KVCLIFF_WRITE_GOLDENS=1 pytest tests/unit/servers/test_command.py``, then read the
diff of the goldens.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from servers.arms import Arm, Build, ServerSpec
from servers.command import Command, difference, is_local, render
from servers.ports import Ports
from servers.tiers.base import HostTier
from servers.tiers.registry import keeps_blocks
from sim.tiers.settings import TIER_KINDS, TierKind
from tests.places import DATA

GOLDENS = DATA / "goldens"
INHERITED = {"PATH": "/usr/bin:/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}
PORTS = Ports(vllm=21000, lmcache=21001, lmcache_http=21002)
MODELS = {"cpu": "/cache/models/tiny", "gpu": "Qwen/Qwen3-8B", "fake": "Qwen/Qwen3-8B"}


def spec(build: Build) -> ServerSpec:
    return ServerSpec(
        build=build,
        model=MODELS[build],
        block_size=32 if build == "cpu" else 16,
        num_gpu_blocks=292,
        max_model_len=2304,
        max_num_batched_tokens=4096,
        dtype="float32" if build == "cpu" else "bfloat16",
    )


def baseline(build: Build = "cpu") -> Arm:
    return Arm("baseline", spec(build))


def lmcache(build: Build = "cpu") -> Arm:
    return Arm("lmcache", spec(build), HostTier(gib=0.5))


def rendered(arm: Arm, inherited: dict[str, str] | None = None) -> tuple[Command, ...]:
    return render(
        arm,
        ports=PORTS,
        model_name="kvcliff-01",
        work_dir=Path("/tmp/kvc-x"),
        cache_dir=Path("/cache"),
        inherited=INHERITED if inherited is None else inherited,
    )


def vllm(arm: Arm, inherited: dict[str, str] | None = None) -> Command:
    return rendered(arm, inherited)[0]


def tier(kind: TierKind, build: Build) -> Arm:
    chunk = spec(build).block_size if keeps_blocks(kind) else 256
    return Arm(kind, spec(build), HostTier(gib=0.5, kind=kind, chunk_tokens=chunk))


def own(build: Build) -> Arm:
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    return Arm("own", spec(build), env={"VLLM_X": "1"}, flags=("--seed", "3"), connector=connector)


ARMS = {
    "baseline": baseline,
    "none": lambda build: Arm("none", spec(build), prefix_caching=False),
    **{kind: partial(tier, kind) for kind in TIER_KINDS},
    "own": own,
}


@pytest.mark.parametrize("build", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ARMS)
def test_commands_are_the_golden_ones(build: Build, name: str):
    shown = [
        {
            "role": command.role,
            "argv": ["$PYTHON" if word == sys.executable else word for word in command.argv],
            "env": dict(sorted(command.env.items())),
            "env_diff": command.env_diff,
        }
        for command in rendered(ARMS[name](build))
    ]
    golden = GOLDENS / f"command-{build}-{name}.json"
    if os.environ.get("KVCLIFF_WRITE_GOLDENS"):
        golden.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    assert golden.exists(), "KVCLIFF_WRITE_GOLDENS=1 writes it: read what it says"
    assert shown == json.loads(golden.read_text(encoding="utf-8"))


@pytest.mark.parametrize("build", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["lmcache-mp", "lmcache", "native", "simple", "own"])
def test_an_arm_is_the_baseline_and_then_its_own_factor(build: Build, name: str):
    without, with_tier = vllm(baseline(build)), vllm(ARMS[name](build))
    assert with_tier.argv[: len(without.argv)] == without.argv
    assert with_tier.argv != without.argv
    added = {
        "lmcache": {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5",
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_CACHE_POLICY": "LRU",
            # Worker 0 of its HTTP server listens on the start + 1: on the tier's own HTTP port.
            "LMCACHE_INTERNAL_API_SERVER_ENABLED": "True",
            "LMCACHE_INTERNAL_API_SERVER_HOST": "127.0.0.1",
            "LMCACHE_INTERNAL_API_SERVER_PORT_START": "21001",
            "LMCACHE_INTERNAL_API_SERVER_INCLUDE_INDEX_LIST": "1",
        },
        "simple": {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"},
        "own": {"VLLM_X": "1"},
    }
    assert dict(with_tier.env) == dict(without.env) | added.get(name, {})


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_without_prefix_cache_one_word_differs(build: Build):
    pairs = zip(vllm(baseline(build)).argv, vllm(ARMS["none"](build)).argv, strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == [
        ("--enable-prefix-caching", "--no-enable-prefix-caching")
    ]


def test_only_the_lmcache_server_is_a_second_process():
    roles = {name: [c.role for c in rendered(ARMS[name]("gpu"))] for name in ARMS}
    assert roles.pop("lmcache-mp") == ["vllm", "lmcache"]
    assert set(map(tuple, roles.values())) == {("vllm",)}


def test_an_eager_server_is_asked_for_once_on_either_build():
    for build in ("cpu", "gpu"):
        eager = replace(baseline(build), server=replace(spec(build), eager=True))
        assert vllm(eager).argv.count("--enforce-eager") == 1
    assert "--enforce-eager" not in vllm(baseline("gpu")).argv


def test_dummy_weights_are_asked_for_in_every_process_that_loads_them():
    made_up = replace(baseline(), server=replace(spec("cpu"), load_format="dummy"))
    argv = vllm(made_up).argv
    assert argv[argv.index("--load-format") + 1] == "dummy"


def test_the_connector_is_pointed_at_the_tiers_own_port():
    # A44/A55: LMCache's default 5555 may be anybody's.
    config = json.loads(vllm(lmcache()).argv[-1])
    assert config["kv_connector"] == "LMCacheMPConnector"
    assert config["kv_connector_extra_config"]["lmcache.mp.port"] == 21001
    assert "21001" in rendered(lmcache())[1].argv


@pytest.mark.parametrize("build", ["cpu", "gpu", "fake"])
def test_every_process_gets_the_same_fixed_hash_seed(build: Build):
    # A39: with a random seed per process the cache keys differ and reuse is silently 0.
    seeds = [command.env["PYTHONHASHSEED"] for command in rendered(lmcache(build), {})]
    assert set(seeds) == {"0"}


def test_inherited_engine_settings_reach_no_arm_and_are_noted():
    # A60
    exported = {
        "LMCACHE_CHUNK_SIZE": "7",
        "VLLM_API_KEY": "s3cret",
        "PROMETHEUS_MULTIPROC_DIR": "/d",
        "OMP_NUM_THREADS": "64",
        "MKL_NUM_THREADS": "64",
        "PYTHONDONTWRITEBYTECODE": "1",
        "http_proxy": "http://p",
        "HTTPS_PROXY": "http://p",
        "All_Proxy": "http://p",
    }
    for arm in (baseline(), lmcache()):
        for dirty, clean in zip(rendered(arm, INHERITED | exported), rendered(arm), strict=True):
            assert dirty.env == clean.env
            removed = {name for name in exported if name != "OMP_NUM_THREADS"}
            assert {name for name, value in dirty.env_diff.items() if value is None} == removed
            assert dirty.env_diff["OMP_NUM_THREADS"] == "1"


def test_everything_else_inherited_stays():
    # A60: a bare env= would lose PATH and HOME.
    kept = INHERITED | {
        "LD_LIBRARY_PATH": "/opt/lib",
        "HF_TOKEN": "hf_x",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert vllm(baseline(), kept).env.items() >= kept.items()


def test_rendering_changes_neither_the_given_nor_the_own_environment():
    # A60: edits of os.environ would persist into the next arm.
    inherited, own = dict(INHERITED), dict(os.environ)
    rendered(lmcache(), inherited)
    assert inherited == INHERITED
    assert dict(os.environ) == own


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "DB_PASSWORD", "MY_SECRET", "CREDENTIALS"]
)
def test_no_secret_is_shown_in_a_difference(name: str):
    changed = difference({name: "new"}, inherited={name: "old"})
    removed = difference({}, inherited={name: "old"})
    assert changed == {name: "<redacted>"}
    assert removed == {name: None}


def test_the_hub_is_asked_for_hub_models_only():
    assert vllm(baseline("cpu")).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in vllm(baseline("gpu")).env
    assert is_local("/m")
    assert not is_local("Qwen/Qwen3-8B")


def test_neither_engine_reports_home():
    for command in rendered(lmcache()):
        assert command.env["DO_NOT_TRACK"] == "1"
        assert command.env["LMCACHE_TRACK_USAGE"] == "false"
    assert vllm(lmcache()).env["VLLM_NO_USAGE_STATS"] == "1"


def test_servers_listen_on_loopback_only():
    for command in rendered(lmcache()):
        words = command.argv
        hosts = {words[i + 1] for i, word in enumerate(words) if word.endswith("host")}
        assert hosts == {"127.0.0.1"}


def test_the_fake_is_one_process_with_both_ports():
    (command,) = rendered(lmcache("fake"))
    assert command.argv[1:3] == ("-m", "servers.fake")
    given = dict(zip(command.argv[3::2], command.argv[4::2], strict=True))
    # 0.5 GiB in chunks of 256 tokens x 4096 bytes (1 MiB each, the default for a model not on disk)
    assert given["--host-chunks"] == "512"
    assert (given["--port"], given["--lmcache-http-port"]) == ("21000", "21002")


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_every_arm_publishes_its_events_alike_and_only_to_a_reader(build: Build) -> None:
    def words(arm: Arm, ports: Ports) -> list[str]:
        command, *_ = render(
            arm, ports=ports, model_name="m", work_dir=Path("/w"), cache_dir=Path("/c"),
            inherited={},
        )  # fmt: skip
        return list(command.argv)

    listening = replace(PORTS, events=21003)
    for arm in (baseline(build), lmcache(build)):
        assert "--kv-events-config" not in words(arm, PORTS)
        argv = words(arm, listening)
        config = json.loads(argv[argv.index("--kv-events-config") + 1])
        # Without a wildcard vLLM connects: nothing of it listens on another address.
        assert config["endpoint"] == "tcp://127.0.0.1:21003"
        assert config["enable_kv_cache_events"] is True


def test_a_tier_without_ports_is_refused():
    with pytest.raises(ValueError, match="no ports"):
        render(
            lmcache(),
            ports=Ports(vllm=21000),
            model_name="m",
            work_dir=Path("/w"),
            cache_dir=Path("/c"),
            inherited={},
        )


def test_the_tier_gets_its_policy_and_limits():
    host = HostTier(gib=1.5, chunk_tokens=128, watermark=0.9, evict_ratio=0.1, policy="noop")
    argv = rendered(replace(lmcache(), host=host))[1].argv
    given = dict(zip(argv[4:-1:2], argv[5:-1:2], strict=True))
    assert given["--l1-size-gb"] == "1.5"
    assert given["--chunk-size"] == "128"
    assert given["--eviction-policy"] == "noop"
    assert given["--eviction-trigger-watermark"] == "0.9"
    assert given["--eviction-ratio"] == "0.1"
