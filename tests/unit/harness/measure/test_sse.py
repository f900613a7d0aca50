"""The SSE parser and the verdict on a stream: bytes in, results out, no socket and no clock."""

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.measure.answer import Received, StreamResult, judge_answer
from harness.measure.sse import DONE, MAX_LINE_BYTES, Event, SseParser, StreamError
from harness.measure.stream import request_body
from tests.places import DATA

# A stream of vLLM 0.32.0 (CPU build, seeded random weights), as it came over the socket:
# 40 prompt tokens, four token events, a usage chunk, [DONE].
RECORDED = (DATA / "vllm-0.32.0-stream.sse").read_bytes()


def events_of(*packets: bytes) -> list[Event]:
    parser = SseParser()
    events = [event for packet in packets for event in parser.feed(packet)]
    return events + parser.close()


def data_of(*packets: bytes) -> list[str]:
    return [event.data for event in events_of(*packets)]


def frame(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text_chunk(text: str, *, finish: str | None = None, ids: list[int] | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return frame({"id": "cmpl-1", "choices": [choice]})


def usage_chunk(prompt: int = 3, output: int = 2, **more: Any) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, **more}
    return frame({"id": "cmpl-1", "choices": [], "usage": usage})


END = b"data: [DONE]\n\n"


def result_of(
    *timed: tuple[float, bytes], prompt_tokens: int = 3, output_tokens: int = 2
) -> StreamResult:
    """The verdict on packets received at the given milliseconds after sending."""
    answer = Received(sent_unix_ns=0, sent_ns=10**9, status=200, media_type="text/event-stream")
    for at_ms, packet in timed:
        answer.add_packet(packet, now_ns=10**9 + round(at_ms * 1e6))
    answer.end()
    return judge_answer(answer, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


GOOD = (text_chunk("a", ids=[65]), text_chunk("b", ids=[66], finish="length"), usage_chunk(), END)


# A12: packet is not event
def test_recorded_stream_cut_at_every_position_gives_the_same_events():
    whole = events_of(RECORDED)
    assert len(whole) == 6
    for cut in range(len(RECORDED) + 1):
        assert events_of(RECORDED[:cut], RECORDED[cut:]) == whole, cut


# A11: multi-byte characters cut by packet boundaries
def test_recorded_stream_fed_one_byte_at_a_time_gives_the_same_events():
    stream = RECORDED + "data: é €\n\ndata: 😀\n\n".encode()
    single = events_of(*(stream[i : i + 1] for i in range(len(stream))))
    assert single == events_of(stream)
    assert [event.data for event in single[-2:]] == ["é €", "😀"]


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_crlf_and_cr_streams_cut_at_every_position_equal_the_lf_stream(end: bytes):
    other = RECORDED.replace(b"\n", end)
    for cut in range(0, len(other) + 1):
        assert events_of(other[:cut], other[cut:]) == events_of(RECORDED), cut


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_named_event_of_two_data_lines_is_one_event_wherever_it_is_cut(end: bytes):
    stream = end.join((b"event: x", b"data: a", b"data: b", b"", b"data: c", b"", b""))
    for cut in range(len(stream) + 1):
        events = events_of(stream[:cut], stream[cut:])
        assert events == [Event("x", "a\nb"), Event("message", "c")], cut


def test_mixed_line_ends_and_glued_comments_keep_events_apart():
    # A12: ":\n\n" glued to the next event; CR and LF of one line end in different packets
    assert data_of(b":\n\ndata: a\r", b"\n\r\n:\n\ndata: b\r\rdata: c\n\n") == ["a", "b", "c"]


# A12: trimming packets eats spaces that belong to the text
def test_only_one_space_after_the_colon_is_dropped_and_none_elsewhere():
    assert data_of(b"data:  two \n\n", b"data:\ttab\n\n") == [" two ", "\ttab"]


# A9: prefix match on "data: " with the space
def test_stream_without_the_space_after_data_equals_the_stream_with_it():
    assert events_of(RECORDED.replace(b"data: ", b"data:")) == events_of(RECORDED)


# A10: splitlines() semantics on a byte protocol
@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\v", "\f"])
def test_unicode_line_separators_inside_text_do_not_end_a_line(separator: str):
    text = f"data: a{separator}b\n\n".encode()
    assert data_of(text) == [f"a{separator}b"]


# A13: comments, retry-only and id-only blocks, empty data, unknown fields
def test_blocks_without_data_dispatch_nothing_and_disturb_nothing():
    noise = b": ping\n\nretry: 10\n\nid: 7\n\ndata\n\ndata:\n\nfoo: bar\n\n\n\nevent: x\n\n"
    parser = SseParser()
    events = parser.feed(noise + b"data: a\n\n" + noise + b"data: b\n\n")
    assert [(e.name, e.data) for e in events] == [("message", "a"), ("message", "b")]


def test_fields_are_read_as_the_standard_says():
    assert events_of(b"event: error\nid: 1\ndata: a\ndata: b\nid: x\0y\nretry: 1x\n\n") == [
        Event("error", "a\nb")
    ]


# A14: stream start and end
def test_one_leading_bom_is_dropped_and_no_second():
    assert data_of(b"\xef", b"\xbb\xbfdata: a\n\n") == ["a"]
    assert data_of(b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n") == ["b"]


@pytest.mark.parametrize("last", [b"data: b", b"data: b\n", b'data: {"x":1}\n', b"data: x\ndata"])
def test_unterminated_last_event_is_discarded(last: bytes):
    assert data_of(b"data: a\n\n" + last) == ["a"]


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r"])
def test_bare_done_without_its_blank_line_counts(last: bytes):
    assert data_of(b"data: a\n\n" + last) == ["a", DONE]


# A15: line-length limit
def test_a_line_of_one_mebibyte_is_one_event():
    packet = b"data: " + b"x" * 2**20 + b"\n\n"
    pieces = [packet[i : i + 65536] for i in range(0, len(packet), 65536)]
    assert [len(data) for data in data_of(*pieces)] == [2**20]


@pytest.mark.parametrize("end", [b"", b"\n\n"])
def test_a_line_over_sixteen_mebibytes_is_a_clear_error(end: bytes):
    at_limit = b"d" * MAX_LINE_BYTES
    assert events_of(at_limit + end) == []
    with pytest.raises(StreamError, match="longer than 16777216 bytes"):
        events_of(at_limit + b"d" + end)


# A11: always UTF-8, and a byte that is not must not stop the reader
def test_malformed_utf8_becomes_the_replacement_character_in_its_place_only():
    assert data_of(b"data: a\xffb\n\ndata: \xe2\x82\xac\n\n") == ["a\ufffdb", "€"]


def test_recorded_stream_is_a_complete_answer_with_every_number():
    frames = [part + b"\n\n" for part in RECORDED.split(b"\n\n")[:-1]]
    timed = zip((16.5, 25.5, 34, 43, 43.25, 43.5), frames, strict=True)
    result = result_of(*timed, prompt_tokens=40, output_tokens=4)
    assert result.error is None
    assert result.complete
    assert (result.ttft_ms, result.total_ms, result.first_byte_ms) == (16.5, 43.0, 16.5)
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (40, 4, 32)
    assert result.server_ttft_ms == pytest.approx(11.0562250, abs=1e-6)  # 11.031992 + 0.024233
    assert result.finish_reason == "length"
    assert result.output_sha256 == hashlib.sha256(b"[139,508,493,50]").hexdigest()


# C1: a token id without text (half a character) stops the clock
def test_first_token_whose_text_is_empty_stops_the_clock():
    first, last = text_chunk("", ids=[301]), text_chunk("é", ids=[17], finish="length")
    result = result_of((160, first), (165, last), (166, usage_chunk() + END))
    assert (result.ttft_ms, result.total_ms, result.error) == (160.0, 165.0, None)


# A1: a frame with no text stops the TTFT clock
def test_comment_role_and_empty_text_do_not_stop_the_clock_but_are_the_first_byte():
    role = frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    result = result_of(
        (50, b": keep-alive\n\n"),
        (100, role),
        (150, text_chunk("")),
        (200, text_chunk("")),
        (300, text_chunk("hi")),
        (310, text_chunk("!", finish="length") + usage_chunk() + END),
    )
    assert (result.ttft_ms, result.first_byte_ms) == (300.0, 50.0)


# A1, C1: where ids are returned, an event without ids is no token even if it has text
def test_token_ids_rule_over_text_when_the_server_returns_them():
    result = result_of(
        (10, text_chunk("echo", ids=[])),
        (30, text_chunk("", ids=[301])),
        (40, text_chunk("é", ids=[17], finish="length") + usage_chunk() + END),
    )
    assert (result.ttft_ms, result.total_ms) == (30.0, 40.0)


# C1: receipt of the bytes that COMPLETE the event
def test_clock_stops_at_the_packet_that_completes_the_first_token_event():
    half = len(GOOD[0]) // 2
    result = result_of(
        (10, GOOD[0][:half]), (25, GOOD[0][half:-1]), (40, b"\n"), (50, b"".join(GOOD[1:]))
    )
    assert (result.ttft_ms, result.first_byte_ms) == (40.0, 10.0)


# A2: first token invisible
def test_reasoning_fields_of_a_chat_stream_count_as_text():
    for name in ("reasoning_content", "reasoning"):
        think = frame({"choices": [{"delta": {name: "hm"}}]})
        last = frame({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        result = result_of((20, think), (30, last + usage_chunk() + END))
        assert (result.ttft_ms, result.error) == (20.0, None)


def test_usage_without_any_visible_token_is_no_visible_text():
    empty = text_chunk("", finish="length")
    result = result_of((20, empty + usage_chunk(output=5) + END), output_tokens=5)
    assert result.error == "no_visible_text: usage says 5 output tokens, none arrived"
    assert (result.ttft_ms, result.complete) == (None, False)


# A3: choices: [] crashes the reader or moves a clock
@pytest.mark.parametrize("place", [0, 1, 2])
def test_usage_chunk_anywhere_gives_the_same_timings(place: int):
    packets = [(10.0, GOOD[0]), (20.0, GOOD[1])]
    packets.insert(place, ([5.0, 15.0, 25.0][place], usage_chunk()))
    result = result_of(*packets, (30, END))
    assert (result.ttft_ms, result.total_ms) == (10.0, 20.0)
    assert result.complete


# A4: the reader leaves at finish_reason, or keeps the first usage
def test_usage_objects_merge_and_the_last_value_that_is_not_null_wins():
    nested = frame({"choices": [{"index": 0, "text": "", "usage": {"prompt_tokens": 2}}]})
    first = usage_chunk(prompt_tokens_details={"cached_tokens": None}, total_tokens=5)
    second = frame(
        {"choices": [], "usage": {"completion_tokens": None, "prompt_tokens_details": {"cached_tokens": 2}}}
    )  # fmt: skip
    result = result_of((1, nested + GOOD[0] + GOOD[1] + first + second + END))
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (3, 2, 2)
    assert result.complete


def test_missing_usage_is_null_and_never_the_number_asked_for():
    result = result_of((1, GOOD[0] + GOOD[1] + END))
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (None, None, None)
    assert result.error is not None
    assert result.error.startswith("no usage")


# A5: "no token" is stored as TTFT 0
def test_done_only_stream_has_no_ttft_and_is_not_complete():
    result = result_of((1, END))
    assert (result.ttft_ms, result.total_ms) == (None, None)
    assert (result.complete, result.error, result.output_sha256) == (False, "no token", None)
    assert result.server_ttft_ms is None


# A6: error object inside a 200 stream is scored as success
ERROR = frame({"error": {"message": "EngineCore encountered an issue", "code": 500}})


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        ((ERROR, END), "EngineCore encountered an issue"),
        ((GOOD[0], ERROR, END), "EngineCore encountered an issue"),
        ((*GOOD[:3], ERROR, END), "EngineCore encountered an issue"),
        ((GOOD[0], b"event: error\ndata: engine died\n\n", *GOOD[1:]), "engine died"),
        ((frame({"object": "error", "message": "bad"}), *GOOD), "bad"),
        ((frame({"error": "first"}), frame({"error": "second"}), *GOOD), "first"),
    ],
    ids=["before", "after-token", "before-done", "event-name", "object", "first-kept"],
)
def test_error_frame_in_any_form_fails_the_row_and_its_first_text_is_kept(
    stream: tuple[bytes, ...], text: str
):
    result = result_of((1, b"".join(stream)))
    assert (result.error, result.complete, result.ttft_ms) == (f"error frame: {text}", False, None)


def test_error_text_is_kept_to_500_characters():
    result = result_of((1, frame({"error": {"message": "x" * 9000}})))
    assert result.error == "error frame: " + "x" * 500


# A7: truncated stream counts as success
@pytest.mark.parametrize(
    ("stream", "missing"),
    [
        (GOOD[:1], "finish_reason and [DONE]"),
        ((text_chunk("a"), text_chunk("b"), usage_chunk(), END), "finish_reason"),
        (GOOD[:3], "[DONE]"),
    ],
)
def test_stream_without_finish_reason_or_done_is_truncated(stream: Any, missing: str):
    result = result_of((1, b"".join(stream)))
    n = 1 if len(stream) == 1 else 2
    expected = f"truncated: the stream ended without {missing}; {n} token events"
    assert (result.error, result.ttft_ms) == (expected, None)


# A8: 200 with a JSON or HTML body
@pytest.mark.parametrize("media_type", ["application/json", "text/html", ""])
def test_200_without_an_event_stream_fails_with_the_body(media_type: str):
    answer = Received(sent_unix_ns=0, sent_ns=1, status=200, media_type=media_type, head=b"oops")
    result = judge_answer(answer, prompt_tokens=3, output_tokens=2)
    assert result.error == f"HTTP 200 with {media_type or 'no media type'}, no event stream: oops"


# A16: chunks counted as tokens
def test_eight_tokens_in_two_chunks_are_eight_tokens_and_one_gap():
    first = text_chunk("abcd", ids=[1, 2, 3, 4])
    second = text_chunk("efgh", ids=[5, 6, 7, 8], finish="length")
    result = result_of((10, first), (18, second + usage_chunk(output=8) + END), output_tokens=8)
    assert (result.output_tokens, result.total_ms, result.error) == (8, 18.0, None)


def test_one_output_token_has_no_gap():
    only = text_chunk("a", ids=[65], finish="length")
    result = result_of((10, only + usage_chunk(output=1) + END), output_tokens=1)
    assert (result.ttft_ms, result.total_ms) == (10.0, 10.0)


# A17: TTFT among the gaps, end-to-end up to [DONE] or usage
def test_total_ends_at_the_last_token_event_and_gaps_leave_ttft_out():
    result = result_of((100, GOOD[0]), (107, GOOD[1]), (150, usage_chunk()), (190, END))
    assert (result.ttft_ms, result.total_ms) == (100.0, 107.0)


# A45: text prompts change length when re-tokenised
def test_prompt_count_off_by_one_fails_the_row():
    result = result_of((1, GOOD[0] + GOOD[1] + usage_chunk(prompt=4) + END))
    assert result.error == "usage says 4 prompt tokens, 3 were sent"
    assert result.prompt_tokens == 4


# A50: early EOS
def test_three_of_eight_tokens_fail_the_row():
    ids = [text_chunk("a", ids=[i]) for i in range(2)] + [text_chunk("a", ids=[9], finish="stop")]
    result = result_of((1, b"".join(ids) + usage_chunk(output=3) + END), output_tokens=8)
    assert result.error == "usage says 3 output tokens, 8 were asked for"
    assert (result.finish_reason, result.ttft_ms) == ("stop", None)


def test_token_ids_that_contradict_usage_fail_the_row():
    result = result_of(
        (1, GOOD[0] + text_chunk("b", ids=[], finish="length") + usage_chunk() + END)
    )
    assert result.error == "usage says 2 output tokens, 1 token ids arrived"


# A50: sampling defaults
def test_every_sampling_field_a_server_has_defaults_for_is_sent():
    body = request_body(model="m", prompt=[5, 6], output_tokens=8)
    assert body["prompt"] == [5, 6]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (8, 0, True)
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n")
    assert [body[name] for name in sampling] == [0.0, 1.0, 0, 0.0, 1.0, 0, 1]
    assert (body["presence_penalty"], body["frequency_penalty"], body["stop"]) == (0.0, 0.0, [])
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] is True


# A46: a template or a locale that changes the prompt's prefix
def test_the_bytes_sent_do_not_depend_on_date_time_zone_or_locale():
    code = (
        "import json, hashlib; from harness.measure.stream import request_body\n"
        "body = json.dumps(request_body(model='m', prompt=[5, 6], output_tokens=8))\n"
        "print(hashlib.sha256(body.encode()).hexdigest(), 'prompt' in body, 'messages' in body)"
    )
    places = ({"TZ": "UTC", "LANG": "C"}, {"TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8"})
    said = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **place},
                       capture_output=True, text=True, check=True, timeout=60).stdout
        for place in places
    }  # fmt: skip
    assert len(said) == 1
    # Token ids to /v1/completions: there is no chat template that could print today's date.
    assert said.pop().split()[1:] == ["True", "False"]


@pytest.mark.parametrize(
    "bad",
    [
        b"data: {\n\n",
        b"data: 7\n\n",
        b"data: []\n\n",
        frame({"choices": 3}),
        frame({"choices": [None]}),
        frame({"choices": [{"text": 5}]}),
        frame({"choices": [{"token_ids": 5}]}),
        frame({"choices": [{"delta": {"content": 5}}]}),
        frame({"choices": [], "usage": 5}),
    ],
)
def test_an_event_that_is_no_chunk_fails_the_row_and_does_not_stop_the_run(bad: bytes):
    result = result_of((1, GOOD[0] + bad + b"".join(GOOD[1:])))
    assert result.error is not None
    assert result.error.startswith("an event is not")
    assert result.ttft_ms is None


# C6: an absent number is null, never 0
@pytest.mark.parametrize("metrics", [None, {}, {"queue_time_ms": 3.0}, {"queue_time_ms": None}])
def test_server_ttft_needs_both_of_its_parts(metrics: Any):
    chunk = frame({"choices": [], "metrics": metrics})
    assert result_of((1, b"".join(GOOD[:3]) + chunk + END)).server_ttft_ms is None


@pytest.mark.parametrize("value", [True, "2", 2.0, None])
def test_a_token_count_that_is_no_integer_is_unknown(value: Any):
    result = result_of((1, GOOD[0] + GOOD[1] + usage_chunk(output=value) + END))
    assert result.output_tokens is None
    assert not result.complete
