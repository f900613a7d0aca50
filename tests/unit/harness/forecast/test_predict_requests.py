import io
import itertools
import json
import sys

import pytest

from harness.errors import InputError
from harness.forecast.requests import (
    PredictSpec,
    is_refused,
    predict_file,
    predict_lines,
    read_spec,
)

LAB = {  # a run recorded on vLLM 0.32 CPU + LMCache 0.5.6: a host tier that holds everything
    "engine": "0.32.0",
    "block_size": 32,
    "num_gpu_blocks": 600,
    "host": "lmcache-mp",
    "chunk_size": 256,
    "host_chunks": 1000,
    "watermark": 0.8,
    "evict_ratio": 0.2,
    "policy": "LRU",
    "max_batched_tokens": 8192,
}
# Blocks of 4 tokens, 8 of them usable, no host tier.
SMALL = {"engine": "0.32.0", "block_size": 4, "num_gpu_blocks": 9, "max_batched_tokens": 64}


def rows(spec, *requests):
    lines = [json.dumps(request).encode() + b"\n" for request in requests]
    return list(predict_lines(PredictSpec.model_validate(spec), lines, where="requests"))


def splits(spec, *requests):
    return [(r["computed"], r["gpu_hit"], r["host_loaded"]) for r in rows(spec, *requests)]


def lab_walks():
    for walk in (range(8), range(8), range(7, -1, -1)):
        yield from walk


def lab_segments():
    return [
        {"segments": [[f"doc{doc}", 3000], [f"q{i}", 20]], "output_len": 2}
        for i, doc in enumerate(lab_walks())
    ]


def lab_ids():
    return [
        {
            "prompt": [
                *range(doc * 3000, (doc + 1) * 3000),
                *range(10**6 + i * 20, 10**6 + i * 20 + 20),
            ],
            "output_len": 2,
        }
        for i, doc in enumerate(lab_walks())
    ]


@pytest.mark.parametrize("requests", [lab_segments(), lab_ids()], ids=["segments", "ids"])
def test_the_recorded_run_of_8_documents_comes_out_as_it_was_measured(requests):
    forward = [(3020, 0, 0)] * 8 + [(204, 0, 2816)] * 8
    reverse = [(44, 2976, 0)] * 6 + [(204, 896, 1920), (204, 0, 2816)]
    assert splits(LAB, *requests) == forward + reverse


def test_bytes_are_whole_chunks_even_where_fewer_tokens_are_counted():
    # Document 1 in the reverse pass: 1,920 tokens counted, chunks 3 … 10 moved: 8 * 256 * 100 B.
    found = rows(LAB | {"chunk_bytes": 25_600}, *lab_segments())
    assert (found[0]["stored_chunks"], found[0]["loaded_bytes"]) == (11, 0)
    assert (found[22]["loaded_chunks"], found[22]["loaded_bytes"]) == (8, 204_800)
    assert (found[23]["loaded_chunks"], found[23]["loaded_bytes"]) == (11, 281_600)


def test_bytes_are_null_where_the_size_of_a_chunk_is_not_given():
    found = rows(LAB, *lab_segments())
    assert (found[23]["loaded_chunks"], found[23]["loaded_bytes"]) == (11, None)
    assert found[0]["loaded_bytes"] == 0  # nothing moved is 0 bytes of any size


def test_a_row_is_exactly_the_published_fields():
    [row] = rows(SMALL, {"prompt": [1, 2, 3, 4, 5], "output_len": 1})
    assert row == {
        "line": 1,
        "computed": 5,
        "gpu_hit": 0,
        "host_loaded": 0,
        "stored_chunks": 0,
        "loaded_chunks": 0,
        "loaded_bytes": 0,
    }


@pytest.mark.parametrize(
    ("first", "second", "shared_tokens"),
    [
        ([["a", 9]], [["a", 9]], 8),  # 2 whole blocks of 4
        ([["a", 9]], [["a", 13]], 8),  # longer: the same prefix
        ([["a", 13]], [["a", 6]], 4),  # shorter: its own whole blocks
        ([["a", 9]], [["b", 9]], 0),
        ([["a", 6], ["b", 6]], [["a", 6], ["b", 6]], 8),
        ([["a", 6], ["b", 6]], [["a", 6], ["c", 6]], 4),  # block 2 begins in a, ends in b or c
        ([["a", 6], ["b", 6]], [["a", 12]], 4),  # after 6 tokens of a: b 0 against a 6
        ([["a", 4], ["a", 5]], [["a", 9]], 4),  # a segment starts at its position 0
        ([["a", 4], ["b", 5]], [["b", 5]], 0),  # a prefix, not a substring
    ],
)
def test_segments_share_what_their_tokens_share_from_the_start(first, second, shared_tokens):
    _, (_, gpu_hit, _) = splits(
        SMALL, *({"segments": segments, "output_len": 1} for segments in (first, second))
    )
    assert gpu_hit == shared_tokens


def test_segments_and_ids_have_no_token_in_common():
    found = splits(
        SMALL,
        {"segments": [["0", 9]], "output_len": 1},
        {"prompt": list(range(9)), "output_len": 1},
    )
    assert found[1] == (9, 0, 0)


def test_the_next_turn_hits_generated_ids_it_repeats():
    # 6 + 6 - 1 = 11 tokens have a slot: 2 full blocks; without the ids only the prompt's 1 is known.
    turn = {"prompt": list(range(6)), "output_len": 6}
    again = {"prompt": [*range(6), *range(50, 56), 99], "output_len": 1}
    assert splits(SMALL, turn | {"output": list(range(50, 56))}, again)[1] == (5, 8, 0)
    assert splits(SMALL, turn, again)[1] == (9, 4, 0)


def test_generated_tokens_may_be_named_as_the_segment_that_repeats_them():
    turn = {"segments": [["s", 6]], "output_len": 6, "output": "answer"}
    again = {"segments": [["s", 6], ["answer", 6], ["q", 1]], "output_len": 1}
    assert splits(SMALL, turn, again)[1] == (5, 8, 0)


def test_a_stop_token_costs_one_slot_more_than_the_same_length_at_max_tokens():
    # 2 usable blocks of 2. A: 2 blocks, 1 of them full. B: P + out = 3 slots if stopped (2 blocks,
    # so A's block is lost), 2 slots otherwise (1 block).
    tiny = SMALL | {"block_size": 2, "num_gpu_blocks": 3}
    a = {"prompt": [1, 2, 3], "output_len": 1}
    b = {"prompt": [9], "output_len": 2}
    assert splits(tiny, a, b, a)[2] == (1, 2, 0)
    assert splits(tiny, a, b | {"stopped": True}, a)[2] == (3, 0, 0)


@pytest.mark.parametrize(("engine", "last"), [("0.24.0", (1, 2, 0)), ("0.23.1", (3, 0, 0))])
def test_the_engine_version_decides_which_blocks_are_reused_first(engine, last):
    # 2 usable blocks of 2. A leaves one block with a hash and one without; B needs one block twice.
    # From 0.24 B takes the one without both times; before, it goes to the tail and A's is next.
    a, b = {"prompt": [1, 2, 3], "output_len": 1}, {"prompt": [9], "output_len": 1}
    found = splits(SMALL | {"block_size": 2, "num_gpu_blocks": 3, "engine": engine}, a, b, b, a)
    assert found[3] == last


def test_the_native_tier_reports_a_prompt_found_in_full_as_loaded_to_its_last_token():
    spec = SMALL | {"host": "native", "chunk_size": 4, "host_chunks": 50, "num_gpu_blocks": 4}
    a, b = {"prompt": [1] * 8, "output_len": 1}, {"prompt": [2] * 9, "output_len": 1}
    assert splits(spec, a, b, a)[2] == (0, 0, 8)
    assert splits(spec | {"host": "lmcache"}, a, b, a)[2] == (1, 0, 7)


def test_vllms_own_tier_keeps_single_blocks_unless_said():
    # 512 tokens are 16 blocks of 32; found in full, all but the GPU's 480 are loaded.
    spec = {name: value for name, value in LAB.items() if name != "chunk_size"} | {"host": "native"}
    found = rows(spec, *[{"segments": [["a", 512]], "output_len": 2}] * 2)
    assert [row["stored_chunks"] for row in found] == [16, 0]
    assert [row["host_loaded"] for row in found] == [0, 32]


def test_a_request_the_server_cannot_hold_is_an_error_and_changes_nothing():
    a = {"prompt": [1] * 9, "output_len": 1}
    huge = {"prompt": [2] * 40, "output_len": 1}
    found = rows(SMALL, a, huge, a)
    assert set(found[1]) == {"line", "error"}
    assert "10 blocks" in found[1]["error"]
    assert found[2]["gpu_hit"] == 8


def test_a_server_of_two_billion_blocks_is_predicted_without_a_list_of_them():
    huge = {"block_size": 1, "num_gpu_blocks": 2**31}
    request = {"segments": [["a", 1000]], "output_len": 1}
    assert splits(SMALL | huge, request, request)[1] == (1, 999, 0)


def test_without_a_prefix_cache_nothing_is_hit():
    a = {"prompt": [1] * 9, "output_len": 1}
    assert splits(SMALL | {"prefix_caching": False}, a, a)[1] == (9, 0, 0)


def test_rows_without_counts_are_told_apart():
    a = {"prompt": [1] * 9, "output_len": 1}
    found = rows(SMALL, a, {"prompt": [2] * 40, "output_len": 1}, a, a | {"lora": "x"}, a)
    assert [is_refused(row) for row in found] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("0.33.1", []),
        ("0.16.0", ["s.json: vLLM 0.16.0: rules of 0.23 assumed; the oldest compared is 0.23"]),
        ("0.34.0", ["s.json: vLLM 0.34.0: rules of 0.33 assumed; the newest compared is 0.33"]),
    ],
)
def test_an_engine_that_was_not_compared_is_predicted_and_said_once(engine, said):
    notes = []
    spec = PredictSpec.model_validate(SMALL | {"engine": engine})
    lines = [json.dumps({"prompt": [1], "output_len": 1}).encode()] * 2
    found = list(predict_lines(spec, lines, where="r", spec_name="s.json", say=notes.append))
    assert [row["computed"] for row in found] == [1, 1]
    assert notes == said


def test_after_a_request_that_is_not_predictable_nothing_is_claimed():
    a = {"prompt": [1] * 9, "output_len": 1}
    found = rows(SMALL, a, a | {"stop": ["\n"]}, a)
    assert "computed" in found[0]
    assert "stop strings" in found[1]["not_predictable"]
    assert found[2] == {
        "line": 3,
        "not_predictable": (
            "the request in line 2 is not predictable, nor what it left in the tiers"
        ),
    }


@pytest.mark.parametrize(
    "field",
    [{"lora": "x"}, {"multimodal": True}, {"prompt_logprobs": 0}, {"cache_salt": "s"}],
    ids=lambda field: next(iter(field)),
)
def test_what_makes_a_request_more_than_its_tokens_is_labelled(field):
    [row] = rows(SMALL, {"prompt": [1], "output_len": 1} | field)
    assert next(iter(field)) in row["not_predictable"]


def test_switches_that_are_off_do_not_matter():
    off = {"stop": [], "lora": None, "multimodal": False, "prompt_logprobs": None}
    [row] = rows(SMALL, {"prompt": [1], "output_len": 1} | off)
    assert row["computed"] == 1


def test_a_prompt_of_several_prefill_steps_across_the_watermark_is_not_predicted():
    # 4 chunks of 8 tokens make 4 of 5: at 0.8 the eviction timer may fall between the two steps.
    spec = SMALL | {
        "host": "lmcache-mp", "chunk_size": 8, "host_chunks": 5, "num_gpu_blocks": 20,
        "max_batched_tokens": 16,
    }  # fmt: skip
    [row] = rows(spec, {"prompt": [1] * 32, "output_len": 1})
    assert "4 of 5 chunks" in row["not_predictable"]


def test_rows_come_as_lines_come_and_no_line_is_read_ahead():
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield json.dumps({"segments": [[str(i), 9]], "output_len": 1}).encode()

    found = predict_lines(PredictSpec.model_validate(SMALL), endless(), where="stream")
    assert next(found)["line"] == 1
    assert read == [0]
    assert next(found)["line"] == 2
    assert read == [0, 1]


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_keep_their_numbers():
    lines = [b"\xef\xbb\xbf" + b'{"prompt": [1], "output_len": 1}\n', b"\n", b"  \r\n",
             b'{"prompt": [1], "output_len": 1}']  # fmt: skip
    found = predict_lines(PredictSpec.model_validate(SMALL), lines, where="requests")
    assert [row["line"] for row in found] == [1, 4]


GOOD = {"prompt": [1], "output_len": 1}


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": [1], "prompt": [1], "output_len": 1}', "twice"),
        ("[1]", "record"),
        (json.dumps({"prompt": [1]}), "output_len"),
        (json.dumps(GOOD | {"output_len": 0}), "output_len"),
        (json.dumps(GOOD | {"output_len": "2"}), "output_len"),
        (json.dumps(GOOD | {"prompt": []}), "prompt"),
        (json.dumps(GOOD | {"prompt": [1, -1]}), r"prompt\.1"),
        (json.dumps(GOOD | {"prompt": [True]}), r"prompt\.0"),
        (json.dumps(GOOD | {"prompt": [2**31]}), r"prompt\.0"),
        (json.dumps(GOOD | {"segments": [["a", 1]]}), "exactly one of prompt and segments"),
        (json.dumps({"output_len": 1}), "exactly one of prompt and segments"),
        (json.dumps({"segments": [["a", 0]], "output_len": 1}), r"segments\.0\.1"),
        (json.dumps({"segments": [["a", "9"]], "output_len": 1}), r"segments\.0\.1"),
        (json.dumps({"segments": [["a", 9.0]], "output_len": 1}), r"segments\.0\.1"),
        (json.dumps({"segments": [["", 9]], "output_len": 1}), r"segments\.0\.0"),
        (json.dumps({"segments": [["a"]], "output_len": 1}), r"segments\.0"),
        (json.dumps({"segments": [["a", 2**40]], "output_len": 1}), r"segments\.0\.1: .*10000000"),
        (json.dumps(GOOD | {"output_len": 2**31}), "output_len: .*10000000"),
        (
            json.dumps({"segments": [["a", 9_999_999], ["b", 1]], "output_len": 1}),
            "10,000,001 tokens; a request has at most 10,000,000",
        ),
        (json.dumps(GOOD | {"output_len": 10_000_000}), "10,000,001 tokens"),
        (json.dumps(GOOD | {"output": [1, 2]}), "2 ids and output_len is 1"),
        (json.dumps(GOOD | {"output": "x"}), "output is a segment name"),
        (json.dumps({"segments": [["a", 1]], "output_len": 1, "output": [1]}), "output is ids"),
        (json.dumps(GOOD | {"max_tokens": 1}), "max_tokens"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_field(request_line, message):
    lines = [json.dumps(GOOD).encode(), request_line.encode()]
    found = predict_lines(PredictSpec.model_validate(SMALL), lines, where="r.jsonl")
    assert next(found)["line"] == 1
    with pytest.raises(InputError, match=rf"r\.jsonl, line 2: .*{message}"):
        next(found)


def test_a_bad_line_is_told_which_fields_there_are():
    found = predict_lines(PredictSpec.model_validate(SMALL), [b"{}"], where="r.jsonl")
    with pytest.raises(InputError) as caught:
        next(found)
    assert "segments, output_len, output, stopped" in (caught.value.hint or "")


@pytest.fixture
def spec_file(tmp_path):
    def write(spec):
        file = tmp_path / "spec.json"
        file.write_text(spec if isinstance(spec, str) else json.dumps(spec))
        return file

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "disk"}, "host: .*'none', 'lmcache-mp', 'lmcache'"),
        ({"policy": "ARC"}, "policy: .*'LRU' or 'noop'"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2.0}, "block_size"),
        ({"watermark": 1.5}, "watermark"),
        ({"gpu_blocks": 3}, "gpu_blocks"),
        ({"num_gpu_blocks": 2**31 + 1}, "num_gpu_blocks: .*2147483648"),
        ({"num_gpu_blocks": 1}, "num_gpu_blocks: .*2"),
        ({"host_chunks": 2**53 + 1}, "host_chunks: .*9007199254740992"),
        ({"concurrency": 4}, "concurrency is 4"),
        ({"speculative_tokens": 3}, "speculative_tokens is 3"),
        ({"lazy_offload": True}, "lazy_offload"),
    ],
)
def test_a_bad_spec_is_refused_with_the_field_and_what_it_takes(spec_file, change, message):
    with pytest.raises(InputError, match=message):
        read_spec(spec_file(SMALL | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "newest"}, "engine 'newest'"),
        ({"engine": "0.9.1"}, "0.9.1"),
        ({"host": "lmcache"}, "host_chunks is missing"),
        ({"host": "lmcache", "host_chunks": 9, "policy": "noop"}, "noop"),
        ({"host": "lmcache-mp", "host_chunks": 9, "chunk_size": 6}, "whole blocks"),
        ({"host": "native", "host_bytes": 9999, "chunk_bytes": 256}, "host_chunks is missing"),
        ({"host_bytes": 9999}, "neither chunk_bytes nor model"),
        ({"chunk_bytes": 255}, "no multiple of chunk_size"),
        ({"model": "/no/such/model"}, "neither a path"),
    ],
)
def test_a_spec_no_server_could_have_is_refused_before_any_request(change, message):
    spec = PredictSpec.model_validate(SMALL | change)
    with pytest.raises(InputError, match=message):
        next(predict_lines(spec, [json.dumps(GOOD).encode()], where="r", spec_name="spec.json"))


MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "dtype": "bfloat16"}


def test_a_model_says_the_bytes_of_a_chunk(tmp_path):
    # 2 * 2 layers * 4 heads * 8 * 2 bytes = 256 a token; 2 chunks of 4 tokens loaded.
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    spec = SMALL | {"host": "lmcache", "chunk_size": 4, "host_chunks": 50, "num_gpu_blocks": 4,
                    "model": str(tmp_path)}  # fmt: skip
    a, b = {"prompt": [1] * 9, "output_len": 1}, {"prompt": [2] * 9, "output_len": 1}
    assert rows(spec, a, b, a)[2]["loaded_bytes"] == 2 * 4 * 256


def test_a_hub_id_whose_shape_comes_with_kvcliff_says_them_too(tmp_path, monkeypatch):
    # 2 * 28 layers * 8 heads * 128 * 2 bytes = 114,688 a token; 2 chunks of 4 tokens loaded.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    spec = SMALL | {"host": "lmcache", "chunk_size": 4, "host_chunks": 50, "num_gpu_blocks": 4,
                    "model": "Qwen/Qwen3-0.6B"}  # fmt: skip
    a, b = {"prompt": [1] * 9, "output_len": 1}, {"prompt": [2] * 9, "output_len": 1}
    assert rows(spec, a, b, a)[2]["loaded_bytes"] == 2 * 4 * 114_688


def test_a_model_that_is_not_plain_full_attention_is_refused(tmp_path):
    kinds = ["full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"layer_types": kinds}))
    spec = PredictSpec.model_validate(SMALL | {"model": str(tmp_path)})
    with pytest.raises(InputError, match="hybrid"):
        next(predict_lines(spec, [b"{}"], where="r"))


def test_a_chunk_size_that_contradicts_the_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    change = {"model": str(tmp_path), "chunk_size": 4, "chunk_bytes": 4}
    spec = PredictSpec.model_validate(SMALL | change)
    with pytest.raises(InputError, match="keeps 1024 a chunk"):
        next(predict_lines(spec, [b"{}"], where="r"))


def test_host_bytes_may_stand_for_host_chunks_and_make_the_watermark_exact():
    # 3 chunks of 4,096 bytes in 16,383 bytes: 0.75 used, so nothing is evicted below 0.8 and the
    # first prompt is still there; 3 of 3 chunks would be beyond it.
    spec = SMALL | {"host": "lmcache-mp", "chunk_size": 4, "num_gpu_blocks": 4}
    requests = [{"prompt": [i] * 4, "output_len": 1} for i in (0, 1, 2, 0)]
    exact = spec | {"host_bytes": 16_383, "chunk_bytes": 4096}
    assert [row["stored_chunks"] for row in rows(exact, *requests)] == [1, 1, 1, 0]
    assert splits(exact, *requests)[3] == (1, 0, 3)
    assert splits(spec | {"host_chunks": 3}, *requests)[3] == (4, 0, 0)


def test_a_host_tier_described_for_another_kind_is_left_out_with_host_none():
    spec = LAB | {"host": "none"}
    assert splits(spec, *lab_segments())[8:16] == [(3020, 0, 0)] * 8


def test_requests_are_read_from_a_file_or_from_standard_input(tmp_path, spec_file, monkeypatch):
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n")
    from_file = list(predict_file(spec_file(SMALL), str(requests)))
    standard_input = io.TextIOWrapper(io.BytesIO(requests.read_bytes()))
    monkeypatch.setattr(sys, "stdin", standard_input)
    assert list(predict_file(spec_file(SMALL), "-")) == from_file
    assert len(from_file) == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path, spec_file):
    with pytest.raises(InputError, match=r"nothing\.json: No such file"):
        read_spec(tmp_path / "nothing.json")
    with pytest.raises(InputError, match=r"nothing\.jsonl: No such file"):
        next(predict_file(spec_file(SMALL), str(tmp_path / "nothing.jsonl")))
