"""The loopback server keeps its own promises: shapes, accounts, faults, and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.measure.stream import complete_prompt, open_client
from servers.fake.script import BEHAVIOURS, parse_script
from servers.fake.server import FakeServer
from servers.fake.spec import FakeSpec
from tests.places import DATA, ROOT

FAKE_FILES = [*(ROOT / "servers" / "fake").glob("*.py"), *(ROOT / "servers" / "tiers").glob("*.py")]
RECORDED = DATA / "vllm-0.32.0-stream.sse"
# 5 usable blocks of 32 hold one prompt of 150 tokens; chunks of 64: two of them per prompt.
SMALL = FakeSpec(model_name="m", num_gpu_blocks=6, host_chunks=40, chunk_tokens=64)
A = list(range(100, 250))
B = list(range(300, 450))


def ask(server: FakeServer, prompt: list[int], *, output_tokens: int = 2) -> Any:
    with open_client(server.base_url, deadline_s=10) as client:
        return complete_prompt(
            client,
            model="m",
            prompt=prompt,
            output_tokens=output_tokens,
            deadline_s=10,
            request_id="r",
        )


def get(url: str) -> httpx.Response:
    # verify=False: nothing here is TLS, and loading the certificates takes 20 ms a call.
    return httpx.get(url, trust_env=False, verify=False)


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, verify=False)


def counters(url: str) -> dict[tuple[str, str], float]:
    """Samples by name and by the one label beside engine and model: source or finished_reason."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(get(f"{url}/metrics").text):
        for sample in family.samples:
            extra = sample.labels.get("source") or sample.labels.get("finished_reason", "")
            key = (sample.name, extra)
            found[key] = found.get(key, 0) + sample.value
    return found


def sources(url: str) -> tuple[float, ...]:
    """(computed, GPU hits, host loads) counted so far."""
    found = counters(url)
    return tuple(
        found["vllm:prompt_tokens_by_source_total", source]
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    )


def always(*behaviours: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"match": {"all": True}, "do": list(behaviours)}]


def shape(value: Any) -> Any:
    """Keys and types, not values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def chunks_of(stream: str) -> list[dict[str, Any]]:
    frames = [frame for frame in stream.split("\n\n") if frame]
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_stream_has_the_shape_of_one_recorded_from_vllm(fake_server):
    server = fake_server(SMALL)
    body = {"model": "m", "prompt": A[:40], "max_tokens": 4, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = post(server.base_url, body)
    ours, theirs = chunks_of(answer.text), chunks_of(RECORDED.read_text())
    assert len(ours) == len(theirs) == 5
    # The fake leaves out what the harness does not read.
    theirs[-1].pop("system_fingerprint")
    for name in ("generation_time_ms", "mean_itl_ms", "tokens_per_second"):
        theirs[-1]["metrics"].pop(name)
    assert [shape(chunk) for chunk in ours] == [shape(chunk) for chunk in theirs]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_plain_completion_without_stream_is_one_json_body(fake_server):
    server = fake_server(SMALL)
    body = {"model": "m", "prompt": A, "max_tokens": 3, "return_token_ids": True}
    answer = post(server.base_url, body).json()
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["text"].isascii()


def test_sources_move_from_computed_to_gpu_to_host_as_worked_by_hand(fake_server):
    server = fake_server(SMALL)
    for prompt in (A, A, B, A):
        assert ask(server, prompt).complete
    ledger = [
        (e["computed"], e["gpu_hit"], e["host_loaded"], e["loaded_chunks"], e["stored_chunks"])
        for e in server.ledger
    ]
    # 150 tokens are 4 full blocks and 2 full chunks: 128 tokens can be reused, 22 never.
    assert ledger == [(150, 0, 0, 0, 2), (22, 128, 0, 0, 0), (150, 0, 0, 0, 2), (22, 0, 128, 2, 0)]
    assert sources(server.base_url) == (344, 128, 128)
    assert server.lmcache_url is not None
    host = counters(server.lmcache_url)
    assert host["lmcache_mp_l1_write_chunks_total", ""] == 4
    assert host["lmcache_mp_lookup_hit_tokens_total", ""] == 256  # requests 2 and 4
    assert host["lmcache_mp_lookup_requested_tokens_total", ""] == 512
    status = get(f"{server.lmcache_url}/status").json()["storage_manager"]
    manager = status["l1_managers"]["_default"]
    assert (manager["total_object_count"], manager["memory_usage_ratio"]) == (4, 0.1)


def test_lmcache_counters_appear_only_once_they_have_moved(fake_server):
    server = fake_server(SMALL)
    assert ("lmcache_mp_l1_write_chunks_total", "") not in counters(server.lmcache_url)
    assert counters(server.lmcache_url)["lmcache_mp_event_bus_queue_depth", ""] == 0
    assert get(f"{server.lmcache_url}/healthcheck").json() == {"status": "healthy"}
    assert get(f"{server.lmcache_url}/config").json()["mp"]["chunk_size"] == 64


def test_server_without_host_tier_has_no_lmcache_port_and_no_external_tokens(fake_server):
    server = fake_server(FakeSpec(model_name="m", num_gpu_blocks=6))
    for prompt in (A, B, A):
        ask(server, prompt)
    assert server.lmcache_url is None
    assert sources(server.base_url) == (450, 0, 0)


def test_usage_ratio_is_exact_to_the_byte_when_the_store_is_no_whole_number_of_chunks(fake_server):
    # 4 chunks of 1 MiB in 4.5 MiB: 3 / 4.5 is below a watermark of 0.7, 3 / 4 would not be.
    spec = FakeSpec(
        model_name="m", num_gpu_blocks=8, host_chunks=4, chunk_tokens=64, watermark=0.7,
        host_bytes=9 * 2**19,
    )  # fmt: skip
    server = fake_server(spec)
    ask(server, list(range(100, 292)))  # 192 tokens: 3 chunks
    manager = get(f"{server.lmcache_url}/status").json()["storage_manager"]["l1_managers"][
        "_default"
    ]
    assert manager["total_object_count"] == 3
    assert manager["memory_usage_ratio"] == pytest.approx(3 / 4.5)


def test_identity_of_the_server_is_what_it_was_started_with(fake_server):
    url = fake_server(SMALL).base_url
    assert get(f"{url}/v1/models").json()["data"][0]["id"] == "m"
    assert get(f"{url}/version").json() == {"version": "0.32.0"}
    assert get(f"{url}/health").status_code == 200
    text = get(f"{url}/metrics").text
    labels = 'enable_prefix_caching="True",engine="0",kv_offloading_size="None",num_gpu_blocks="6"'
    assert f'vllm:cache_config_info{{block_size="32",{labels}}} 1' in text


@pytest.mark.parametrize(
    ("change", "code"),
    [({"model": "other"}, 404), ({"prompt": [1] * 40000}, 400), ({"prompt": [1] * 300}, 400)],
    ids=["model", "longer-than-context", "more-blocks-than-the-pool"],
)
def test_request_that_cannot_be_served_is_refused_and_counts_nothing(fake_server, change, code):
    server = fake_server(SMALL)
    body = {"model": "m", "prompt": A, "max_tokens": 2} | change
    answer = post(server.base_url, body)
    assert answer.status_code == code
    assert answer.json()["error"]["code"] == code
    assert sources(server.base_url) == (0, 0, 0)


def test_dropped_stream_counts_as_aborted_and_its_prompt_as_computed(fake_server):
    server = fake_server(SMALL, script=always({"close_after": {"tokens": 1}}))
    assert not ask(server, A, output_tokens=3).complete
    found = counters(server.base_url)
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:request_success_total", "length"] == 0
    assert server.ledger[0]["end"] == "dropped"


def test_raw_answer_counts_as_one_finished_request_when_its_first_bytes_go_out(fake_server):
    server = fake_server(SMALL, script=always({"raw": [[0, ": nothing else\n\n"]]}))
    assert ask(server, A).error == "no token"
    found = counters(server.base_url)
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_success_total", "abort"] == 0


# A26: absent is read as zero
@pytest.mark.parametrize("code", [500, 307])
def test_metrics_can_answer_with_an_error_or_a_redirect(fake_server, code):
    server = fake_server(SMALL, script=always({"metrics_status": code}))
    for url in (server.base_url, server.lmcache_url):
        answer = get(f"{url}/metrics")
        assert (answer.status_code, answer.text) == (code, "")


def test_metrics_can_be_empty_or_lack_a_series(fake_server):
    server = fake_server(SMALL, script=always({"metrics_empty": True}))
    assert get(f"{server.base_url}/metrics").text == ""
    missing = "vllm:prompt_tokens_by_source_total"
    server = fake_server(SMALL, script=always({"missing_series": [missing]}))
    names = {name for name, _ in counters(server.base_url)}
    assert missing not in names
    assert "vllm:prompt_tokens_total" in names


def test_counters_can_be_published_late(fake_server):
    server = fake_server(SMALL, script=always({"metrics_lag_s": 0.5}))
    ask(server, A)
    assert sources(server.base_url) == (0, 0, 0)
    until = time.monotonic() + 5
    while sources(server.base_url) != (150, 0, 0):
        assert time.monotonic() < until, "the counters never came"


def test_a_lag_on_one_request_ends_with_the_next(fake_server):
    rule = {"match": {"nth": 1}, "do": [{"metrics_lag_s": 60}]}
    server = fake_server(SMALL, script=[rule])
    ask(server, A)
    assert sources(server.base_url) == (0, 0, 0)
    ask(server, B)
    assert sources(server.base_url) == (300, 0, 0)


# A29: multi-engine series and foreign traffic; A33: a restart
@pytest.mark.parametrize(
    ("behaviour", "name", "value"),
    [
        ({"foreign": 2}, ("vllm:request_success_total", "length"), 3),
        ({"reset_counters": True}, ("vllm:request_success_total", "length"), 0),
        ({"miscount": 10}, ("vllm:prompt_tokens_by_source_total", "local_cache_hit"), 10),
        ({"stop_after": 1}, ("vllm:request_success_total", "stop"), 1),
    ],
    ids=["foreign", "reset", "miscount", "stop"],
)
def test_accounts_can_be_falsified_on_one_request(fake_server, behaviour, name, value):
    server = fake_server(SMALL, script=[{"match": {"nth": 1}, "do": [behaviour]}])
    ask(server, A)
    assert counters(server.base_url)[name] == value


def test_second_engine_gets_series_of_its_own(fake_server):
    server = fake_server(SMALL, script=[{"match": {"nth": 2}, "do": [{"engine": "1"}]}])
    ask(server, A)
    ask(server, A)
    text = get(f"{server.base_url}/metrics").text
    name = "vllm:prompt_tokens_total"
    assert f'{name}{{engine="0",model_name="m"}} 150.0' in text
    assert f'{name}{{engine="1",model_name="m"}} 150.0' in text


# A42: LMCache is broken but the server still answers
def test_host_tier_can_drop_everything_while_the_server_still_answers(fake_server):
    server = fake_server(SMALL, script=always({"drop_stores": True}))
    assert all(ask(server, prompt).complete for prompt in (A, B, A))
    assert sources(server.base_url) == (450, 0, 0)
    assert ("lmcache_mp_l1_write_chunks_total", "") not in counters(server.lmcache_url)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": {"nth": 0}, "do": []}, "nth"),
        ({"match": {"all": True}}, "match and do"),
        ({"match": {"all": True}, "do": [{"hang": 1}]}, "hang"),
    ],
)
def test_rule_that_could_never_act_is_rejected(rule, message):
    with pytest.raises(ValueError, match=message):
        parse_script([rule])


def test_every_documented_behaviour_is_one_the_server_acts_on():
    code = "".join(file.read_text() for file in FAKE_FILES if file.name != "script.py")
    assert [name for name in BEHAVIOURS if f'"{name}"' not in code] == []


# The server as a process


def test_sigterm_ends_the_process_at_once_even_in_the_middle_of_a_stream(fake_process):
    fake = fake_process("--model-name", "m", script=always({"hang_after": 1}))
    body = {"model": "m", "prompt": A, "stream": True}
    with (
        httpx.Client(trust_env=False, verify=False) as client,
        client.stream("POST", f"{fake.url}/v1/completions", json=body) as answer,
    ):
        assert next(answer.iter_raw()).startswith(b"data: ")
        started = time.monotonic()
        fake.process.send_signal(signal.SIGTERM)
        assert fake.process.wait(5) == 0
        assert time.monotonic() - started < 2


# A52: stop deadline shorter than the server's
def test_sigterm_can_take_its_time(fake_process):
    fake = fake_process("--model-name", "m", script=always({"sigterm_s": 0.5}))
    started = time.monotonic()
    fake.process.terminate()
    assert fake.process.wait(5) == 0
    assert time.monotonic() - started >= 0.5


# A56: readiness; the server dies
def test_process_can_die_before_it_listens_and_after(fake_process):
    never = fake_process(script=always({"startup_s": 60}, {"die_after_s": 0.3}))
    assert (never.url, never.process.wait(5)) == ("", 1)
    assert "fatal error" in never.said[-1]
    later = fake_process(script=always({"die_after_s": 1.5}, {"die_code": 0}))
    assert get(f"{later.url}/health").status_code == 200
    assert later.process.wait(5) == 0  # vLLM exits 0 when its engine core dies


def test_health_can_be_200_before_the_model_can_serve(fake_process):
    fake = fake_process(
        "--model-name", "m", script=always({"startup_s": 1}, {"health_early": True})
    )
    body = {"model": "m", "prompt": A, "max_tokens": 1}
    assert get(f"{fake.url}/health").status_code == 200
    assert post(fake.url, body).status_code == 503
    until = time.monotonic() + 5
    while post(fake.url, body).status_code != 200:
        assert time.monotonic() < until, "the server never became ready"


def test_nothing_listens_before_the_start_up_time_is_over(fake_process):
    started = time.monotonic()
    fake = fake_process(script=always({"startup_s": 0.5}))
    assert time.monotonic() - started >= 0.5
    assert get(f"{fake.url}/health").status_code == 200


# A54: unread PIPE
def test_stderr_can_be_flooded_before_the_server_listens(fake_process):
    fake = fake_process(script=always({"stderr_bytes": 10 * 2**20}))
    assert sum(len(line) for line in fake.said) >= 10 * 2**20
    assert get(f"{fake.url}/health").status_code == 200


# A55: the wrong server answers
def test_taken_port_ends_the_process_with_an_error(fake_server):
    port = fake_server(SMALL).base_url.rpartition(":")[2]
    argv = [sys.executable, "-m", "servers.fake", "--port", port]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 1
    assert "Address already in use" in ended.stderr


def test_script_and_ledger_can_come_from_the_environment(tmp_path):
    # A launcher that starts the fake like any other server has no argument for them.
    script, ledger = tmp_path / "script.json", tmp_path / "ledger.jsonl"
    script.write_text(json.dumps(always({"die_after_s": 0.1}, {"die_code": 7})))
    env = os.environ | {"KVCLIFF_FAKE_SCRIPT": str(script), "KVCLIFF_FAKE_LEDGER": str(ledger)}
    argv = [sys.executable, "-m", "servers.fake", "--port", "0"]
    ended = subprocess.run(argv, env=env, capture_output=True, timeout=20, check=False)
    assert ended.returncode == 7


def test_stopping_a_server_frees_its_port_and_ends_its_threads(fake_server):
    server = fake_server(SMALL)
    ask(server, A)
    port = int(server.base_url.rpartition(":")[2])
    server.stop()
    assert server.open_connections == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
