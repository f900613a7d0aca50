"""Every kind of host tier over the loopback server: settled, attributed, reconciled, read back."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.counters.tiers.native import OFFLOAD_GRACE_S
from harness.errors import MachineError
from harness.measure.replay import Doors, SessionContext, replay
from harness.measure.settle import Scraper
from harness.measure.stream import open_client
from harness.record.journal import JournalWriter, read_journal
from harness.record.row import Row
from servers.arms import Arm, ServerSpec
from servers.child import ServerLog
from servers.errors import LaunchError
from servers.fake.__main__ import main as fake_main
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec
from servers.launch import Running
from servers.probe import probe
from servers.tiers.base import HostTier
from sim.predict import Prediction, Predictor
from sim.tiers.settings import TierKind
from sim.workload import Workload, WorkloadSpec, build_workload

BLOCK_BYTES = 8192
CHUNK = {"lmcache-mp": 64, "lmcache": 64, "native": 32, "simple": 32, None: 64}
Kind = TierKind | None

# Three documents of 8 blocks and a question, in a GPU of 17 usable blocks: the third pushes the
# first out. Passes forward, forward and back, so that prompts are found in part, too.
WORKLOAD = build_workload(
    WorkloadSpec(
        documents=3, document_tokens=256, question_tokens=8, output_tokens=2,
        passes=("fwd", "fwd", "rev"), warmup_documents=1, seed=3, vocab=(64, 4000),
    )
)  # fmt: skip


def spec_of(kind: Kind, **changed: Any) -> FakeSpec:
    chunk = CHUNK[kind]
    return FakeSpec(
        **{
            "model_name": "m",
            "num_gpu_blocks": 18,
            "host_kind": kind or "lmcache-mp",
            "host_chunks": None if kind is None else 4096 // chunk,
            "chunk_tokens": chunk,
            "chunk_bytes": chunk // 32 * BLOCK_BYTES,
            **changed,
        }
    )


def scraper_of(server: FakeServer, kind: Kind) -> Scraper:
    return Scraper(
        server.base_url,
        lmcache_url=server.lmcache_url,
        model_name="m",
        kind=kind,
    )


def replayed(
    server: FakeServer, kind: Kind, folder: Path, *, workload: Workload = WORKLOAD,
    settle_s: float = 5.0,
) -> list[Row]:  # fmt: skip
    """Every row of a session against ``server``, as the journal gives it back."""
    httpx.post(  # the launcher's readiness completion
        f"{server.base_url}/v1/completions",
        json={"model": "m", "prompt": [1], "max_tokens": 2},
        trust_env=False,
    )
    has_tier = kind is not None
    context = SessionContext(
        run="run", session="01-arm", order=1, config="arm", kind=kind, connector=None, model_name="m",
        chunk_tokens=CHUNK[kind] if has_tier else None,
        chunk_bytes=CHUNK[kind] // 32 * BLOCK_BYTES if has_tier else None,
        request_s=10, settle_s=settle_s,
    )  # fmt: skip
    path = folder / "journal.jsonl"
    with (
        open_client(server.base_url, deadline_s=10) as client,
        scraper_of(server, kind) as scraper,
        JournalWriter(path) as journal,
    ):
        replay(workload, context, doors=Doors(client, scraper), journal=journal,
               on_row=lambda _: None, check_alive=lambda: None)  # fmt: skip
    return read_journal(path)


def predicted(spec: FakeSpec) -> Iterator[Prediction]:
    predictor = Predictor(spec.tiers())
    for request in WORKLOAD:
        yield predictor.request(request.prompt, request.output_tokens)


@pytest.mark.parametrize("kind", ["lmcache-mp", "lmcache", "native", None])
def test_every_request_of_every_kind_is_attributed_as_predicted_to_the_byte(
    kind: Kind, tmp_path: Path
) -> None:
    spec = spec_of(kind)
    with FakeServer(spec) as server:
        rows = replayed(server, kind, tmp_path)
    assert [row.unattributed for row in rows] == [None] * 10
    sources = [(row.computed, row.gpu_hit, row.host_loaded) for row in rows]
    expected = list(predicted(spec))
    assert sources == [(p.split.computed, p.split.gpu_hit, p.split.host_loaded) for p in expected]
    bytes_moved = [p.moved_tokens // 32 * BLOCK_BYTES for p in expected]
    assert [row.loaded_bytes for row in rows] == (bytes_moved if kind else [None] * 10)
    assert [row.disagreement for row in rows] == [None] * 10
    # Something of every kind happened, or the above says little.
    assert any(row.gpu_hit for row in rows)
    assert any(row.host_loaded for row in rows) == (kind is not None)


@pytest.mark.parametrize(
    ("kind", "source", "stored"),
    [
        ("lmcache-mp", "lookup_hits", 256),
        ("lmcache", "chunks_times_bytes", None),
        ("native", "kv_offload_load_bytes", None),
        ("simple", "load_blocks_times_bytes", None),
        (None, None, None),
    ],
)
def test_rows_say_where_their_bytes_are_from_and_what_is_not_measured_is_null(
    kind: Kind, source: str | None, stored: int | None, tmp_path: Path
) -> None:
    with FakeServer(spec_of(kind)) as server:
        rows = replayed(server, kind, tmp_path)
    # The first measured request: nothing was there, 264 tokens are 8 blocks and 4 chunks of 64.
    assert (rows[1].computed, rows[1].stored_tokens) == (264, stored)
    # The same document after the others: 8 blocks come from the host.
    assert rows[4].loaded_bytes == (8 * BLOCK_BYTES if kind else None)
    assert {row.loaded_source for row in rows} == {source}


def repeated() -> Workload:
    """One document of 8 blocks and no rest, asked the same again: found in full."""
    return build_workload(
        WorkloadSpec(
            documents=3, document_tokens=248, question_tokens=8, output_tokens=2,
            passes=("fwd", "fwd"), warmup_documents=1, seed=3, vocab=(64, 4000),
            questions="repeated",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("lmcache-mp", (1, 0, 255)),
        ("lmcache", (1, 0, 255)),
        ("native", (0, 0, 256)),
        ("simple", (32, 0, 224)),
    ],
)
def test_a_prompt_found_in_full_counts_as_its_tier_counts_it(
    kind: TierKind, split: tuple[int, int, int], tmp_path: Path
) -> None:
    # A37: LMCache leaves a token, vLLM's own offloading none, its simple one a block.
    with FakeServer(spec_of(kind)) as server:
        row = replayed(server, kind, tmp_path, workload=repeated())[4]
    assert (row.computed, row.gpu_hit, row.host_loaded) == split
    blocks = 7 if kind == "simple" else 8
    assert (row.loaded_bytes, row.disagreement) == (blocks * BLOCK_BYTES, None)


def test_without_a_prefix_cache_every_prompt_is_computed(tmp_path: Path) -> None:
    with FakeServer(spec_of(None, prefix_caching=False)) as server:
        rows = replayed(server, None, tmp_path)
    assert [(row.computed, row.gpu_hit, row.host_loaded) for row in rows] == [(264, 0, 0)] * 10


# --- settling


def always(*behaviours: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"match": {"all": True}, "do": list(behaviours)}]


@pytest.mark.parametrize("kind", ["native", "simple"])
def test_stores_that_are_still_copied_are_waited_for(kind: TierKind, tmp_path: Path) -> None:
    with FakeServer(spec_of(kind), script=always({"copy_s": 0.25})) as server:
        rows = replayed(server, kind, tmp_path)
    assert {row.unattributed for row in rows} == {None}
    assert rows[1].settle_ms >= 200
    if kind == "native":
        # 8 blocks were counted as stored before the next request was sent.
        before, after = rows[1].counters_before, rows[1].counters_after
        assert after["native_store_bytes"] - before["native_store_bytes"] == 8 * BLOCK_BYTES


def test_a_store_that_is_published_with_the_next_request_only_does_not_void_a_run(
    tmp_path: Path,
) -> None:
    # As engines do that go idle with copies open: one grace per request, and no time-out.
    one = WORKLOAD[:2]
    with FakeServer(spec_of("native"), script=always({"copy_s": 60})) as server:
        rows = replayed(server, "native", tmp_path, workload=one, settle_s=10)
    assert [row.unattributed for row in rows] == [None, None]
    for row in rows:
        assert OFFLOAD_GRACE_S * 1e3 <= row.settle_ms < OFFLOAD_GRACE_S * 1e3 + 900


@pytest.mark.parametrize(
    ("fault", "reason"),
    [({"unhealthy": True}, "not healthy"), ({"pinned_chunks": 2}, "has 2 chunks pinned")],
)
def test_lmcache_inside_vllm_that_is_not_at_rest_stops_the_session_before_it_measures(
    fault: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    # A42
    with (
        FakeServer(spec_of("lmcache"), script=always(fault)) as server,
        pytest.raises(MachineError, match=reason),
    ):
        replayed(server, "lmcache", tmp_path, settle_s=0.1)


def test_a_tier_that_drops_everything_shows_as_computed(tmp_path: Path) -> None:
    # A42: every answer is right, and nothing is loaded.
    for kind in ("lmcache", "native"):
        folder = tmp_path / kind
        folder.mkdir()
        with FakeServer(spec_of(kind), script=always({"drop_stores": True})) as server:
            rows = replayed(server, kind, folder)
        assert {row.host_loaded for row in rows} == {0}
        assert {row.loaded_bytes for row in rows} == {0}


def test_a_scraper_needs_lmcaches_url_exactly_for_lmcache() -> None:
    for kind, url in (("lmcache", None), ("native", "http://127.0.0.1:1")):
        with pytest.raises(ValueError, match=f"{kind}.*lmcache_url"):
            Scraper("http://127.0.0.1:1", lmcache_url=url, model_name="m", kind=kind)


def test_a_settle_of_vllms_own_offloading_looks_twice_at_a_server_at_rest() -> None:
    # The second look is what says that the step after the request has run.
    with FakeServer(spec_of("native")) as server, scraper_of(server, "native") as scraper:
        body = {"model": "m", "prompt": [1], "max_tokens": 2}
        httpx.post(f"{server.base_url}/v1/completions", json=body, trust_env=False)
        began = time.monotonic()
        settled = scraper.settle(None, deadline_s=5)
        assert settled.unsettled is None
        assert server.seen.count("GET /metrics") == 2
        assert time.monotonic() - began < 2


# --- the probe


def asked(kind: Kind, *, gib: float = 0.0009765625, **changed: Any) -> Arm:
    """An arm whose tier holds 1 MiB: 64 chunks of 16 KiB, or 128 blocks of 8 KiB."""
    server = ServerSpec("fake", "owner/m", 32, 18, 2048, 4096, "float32")
    host = None if kind is None else HostTier(gib, kind, chunk_tokens=CHUNK[kind])
    return Arm(kind or "baseline", server, host, **changed)


def running(server: FakeServer, folder: Path, *, log: str = "") -> Running:
    path = folder / "vllm.log"
    path.write_text(log)
    return Running(
        base_url=server.base_url, lmcache_url=server.lmcache_url, model_name="m", commands=(),
        logs={"vllm": ServerLog(path, start=0)}, start_s=1.0,
    )  # fmt: skip


GIVEN = {"kv_offloading_size": "0.0009765625"}


@pytest.mark.parametrize("kind", ["lmcache-mp", "lmcache", "native", "simple", None])
def test_the_probe_passes_every_kind_that_is_as_asked(kind: Kind, tmp_path: Path) -> None:
    more = GIVEN if kind in ("native", "simple") else {}
    with FakeServer(spec_of(kind, **more)) as server:
        facts = probe(running(server, tmp_path), asked(kind))
    assert facts.host_bytes == (2**20 if kind else None)
    assert facts.prefix_caching is True
    assert facts.connector == asked(kind).connector_class
    in_lmcache = kind in ("lmcache-mp", "lmcache")
    assert facts.chunk_tokens == (64 if in_lmcache else None)
    assert facts.policy == ("LRU" if in_lmcache else None)


def test_the_simple_offload_says_its_blocks_once_a_request_was_served(tmp_path: Path) -> None:
    with FakeServer(spec_of("simple", **GIVEN)) as server:
        body = {"model": "m", "prompt": [1], "max_tokens": 2}
        httpx.post(f"{server.base_url}/v1/completions", json=body, trust_env=False)
        assert probe(running(server, tmp_path), asked("simple")).host_blocks == 128


@pytest.mark.parametrize(
    ("kind", "spec", "arm", "named"),
    [
        (None, {"prefix_caching": False}, {}, "prefix_caching is False, asked True"),
        (None, {}, {"prefix_caching": False}, "prefix_caching is True, asked False"),
        ("lmcache", {"chunk_tokens": 128}, {}, "chunk_tokens is 128, asked 64"),
        ("lmcache", {"host_chunks": 63}, {}, "host_bytes is 1032192, asked 1048576"),
        ("native", {}, {}, "host_bytes is None, asked 1048576"),
        ("native", {"kv_offloading_size": "0.5"}, {}, "host_bytes is 536870912, asked 1048576"),
        ("simple", {"kv_offloading_size": "0.5"}, {}, "host_bytes is 536870912, asked 1048576"),
    ],
)
def test_a_tier_that_is_not_what_was_asked_for_is_refused_with_both_values(
    kind: Kind, spec: dict[str, Any], arm: dict[str, Any], named: str, tmp_path: Path
) -> None:
    # A40, A41
    with FakeServer(spec_of(kind, **spec)) as server, pytest.raises(LaunchError, match=named):
        probe(running(server, tmp_path), asked(kind, **arm))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"cache_policy": "LFU"}, "policy is 'LFU', asked 'LRU'"),
        ({"local_cpu": False}, "local_cpu is False, asked True"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk is True, asked False"),
        ({"remote_url": "lm://x:1"}, "remote_url is 'lm://x:1', asked False"),
    ],
)
def test_a_setting_of_lmcache_inside_vllm_that_changes_what_it_keeps_is_refused(
    setting: dict[str, Any], named: str, tmp_path: Path
) -> None:
    # A40
    script = always({"lmcache_conf": setting})
    with (
        FakeServer(spec_of("lmcache"), script=script) as server,
        pytest.raises(LaunchError, match=named),
    ):
        probe(running(server, tmp_path), asked("lmcache"))


CREATED = "Creating v1 connector with name: {} and engine_id: e\n"


@pytest.mark.parametrize(
    ("kind", "log", "named"),
    [
        ("native", CREATED.format("SimpleCPUOffloadConnector"), "'SimpleCPUOffloadConnector', "
         "asked 'OffloadingConnector'"),
        ("simple", CREATED.format("OffloadingConnector"), "asked 'SimpleCPUOffloadConnector'"),
        ("native", "", "connector is None, asked 'OffloadingConnector'"),
        (None, CREATED.format("OffloadingConnector"), "'OffloadingConnector', asked None"),
        (
            "lmcache",
            CREATED.format("LMCacheConnectorV1") + "Initializing native LMCache connector\n",
            "LMCacheConnectorV1 of vLLM's own copy",
        ),
        (
            "lmcache",
            CREATED.format("LMCacheConnectorV1") + "RuntimeError: No supported cpu connector "
            "found.\nSystem will operate in degraded mode (recompute).\n",
            "does not work: its log says 'No supported cpu connector found'",
        ),
    ],
)  # fmt: skip
def test_a_connector_that_really_runs_and_is_not_the_arms_is_refused(
    kind: Kind, log: str, named: str, tmp_path: Path
) -> None:
    # A42
    more = GIVEN if kind in ("native", "simple") else {}
    server_spec = ServerSpec("gpu", "owner/m", 32, 18, 2048, 4096, "float32")
    host = asked(kind).host
    with FakeServer(spec_of(kind, **more)) as server, pytest.raises(LaunchError, match=named):
        probe(running(server, tmp_path, log=log), Arm("arm", server_spec, host))


# --- the loopback server as a command


@pytest.mark.parametrize(
    "argv",
    [
        ["--host-kind", "native", "--host-chunks", "40", "--lmcache-http-port", "0"],
        ["--host-kind", "lmcache", "--host-chunks", "40"],
        ["--lmcache-http-port", "0"],
        ["--host-kind", "lmcach"],
    ],
)
def test_a_command_line_that_contradicts_itself_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        fake_main(["--port", "0", *argv])
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_the_command_line_starts_the_server_it_describes(fake_process: Any) -> None:
    # Two servers: a host tier without vLLM's prefix cache is no server a plan can ask for.
    native = [
        "--model-name",
        "m",
        "--host-kind",
        "native",
        "--host-chunks",
        "40",
        "--chunk-tokens",
        "32",
    ]
    fake = fake_process(*native, "--kv-offloading-size", "0.5")
    page = httpx.get(f"{fake.url}/metrics", trust_env=False).text
    assert 'enable_prefix_caching="True",engine="0",kv_offloading_size="0.5"' in page
    assert "\nvllm:kv_offload_total_bytes_total{" in page
    assert fake.lmcache_url == "None"
    bare = fake_process("--model-name", "m", "--no-prefix-caching")
    page = httpx.get(f"{bare.url}/metrics", trust_env=False).text
    assert 'enable_prefix_caching="False",engine="0",kv_offloading_size="None"' in page
    assert "vllm:kv_offload" not in page
