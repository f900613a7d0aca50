import json
import random
from pathlib import Path
from typing import Any

import pytest

from sim.curves import turns
from sim.curves.readers import read_trace
from sim.curves.reference import hits_at
from sim.curves.trace import Trace, TraceError

FIRST = {
    "session_id": "s", "timestamp": 2000, "input_length": 1536, "output_length": 512,
    "hash_ids": [1, 2, 3],
}  # fmt: skip
SECOND = {
    "session_id": "s", "delay": 500, "input_length": 512, "output_length": 9, "hash_ids": [4]
}  # fmt: skip


def read(path: Path, *rows: dict[str, Any], deltas: bool | None = True, **how: Any) -> Trace:
    (path / "t").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(str(path / "t"), deltas=deltas, **how)


def paths(trace: Trace) -> list[list[int]]:
    return [trace.path(r) for r in range(len(trace.requests))]


def in_common(one: list[Any], other: list[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_a_turns_prompt_is_the_prompt_before_the_answer_and_what_is_new(
    tmp_path: Path, compiled: bool
) -> None:
    # 1,536 + 512 generated + 512 new are 2,560 tokens: 5 blocks of 512, the first 3 seen before.
    trace = read(tmp_path, FIRST, SECOND, compiled=compiled)
    assert trace.requests.input_tokens.tolist() == [1536, 2560]
    first, second = paths(trace)
    assert (len(first), len(second), in_common(first, second)) == (3, 5, 3)
    assert hits_at([first, second], 100) == 3


def test_turns_that_end_inside_a_block_shift_what_follows_them(tmp_path: Path) -> None:
    # 1,000 tokens are blocks 1 and 488 of 2; after 200 generated tokens and 400 new ones the second
    # block is 488 + 24, and three more hold the other 176 + 400: 1,600 tokens, one block in common.
    trace = read(
        tmp_path,
        FIRST | {"input_length": 1000, "output_length": 200, "hash_ids": [1, 2]},
        SECOND | {"input_length": 400},
    )
    first, second = paths(trace)
    assert trace.requests.input_tokens.tolist() == [1000, 1600]
    assert (len(first), len(second), in_common(first, second)) == (2, 4, 1)


def test_a_block_that_goes_on_is_not_one_that_begins_again(tmp_path: Path) -> None:
    # Blocks of 4. P says 2 tokens of 5 and all 4 of 7: its second block is 7's last two. Q says 2 of
    # 5, 2 of 7 and again 2 of 7: its second block is 7's first two.
    turn = {"output_length": 0, "hash_ids": [7]}
    begin = turn | {"input_length": 2, "hash_ids": [5]}
    rows = [begin | {"session_id": "P"}, turn | {"session_id": "P", "input_length": 4}]
    rows += [row | {"session_id": "Q"} for row in (begin, *[turn | {"input_length": 2}] * 2)]
    p, q = (paths(read(tmp_path, *rows, block_tokens=4))[r] for r in (1, 4))
    assert (len(p), len(q), in_common(p, q)) == (2, 2, 1)


def test_sessions_share_what_they_begin_with_and_no_answers(tmp_path: Path) -> None:
    other = {"session_id": "other"}
    trace = read(tmp_path, FIRST, FIRST | other, SECOND | other, SECOND)
    a, b, b_again, a_again = paths(trace)
    assert a == b
    assert in_common(b_again, a_again) == 3


def test_turns_without_ids_hold_what_no_other_holds(tmp_path: Path) -> None:
    # AIPerf's own example: 300 tokens, then 300 + 40 + 150 = 490, four blocks of 100 and a part.
    rows = [{"session_id": "abc", "input_length": 300, "output_length": 40},
            {"session_id": "abc", "delay": 2, "input_length": 150, "output_length": 20}]  # fmt: skip
    trace = read(tmp_path, *rows, block_tokens=100)
    first, second = paths(trace)
    assert trace.requests.input_tokens.tolist() == [300, 490]
    assert (len(first), len(second), in_common(first, second)) == (3, 5, 3)
    assert not trace.requests.starts_known


def test_a_turn_comes_at_its_timestamp_or_its_delay_after_the_one_before(tmp_path: Path) -> None:
    late = SECOND | {"timestamp": 9000}  # its delay of 500 says nothing then
    trace = read(tmp_path, FIRST, SECOND, FIRST | {"session_id": "b"}, late, SECOND)
    assert trace.requests.session.tolist() == [0, 0, 1, 0, 0]
    assert (trace.requests.arrivals_ns() // 10**6).tolist() == [2000, 2500, 2000, 9000, 9500]
    # Starts are stretched, the pace of a session is not.
    assert trace.requests.session_start_ns.tolist() == [2 * 10**9, 2 * 10**9]


def test_rows_without_a_session_stand_alone(tmp_path: Path) -> None:
    alone = {name: FIRST[name] for name in FIRST if name != "session_id"}
    trace = read(tmp_path, alone, alone)
    assert trace.requests.input_tokens.tolist() == [1536, 1536]
    assert trace.requests.session.tolist() == [0, 1]
    assert paths(trace)[0] == paths(trace)[1]


def test_blocks_are_equal_exactly_where_their_tokens_are(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows, prompts = [], []
    spoken: dict[str, list[Any]] = {}
    for number in range(400):
        name = str(rng.randrange(120))  # short talks, so that many are alike for long
        ids = [rng.randrange(2) for _ in range(rng.randint(0, 3))]
        n_tokens = max(0, len(ids) * 4 - rng.choice([0, 0, 1, 2, 3]))
        if rng.random() < 0.2:
            n_tokens = len(ids) * 4 + rng.randint(1, 3)  # a last block that is not listed
        n_out = rng.choice([0, 0, 0, rng.randint(1, 9)])
        rows.append({"session_id": name, "input_length": n_tokens, "output_length": n_out,
                     "hash_ids": ids})  # fmt: skip
        listed = [(block, i) for block in ids for i in range(4)][:n_tokens]
        listed += [("row", number, i) for i in range(n_tokens - len(listed))]
        spoken.setdefault(name, []).extend(listed)
        prompts.append(list(spoken[name]))
        spoken[name] += [("answer", number, i) for i in range(n_out)]
    trace = read(tmp_path, *rows, block_tokens=4)
    assert trace.requests.input_tokens.tolist() == [len(prompt) for prompt in prompts]
    blocks = [[tuple(p[i : i + 4]) for i in range(0, len(p), 4)] for p in prompts]
    for one, its_path in zip(blocks, paths(trace), strict=True):
        for other, other_path in zip(blocks, paths(trace), strict=True):
            assert in_common(its_path, other_path) == in_common(one, other)


def test_answers_that_fill_blocks_are_what_a_cache_may_find_besides(tmp_path: Path) -> None:
    # 1,536 + 512 tokens generated, the last of which has no slot: 3 blocks are full, as the prompt's.
    assert turns.found_again(read(tmp_path, FIRST, SECOND).requests) == 0
    # One more fills a fourth; the last turn's answer is repeated by nobody.
    longer = read(tmp_path, FIRST | {"output_length": 513}, SECOND | {"output_length": 5000})
    assert turns.found_again(longer.requests) == 1


@pytest.mark.parametrize("field", ["session_id", "delay"])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_may_be_turns_are_not_read_until_somebody_says_what_they_are(
    tmp_path: Path, field: str, compiled: bool
) -> None:
    plain = {name: FIRST[name] for name in FIRST if name != "session_id"}
    row = plain | {field: 7}
    with pytest.raises(TraceError, match=rf"t:2: field '{field}': .* say --deltas or --no-deltas"):
        read(tmp_path, plain, row, deltas=None, compiled=compiled)
    whole = read(tmp_path, plain, row, deltas=False, compiled=compiled)
    assert whole.requests.input_tokens.tolist() == [1536, 1536]
    assert paths(whole) == [[1, 2, 3]] * 2
    says_so = row | {"context_mode": "message_array_with_responses"}
    assert paths(read(tmp_path, plain, says_so, deltas=None, compiled=compiled)) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("field", ["messages", "payload", "text_input"])
@pytest.mark.parametrize("deltas", [None, False, True])
def test_a_prompt_that_is_a_text_is_refused(
    tmp_path: Path, field: str, deltas: bool | None
) -> None:
    message = f"field '{field}' holds the prompt as text, which has no blocks"
    with pytest.raises(TraceError, match=message):
        read(tmp_path, FIRST | {field: "Hello"}, deltas=deltas)
    if not deltas:
        with pytest.raises(TraceError, match=message):
            read(tmp_path, {"session_id": "s", field: "Hello", "output_length": 4}, deltas=deltas)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([FIRST | {"hash_ids": [1]}], r"t: 1 block ids for 1536 tokens; at 512 .* 3 are needed"),
        ([FIRST, SECOND | {"timestamp": 1999}], r"t:2: field 'timestamp' is before the turn"),
        ([FIRST, SECOND | {"session_id": "b"}],
         "t:2: the first turn of its session has no timestamp, the trace's first row has a"),
        ([FIRST | {"session_id": 1.5}], "field 'session_id' is 1.5; a name is needed"),
        ([FIRST | {"context_mode": "message_array_with_responses"}], "no turn"),
        ([FIRST | {"block_size": 16}], r"3 block ids for 1536 tokens; at 16 tokens"),
        ([{"hash_ids": [1], "chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 1}],
         "Qwen-Bailian JSONL has whole prompts: leave out --deltas"),
        ([FIRST, SECOND | {"input_length": None}], "t:2: field 'input_length' is None"),
        ([FIRST | {"output_length": 2**60}] + [SECOND] * 3, "t:2: a prompt of 1,152,921,504,606,849,024 tokens with its session before it"),
    ],
)  # fmt: skip
def test_turns_that_cannot_be_joined_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path, *rows)
