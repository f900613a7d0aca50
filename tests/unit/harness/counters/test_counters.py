import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.counters.attribute import Snapshot, delta, derive
from harness.counters.errors import (
    CounterError,
    CounterReset,
    ForeignTraffic,
    MissingSeries,
    ScrapeError,
)
from harness.counters.tiers.base import Measured
from harness.measure.settle import Scraper, Settled
from sim.split import TokenSplit
from tests.places import DATA

METRICS = DATA / "metrics"
MODEL = "kvcliff-golden"
OURS = f'engine="0",model_name="{MODEL}"'

# The pages are real: vLLM 0.32.0 and LMCache 0.5.6 around one request of 2,020 tokens whose
# document was partly on the GPU and wholly in the host tier. Per-request truth, by hand from the
# two pages: 36624-36396 computed, 3072-1984 GPU, 704-0 host, 3584-1792 looked-up tokens.
REAL_SPLIT = TokenSplit(2020, computed=228, gpu_hit=1088, host_loaded=704)
CHUNK_BYTES = 524288  # 14,680,064 bytes used by 28 chunks in the real /status


def golden(name: str) -> str:
    return (METRICS / f"{name}.txt").read_text()


def changed(page: str, starts: str, value: str) -> str:
    """The page with the value of every line that starts so replaced; at least one must."""
    lines = page.split("\n")
    hits = [i for i, line in enumerate(lines) if line.startswith(starts)]
    assert hits, f"no line starts with {starts}"
    for i in hits:
        lines[i] = f"{lines[i].rsplit(' ', 1)[0]} {value}"
    return "\n".join(lines)


def without(page: str, *starts: str) -> str:
    kept = [line for line in page.split("\n") if not line.startswith(starts)]
    assert len(kept) < len(page.split("\n"))
    return "\n".join(kept)


def renamed(page: str, model: str) -> str:
    return page.replace(f'model_name="{MODEL}"', f'model_name="{model}"')


def status(page: str, **l1: object) -> str:
    """The real /status page with fields of its L1 manager (or top level) replaced."""
    body = json.loads(page)
    for key, value in l1.items():
        if key in body:
            body[key] = value
        else:
            body["storage_manager"]["l1_managers"]["_default"][key] = value
    return json.dumps(body)


@dataclass
class Answer:
    body: str
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Stub:
    """Answers GETs from a script: each path has a list of answers, the last one repeats."""

    url: str
    script: dict[str, list[Answer | str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str) -> Answer:
        self.asked.append(path)
        answers = self.script[path]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return found if isinstance(found, Answer) else Answer(found)


def handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = stub.answer(self.path)
            if answer.code == 0:  # accept, then say nothing until the test is over
                stub.gate.wait(10)
                return
            if answer.code in (1, 2):  # a byte of a page (2: of its head) that never ends
                if answer.code == 1:
                    self.send_response(200)
                    self.end_headers()
                else:
                    self.wfile.write(b"HTTP/1.0 200 OK\r\nserver: ")
                with contextlib.suppress(OSError):
                    while not stub.gate.wait(0.05):
                        self.wfile.write(b"#")
                return
            self.send_response(answer.code)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def start() -> Iterator[Callable[[], Stub]]:
    running: list[tuple[Stub, ThreadingHTTPServer, threading.Thread]] = []

    def run() -> Stub:
        stub = Stub("")
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stub))
        stub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((stub, server, thread))
        return stub

    yield run
    for stub, server, thread in running:
        stub.gate.set()
        server.shutdown()
        thread.join(5)
        server.server_close()


@pytest.fixture
def vllm(start: Callable[[], Stub]) -> Stub:
    stub = start()
    stub.script["/metrics"] = [golden("vllm-0.32.0-after")]
    return stub


@pytest.fixture
def host(start: Callable[[], Stub]) -> Stub:
    stub = start()
    stub.script["/metrics"] = [golden("lmcache-0.5.6-after")]
    stub.script["/status"] = [golden("lmcache-0.5.6-after-status")]
    return stub


def scraper(vllm: Stub, host: Stub | None = None, model: str = MODEL) -> Scraper:
    lmcache_url = None if host is None else host.url
    return Scraper(
        vllm.url,
        kind=None if host is None else "lmcache-mp",
        lmcache_url=lmcache_url,
        model_name=model,
    )


def read(vllm: Stub, host: Stub | None = None, model: str = MODEL) -> Snapshot:
    with scraper(vllm, host, model) as reading:
        return reading.read()


def at(vllm: Stub, host: Stub | None, when: str) -> Snapshot:
    """A reading of the real pages ``before`` or ``after`` the real request."""
    saved = dict(vllm.script), None if host is None else dict(host.script)
    vllm.script["/metrics"] = [golden(f"vllm-0.32.0-{when}")]
    if host is not None:
        host.script["/metrics"] = [golden(f"lmcache-0.5.6-{when}")]
        host.script["/status"] = [golden(f"lmcache-0.5.6-{when}-status")]
    snapshot = read(vllm, host)
    vllm.script = saved[0]
    if host is not None and saved[1] is not None:
        host.script = saved[1]
    return snapshot


# --- the real pages ---------------------------------------------------------------------------


def test_a_fresh_server_reads_as_zeros_for_every_series_it_exports(vllm: Stub) -> None:
    vllm.script["/metrics"] = [golden("vllm-0.32.0-no-connector")]
    assert read(vllm) == Snapshot(
        vllm={
            "finished": 0,
            "preemptions": 0,
            "prompt_computed": 0,
            "prompt_gpu_hit": 0,
            "prompt_host_loaded": 0,
            "prompt_tokens": 0,
            "prefix_queries": 0,
            "prefix_hits": 0,
            "external_hits": 0,
        },
        host=None,
        launch=f"{MODEL} vllm@1795967258.90",
    )


def test_one_real_request_is_split_as_its_pages_say(vllm: Stub, host: Stub) -> None:
    measured = delta(
        at(vllm, host, "before"),
        at(vllm, host, "after"),
        prompt_tokens=2020,
        chunk_tokens=256,
        chunk_bytes=None,
    )
    assert measured.split == REAL_SPLIT
    # LMCache found 1,792 tokens = 7 chunks; the GPU hit of 1,088 ends inside the fifth (4 whole),
    # so 3 whole chunks = 768 tokens moved although 704 tokens are counted.
    assert measured.loaded_bytes == 3 * CHUNK_BYTES
    assert measured.loaded_source == "lookup_hits"
    assert measured.stored_tokens == 0
    assert measured.disagreement is None


def test_the_loaded_chunks_counter_is_used_where_the_transfer_mode_has_one(
    vllm: Stub, host: Stub
) -> None:
    # The same workload with LMCache driving the transfers; the counter appears with the first load.
    pages = []
    for when in ("before", "after"):
        vllm.script["/metrics"] = [golden(f"vllm-0.32.0-{when}")]
        host.script["/metrics"] = [golden(f"lmcache-0.5.6-driven-{when}")]
        host.script["/status"] = [golden(f"lmcache-0.5.6-driven-{when}-status")]
        pages.append(read(vllm, host).flat())
    assert "host_loaded_chunks" not in pages[0]
    measured = derive(*pages, prompt_tokens=2020, chunk_tokens=256, chunk_bytes=None)
    assert measured.loaded_source == "chunks_loaded_counter"
    assert measured.loaded_bytes == 3 * CHUNK_BYTES
    assert measured.disagreement is None


def test_dropped_stores_and_evictions_are_counted_from_their_first_event_on(
    vllm: Stub, host: Stub
) -> None:
    assert at(vllm, host, "before").flat()["host_alloc_failed_chunks"] == 0  # not exported yet
    host.script["/metrics"] = [golden("lmcache-0.5.6-failed")]
    counters = read(vllm, host).flat()
    assert counters["host_alloc_failed_chunks"] == 56
    assert counters["host_evicted_chunks"] == 153


def test_the_flat_counters_are_enough_to_derive_the_same_result(vllm: Stub, host: Stub) -> None:
    before, after = at(vllm, host, "before"), at(vllm, host, "after")
    ask = {"prompt_tokens": 2020, "chunk_tokens": 256, "chunk_bytes": None}
    journal = json.loads(json.dumps([before.flat(), after.flat()]))
    assert derive(*journal, **ask) == delta(before, after, **ask)


# --- names, labels, numbers -------------------------------------------------------------------


def test_only_exact_sample_names_count(vllm: Stub) -> None:
    # A24: the real page also has _created timestamps (1.79e9) and external_prefix_cache_queries.
    page = golden("vllm-0.32.0-after")
    for look_alike in ("request_success_created", "external_prefix_cache_queries_total"):
        assert f"vllm:{look_alike}{{" in page
    counters = read(vllm).vllm
    assert counters["finished"] == 20
    assert counters["prefix_queries"] == 20 * 2020
    assert counters["prefix_hits"] == 3072


def test_label_values_may_hold_quotes_braces_commas_and_escapes(vllm: Stub) -> None:
    # A27
    name = 'my "model"},{x=1, \\ \n end'
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    vllm.script["/metrics"] = [renamed(golden("vllm-0.32.0-after"), escaped)]
    assert read(vllm, model=name).vllm["prompt_computed"] == 36624


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (f"vllm:num_preemptions_total{{{OURS}}} 1.1e+010", 11_000_000_000),
        (f"vllm:num_preemptions_total{{{OURS}}} 7 1700000000000", 7),
        (f'vllm:num_preemptions_total{{{OURS}}} 7 # {{trace_id="a"}} 1.0 1700000000', 7),
        (f"vllm:num_preemptions_total{{{OURS},}} 7", 7),
        (f"vllm:num_preemptions_total{{{OURS}}} 7\r", 7),
        (f'vllm:num_preemptions_total{{ model_name = "{MODEL}" , engine = "0" }}  7', 7),
    ],
    ids=["exponent", "timestamp", "exemplar", "trailing-comma", "crlf", "spaces"],
)
def test_every_number_form_is_read_as_its_value(vllm: Stub, line: str, value: int) -> None:
    # A28
    page = without(golden("vllm-0.32.0-after"), "vllm:num_preemptions_total{")
    vllm.script["/metrics"] = [page + line + "\n"]
    assert read(vllm).vllm["preemptions"] == value


@pytest.mark.parametrize("value", ["NaN", "+Inf", "9.75e-06", "-1.0", "seven"])
def test_a_value_no_counter_can_have_refuses_the_scrape(vllm: Stub, value: str) -> None:
    # A28
    page = golden("vllm-0.32.0-after")
    vllm.script["/metrics"] = [changed(page, "vllm:num_preemptions_total{", value)]
    with pytest.raises(ScrapeError):
        read(vllm)


# --- versions and absent series ---------------------------------------------------------------

OLD_PAGE = f"""\
vllm:request_success_total{{{OURS},finished_reason="length"}} 3.0
vllm:num_preemptions_total{{{OURS}}} 0.0
vllm:prompt_tokens_total{{{OURS}}} 3000.0
"""


def test_a_server_with_only_outdated_names_is_refused(vllm: Stub) -> None:
    # A25
    vllm.script["/metrics"] = [OLD_PAGE + f"vllm:gpu_prefix_cache_hits_total{{{OURS}}} 64.0\n"]
    with pytest.raises(MissingSeries, match="only the outdated vllm:gpu_prefix_cache_hits_total"):
        read(vllm)


def test_without_sources_by_name_the_split_comes_from_hits(vllm: Stub) -> None:
    # vLLM before 0.16: 1,000 more prompt tokens, 512 of them hit, queried once.
    page = OLD_PAGE + (
        f"vllm:prefix_cache_queries_total{{{OURS}}} 3000.0\n"
        f"vllm:prefix_cache_hits_total{{{OURS}}} 64.0\n"
    )
    vllm.script["/metrics"] = [page]
    before = read(vllm)
    page = changed(page, "vllm:request_success_total", "4.0")
    page = changed(page, "vllm:prompt_tokens_total", "4000.0")
    page = changed(page, "vllm:prefix_cache_queries_total", "4000.0")
    vllm.script["/metrics"] = [changed(page, "vllm:prefix_cache_hits_total", "576.0")]
    measured = delta(before, read(vllm), prompt_tokens=1000, chunk_tokens=None, chunk_bytes=None)
    assert measured.split == TokenSplit(1000, computed=488, gpu_hit=512, host_loaded=0)


def test_with_a_host_tier_the_fallback_needs_the_external_hits(vllm: Stub, host: Stub) -> None:
    page = without(
        golden("vllm-0.32.0-after"),
        "vllm:prompt_tokens_by_source_total{",
        "vllm:external_prefix_cache_hits_total{",
    )
    vllm.script["/metrics"] = [page]
    with pytest.raises(MissingSeries, match="external_prefix_cache_hits_total"):
        read(vllm, host)


@pytest.mark.parametrize(
    "series",
    [
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        f'vllm:prompt_tokens_by_source_total{{{OURS},source="local_cache_hit"',
    ],
)
def test_a_missing_series_is_named_and_never_zero(vllm: Stub, series: str) -> None:
    # A26
    vllm.script["/metrics"] = [without(golden("vllm-0.32.0-after"), series)]
    with pytest.raises(MissingSeries, match=series.split("{")[0]):
        read(vllm)


def test_another_models_series_do_not_stand_in_for_ours(vllm: Stub) -> None:
    # A29, A30: also what a stale multiprocess directory of an earlier launch looks like.
    vllm.script["/metrics"] = [renamed(golden("vllm-0.32.0-after"), "kvcliff-earlier")]
    with pytest.raises(MissingSeries, match="it has \\['kvcliff-earlier'\\]"):
        read(vllm)


def test_lmcache_with_metrics_switched_off_is_refused_not_read_as_idle(
    vllm: Stub, host: Stub
) -> None:
    # A26: such a page holds python_gc and process lines only.
    host.script["/metrics"] = [without(golden("lmcache-0.5.6-after"), "lmcache_mp_")]
    with pytest.raises(MissingSeries, match="lmcache_mp_event_bus_queue_depth"):
        read(vllm, host)


def test_a_series_that_vanishes_between_readings_is_missing() -> None:
    # A26
    with pytest.raises(MissingSeries, match="prompt_gpu_hit"):
        ask_gpu({"prompt_gpu_hit": None})


def test_a_series_that_appears_only_after_the_request_has_no_known_start() -> None:
    # A26: counting it from 0 would credit everything before to this request.
    before = {name: count for name, count in GPU_BEFORE.items() if name != "prompt_gpu_hit"}
    after = GPU_BEFORE | {"finished": 101, "prompt_computed": 1000, "prompt_gpu_hit": 500}
    with pytest.raises(MissingSeries, match="prompt_gpu_hit not exported before"):
        derive(before, after, prompt_tokens=1000, chunk_tokens=None, chunk_bytes=None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("", 500), "HTTP 500"),
        (Answer("", 307, {"Location": "/metrics/"}), "is redirected to '/metrics/'"),
        (Answer(""), "empty page"),
    ],
)
def test_a_page_that_is_not_one_fails_the_scrape_with_its_reason(
    vllm: Stub, answer: Answer, reason: str
) -> None:
    # A26
    vllm.script["/metrics"] = [answer]
    with pytest.raises(ScrapeError, match=reason):
        read(vllm)


def test_a_status_page_without_an_l1_manager_is_refused(vllm: Stub, host: Stub) -> None:
    body = json.loads(golden("lmcache-0.5.6-after-status"))
    del body["storage_manager"]["l1_managers"]
    del body["storage_manager"]["l1_manager"]
    host.script["/status"] = [json.dumps(body)]
    with pytest.raises(MissingSeries, match="l1_manager"):
        read(vllm, host)


def test_the_older_status_layout_is_read_too(vllm: Stub, host: Stub) -> None:
    body = json.loads(golden("lmcache-0.5.6-after-status"))
    del body["storage_manager"]["l1_managers"]
    del body["storage_manager"]["l1_eviction_controllers"]
    host.script["/status"] = [json.dumps(body)]
    assert read(vllm, host).flat()["host_resident_chunks"] == 28


def test_proxy_settings_of_the_environment_are_not_used(
    vllm: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert read(vllm).vllm["finished"] == 20


# --- engines, other clients, restarts ---------------------------------------------------------


def test_engines_are_summed_and_other_models_counted_apart(vllm: Stub) -> None:
    # A29: all traffic on engine 1; another model on the same server counts nothing.
    page = golden("vllm-0.32.0-after")
    idle = golden("vllm-0.32.0-no-connector")
    second = without(page.replace('engine="0"', 'engine="1"'), "process_")
    others = without(renamed(page, "someone-else"), "process_")
    vllm.script["/metrics"] = ["\n".join([idle, second, others])]
    counters = read(vllm).vllm
    assert counters["finished"] == 20
    assert counters["prompt_gpu_hit"] == 3072
    assert counters["others_finished"] == 20


def test_a_sample_that_comes_twice_is_refused_and_not_added_up(vllm: Stub) -> None:
    vllm.script["/metrics"] = [golden("vllm-0.32.0-after") * 2]
    with pytest.raises(ScrapeError, match=r"has the sample \S+ .* twice"):
        read(vllm)


def test_a_request_of_another_model_is_foreign_traffic() -> None:
    with pytest.raises(ForeignTraffic, match="2 requests of another model finished beside ours"):
        ask_gpu({"others_finished": 2})


def test_a_second_client_is_foreign_traffic() -> None:
    # A29
    with pytest.raises(ForeignTraffic, match="finished 2 requests where we sent 1"):
        ask_gpu({"finished": 102})


def test_a_foreign_request_that_has_not_finished_shows_in_the_tokens() -> None:
    # A29: its prompt is counted at its first output, its end only later.
    with pytest.raises(ForeignTraffic, match="= 1500 prompt tokens, our prompt has 1000"):
        ask_gpu({"prompt_computed": 2000})


def test_foreign_lookups_in_the_host_tier_are_foreign_traffic() -> None:
    with pytest.raises(ForeignTraffic, match="2 lookups"):
        ask_host({"host_lookups": 12})


def test_more_stored_chunks_than_the_prompt_has_are_foreign_traffic() -> None:
    with pytest.raises(ForeignTraffic, match="stored 4"):
        ask_host({"host_written_chunks": 44})


def test_a_falling_counter_is_a_reset_and_never_clamped() -> None:
    # A31
    with pytest.raises(CounterReset, match="prompt_computed fell from 500 to 3"):
        ask_gpu({"prompt_computed": 3})


def test_readings_of_two_launches_are_not_subtracted(vllm: Stub) -> None:
    # A31: every counter rose plausibly, but another process did the counting.
    before = at(vllm, None, "before")
    page = golden("vllm-0.32.0-after")
    vllm.script["/metrics"] = [changed(page, "process_start_time_seconds", "1.79e+09")]
    with pytest.raises(CounterReset, match="two server processes"):
        delta(before, read(vllm), prompt_tokens=2020, chunk_tokens=None, chunk_bytes=None)


def test_a_restarted_lmcache_is_another_launch(vllm: Stub, host: Stub) -> None:
    # A31: vLLM survives an LMCache restart silently; the cache is empty afterwards.
    before = at(vllm, host, "before")
    page = golden("lmcache-0.5.6-after")
    host.script["/metrics"] = [changed(page, "process_start_time_seconds", "1.79e+09")]
    with pytest.raises(CounterReset):
        delta(before, read(vllm, host), prompt_tokens=2020, chunk_tokens=256, chunk_bytes=None)


# --- what the counters mean -------------------------------------------------------------------

GPU_BEFORE = {
    "finished": 100,
    "preemptions": 0,
    "prompt_computed": 500,
    "prompt_gpu_hit": 0,
    "prompt_host_loaded": 0,
}
HOST_BEFORE = {
    "host_lookups": 10,
    "host_hit_tokens": 0,
    "host_written_chunks": 40,
    "host_evicted_chunks": 0,
    "host_alloc_failed_chunks": 0,
    "host_read_failed_chunks": 0,
    "host_resident_chunks": 40,
    "host_used_bytes": 40 * 1000,
}


def after_of(before: dict[str, int], change: dict[str, int | None]) -> dict[str, int]:
    after: dict[str, int | None] = {**before, **change}
    return {name: value for name, value in after.items() if value is not None}


def ask_gpu(change: dict[str, int | None], prompt_tokens: int = 1000) -> Measured:
    """A request of 1,000 computed tokens, then ``change`` on top; no host tier."""
    after = after_of(GPU_BEFORE, {"finished": 101, "prompt_computed": 1500} | change)
    return derive(
        GPU_BEFORE, after, prompt_tokens=prompt_tokens, chunk_tokens=None, chunk_bytes=None
    )


def ask_host(change: dict[str, int | None], prompt_tokens: int = 1000) -> Measured:
    """The same request with a host tier that looked it up and found nothing, then ``change``."""
    before = GPU_BEFORE | HOST_BEFORE
    moved = {"finished": 101, "prompt_computed": 500 + prompt_tokens, "host_lookups": 11}
    after = after_of(before, moved | change)
    return derive(before, after, prompt_tokens=prompt_tokens, chunk_tokens=256, chunk_bytes=None)


def test_hits_counted_twice_are_refused() -> None:
    # A34
    with pytest.raises(CounterError, match="2000 GPU"):
        ask_gpu({"prompt_computed": 500, "prompt_gpu_hit": 2000})


def test_hits_queried_twice_are_refused_in_the_fallback() -> None:
    # A34: vLLM < 0.27 queries again when a connector defers the request (#48860).
    before = {"finished": 1, "preemptions": 0, "prompt_tokens": 0, "prefix_queries": 0}
    before["prefix_hits"] = 0
    after = before | {"finished": 2, "prompt_tokens": 1000, "prefix_queries": 2000}
    with pytest.raises(CounterError, match="rose by 2000 for a prompt of 1000"):
        derive(before, after, prompt_tokens=1000, chunk_tokens=None, chunk_bytes=None)


def test_a_preempted_request_is_not_attributed() -> None:
    # A34
    with pytest.raises(CounterError, match="1 preemptions"):
        ask_gpu({"preemptions": 1})


def test_no_finished_request_is_not_a_cold_one() -> None:
    with pytest.raises(CounterError, match="finished no requests"):
        ask_gpu({"finished": 100, "prompt_computed": 500})


def test_local_and_external_tokens_share_the_prompt_as_denominator() -> None:
    # A35: 256 local + 512 external of 900 leave 132; (256+512)/900 = 85.3 %.
    split = ask_gpu(
        {"prompt_computed": 632, "prompt_gpu_hit": 256, "prompt_host_loaded": 512}, 900
    ).split
    assert split == TokenSplit(900, computed=132, gpu_hit=256, host_loaded=512)


def test_found_but_not_loaded_is_no_host_hit() -> None:
    # A36: the lookup found 1,024 of 1,030 tokens, vLLM loaded none and recomputed.
    measured = ask_host({"host_hit_tokens": 1024}, 1030)
    assert measured.split.host_loaded == 0
    assert measured.loaded_bytes == 0
    assert "vLLM counts 0 tokens from the host" in measured.disagreement


def test_tokens_counted_as_loaded_that_never_moved_are_flagged() -> None:
    # A36: vLLM counted 1,024 at admission; the transfer counter, which exists here, stood still.
    measured = ask_host(
        {
            "prompt_computed": 506,
            "prompt_host_loaded": 1024,
            "host_hit_tokens": 1024,
            "host_loaded_chunks": 0,
        },
        1030,
    )
    assert measured.loaded_bytes == 0
    assert measured.disagreement == "LMCache loaded 0 chunks where vLLM's counts need 4"


def test_failed_reads_are_flagged_because_vllm_recomputes_silently() -> None:
    measured = ask_host(
        {
            "prompt_computed": 506,
            "prompt_host_loaded": 1024,
            "host_hit_tokens": 1024,
            "host_read_failed_chunks": 2,
        },
        1030,
    )
    assert "failed to read 2 chunks" in measured.disagreement


def test_a_hit_the_gpu_already_holds_moves_no_bytes() -> None:
    measured = ask_host(
        {"prompt_computed": 508, "prompt_gpu_hit": 1024, "host_hit_tokens": 1024}, 1032
    )
    assert measured.loaded_bytes == 0
    assert measured.disagreement is None


@pytest.mark.parametrize("hit", [511, 496])
def test_a_full_hit_is_one_token_or_one_block_short(hit: int) -> None:
    # A37: LMCache leaves 1 token, the GPU cache a whole block of 16.
    split = ask_gpu({"prompt_computed": 500 + 512 - hit, "prompt_gpu_hit": hit}, 512).split
    assert (split.computed, split.gpu_hit) == (512 - hit, hit)


def test_a_hit_longer_than_the_prompt_is_refused() -> None:
    # A37
    with pytest.raises(CounterError, match="528"):
        ask_gpu({"prompt_computed": 500, "prompt_gpu_hit": 528}, 512)


def test_a_full_host_hit_counts_one_token_less_and_loads_every_chunk() -> None:
    # A37: 512 tokens = 2 chunks found, 511 counted, 2 moved.
    measured = ask_host(
        {"prompt_computed": 501, "prompt_host_loaded": 511, "host_hit_tokens": 512}, 512
    )
    assert measured.split.host_loaded == 511
    assert (measured.loaded_bytes, measured.disagreement) == (2 * 1000, None)


def test_a_token_recomputed_after_a_full_hit_is_not_counted_twice() -> None:
    # vLLM 0.16: sources sum to P + recomputed; the hit of 512 includes the recomputed token.
    split = ask_gpu_recomputed(computed=1, gpu_hit=512, recomputed=1)
    assert split == TokenSplit(512, computed=1, gpu_hit=511, host_loaded=0)


def ask_gpu_recomputed(*, computed: int, gpu_hit: int, recomputed: int) -> TokenSplit:
    before = GPU_BEFORE | {"prompt_recomputed": 7}
    after = before | {
        "finished": 101,
        "prompt_computed": 500 + computed,
        "prompt_gpu_hit": gpu_hit,
        "prompt_recomputed": 7 + recomputed,
    }
    return derive(before, after, prompt_tokens=512, chunk_tokens=None, chunk_bytes=None).split


@pytest.mark.parametrize(("tokens", "chunks"), [(255, 0), (256, 1), (257, 1), (700, 2)])
def test_stored_tokens_are_whole_chunks_and_the_tail_is_no_fault(tokens: int, chunks: int) -> None:
    # A38
    measured = ask_host({"host_written_chunks": 40 + chunks}, tokens)
    assert measured.stored_tokens == chunks * 256
    assert measured.disagreement is None


def test_a_chunk_size_other_than_the_one_asked_for_is_refused() -> None:
    # A38
    with pytest.raises(CounterError, match="384 tokens, no multiple of 256"):
        ask_host({"host_hit_tokens": 384})


def test_dropped_events_make_lmcaches_counters_unusable() -> None:
    before = GPU_BEFORE | HOST_BEFORE | {"host_dropped_events": 0}
    after = before | {"finished": 101, "prompt_computed": 1500, "host_dropped_events": 5}
    with pytest.raises(CounterError, match="dropped 5 events"):
        derive(before, after, prompt_tokens=1000, chunk_tokens=256, chunk_bytes=None)


def test_a_request_lmcache_was_not_asked_about_is_not_a_miss() -> None:
    # An unhealthy LMCache is bypassed silently; that is no cold cache.
    with pytest.raises(CounterError, match="LMCache counted no lookups"):
        ask_host({"host_lookups": 10})


def test_bytes_need_a_chunk_size_in_bytes_and_are_else_not_measured() -> None:
    loaded = {"prompt_computed": 506, "prompt_host_loaded": 1024, "host_hit_tokens": 1024}
    empty = {"host_resident_chunks": 0, "host_used_bytes": 0}
    assert ask_host(loaded, 1030).loaded_bytes == 4 * 1000  # 40,000 bytes used by 40 chunks
    assert ask_host(loaded | empty, 1030).loaded_bytes is None
    # 40,001 bytes do not divide into 40 chunks: something is being written, so no chunk size.
    assert ask_host(loaded | {"host_used_bytes": 40_001}, 1030).loaded_bytes is None


def test_rate_gauges_are_never_read(vllm: Stub) -> None:
    # A32: gauges that say everything hit; the counters say nothing did.
    page = golden("vllm-0.32.0-no-connector")
    gauges = "".join(
        f"{name}{{{OURS}}} 1.0\n"
        for name in ("vllm:gpu_prefix_cache_hit_rate", "lmcache:lookup_hit_rate")
    )
    vllm.script["/metrics"] = [page + gauges]
    before = read(vllm)
    page = changed(page, 'vllm:request_success_total{engine="0",finished_reason="length"', "1.0")
    by_source = f'vllm:prompt_tokens_by_source_total{{{OURS},source="local_compute"'
    vllm.script["/metrics"] = [changed(page, by_source, "1000.0") + gauges]
    measured = delta(before, read(vllm), prompt_tokens=1000, chunk_tokens=None, chunk_bytes=None)
    assert measured.split == TokenSplit(1000, computed=1000, gpu_hit=0, host_loaded=0)


# --- settling ---------------------------------------------------------------------------------


def settle(vllm: Stub, host: Stub | None, before: Snapshot, deadline_s: float = 5.0) -> Settled:
    with scraper(vllm, host) as reading:
        return reading.settle(before, deadline_s=deadline_s)


def test_the_real_pages_are_settled_at_first_sight(vllm: Stub, host: Stub) -> None:
    before, after = at(vllm, host, "before"), at(vllm, host, "after")
    vllm.asked.clear()
    host.asked.clear()
    settled = settle(vllm, host, before)
    assert settled.unsettled is None
    assert settled.after == after
    # State first, then the emptied event bus, then the counters: see Scraper._look.
    assert (vllm.asked, host.asked) == (["/metrics"], ["/status", "/metrics", "/metrics"])


def test_counters_published_late_are_waited_for(vllm: Stub, host: Stub) -> None:
    # A33: six looks show the page from before the request.
    before, after = at(vllm, host, "before"), at(vllm, host, "after")
    vllm.script["/metrics"] = [
        *[golden("vllm-0.32.0-before")] * 6,
        golden("vllm-0.32.0-after"),
    ]
    vllm.asked.clear()
    settled = settle(vllm, host, before)
    assert (settled.unsettled, settled.after) == (None, after)
    assert len(vllm.asked) == 7


def test_the_host_tiers_counters_are_waited_for_until_they_match_its_state(
    vllm: Stub, host: Stub
) -> None:
    # A33: LMCache's counters run behind its state (28 chunks) by one event at first.
    before, after = at(vllm, host, "before"), at(vllm, host, "after")
    late = changed(golden("lmcache-0.5.6-after"), "lmcache_mp_l1_write_chunks_total", "119.0")
    host.script["/metrics"] = [late] * 4 + [golden("lmcache-0.5.6-after")]
    settled = settle(vllm, host, before)
    assert (settled.unsettled, settled.after) == (None, after)


def test_a_condition_that_never_holds_is_named_and_does_not_raise(vllm: Stub, host: Stub) -> None:
    before = at(vllm, host, "before")
    vllm.script["/metrics"] = [golden("vllm-0.32.0-before")]
    settled = settle(vllm, host, before, deadline_s=0.05)
    assert settled.unsettled == "vLLM has not counted the request as finished"
    assert settled.after is not None
    assert settled.after.vllm["finished"] == 19


@pytest.mark.parametrize(
    ("gauge", "value", "reason"),
    [
        ("vllm:num_requests_running", "1.0", "1 requests running and 0 waiting"),
        ("vllm:num_requests_waiting", "2.0", "0 requests running and 2 waiting"),
        ("vllm:kv_cache_usage_perc", "0.12", "kv_cache_usage_perc is 0.1200 and was never 0"),
    ],
)
def test_work_left_in_vllm_is_unsettled(vllm: Stub, gauge: str, value: str, reason: str) -> None:
    before = at(vllm, None, "before")
    vllm.script["/metrics"] = [changed(golden("vllm-0.32.0-after"), gauge + "{", value)]
    assert reason in settle(vllm, None, before, deadline_s=0.05).unsettled


def test_kv_usage_needs_to_be_zero_only_once_after_success(vllm: Stub) -> None:
    before = at(vllm, None, "before")
    done = golden("vllm-0.32.0-after")
    still_running = changed(done, "vllm:num_requests_running{", "1.0")
    lagging = changed(done, "vllm:kv_cache_usage_perc{", "0.12")
    vllm.script["/metrics"] = [still_running, lagging]
    assert settle(vllm, None, before).unsettled is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"read_locked_count": 7}, "read_locked_count is 7"),
        ({"write_locked_count": 7}, "write_locked_count is 7"),
        ({"staging_object_count": 2}, "staging_object_count is 2"),
        ({"active_prefetch_jobs": 1}, "active_prefetch_jobs is 1"),
        ({"memory_usage_ratio": 0.8}, "0.800 full, at or above its watermark 0.8"),
        ({"total_object_count": 29}, "counters say 28 chunks are resident, its state 29"),
    ],
)
def test_work_left_in_lmcache_is_unsettled(
    vllm: Stub, host: Stub, fields: dict[str, object], reason: str
) -> None:
    before = at(vllm, host, "before")
    host.script["/status"] = [status(golden("lmcache-0.5.6-after-status"), **fields)]
    assert reason in settle(vllm, host, before, deadline_s=0.05).unsettled


def test_a_full_tier_that_never_evicts_is_settled(vllm: Stub, host: Stub) -> None:
    before = at(vllm, host, "before")
    body = json.loads(golden("lmcache-0.5.6-after-status"))
    body["storage_manager"]["l1_managers"]["_default"]["memory_usage_ratio"] = 1.0
    controllers = body["storage_manager"]["l1_eviction_controllers"]
    controllers["_default"]["eviction_policy"] = "noop"
    host.script["/status"] = [json.dumps(body)]
    assert settle(vllm, host, before).unsettled is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("lmcache_mp_event_bus_queue_depth 3.0", "event bus still holds 3 events"),
        ('lmcache_mp_lookups_requests_total{cache_salt=""} 19.0', "counted no lookup"),
        ('lmcache_mp_lookups_requests_total{cache_salt=""} 21.0', "lookups moved by 2"),
        ('lmcache_mp_num_submitted_stores_total{device="cuda:0"} 1.0', "1 stores in flight"),
    ],
)
def test_lmcache_counters_that_are_not_final_are_unsettled(
    vllm: Stub, host: Stub, line: str, reason: str
) -> None:
    before = at(vllm, host, "before")
    name = line.split("{")[0].split(" ")[0]
    page = golden("lmcache-0.5.6-after")
    kept = "\n".join(old for old in page.split("\n") if not old.startswith(name))
    host.script["/metrics"] = [kept + line + "\n"]
    assert reason in settle(vllm, host, before, deadline_s=0.05).unsettled


def test_a_leaked_session_delays_but_does_not_unsettle(vllm: Stub, host: Stub) -> None:
    before = at(vllm, host, "before")
    host.script["/status"] = [status(golden("lmcache-0.5.6-after-status"), active_sessions=1)]
    settled = settle(vllm, host, before)
    assert settled.unsettled is None
    assert settled.settle_ms >= 250


def test_a_second_client_ends_the_wait_at_once(vllm: Stub) -> None:
    # A29: two requests finished where we sent one; waiting cannot undo that.
    before = at(vllm, None, "before")
    page = golden("vllm-0.32.0-after")
    ours = 'vllm:request_success_total{engine="0",finished_reason="length"'
    vllm.script["/metrics"] = [changed(page, ours, "21.0")]
    settled = settle(vllm, None, before, deadline_s=60)
    assert settled.unsettled == "vLLM's finished requests moved by 2 where we sent 1"


def test_a_passing_scrape_failure_is_tried_again(vllm: Stub) -> None:
    before, after = at(vllm, None, "before"), at(vllm, None, "after")
    vllm.script["/metrics"] = [Answer("", 500), Answer(""), golden("vllm-0.32.0-after")]
    settled = settle(vllm, None, before)
    assert (settled.unsettled, settled.after) == (None, after)


def test_a_server_that_is_gone_ends_the_wait_at_once_without_a_reading(
    vllm: Stub, start: Callable[[], Stub]
) -> None:
    before = at(vllm, None, "before")
    gone = Scraper("http://127.0.0.1:1", lmcache_url=None, model_name=MODEL)
    begun = time.monotonic()
    with gone:
        settled = gone.settle(before, deadline_s=60)
    assert time.monotonic() - begun < 5
    assert settled.after is None
    assert "127.0.0.1:1/metrics" in settled.unsettled


@pytest.mark.parametrize("code", [1, 2], ids=["body", "head"])
def test_a_page_that_dribbles_for_ever_cannot_hold_a_settle_past_its_deadline(
    vllm: Stub, code: int
) -> None:
    before = at(vllm, None, "before")
    vllm.script["/metrics"] = [Answer("", code=code)]
    begun = time.monotonic()
    settled = settle(vllm, None, before, deadline_s=0.05)
    assert time.monotonic() - begun < 4
    assert "was not whole" in str(settled.unsettled)
    assert settled.after is None


def test_a_server_that_never_answers_cannot_hold_a_settle_past_its_deadline(vllm: Stub) -> None:
    before = at(vllm, None, "before")
    vllm.script["/metrics"] = [Answer("", code=0)]
    begun = time.monotonic()
    settled = settle(vllm, None, before, deadline_s=0.05)
    assert time.monotonic() - begun < 4
    assert "ReadTimeout" in settled.unsettled
    assert settled.after is None
