"""Sources by the engine's KV events: the rule, and everything it must not guess from."""

from typing import Any

import msgspec
import pytest

from harness.counters.errors import CounterError
from harness.counters.events import (
    KvEvents,
    LostEvents,
    Preempted,
    check_named,
    chunks_loaded,
    named_from,
    split_by_events,
)
from sim.split import TokenSplit

BLOCK = 32


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(hashes: list[bytes], parent: bytes | None, who: str, **changed: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": [0] * BLOCK * len(hashes), "block_size": BLOCK, "lora_id": None,
        "medium": "GPU", "lora_name": None, "group_idx": 0, "session_id": who, **changed,
    }  # fmt: skip


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def test_a_block_stands_behind_its_parent_whoever_named_that() -> None:
    events = KvEvents(BLOCK)
    events.add(number(0), batch(stored([b"a", b"b"], None, "one")))
    events.add(number(1), batch(stored([b"c"], b"b", "two"), stored([b"d"], b"c", "two")))
    assert events.take("one") == [0, 1]
    assert events.take("two") == [2, 3]
    assert events.take("two") == []  # once only
    assert events.lost == 0


def test_removed_and_cleared_blocks_and_those_of_other_media_name_nothing() -> None:
    events = KvEvents(BLOCK)
    events.add(
        number(0),
        batch(
            stored([b"a"], None, "one"),
            {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
            stored([b"x", b"y"], None, "one", medium="CPU"),
        ),
    )
    assert events.take("one") == [0]


def test_batches_that_never_came_are_counted_and_their_blocks_have_no_place() -> None:
    events = KvEvents(BLOCK)
    events.add(number(2), batch(stored([b"c"], b"b", "one")))
    assert events.lost == 2
    assert events.take("one") == [None]


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"group_idx": 1}, "layer group 1"), ({"block_size": 16}, "blocks of 16 tokens, not 32")],
)
def test_events_of_another_shape_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CounterError, match=message):
        KvEvents(BLOCK).add(number(0), batch(stored([b"a"], None, "one", **changed)))


@pytest.mark.parametrize(
    "payload", [b"", b"\x01", batch({"type": "Else"}), msgspec.msgpack.encode({})]
)
def test_what_is_no_batch_of_events_is_refused(payload: bytes) -> None:
    with pytest.raises(CounterError, match="not as vLLM"):
        KvEvents(BLOCK).add(number(0), payload)


def test_a_second_publisher_is_noticed() -> None:
    events = KvEvents(BLOCK)
    events.add(number(0), batch())
    with pytest.raises(CounterError, match="a second server publishes"):
        events.add(number(0), batch())


@pytest.mark.parametrize(
    ("cached", "positions", "split"),
    [
        (0, range(6), (200, 0, 0)),  # nothing was cached
        (64, range(2, 6), (136, 64, 0)),  # two blocks were on the GPU
        (192, (), (8, 192, 0)),  # all six were
        (192, range(6), (8, 0, 192)),  # all came from the host
        (192, range(2, 6), (8, 64, 128)),  # the first two were on the GPU
    ],
)
def test_the_tokens_before_the_first_named_block_are_the_gpu_hit(
    cached: int, positions: range, split: tuple[int, int, int]
) -> None:
    found = split_by_events(200, cached, named_from(list(positions), BLOCK))
    assert (found.computed, found.gpu_hit, found.host_loaded) == split
    check_named(found, list(positions), block_size=BLOCK, unit_tokens=64)


def test_an_answer_that_counts_more_than_its_prompt_is_refused() -> None:
    with pytest.raises(CounterError, match="201 cached tokens of a prompt of 200"):
        split_by_events(200, 201, None)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], Preempted, "named its blocks twice"),
        ([0, 1, 2, 3, 4], LostEvents, "5 of the 6 blocks"),
        ([0, 1, 2, 4, 5], LostEvents, "5 of the 6 blocks"),
        ([1, 2, 3, 4, 5], LostEvents, "5 of the 6 blocks"),
        ([], LostEvents, "0 of the 6 blocks"),
        ([None], LostEvents, "0 of the 6 blocks"),
        ([0, 1, 2, 3, 4, 5, None], LostEvents, "6 of the 6 blocks"),
    ],
)
def test_blocks_that_are_not_exactly_those_left_to_the_request_are_refused(
    positions: list[int | None], error: type[CounterError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_named(TokenSplit(200, 200, 0, 0), positions, block_size=BLOCK, unit_tokens=None)


def test_blocks_of_the_answer_come_behind_those_of_the_prompt() -> None:
    split = TokenSplit(200, 200, 0, 0)
    check_named(split, [*range(6), 6, 7], block_size=BLOCK, unit_tokens=None)
    with pytest.raises(LostEvents):
        check_named(split, [*range(5), 6, 7], block_size=BLOCK, unit_tokens=None)


def test_a_load_ends_with_a_unit_or_before_the_last_token() -> None:
    def check(prompt: int, host: int, unit: int | None) -> None:
        split = TokenSplit(prompt, prompt - host, 0, host)
        blocks = list(range(prompt // BLOCK))
        check_named(split, blocks, block_size=BLOCK, unit_tokens=unit)

    check(200, 128, 64)
    check(256, 255, 64)  # all of the prompt was found: its last token is computed all the same
    with pytest.raises(CounterError, match="ends at token 96"):
        check(200, 96, 64)
    with pytest.raises(CounterError, match="no host tier"):
        check(200, 128, None)


@pytest.mark.parametrize(
    ("gpu_hit", "host", "chunks"), [(0, 0, 0), (0, 256, 4), (32, 224, 4), (64, 192, 3), (0, 255, 4)]
)
def test_whole_chunks_move_from_the_one_in_which_the_gpu_hit_ends(
    gpu_hit: int, host: int, chunks: int
) -> None:
    assert chunks_loaded(TokenSplit(300, 300 - gpu_hit - host, gpu_hit, host), 64) == chunks
