"""The surface of real tiers against ``sim.predict``, request by request at each pair of sizes."""

import os
from pathlib import Path

import numpy as np
import pytest

from scripts.curves_exact import predicted_sources, surface_against_prediction
from sim.curves.readers import read_trace
from sim.curves.stack import curve
from sim.curves.synthetic import chat_trace, random_trace, trace_of
from sim.curves.tiers import Replay, Surface, tier_surface
from sim.curves.trace import Trace
from sim.curves.tree import build_tree
from sim.errors import SpecError
from sim.predict import TierSpec
from sim.tiers.settings import HostSettings, TierKind

BLOCK = 16


def traces() -> list[Trace]:
    """Prompts of whole blocks and of a few tokens more; 16 tokens a block."""
    chats = chat_trace(3, n_accesses=4_000)
    drawn = [chats, *(random_trace(seed, n_requests=40) for seed in range(4))]
    made = [
        trace_of([trace.path(r) for r in range(min(len(trace.requests), 120))], block_tokens=BLOCK)
        for trace in drawn
    ]
    for number, trace in enumerate(made):
        if number != 2:  # that one has whole blocks only: second copies
            n = np.arange(len(trace.requests))
            trace.requests.input_tokens[:] += n * 7 % (40 if number == 3 else BLOCK)
    return made


@pytest.mark.parametrize(
    ("kind", "chunk", "watermark", "ratio"),
    [
        ("lmcache-mp", 2 * BLOCK, 0.8, 0.2),
        ("lmcache-mp", BLOCK, 0.5, 0.37),
        ("lmcache", 2 * BLOCK, 0.8, 0.2),
        ("native", BLOCK, 0.8, 0.2),
    ],
)
def test_a_surface_is_what_is_predicted_request_by_request(
    kind: TierKind, chunk: int, watermark: float, ratio: float
) -> None:
    settings = HostSettings(chunk_tokens=chunk, watermark=watermark, evict_ratio=ratio)
    loads = 0
    for trace in traces():
        tree = build_tree(trace)
        longest = int((-(-trace.requests.input_tokens // BLOCK)).max())
        gpu = [longest + n for n in (0, 3, 20)]
        least = longest if kind == "native" else 0
        host = sorted({least + n for n in (0, 1, 5, 9, 17, 26, 40, 70, 150, 400, 3_000)})
        for compiled in (False, True):
            replay = Replay.of(tree, last_token=True, compiled=compiled)
            found = tier_surface(replay, gpu, host, kind=kind, settings=settings)
            for i, g in enumerate(gpu):
                for j, h in enumerate(host):
                    tiers = TierSpec(
                        block_size=BLOCK, num_gpu_blocks=g + 1, max_num_batched_tokens=10**9,
                        host=kind, host_chunks=h, **settings.settings(),
                    )  # fmt: skip
                    got = found.gpu_hit_tokens[i, j], found.host_loaded_tokens[i, j]
                    if not compiled:
                        assert got == predicted_sources(tree, tiers), (kind, g, h)
                    loads += int(got[1] > 0)
        both = [
            tier_surface(
                Replay.of(tree, compiled=compiled), gpu, host, kind=kind, settings=settings
            ).host_loaded_tokens
            for compiled in (False, True)
        ]
        assert np.array_equal(*both)
    assert loads > 100


def test_a_real_traces_surface_is_what_is_predicted() -> None:
    folder = os.environ.get("KVCLIFF_TRACES")
    if not folder:
        pytest.skip("set KVCLIFF_TRACES to the folder with mooncake_conversation.jsonl")
    whole = read_trace(str(Path(folder) / "mooncake_conversation.jsonl"))
    tree = build_tree(whole.without_partial_blocks())
    part = tree.requests.order()[:2_000]
    settings = HostSettings(chunk_tokens=512)
    gpu, host = [568, 4_000], [1_500, 8_000, 30_000]
    replay = Replay.of(tree, order=part, last_token=True)
    found = tier_surface(replay, gpu, host, kind="lmcache-mp", settings=settings)
    assert found.host_loaded_tokens[0].min() > 0
    for i, g in enumerate(gpu):
        for j, h in enumerate(host):
            tiers = TierSpec(
                block_size=512, num_gpu_blocks=g + 1, max_num_batched_tokens=10**9,
                host="lmcache-mp", host_chunks=h, **settings.settings(),
            )  # fmt: skip
            got = found.gpu_hit_tokens[i, j], found.host_loaded_tokens[i, j]
            assert got == predicted_sources(tree, tiers, part), (g, h)


def test_native_with_a_prompt_larger_than_itself_says_that_timing_decides() -> None:
    replay = Replay.of(build_tree(trace_of([[1, 2, 3]])))
    with pytest.raises(SpecError, match="the native host tier holds 2"):
        tier_surface(replay, [9], [2], kind="native", settings=HostSettings(chunk_tokens=BLOCK))


def test_the_servers_watermark_by_hand() -> None:
    # 5 chunks, watermark 0.8, 0.2 dropped: a (4) is cut to 3 at once; b (2) makes 5, then 4, then
    # 3: b and a's first. a again finds that one.
    tree = build_tree(trace_of([[1, 2, 3, 4], [8, 9], [1, 2, 3, 4]], block_tokens=BLOCK))
    found = Replay.of(tree).watermark(5, HostSettings(chunk_tokens=BLOCK))
    assert found.tolist() == [0, 0, 1]


def test_a_chunk_that_no_prompt_fills_is_never_loaded() -> None:
    # 3 blocks of 16 are one chunk of 32; its 16 tokens behind it are computed again.
    tree = build_tree(trace_of([[1, 2, 3], [1, 2, 3]], block_tokens=BLOCK))
    found = surface_of(Replay.of(tree), [0], [99], chunk_tokens=32)
    assert found.host_loaded_tokens.tolist() == [[32]]


def test_the_last_token_costs_the_gpu_a_block_and_the_host_a_token() -> None:
    replay = Replay.of(build_tree(trace_of([[1, 2], [1, 2]], block_tokens=BLOCK)), last_token=True)
    found = surface_of(replay, [0, 9], [0, 9])
    # GPU: floor(31 / 16) blocks. Host: 31 of 32 tokens, and 31 - 16 behind the GPU's hit.
    assert found.gpu_hit_tokens.tolist() == [[0, 0], [16, 16]]
    assert found.host_loaded_tokens.tolist() == [[0, 31], [0, 15]]
    assert found.prompt_tokens == 64


def test_the_gpu_side_is_the_curve() -> None:
    tree = build_tree(random_trace(5))
    sizes, block = [0, 3, 9, 50], tree.requests.block_tokens
    found = surface_of(Replay.of(tree), sizes, [0], chunk_tokens=block)
    hits = curve(tree)
    assert (found.gpu_hit_tokens[:, 0] // block).tolist() == [hits.at(size) for size in sizes]


def test_no_size_of_the_surface_differs_from_the_prediction() -> None:
    count = surface_against_prediction(600)
    assert (count.mismatches, count.examples) == (0, [])
    assert count.with_hits > count.pairs // 3


def test_capacities_out_of_range_are_refused() -> None:
    replay = Replay.of(build_tree(random_trace(1)))
    with pytest.raises(ValueError, match="GPU capacities"):
        surface_of(replay, [-1], [1])
    with pytest.raises(ValueError, match="host capacities"):
        surface_of(replay, [1], [])


def surface_of(
    replay: Replay, gpu: list[int], host: list[int], *, chunk_tokens: int = BLOCK
) -> Surface:
    """With LMCache's server."""
    settings = HostSettings(chunk_tokens=chunk_tokens)
    return tier_surface(replay, gpu, host, kind="lmcache-mp", settings=settings)
