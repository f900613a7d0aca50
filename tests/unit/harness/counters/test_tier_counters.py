"""What one request did at each kind of host tier, from raw counters; and when a tier is at rest."""

from dataclasses import dataclass

import pytest

from harness.counters.attribute import derive
from harness.counters.errors import CounterError, MissingSeries, ScrapeError
from harness.counters.pages import Samples, counts, gauge_values, parse
from harness.counters.tiers import lmcache, native, simple
from harness.counters.tiers.base import ONE_REQUEST, Measured, NotYetError
from harness.counters.tiers.lmcache import RESIDENT
from harness.counters.tiers.native import OFFLOAD_GRACE_S, OffloadRest
from harness.counters.tiers.registry import COUNTED, tier_of
from servers.metrics import Series
from servers.tiers.registry import SERVED
from sim.split import TokenSplit
from sim.tiers.registry import MODELS
from sim.tiers.settings import TIER_KINDS

BEFORE = {
    "finished": 7,
    "preemptions": 0,
    "prompt_computed": 500,
    "prompt_gpu_hit": 0,
    "prompt_host_loaded": 0,
}
NATIVE = {
    "native_load_bytes": 4096,
    "native_load_ns": 1_000,
    "native_store_bytes": 9_000,
    "native_alloc_failures": 0,
}
BLOCK_BYTES = 16 * 1024  # 16 tokens of 1,024 bytes


def ask(
    tier: dict[str, int],
    split: tuple[int, int, int],
    change: dict[str, int],
    *,
    chunk_tokens: int | None,
    chunk_bytes: int | None = None,
) -> Measured:
    """A request with the sources ``split`` at a tier whose counters ``change``."""
    before = BEFORE | tier
    computed, gpu_hit, loaded = split
    after = before | {
        "finished": 8,
        "prompt_computed": 500 + computed,
        "prompt_gpu_hit": gpu_hit,
        "prompt_host_loaded": loaded,
    }
    return derive(
        before,
        after | change,
        prompt_tokens=sum(split),
        chunk_tokens=chunk_tokens,
        chunk_bytes=chunk_bytes,
    )


# --- which tier


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("host_lookups", "lmcache-mp"),
        ("lmcache_resident_chunks", "lmcache"),
        ("native_load_bytes", "native"),
        ("simple_load_blocks", "simple"),
        ("prompt_host_loaded", None),
    ],
)
def test_a_reading_tells_the_kind_of_its_tier_by_its_names(name: str, kind: str | None) -> None:
    assert tier_of({"finished": 1, name: 0}) == kind


def test_every_kind_of_tier_is_counted_started_and_simulated_and_its_names_are_its_own() -> None:
    assert set(COUNTED) == set(SERVED) == set(MODELS) == set(TIER_KINDS)
    names = [s.name for tier in COUNTED.values() for s in (*tier.vllm_series, *tier.host_series)]
    assert len(set(names)) == len(names)
    assert {tier_of([tier.witness]) for tier in COUNTED.values()} == set(TIER_KINDS)


def test_a_reading_of_two_tiers_is_refused() -> None:
    with pytest.raises(CounterError, match="several host tiers"):
        tier_of(["host_lookups", "native_load_bytes"])


def test_a_tier_without_all_its_counters_is_refused() -> None:
    half = {"native_load_bytes": 0, "native_store_bytes": 0}
    with pytest.raises(MissingSeries, match="native_alloc_failures, native_load_ns"):
        ask(half, (100, 0, 0), {}, chunk_tokens=16)


def test_a_tier_of_unknown_chunk_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is None"):
        ask(NATIVE, (100, 0, 0), {}, chunk_tokens=None)


# --- vLLM's own offloading


def test_a_native_full_hit_computes_nothing_and_moves_the_bytes_its_worker_counted() -> None:
    # A37: 160 tokens, 32 on the GPU; the other 8 blocks of 16 KiB are loaded .
    measured = ask(
        NATIVE,
        (0, 32, 128),
        {"native_load_bytes": 4096 + 8 * BLOCK_BYTES, "native_load_ns": 1_000 + 2_000_000},
        chunk_tokens=16,
        chunk_bytes=BLOCK_BYTES,
    )
    assert measured.split == TokenSplit(160, computed=0, gpu_hit=32, host_loaded=128)
    assert (measured.loaded_bytes, measured.loaded_source) == (131_072, "kv_offload_load_bytes")
    assert measured.disagreement is None


def test_native_stores_stay_unknown_for_they_may_be_published_later() -> None:
    measured = ask(NATIVE, (160, 0, 0), {"native_store_bytes": 99_000}, chunk_tokens=16)
    assert (measured.stored_tokens, measured.loaded_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("split", "n_bytes"), [((32, 0, 128), 0), ((160, 0, 0), BLOCK_BYTES)], ids=["tokens", "bytes"]
)
def test_native_tokens_without_bytes_or_bytes_without_tokens_are_a_disagreement(
    split: tuple[int, int, int], n_bytes: int
) -> None:
    # A36
    change = {"native_load_bytes": 4096 + n_bytes}
    measured = ask(NATIVE, split, change, chunk_tokens=16)
    assert measured.disagreement == (
        f"vLLM counts {split[2]} tokens from the host and its offloading {n_bytes} bytes loaded"
    )


# --- vLLM's simple offload


def test_simple_loads_are_its_blocks_times_the_bytes_of_one() -> None:
    tier = {"simple_load_blocks": 10}
    change = {"simple_load_blocks": 13}
    measured = ask(tier, (16, 0, 48), change, chunk_tokens=16, chunk_bytes=BLOCK_BYTES)
    assert measured.loaded_bytes == 3 * BLOCK_BYTES
    assert measured.loaded_source == "load_blocks_times_bytes"
    assert (measured.stored_tokens, measured.disagreement) == (None, None)
    unknown = ask(tier, (16, 0, 48), change, chunk_tokens=16)
    assert unknown.loaded_bytes is None


def test_simple_blocks_that_are_not_vllms_tokens_are_a_disagreement() -> None:
    measured = ask({"simple_load_blocks": 0}, (16, 0, 48), {}, chunk_tokens=16)
    assert measured.disagreement == (
        "vLLM counts 48 tokens from the host and its offload 0 blocks of 16 loaded"
    )


# --- LMCache inside vLLM

IN_PROCESS = {RESIDENT: 28}


@pytest.mark.parametrize(
    ("split", "loaded"),
    [
        # 1,792 = 7 chunks found; the GPU's 1,088 end in the fifth, so 3 whole chunks move.
        ((228, 1088, 704), 3),
        ((44, 0, 2816), 11),
        # The whole prompt of 512 was found: 511 count, 2 chunks move.
        ((1, 0, 511), 2),
        ((1, 256, 255), 1),
        # 513 tokens: found in full is 512, no token less.
        ((1, 0, 512), 2),
    ],
)
def test_in_process_loads_are_the_chunks_that_end_where_the_load_does(
    split: tuple[int, int, int], loaded: int
) -> None:
    # A37, A38
    measured = ask(IN_PROCESS, split, {}, chunk_tokens=256, chunk_bytes=5_000)
    assert (measured.loaded_bytes, measured.loaded_source) == (loaded * 5_000, "chunks_times_bytes")
    assert measured.disagreement is None


def test_an_in_process_request_that_loads_nothing_moves_no_bytes() -> None:
    # Resident chunks may fall: a store evicts. They are a state, not a counter.
    measured = ask(IN_PROCESS, (300, 0, 0), {RESIDENT: 20}, chunk_tokens=256)
    assert (measured.loaded_bytes, measured.stored_tokens) == (0, None)


def test_an_in_process_load_that_ends_inside_a_chunk_is_a_disagreement() -> None:
    measured = ask(IN_PROCESS, (100, 0, 900), {}, chunk_tokens=256, chunk_bytes=5_000)
    assert measured.loaded_bytes is None
    assert measured.disagreement == "the load ends at token 900, LMCache's chunks of 256 do not"


# --- pages


def test_seconds_are_kept_as_whole_nanoseconds() -> None:
    page = (
        'vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 4096.0\n'
        'vllm:kv_offload_load_time_total{engine="0",model_name="m"} 0.0012345\n'
    )
    series = native.TIER.vllm_series
    samples = parse(page, wanted=series, where="page")
    found = counts(samples, series, model_name="m", where="page")
    # The store's counters have not been exported: nothing was stored yet.
    assert found == {
        "native_load_bytes": 4096,
        "native_load_ns": 1_234_500,
        "native_store_bytes": 0,
        "native_alloc_failures": 0,
    }


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-0.5"])
def test_seconds_no_counter_can_have_refuse_the_page(value: str) -> None:
    series = Series("s", "s_total", "always", per_unit=10**9)
    samples = parse(f"s_total {value}\n", wanted=[series], where="page")
    with pytest.raises(ScrapeError, match="not a count"):
        counts(samples, (series,), model_name=None, where="page")


# --- at rest

WRITE = "vllm:kv_offload_cpu_cache_write_usage_perc"


def test_offloading_is_at_rest_when_the_same_idle_state_is_seen_twice() -> None:
    rest = OffloadRest(native.TIER.gauges, "m")
    with pytest.raises(NotYetError, match="not seen twice"):
        rest.check_state({WRITE: 0.0}, {"native_store_bytes": 5}, now=0.0)
    with pytest.raises(NotYetError, match="not seen twice"):  # a store was still counted
        rest.check_state({WRITE: 0.0}, {"native_store_bytes": 9}, now=0.1)
    rest.check_state({WRITE: 0.0}, {"native_store_bytes": 9}, now=0.2)


def test_a_busy_gauge_that_stands_still_is_waited_for_no_longer_than_its_grace() -> None:
    rest = OffloadRest(native.TIER.gauges, "m")
    busy = {WRITE: 0.25}
    with pytest.raises(NotYetError):
        rest.check_state(busy, {}, now=10.0)
    with pytest.raises(NotYetError, match=f"{WRITE} is 0.25"):
        rest.check_state(busy, {}, now=10.0 + OFFLOAD_GRACE_S - 0.01)
    rest.check_state(busy, {}, now=10.0 + OFFLOAD_GRACE_S)


def test_a_busy_gauge_that_moves_starts_its_grace_again() -> None:
    rest = OffloadRest(native.TIER.gauges, "m")
    for now, share in ((0.0, 0.5), (0.9, 0.4), (1.8, 0.3)):
        with pytest.raises(NotYetError):
            rest.check_state({WRITE: share}, {}, now=now)
    with pytest.raises(NotYetError):
        rest.check_state({WRITE: 0.3}, {}, now=2.7)


def test_gauges_of_other_models_and_of_other_tiers_are_not_read() -> None:
    page = f'{WRITE}{{engine="0",model_name="m"}} 0.5\n{WRITE}{{engine="0",model_name="x"}} 1\n'
    samples = parse(page, wanted=native.TIER.gauges, where="page")
    assert gauge_values(samples, native.TIER.gauges, "m") == {WRITE: 0.5}
    assert gauge_values(samples, simple.TIER.gauges, "m") == {}


def in_process_page(*, served: str = "m", pinned: int = 0, healthy: int = 1) -> str:
    """The worker's gauges of a page of LMCache's internal API; the scheduler's are always 0."""
    values = {
        "local_cpu_hot_cache_count": 6,
        "pin_monitor_pinned_objects_count": pinned,
        "lmcache_is_healthy": healthy,
    }
    return "".join(
        f'lmcache:{name}{{role="{role}",served_model_name="{served}"}} {value}\n'
        for name, of_worker in values.items()
        for role, value in (("scheduler", 0), ("worker", of_worker))
    )


@dataclass
class InProcessPages:
    """A page of LMCache's internal API, as a server that serves ``m`` gives it."""

    page: str
    model_name: str = "m"
    where: str = "page"

    def metrics(self) -> Samples:
        return parse(self.page, wanted=lmcache.TIER.gauges, where="page")

    def status(self) -> None:
        raise AssertionError("LMCache inside vLLM has no /status")


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (in_process_page(healthy=0), "says that it is not healthy"),
        (in_process_page(pinned=3), "has 3 chunks pinned"),
    ],
)
def test_lmcache_in_process_is_not_at_rest(page: str, reason: str) -> None:
    # A42
    with pytest.raises(NotYetError, match=reason):
        lmcache.TIER.rest("m", ONE_REQUEST).check({}, {}, InProcessPages(page), {})


def test_only_the_workers_half_of_the_connector_counts() -> None:
    reading = lmcache.TIER.rest("m", ONE_REQUEST).check(
        {}, {}, InProcessPages(in_process_page()), {}
    )
    assert reading is not None
    assert reading.counters == {RESIDENT: 6}


def test_another_servers_internal_api_is_refused() -> None:
    # A55
    pages = InProcessPages(in_process_page(served="other"))
    with pytest.raises(MissingSeries, match=r"serves 'm'; it has \['other'\]"):
        lmcache.TIER.rest("m", ONE_REQUEST).check({}, {}, pages, {})
