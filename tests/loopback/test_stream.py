"""The streaming client against the scripted loopback server: real sockets, bytes and delays."""

import contextlib
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from harness.measure.answer import StreamResult
from harness.measure.stream import complete_prompt, open_client
from servers.fake.engine import output_ids
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec

pytestmark = pytest.mark.alone

PROMPT = list(range(100, 180))
SPEC = FakeSpec(model_name="m")


@pytest.fixture
def ask() -> Iterator[Any]:
    """``ask(server_or_url, …)``: one prompt through one client per server, kept between calls."""
    clients: dict[str, httpx.Client] = {}

    def send(server: Any, *, output_tokens: int = 4, deadline_s: float = 10) -> StreamResult:
        url = server if isinstance(server, str) else server.base_url
        if url not in clients:
            clients[url] = open_client(url, deadline_s=deadline_s)
        return complete_prompt(
            clients[url],
            model="m",
            prompt=PROMPT,
            output_tokens=output_tokens,
            deadline_s=deadline_s,
            request_id="r-1",
        )

    yield send
    for client in clients.values():
        client.close()


def entry_of(server: FakeServer, index: int) -> dict[str, Any]:
    """An entry of the server's ledger, which it writes after the answer's last byte."""
    until = time.monotonic() + 5
    while not server.ledger:
        assert time.monotonic() < until, "the server has recorded no answer"
        time.sleep(0.005)
    return server.ledger[index]


def server_delay_ms(server: FakeServer, index: int = -1) -> float:
    """From the request's first byte at the server to the write of the first token."""
    entry = entry_of(server, index)
    return float(entry["first_token_ns"] - entry["received_ns"]) / 1e6


def always(*behaviours: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"match": {"all": True}, "do": list(behaviours)}]


def nth(n: int, *behaviours: dict[str, Any]) -> dict[str, Any]:
    return {"match": {"nth": n}, "do": list(behaviours)}


def chunk(text: str | None = None, *, finish: str | None = None, usage: Any = None) -> str:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return f"data: {json.dumps({'id': 'c', 'choices': choices, 'usage': usage})}\n\n"


USAGE = chunk(usage={"prompt_tokens": len(PROMPT), "completion_tokens": 4})
DONE = "data: [DONE]\n\n"


def test_good_answer_is_complete_with_counts_digest_and_one_request_seen(fake_server, ask):
    server = fake_server(SPEC)
    result = ask(server)
    assert result.error is None
    assert result.complete
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (80, 4, 0)
    assert result.finish_reason == "length"
    assert result.conn_reused
    assert server.completions_seen() == 1
    assert entry_of(server, 0)["request_id"] == "r-1"


def test_equal_prompts_give_equal_digests_and_other_output_another(fake_server, ask):
    server = fake_server(SPEC, script=[nth(3, {"other_output": True})])
    digests = [ask(server).output_sha256 for _ in range(3)]
    assert digests[0] == digests[1] != digests[2]
    assert output_ids(PROMPT, 4) != output_ids(PROMPT, 4, salt="other")


def bare_ttft_ms(sock: socket.socket) -> float:
    """TTFT of one prompt by the least client there can be: a send, and receives up to the token."""
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    sent, received, stamp = time.perf_counter_ns(), b"", 0
    sock.sendall(request)
    while b"[DONE]" not in received or not received.endswith(b"0\r\n\r\n"):
        received += sock.recv(65536)
        if not stamp and b"data:" in received:
            stamp = time.perf_counter_ns()
    return (stamp - sent) / 1e6


# C1, A17: a stopwatch on both ends. Two contrasting profiles: a scaled or shifted clock fits one.
@pytest.mark.parametrize(
    ("first_ms", "token_ms"), [(2.0, 4.0), (10.0, 0.5)], ids=["short-first", "long-first"]
)
def test_the_stopwatch_adds_at_most_a_quarter_of_a_millisecond_to_a_bare_sockets(
    fake_process, ask, first_ms, token_ms
):
    script = always({"first_token_ms": first_ms}, {"token_ms": token_ms})

    def median_error_ms(ttft_ms: list[float], entries: list[dict[str, Any]]) -> float:
        served = [(e["first_token_ns"] - e["received_ns"]) / 1e6 for e in entries]
        assert min(served) >= first_ms
        return statistics.median(abs(a - b) for a, b in zip(ttft_ms, served, strict=True))

    def added_ms() -> float:
        fake = fake_process("--model-name", "m", script=script)
        results = [ask(fake.url, output_tokens=2) for _ in range(110)]
        assert [result.error for result in results] == [None] * 110
        assert statistics.median(r.total_ms - r.ttft_ms for r in results) >= 0.9 * token_ms
        port = httpx.URL(fake.url).port
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            bare = [bare_ttft_ms(sock) for _ in range(111)][:110]
        entries = fake.ledger()  # the last answer's entry may not be written yet
        assert len(entries) in (220, 221)
        ours = median_error_ms([r.ttft_ms for r in results], entries[:110])
        return ours - median_error_ms(bare, entries[110:220])

    # How soon a sleeping process wakes is the machine's affair and in both. Other work only adds:
    # one quiet round of five is enough.
    rounds: list[float] = []
    while len(rounds) < 5 and min(rounds, default=1.0) > 0.25:
        rounds.append(added_ms())
    assert min(rounds) <= 0.25, rounds


# A1: a frame with no text stops the TTFT clock
def test_comment_role_and_empty_text_do_not_stop_the_clock(fake_server, ask):
    raw = [
        [50, ": keep-alive\n\n"],
        [50, 'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'],
        [50, chunk("")],
        [150, chunk("abc")],
        [0, chunk("d", finish="length") + USAGE + DONE],
    ]
    result = ask(fake_server(SPEC, script=always({"raw": raw})))
    assert result.error is None
    assert result.ttft_ms >= 300
    assert 50 <= result.first_byte_ms < 200


# A2: half a character is a token without text; the ids say so
def test_first_token_without_text_stops_the_clock_by_its_id(fake_server, ask):
    script = always({"texts": ["", "", "x"]}, {"first_token_ms": 20}, {"token_ms": 200})
    server = fake_server(SPEC, script=script)
    result = ask(server)
    assert result.ttft_ms == pytest.approx(server_delay_ms(server), abs=100)


def test_server_that_returns_no_ids_is_timed_by_its_text(fake_server, ask):
    script = always({"texts": ["", "", "x"]}, {"no_token_ids": True}, {"token_ms": 60})
    result = ask(fake_server(SPEC, script=script))
    assert result.error is None
    assert result.ttft_ms >= 120


def test_usage_that_claims_tokens_nobody_saw_is_no_visible_text(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"texts": [""]}, {"no_token_ids": True})))
    assert result.error == "no_visible_text: usage says 4 output tokens, none arrived"


# A3: choices: [] moves a clock
@pytest.mark.parametrize("place", [0, 1, 2])
def test_usage_chunk_first_in_the_middle_or_last_leaves_the_clock_alone(fake_server, ask, place):
    raw = [[60, chunk("a")], [60, chunk("b", finish="length")]]
    raw.insert(place, [0, USAGE])
    result = ask(fake_server(SPEC, script=always({"raw": [*raw, [600, DONE]]})))
    assert result.error is None
    assert 60 <= result.ttft_ms < 300
    assert 60 <= result.total_ms < 600


# A4: usage after finish, in two parts
def test_second_usage_chunk_adds_cached_tokens(fake_server, ask):
    script = always(
        {"no_cached_tokens": True},
        {"extra_usage": [{"prompt_tokens": None, "prompt_tokens_details": {"cached_tokens": 32}}]},
    )
    result = ask(fake_server(SPEC, script=script))
    assert (result.cached_tokens, result.prompt_tokens, result.output_tokens) == (32, 80, 4)
    assert result.complete


def test_missing_cached_tokens_are_null_and_the_answer_complete(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"no_cached_tokens": True})))
    assert (result.cached_tokens, result.complete) == (None, True)


# A5: "no token" is stored as TTFT 0
def test_done_only_stream_beside_good_ones_leaves_the_median_alone(fake_server, ask):
    server = fake_server(SPEC, script=[nth(2, {"raw": [[0, DONE]]})])
    results = [ask(server) for _ in range(3)]
    assert [result.complete for result in results] == [True, False, True]
    assert (results[1].ttft_ms, results[1].error) == (None, "no token")


# A6: error object inside a 200 stream
@pytest.mark.parametrize(
    "fault",
    [
        {"tokens": 0, "frame": 'data: {"error":{"message":"boom"}}\n\n', "then": "done"},
        {"tokens": 2, "frame": 'data: {"error":{"message":"boom"}}\n\n', "then": "close"},
        {"tokens": 2, "frame": "event: error\ndata: boom\n\n", "then": "continue"},
        {"tokens": 2, "frame": 'data: {"error":{"message":"boom"}}\n\n', "then": "done"},
    ],
    ids=["before-tokens", "after-tokens", "event-error", "then-normal-done"],
)
def test_error_frame_in_each_of_its_forms_fails_the_row(fake_server, ask, fault):
    result = ask(fake_server(SPEC, script=always({"error_after": fault})))
    assert (result.error, result.complete, result.ttft_ms) == ("error frame: boom", False, None)


# A7: truncated stream counts as success
@pytest.mark.parametrize("clean", [True, False])
def test_stream_closed_after_three_of_eight_tokens_is_truncated(fake_server, ask, clean):
    server = fake_server(SPEC, script=[nth(1, {"close_after": {"tokens": 3, "clean": clean}})])
    result = ask(server, output_tokens=8)
    assert result.error is not None
    assert result.error.startswith("truncated: ")
    assert (result.complete, result.ttft_ms, result.total_ms) == (False, None, None)
    assert ask(server, output_tokens=8).complete


@pytest.mark.parametrize("part", ["no_finish", "no_usage", "no_done"])
def test_answer_without_one_of_its_closing_parts_is_not_complete(fake_server, ask, part):
    result = ask(fake_server(SPEC, script=always({part: True})))
    assert (result.complete, result.ttft_ms) == (False, None)
    assert result.error is not None


# A8: 200 with a JSON or HTML body; the media type's case and parameters do not matter
def test_json_body_with_status_200_fails_with_its_first_500_bytes(fake_server, ask):
    status = {"code": 200, "type": "application/json", "body": "x" * 3000}
    result = ask(fake_server(SPEC, script=always({"status": status})))
    assert result.error == f"HTTP 200 with application/json, no event stream: {'x' * 500}"


def test_media_type_is_compared_without_case_and_parameters(fake_server, ask):
    script = always({"content_type": "Text/Event-Stream ; charset=latin-1"})
    assert ask(fake_server(SPEC, script=script)).complete


# A9, A10, A11, A13: legal spellings and separators, over the wire
def test_no_space_separators_comments_and_crlf_survive_the_wire(fake_server, ask):
    text = "a\u2028b\u2029c\u0085d\ve\f€😀"
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    token = json.dumps({"choices": [choice]}, ensure_ascii=False)
    usage = USAGE.removeprefix("data: ").strip()
    stream = f":\r\n\r\nretry: 5\r\n\r\ndata:{token}\r\n\r\ndata\r\n\r\ndata:{usage}\r\n\r\n"
    packets = [[0, bytes([byte])] for byte in f"\ufeff{stream}data: [DONE]".encode()]
    by_byte = ask(fake_server(SPEC, script=always({"raw": packets})))
    whole = ask(fake_server(SPEC, script=always({"raw": [[0, chunk(text, finish="length")],
                                                         [0, USAGE + DONE]]})))  # fmt: skip
    assert by_byte.error is None
    assert by_byte.output_sha256 == whole.output_sha256


# A15: line-length limit
def test_a_data_line_of_one_mebibyte_is_read(fake_server, ask):
    raw = [[0, chunk("x" * 2**20, finish="length")], [0, USAGE + DONE]]
    assert ask(fake_server(SPEC, script=always({"raw": raw}))).complete


def test_a_line_over_the_limit_is_a_failed_row_with_a_clear_error(fake_server, ask):
    raw = [[0, "data: "], *[[0, "x" * 2**20]] * 17]
    result = ask(fake_server(SPEC, script=always({"raw": raw})))
    assert result.error == "a line of the stream is longer than 16777216 bytes"


# A16: chunks counted as tokens
def test_eight_tokens_in_two_events_are_eight_output_tokens(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"tokens_per_event": 4})), output_tokens=8)
    assert (result.output_tokens, result.complete) == (8, True)


# A17: stamp taken too late
def test_slow_json_decoding_leaves_every_time_unchanged(fake_server, ask, monkeypatch):
    def slow(text: str) -> Any:
        time.sleep(0.3)
        return json.loads(text)

    monkeypatch.setattr(
        "harness.measure.stream.json", SimpleNamespace(loads=slow, dumps=json.dumps)
    )
    # Three events without a token come first: decoding them on the way would cost 900 ms.
    raw = [[0, chunk("")], [0, chunk("")], [0, chunk("")], [20, chunk("a")],
           [20, chunk("b", finish="length")], [0, USAGE + DONE]]  # fmt: skip
    result = ask(fake_server(SPEC, script=always({"raw": raw})))
    assert result.error is None
    assert 20 <= result.ttft_ms < 200
    assert 40 <= result.total_ms < 220


# A18: proxy variables capture loopback traffic
def test_proxy_variables_are_ignored(fake_server, ask, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert ask(fake_server(SPEC)).complete


# A19: connection set-up inside TTFT
def test_expired_keepalive_and_a_slow_accept_stay_outside_ttft(fake_server, ask):
    script = always({"keepalive_s": 0.1}, {"accept_delay_ms": 400}, {"first_token_ms": 10})
    server = fake_server(SPEC, script=script)
    for _ in range(3):
        result = ask(server)
        assert result.complete
        assert result.conn_reused
        assert 10 <= result.ttft_ms < 300
        await_no_connection(server)


def await_no_connection(server: FakeServer) -> None:
    """Return when the server has closed its idle connections."""
    until = time.monotonic() + 5
    while server.open_connections:
        assert time.monotonic() < until, "the server kept the connection open"
        time.sleep(0.01)


def test_one_connection_serves_request_after_request(fake_server, ask):
    server = fake_server(SPEC)
    assert [ask(server).conn_reused for _ in range(3)] == [True] * 3
    assert server.open_connections == 1


def test_request_that_had_to_connect_says_so_and_its_ttft_starts_after_connecting(fake_server, ask):
    server = fake_server(SPEC, script=always({"health_closes": True}))
    result = ask(server)
    assert (result.complete, result.conn_reused) == (True, False)
    assert result.ttft_ms == pytest.approx(server_delay_ms(server), abs=100)


# A20: client pool limit turns into latency
def test_150_requests_at_once_all_reach_the_server_before_the_first_is_answered(fake_process, ask):
    script = [*always({"first_token_ms": 2500}), nth(1, {"first_token_ms": 0})]
    fake = fake_process("--model-name", "m", script=script)
    assert ask(fake.url).complete  # opens the one client that all threads share
    with ThreadPoolExecutor(150) as threads:
        results = list(threads.map(lambda _: ask(fake.url, deadline_s=30), range(150)))
    assert all(result.complete for result in results)
    served = [entry for entry in fake.ledger() if entry["n"] > 1]
    assert len(served) == 150
    assert max(e["received_ns"] for e in served) < min(e["first_token_ns"] for e in served)


# A21: default timeouts are far below a cold prefill
def test_answer_that_starts_after_httpx_default_of_five_seconds_is_complete(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"first_token_ms": 5500})), deadline_s=20)
    assert result.error is None
    assert result.ttft_ms >= 5500


def test_hanging_stream_ends_at_its_deadline_and_the_next_request_works(fake_server, ask):
    server = fake_server(SPEC, script=[nth(1, {"hang_after": 2})])
    started = time.perf_counter()
    result = ask(server, deadline_s=0.4)
    assert 0.4 <= time.perf_counter() - started < 1.5
    assert result.error == "deadline: the stream had not ended after 0.4 s; 2 events had arrived"
    assert (result.complete, result.ttft_ms) == (False, None)
    assert ask(server, deadline_s=5).complete


@pytest.fixture
def dribbling_head() -> Iterator[Callable[[int], str]]:
    """A server whose answer number ``n`` (first is 1) has a head that never ends, a byte at a time."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket, first_bad: int) -> None:
        with connection, contextlib.suppress(OSError):
            for number in itertools.count(1):
                if not connection.recv(65536):
                    return
                if number == first_bad:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nserver: ")
                    while not over.wait(0.02):
                        connection.sendall(b"x")
                    return
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    def serve(first_bad: int) -> None:
        with contextlib.suppress(OSError):
            answer(listener.accept()[0], first_bad)

    def start(first_bad: int) -> str:
        threads.append(threading.Thread(target=serve, args=(first_bad,)))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    over.set()
    listener.close()
    for thread in threads:
        thread.join(5)


@pytest.mark.parametrize("first_bad", [1, 2], ids=["of the check before", "of the answer"])
def test_a_head_that_never_ends_is_cut_at_the_deadline(dribbling_head, ask, first_bad):
    began = time.monotonic()
    result = ask(dribbling_head(first_bad), deadline_s=0.3)
    assert time.monotonic() - began < 2
    assert result.error == "deadline: the stream had not ended after 0.3 s; 0 events had arrived"


def test_dribbling_stream_ends_at_its_deadline_although_each_read_is_quick(fake_server, ask):
    raw = [[20, ": still here\n\n"]] * 200
    started = time.perf_counter()
    result = ask(fake_server(SPEC, script=always({"raw": raw})), deadline_s=0.4)
    assert 0.4 <= time.perf_counter() - started < 1.5
    assert result.error == "deadline: the stream had not ended after 0.4 s; 0 events had arrived"


def test_a_token_event_after_done_neither_stretches_the_time_nor_counts(fake_server, ask):
    raw = [[0, chunk("abcd", finish="length") + USAGE + DONE], [400, chunk("e")]]
    result = ask(fake_server(SPEC, script=always({"raw": raw})))
    assert (result.complete, result.output_tokens) == (True, 4)
    assert result.total_ms < 300


def test_body_that_does_not_end_after_done_costs_a_second_and_no_row(fake_server, ask):
    raw = [[0, chunk("a", finish="length") + USAGE + DONE], [60000, ": never\n\n"]]
    server = fake_server(SPEC, script=[nth(1, {"raw": raw})])
    started = time.perf_counter()
    assert ask(server).complete
    assert time.perf_counter() - started < 5
    assert ask(server).complete


# A22: silent retries
def test_503_then_200_is_one_failed_row_and_one_request_seen(fake_server, ask):
    status = {"code": 503, "body": {"error": {"message": "overloaded"}}}
    server = fake_server(SPEC, script=[nth(1, {"status": status})])
    result = ask(server)
    assert server.completions_seen() == 1
    assert result.error == 'HTTP 503: {"error": {"message": "overloaded"}}'
    assert (result.complete, result.ttft_ms) == (False, None)
    assert ask(server).complete
    assert server.completions_seen() == 2


def test_redirect_is_not_followed(fake_server, ask):
    status = {"code": 307, "headers": {"location": "/v1/completions"}}
    server = fake_server(SPEC, script=always({"status": status}))
    assert ask(server).error == "HTTP 307: "
    assert server.completions_seen() == 1


def test_dead_port_is_a_failed_row(fake_server, ask):
    server = fake_server(SPEC)
    server.stop()
    result = ask(server)
    assert result.error is not None
    assert result.error.startswith("no connection: ")
    assert (result.ttft_ms, result.complete, result.first_byte_ms) == (None, False, None)


# A23: wall clock for durations
def test_wall_clock_stepping_back_an_hour_changes_no_duration(fake_server, ask, monkeypatch):
    steps = iter(range(0, 10**9, 3600))
    real_s, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real_s() - next(steps))
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - next(steps) * 10**9)
    server = fake_server(SPEC, script=always({"first_token_ms": 20}, {"token_ms": 10}))
    result = ask(server)
    assert result.ttft_ms == pytest.approx(server_delay_ms(server), abs=100)
    assert 50 <= result.total_ms < 500


# A45: prompts change length when re-tokenised
def test_server_that_counts_one_prompt_token_more_fails_the_row(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"prompt_tokens_off": 1})))
    assert result.error == "usage says 81 prompt tokens, 80 were sent"


# A50: early EOS
def test_server_that_stops_at_three_of_eight_tokens_fails_the_row(fake_server, ask):
    result = ask(fake_server(SPEC, script=always({"stop_after": 3})), output_tokens=8)
    assert result.error == "usage says 3 output tokens, 8 were asked for"
    assert (result.output_tokens, result.finish_reason, result.ttft_ms) == (3, "stop", None)
