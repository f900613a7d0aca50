import bz2
import gzip
import io
import json
import lzma
import math
import os
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.curves.readers import read_trace
from sim.curves.reference import hits_at
from sim.curves.sources import expected_bytes
from sim.curves.stack import curve
from sim.curves.trace import Trace, TraceError
from sim.curves.tree import build_tree

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}
BAILIAN = {
    "chat_id": 9, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 3,
    "type": "text", "turn": 1, "hash_ids": [1089, 1090, 6326],
}  # fmt: skip
KVCACHE_SIMULATOR = {"hash_ids": ["a", "b"], "input_length": 30, "block_size": 16}
LMCACHE = {
    "timestamp": 1711929600.25, "request_id": "r", "model_name": "m", "chunk_size": 256,
    "seq_len": 700, "dtypes": ["bfloat16"], "shapes": [[2, 4, 256, 8]],
    "chunk_hashes": ["0xab", "0xcd"],
}  # fmt: skip
JOURNAL = {
    "session": "02-lmcache", "pass": "pass1-cold", "doc": 3, "doc_tokens": 70,
    "prompt_tokens": 100, "output_tokens": 2, "phase": "measure", "sent_unix_ns": 5_000_000_000,
}  # fmt: skip


def weka(name: str, ids: list[list[int]], **changes: Any) -> dict[str, Any]:
    requests = [
        {"t": 10.0 * i, "type": "n", "in": 64 * len(row) + 5, "out": 9, "hash_ids": row}
        for i, row in enumerate(ids)
    ]
    session = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}
    return session | changes


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def paths(trace: Trace) -> list[list[int]]:
    return [trace.path(r) for r in range(len(trace.requests))]


def test_mooncake_times_are_milliseconds_and_blocks_512_tokens(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", MOONCAKE))
    assert paths(trace) == [[4, 5, 6]]
    assert trace.requests.arrivals_ns().tolist() == [1_500_000_000]
    assert trace.requests.block_tokens == 512
    assert trace.requests.input_tokens.tolist() == [1030]
    assert trace.requests.output_tokens.tolist() == [7]


def test_bailian_times_are_seconds_blocks_16_tokens_and_turns_share_a_session(
    tmp_path: Path,
) -> None:
    second = BAILIAN | {"chat_id": 12, "parent_chat_id": 9, "timestamp": 70.0}
    other = BAILIAN | {"chat_id": 13, "timestamp": 65.0}
    trace = read_trace(write(tmp_path / "t", BAILIAN, second, other))
    assert trace.requests.block_tokens == 16
    assert trace.requests.session.tolist() == [0, 0, 1]
    assert trace.requests.session_start_ns.tolist() == [61_500_000_000, 65_000_000_000]
    assert trace.requests.time_ns.tolist() == [0, 8_500_000_000, 0]
    # Starts three times as far apart, the pace inside a session kept.
    assert trace.requests.arrivals_ns(time_scale=3).tolist() == [
        61_500_000_000, 70_000_000_000, 72_000_000_000]  # fmt: skip
    assert trace.requests.order(time_scale=3).tolist() == [0, 1, 2]
    assert trace.requests.order().tolist() == [0, 2, 1]


def test_kvcache_simulator_rows_carry_the_block_size_and_ids_of_any_kind(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", KVCACHE_SIMULATOR, KVCACHE_SIMULATOR | {
        "hash_ids": ["a", 7, "7"]}))  # fmt: skip
    assert trace.requests.block_tokens == 16
    first, second = paths(trace)
    assert first[0] == second[0]
    assert second[1] == second[2]  # 7 and "7" name one block there
    assert first[1] != second[1]


def test_lmcache_lookups_have_chunks_and_their_bytes(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", LMCACHE, LMCACHE | {"chunk_hashes": ["0xab"]}))
    assert trace.requests.block_tokens == 256
    assert paths(trace)[0][:1] == paths(trace)[1]
    assert trace.requests.kv_bytes_per_token == 2 * 4 * 8 * 2  # shape without its tokens, bfloat16
    assert trace.requests.input_tokens.tolist() == [700, 700]


def test_chunk_hashes_of_different_models_are_different_chunks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", LMCACHE, LMCACHE | {"model_name": "other"}))
    first, second = paths(trace)
    assert not set(first) & set(second)


def test_weka_ids_are_local_to_a_session_whose_start_is_unknown(tmp_path: Path) -> None:
    write(tmp_path / "a.json", weka("a", [[1, 2], [1, 2, 3]]))
    write(tmp_path / "b.json", weka("b", [[0, 2]]))
    trace = read_trace(str(tmp_path))
    first, second, third = paths(trace)
    assert first == second[:2]
    assert not set(second) & set(third)
    assert trace.requests.session.tolist() == [0, 0, 1]
    assert not trace.requests.starts_known
    assert trace.requests.block_tokens == 64


def test_weka_sessions_of_a_global_scope_share_ids(tmp_path: Path) -> None:
    write(tmp_path / "a.json", weka("a", [[1, 2]], hash_id_scope="global"))
    write(tmp_path / "b.json", weka("b", [[1, 2]], hash_id_scope="global"))
    first, second = paths(read_trace(str(tmp_path)))
    assert first == second


def test_sessions_of_both_scopes_do_not_mix_their_ids(tmp_path: Path) -> None:
    write(tmp_path / "a.json", weka("a", [[1, 2]], hash_id_scope="global"))
    write(tmp_path / "b.json", weka("b", [[1, 2]]))
    write(tmp_path / "c.json", weka("c", [[1, 2]], hash_id_scope="global"))
    for compiled in (False, True):
        first, second, third = paths(read_trace(str(tmp_path), compiled=compiled))
        assert first == third
        assert not set(first) & set(second)


def test_a_session_that_comes_back_with_new_ids_runs_into_no_other(tmp_path: Path) -> None:
    rows = [weka("a", [[1, 2]]), weka("b", [[1, 2]]), weka("a", [[1, 2, 4]])]
    for compiled in (False, True):
        first, second, third = paths(read_trace(write(tmp_path / "t", *rows), compiled=compiled))
        assert first == third[:2]
        assert len({*first, *second, *third}) == 5


def test_a_sub_agents_times_count_from_its_own_start(tmp_path: Path) -> None:
    session = weka("a", [[1], [2]])
    nested = {"t": 4.0, "type": "subagent", "requests": weka("x", [[7], [8]])["requests"]}
    session["requests"].insert(1, nested)
    trace = read_trace(write(tmp_path / "a.json", session))
    assert trace.requests.time_ns.tolist() == [0, 4 * 10**9, 14 * 10**9, 10 * 10**9]
    assert paths(trace) == [[1], [7], [8], [2]]
    assert trace.requests.order().tolist() == [0, 1, 3, 2]


def test_a_pretty_printed_session_is_read_as_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(weka("a", [[1, 2], [1, 3]]), indent=2))
    assert paths(read_trace(str(file))) == [[1, 2], [1, 3]]


def test_a_journal_of_ours_is_a_trace_whose_questions_are_asked_once(tmp_path: Path) -> None:
    again = JOURNAL | {"pass": "pass2-replay", "sent_unix_ns": 6_000_000_000}
    trace = read_trace(write(tmp_path / "j.jsonl", JOURNAL, again), block_tokens=32)
    first, second = paths(trace)
    # 70 of 100 tokens are the document: two whole blocks of 32 shared, the third is not.
    assert len(first) == len(second) == 3
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_a_question_that_a_later_document_includes_keeps_its_name(tmp_path: Path) -> None:
    # 64 tokens, then questions of 32: the second prompt includes the first question, in block 3.
    first = JOURNAL | {"doc_tokens": 64, "prompt_tokens": 96}
    second = first | {
        "pass": "pass2-replay", "doc_tokens": 96, "prompt_tokens": 128, "sent_unix_ns": 6 * 10**9
    }  # fmt: skip
    third = second | {
        "pass": "pass3-replay", "doc_tokens": 128, "prompt_tokens": 160, "sent_unix_ns": 7 * 10**9
    }  # fmt: skip
    trace = read_trace(write(tmp_path / "j.jsonl", first, second, third), block_tokens=32)
    one, two, three = paths(trace)
    assert two[:3] == one
    assert three[:4] == two
    assert len(three) == 5


def test_a_question_asked_again_is_the_same_where_that_is_said(tmp_path: Path) -> None:
    again = JOURNAL | {"pass": "pass2-replay", "sent_unix_ns": 6_000_000_000}
    file = write(tmp_path / "j.jsonl", JOURNAL, again)
    first, second = paths(read_trace(file, block_tokens=32, asked_again=True))
    assert first == second


def test_a_journal_needs_a_block_size(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"does not say the block size: give --block-tokens"):
        read_trace(write(tmp_path / "j.jsonl", JOURNAL))


def _tar(path: Path, sessions: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, session in sessions.items():
            data = json.dumps(session).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def test_compressed_files_and_archives_are_known_by_content(tmp_path: Path) -> None:
    line = json.dumps(MOONCAKE).encode() + b"\n"
    sessions = {"b.json": weka("b", [[9]]), "a.json": weka("a", [[1, 2]]), "README": {}}
    (tmp_path / "gz").write_bytes(gzip.compress(line))
    (tmp_path / "xz").write_bytes(lzma.compress(line))
    (tmp_path / "tar").write_bytes(lzma.compress(_tar(tmp_path, sessions)))
    assert paths(read_trace(str(tmp_path / "gz"))) == [[4, 5, 6]]
    assert paths(read_trace(str(tmp_path / "xz"))) == [[4, 5, 6]]
    assert [len(p) for p in paths(read_trace(str(tmp_path / "tar")))] == [2, 1]  # by name: a, b


@pytest.mark.parametrize("packed", [".zst", ".bz2", ".zip"])
def test_a_packed_file_in_a_folder_is_refused_not_left_out(tmp_path: Path, packed: str) -> None:
    content = {
        ".zst": bytes.fromhex("28b52ffd2400"), ".bz2": bz2.compress(b"{}"), ".zip": b"PK\x03\x04",
    }[packed]  # fmt: skip
    write(tmp_path / "a.jsonl", MOONCAKE)
    (tmp_path / f"b.jsonl{packed}").write_bytes(content)
    with pytest.raises(TraceError, match=rf"b\.jsonl\{packed}: packed with .* unpack it first"):
        read_trace(str(tmp_path))


def test_a_folders_files_may_be_packed_in_the_ways_that_are_read(tmp_path: Path) -> None:
    line = json.dumps(MOONCAKE).encode() + b"\n"
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(line))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(line))
    assert len(read_trace(str(tmp_path)).requests) == 2


def test_a_dash_is_standard_input_even_when_it_must_be_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = json.dumps(KVCACHE_SIMULATOR) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows.encode())))
    assert [len(path) for path in paths(read_trace("-"))] == [2]


@pytest.mark.parametrize("size", [2**31, 2**62 - 1, 2**70])
def test_ids_of_any_size_stay_distinct(tmp_path: Path, size: int) -> None:
    row = MOONCAKE | {"hash_ids": [size, size + 1, 3]}
    for compiled in (False, True):
        (path,) = paths(read_trace(write(tmp_path / "t", row), compiled=compiled))
        assert len(set(path)) == 3


@pytest.mark.parametrize("wrap", [2**32, 2**63, 2**64])
def test_ids_that_are_equal_in_too_few_bits_are_different_blocks(tmp_path: Path, wrap: int) -> None:
    row = MOONCAKE | {"hash_ids": [3, wrap + 3]}
    for compiled in (False, True):
        (path,) = paths(read_trace(write(tmp_path / "t", row), compiled=compiled))
        assert len(set(path)) == 2


def test_blank_lines_byte_order_mark_and_crlf_are_no_rows(tmp_path: Path) -> None:
    line = json.dumps(MOONCAKE).encode()
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf\r\n" + line + b"\r\n\r\n" + line)
    assert len(read_trace(str(tmp_path / "t")).requests) == 2


NEXT = np.nextafter(1711929600.25, math.inf)  # 238 ns later, the next moment a float can say


@pytest.mark.parametrize(
    "rows",
    [
        [MOONCAKE | {"timestamp": 1500.000002}, MOONCAKE | {"timestamp": 1500.000001}],
        [MOONCAKE | {"timestamp": 1711929600250.001}, MOONCAKE | {"timestamp": 1711929600250}],
        [BAILIAN | {"timestamp": 61.500000002}, BAILIAN | {"timestamp": 61.500000001}],
        [KVCACHE_SIMULATOR | {"timestamp": 0.000002}, KVCACHE_SIMULATOR | {"timestamp": 0.000001}],
        [LMCACHE | {"timestamp": float(NEXT)}, LMCACHE],
        [JOURNAL | {"sent_unix_ns": 1_711_929_600_250_000_001},
         JOURNAL | {"sent_unix_ns": 1_711_929_600_250_000_000}],
    ],
)  # fmt: skip
def test_requests_a_nanosecond_apart_are_served_by_arrival(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    block = 32 if "pass" in rows[0] else None
    trace = read_trace(write(tmp_path / "t", *rows), block_tokens=block)
    assert trace.requests.order().tolist() == [1, 0]


def test_a_sessions_requests_a_nanosecond_apart_are_served_by_arrival(tmp_path: Path) -> None:
    session = weka("a", [[1], [2]])
    for request, t in zip(session["requests"], (7.000000002, 7.000000001), strict=True):
        request["t"] = t
    nested = {"t": 7.0, "requests": [{"t": 0.0000000015, "in": 64, "hash_ids": [3]}]}
    session["requests"].append(nested)
    trace = read_trace(write(tmp_path / "a.json", session))
    assert trace.requests.time_ns.tolist() == [7_000_000_002, 7_000_000_001, 7_000_000_002]
    assert trace.requests.order().tolist() == [1, 0, 2]  # the trace's order within a nanosecond


def test_the_order_of_arrival_is_that_of_the_numbers_written(tmp_path: Path) -> None:
    draw = random.Random(3)
    times = [1.7e9 + draw.randrange(2**12) * 2.0**-22 for _ in range(500)]
    trace = read_trace(write(tmp_path / "t", *(LMCACHE | {"timestamp": t} for t in times)))
    assert trace.requests.order().tolist() == sorted(range(500), key=lambda r: times[r])


def spaced_json(draw: random.Random, rows: list[Any]) -> bytes:
    """The rows with white space where JSON allows it."""
    text = "".join(json.dumps(row, separators=draw.choice([(",", ":"), (" ,  ", " : ")])) + "\n"
                   for row in rows)  # fmt: skip
    return text.replace("[", draw.choice(["[", "[  "])).replace("]", " ]").encode()


def test_the_compiled_scanner_reads_what_the_plain_way_reads(tmp_path: Path) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        size = draw.choice([10, 10**6, 10**17])
        rows = [
            MOONCAKE | {"hash_ids": [draw.randrange(size) for _ in range(draw.randrange(6))],
                        "note": draw.choice(["", 'x"hash_ids":[1', "\\", "ü"]), "timestamp": i}
            for i in range(draw.randint(1, 30))
        ]  # fmt: skip
        file = tmp_path / f"{seed}"
        file.write_bytes(spaced_json(draw, rows))
        fast, plain = (read_trace(str(file), compiled=compiled) for compiled in (True, False))
        assert paths(fast) == paths(plain) == [row["hash_ids"] for row in rows], seed
        assert fast.ids.dtype == plain.ids.dtype
        assert fast.requests.time_ns.tolist() == plain.requests.time_ns.tolist()


BAD_ROWS = [
    ({"timestamp": True}, r"t:2: field 'timestamp' is True; a number ≥ 0"),
    ({"timestamp": "1"}, r"t:2: field 'timestamp' is '1'; a number ≥ 0"),
    ({"timestamp": -1}, r"t:2: field 'timestamp' is -1; a number ≥ 0"),
    ({"input_length": 1.5}, r"t:2: field 'input_length' is 1.5; a whole number"),
    ({"input_length": True}, r"t:2: field 'input_length' is True; a whole number"),
    ({"input_length": -1}, r"t:2: field 'input_length' is -1; a whole number ≥ 0"),
    ({"timestamp": 10**400}, r"t:2: field 'timestamp' is 1000.*: a moment 4,611,686,018 s or more"),
    ({"timestamp": 1e300}, r"t:2: field 'timestamp' is 1e\+300: .* is it in the format's unit\?"),
    ({"timestamp": 2**62 // 10**6 + 1}, r"t:2: field 'timestamp' .* is it in the format's unit\?"),
    ({"input_length": 2**62}, r"t:2: field 'input_length' is 4611686018427387904"),
    ({"input_length": 2**61}, r"t:2: 2.31e\+18 prompt tokens, of 2.31e\+18 in the trace; it must"),
    ({"output_length": 2**62 - 1}, r"t:2: 4.61e\+18 generated tokens"),
    ({"hash_ids": 0}, r"t:2: field 'hash_ids' is of type int; a list is needed"),
    ({"hash_ids": [1, None]}, r"t:2: hash_ids\[1\] is None; a whole number or a string"),
    ({"hash_ids": [1, True]}, r"t:2: hash_ids\[1\] is True; a whole number or a string"),
    ({"hash_ids": [1.0]}, r"t:2: hash_ids\[0\] is 1.0; a whole number or a string"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_a_wrong_value_is_named_with_file_line_and_field(
    tmp_path: Path, compiled: bool, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t", MOONCAKE, MOONCAKE | change), compiled=compiled)


BAD_TEXTS = [
    (b'{"a": 1}\n', r"t: not a trace format known here. It has the fields a; needed are"),
    (b"[1]\n", r"t: a list where a JSON object should be"),
    (b"", r"t: the trace is empty"),
    (b"\n\n", r"t: the trace is empty"),
    (b"hello\n", r"t:1: not valid JSON"),
    (b'{"timestamp": 1, "inp', r"t:1: not valid JSON"),
    (b'{"timestamp": NaN, "input_length": 1, "hash_ids": []}\n', r"t: not valid JSON: NaN is not a number"),
    (b'{"timestamp": 1e999, "input_length": 1, "hash_ids": []}\n',
     r"t: not valid JSON: 1e999 is too large for a number"),
    (b'{"timestamp": 1, "input_length": 1, "hash_ids": ["\\ud800"]}\n',
     r"t: not valid JSON: .*surrogates not allowed"),
    (b'{"timestamp": 1, "timestamp": 2, "input_length": 1, "hash_ids": []}\n',
     r"t: not valid JSON: key 'timestamp' appears twice"),
    (b'{"timestamp": 1, "input_length": 1, "hash_ids": [01]}\n', r"t: not valid JSON"),
    (b'{"timestamp": 1, "input_length": 1, "hash_ids": [1,]}\n', r"t: not valid JSON"),
    (b'{"timestamp": 1, "input_length": 1, "hash_ids": [1], "x": "\xff"}\n', r"t: not valid JSON: not UTF-8 at byte"),
    (b"\x1f\x8b\x08garbage", r"t: damaged compressed file"),
    (b"PK\x03\x04 a compiled trace, piped",
     r"t: packed with zip, .*\(unzip\); .*; a compiled trace is read from its own file alone"),
    (bytes.fromhex("28b52ffd2400"), r"t: packed with zstd, which is not read: .*\(unzstd\); read are"),
    (bz2.compress(b'{"timestamp": 1}\n'), r"t: packed with bzip2, .*\(bunzip2\); .* gzip, xz and tar$"),
]  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, compiled: bool, text: bytes, message: str
) -> None:
    (tmp_path / "t").write_bytes(text)
    with pytest.raises(TraceError, match=message):
        read_trace(str(tmp_path / "t"), compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_truncated_last_row_is_an_error_with_its_line(tmp_path: Path, compiled: bool) -> None:
    rows = json.dumps(MOONCAKE) + "\n" + json.dumps(MOONCAKE)[:-9]
    (tmp_path / "t").write_text(rows)
    with pytest.raises(TraceError, match=r"t:2: not valid JSON"):
        read_trace(str(tmp_path / "t"), compiled=compiled)


def test_rows_of_another_format_or_block_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t:2: not Mooncake JSONL as the rest .* 'hash_ids'"):
        read_trace(write(tmp_path / "t", MOONCAKE, LMCACHE))
    other = KVCACHE_SIMULATOR | {"block_size": 32}
    with pytest.raises(TraceError, match=r"t:2: blocks of 32 tokens, but 16 in the rows before"):
        read_trace(write(tmp_path / "t", KVCACHE_SIMULATOR, other))
    with pytest.raises(TraceError, match=r"'block_size' is 16, but 64 was asked for"):
        read_trace(write(tmp_path / "t", KVCACHE_SIMULATOR), block_tokens=64)


def test_totals_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    half = MOONCAKE | {"input_length": 2**60}
    with pytest.raises(
        TraceError, match=r"t:1: 1.15e\+18 prompt tokens, of 2.31e\+18 in the trace"
    ):
        read_trace(write(tmp_path / "t", half, half))
    with pytest.raises(TraceError, match=r"t: 3.46e\+18 listed block tokens"):
        read_trace(write(tmp_path / "t", MOONCAKE), block_tokens=2**60)
    for size in (0, 2**61, 2**70):
        with pytest.raises(TraceError, match=r"they hold at least 1, below 2\*\*61"):
            read_trace(write(tmp_path / "t", MOONCAKE), block_tokens=size)
    at_most = read_trace(write(tmp_path / "t", MOONCAKE | {"input_length": 2**61 - 1024}))
    assert int(at_most.requests.input_tokens[0]) == 2**61 - 1024


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": [["x"]]}, {"shapes": [[[1]]]}, {"shapes": [[2, 10**400]]}, {"shapes": [[0]]},
        {"shapes": [[True]]}, {"shapes": [3]}, {"shapes": {"a": 1}}, {"dtypes": ["a", "b"]},
        {"dtypes": "bfloat16"},
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"t:2: fields 'shapes' and 'dtypes' are .* and .*; lists"):
        read_trace(write(tmp_path / "t", LMCACHE, LMCACHE | change))


@pytest.mark.parametrize("change", [{"dtypes": ["int3"]}, {"shapes": [], "dtypes": []},
                                    {"shapes": None}, {"shapes": [[2**31] * 4]}])  # fmt: skip
def test_lookups_that_do_not_say_their_bytes_have_none(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    trace = read_trace(write(tmp_path / "t", LMCACHE | change))
    assert trace.requests.kv_bytes_per_token is None


def test_a_journals_document_is_no_longer_than_its_prompt(tmp_path: Path) -> None:
    for change in ({"doc_tokens": 101}, {"prompt_tokens": 2**61}):
        with pytest.raises(TraceError, match=r"t: fields 'doc_tokens' and 'prompt_tokens' are"):
            read_trace(write(tmp_path / "t", JOURNAL | change), block_tokens=32)


def test_a_moment_of_sub_agents_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    session = weka("a", [[1]])
    nested = {"t": 4e9, "requests": [{"t": 4e9, "in": 64, "hash_ids": [3]}]}
    session["requests"].append(nested)
    with pytest.raises(TraceError, match=r"requests\[1\]: requests\[0\]: field 't' is 4000000000"):
        read_trace(write(tmp_path / "a.json", session))


def test_a_wrong_value_in_a_session_is_named_with_its_request(tmp_path: Path) -> None:
    session = weka("a", [[1], [2]])
    del session["requests"][1]["in"]
    with pytest.raises(TraceError, match=r"a.json: requests\[1\]: field 'in' is missing"):
        read_trace(write(tmp_path / "a.json", session))
    with pytest.raises(TraceError, match=r"'hash_id_scope' is 'mine'; known: local, global"):
        read_trace(write(tmp_path / "a.json", weka("a", [[1]], hash_id_scope="mine")))


def test_a_path_that_is_not_there_and_a_folder_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing: cannot be read: No such file"):
        read_trace(str(tmp_path / "missing"))
    with pytest.raises(TraceError, match=r"the folder has no file ending in \.json"):
        read_trace(str(tmp_path))


def test_long_files_are_read_in_pieces_that_keep_their_line_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.curves.readers.PIECE_BYTES", 200)
    rows = [MOONCAKE | {"hash_ids": [i, i + 1], "timestamp": i} for i in range(50)]
    for compiled in (False, True):
        trace = read_trace(write(tmp_path / "t", *rows), compiled=compiled)
        assert paths(trace) == [row["hash_ids"] for row in rows]
        with pytest.raises(TraceError, match=r"bad:51: field 'timestamp' is -1"):
            read_trace(
                write(tmp_path / "bad", *rows, MOONCAKE | {"timestamp": -1}), compiled=compiled
            )


def test_blocks_that_a_prompt_does_not_fill_can_be_left_out(tmp_path: Path) -> None:
    exact = MOONCAKE | {"input_length": 1536}
    trace = read_trace(write(tmp_path / "t", MOONCAKE, exact)).without_partial_blocks()
    assert paths(trace) == [[4, 5], [4, 5, 6]]


def test_the_real_traces_have_the_counts_their_readme_states() -> None:
    folder = os.environ.get("KVCLIFF_TRACES")
    if not folder:
        pytest.skip("set KVCLIFF_TRACES to the folder with mooncake_conversation.jsonl")
    trace = read_trace(str(Path(folder) / "mooncake_conversation.jsonl"))
    assert len(trace.requests) == 12_031
    assert len(trace.ids) == 288_500
    assert len(np.unique(trace.ids)) == 182_790
    tree = build_tree(trace)
    found = curve(tree)
    assert found.ideal == 288_500 - 182_790
    for capacity in (100, 5_000, 40_000):
        assert hits_at((trace.path(r) for r in range(12_031)), capacity) == found.at(capacity)


def test_the_real_sessions_are_read_from_their_archive_and_nest() -> None:
    folder = os.environ.get("KVCLIFF_TRACES")
    if not folder:
        pytest.skip("set KVCLIFF_TRACES to the folder with weka_sessions.tar.xz")
    trace = read_trace(str(Path(folder) / "weka_sessions.tar.xz"))
    assert len(trace.requests.session_start_ns) == 355
    assert len(trace.requests) == 23_491 + 524  # of sessions, of sub-agents
    assert len(trace.ids) == 47_061_278
    assert int(trace.requests.input_tokens.sum()) == 3_012_680_174
    assert build_tree(trace).n_blocks == 1_727_499


def test_the_bytes_to_read_are_known_before_only_of_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}\n")
    (tmp_path / "b.jsonl").write_text("{}{}\n")
    (tmp_path / "notes.txt").write_text("no part of the trace")
    assert expected_bytes(str(tmp_path)) == 3 + 5
    assert expected_bytes(str(tmp_path / "b.jsonl")) == 5
    # Its bytes on disk are fewer than it gives: a bar drawn with them would run past its end.
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    for path in (tmp_path, tmp_path / "c.jsonl.gz", tmp_path / "absent.jsonl", "-"):
        assert expected_bytes(str(path)) is None
