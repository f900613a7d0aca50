import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.curves_exact import against_reference
from sim.curves import bands, compiled
from sim.curves.convert import convert, lookup_events
from sim.curves.readers import read_trace
from sim.curves.reference import ReferenceLru, hits_at, prefix_keys
from sim.curves.stack import Curve, curve
from sim.curves.synthetic import chat_trace, random_trace, trace_of
from sim.curves.tiers import Replay
from sim.curves.trace import TraceError
from sim.curves.tree import PrefixTree, build_tree
from tests.places import ROOT

# Three prompts: a, b, then a's prefix with another end.
ABC = [[1, 2, 3], [9, 8], [1, 2, 4]]


def tree_of(paths: list[list[int]], **settings: int) -> PrefixTree:
    return build_tree(trace_of(paths, **settings))  # type: ignore[arg-type]


def test_hits_at_every_capacity_by_hand() -> None:
    # After a and b the stack is 9 8 1 2 3: blocks 1 and 2 stand third and fourth.
    found = curve(tree_of(ABC))
    assert found.hits.tolist() == [0, 0, 0, 1, 2]
    assert found.at(5) == 2
    assert (found.accesses, found.requests, found.ideal) == (8, 3, 2)


def test_a_repeated_prompt_keeps_its_head_when_it_does_not_fit() -> None:
    # Freed last block first, a prompt of 4 blocks leaves its first C in a pool of C.
    found = curve(tree_of([[1, 2, 3, 4], [1, 2, 3, 4]]))
    assert found.hits.tolist() == [0, 1, 2, 3, 4]


def test_lmcaches_simulator_keeps_the_tail_so_nothing_hits_until_all_fits() -> None:
    found = curve(tree_of([[1, 2, 3, 4], [1, 2, 3, 4]]), forward=True)
    assert found.hits.tolist() == [0, 0, 0, 0, 4]


def test_an_id_means_a_block_only_together_with_what_is_before_it() -> None:
    found = curve(tree_of([[1, 2], [7, 2]]))
    assert found.ideal == 0


def test_capacity_0_holds_nothing_equality_fits_and_below_0_is_refused() -> None:
    found = curve(tree_of([[1, 2], [1, 2]]))
    assert [found.at(c) for c in (0, 1, 2, 3, 10**9)] == [0, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="a capacity of -1; 0 is the smallest"):
        found.at(-1)


def test_the_smallest_capacity_for_a_share_of_the_ideal() -> None:
    found = curve(tree_of([[1, 2, 3, 4], [1, 2, 3, 4]]))
    assert [found.capacity_for(share) for share in (0.01, 0.25, 0.26, 0.75, 1.0)] == [1, 1, 2, 3, 4]
    assert curve(tree_of([[1], [2]])).capacity_for(0.95) == 0
    # In binary 0.07 × 100 is a little more than 7, and 0.29 × 100 a little less than 29.
    assert Curve(np.arange(101), 200, 10, 16, 3200).capacity_for(0.07) == 7
    assert curve(tree_of([[1]] * 100), warm_up=0.29).requests == 71
    for share in (0, -1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"it must be a share in \(0, 1\]"):
            found.capacity_for(share)


def test_the_last_token_rule_costs_a_prompt_found_whole_its_last_block() -> None:
    # 2 whole blocks of 16: at most floor(31 / 16) = 1 can be hit; with a 33rd token both can.
    aligned = trace_of([[1, 2], [1, 2]], input_tokens=[32, 32])
    longer = trace_of([[1, 2], [1, 2]], input_tokens=[33, 33])
    assert curve(build_tree(aligned), last_token=True).ideal == 1
    assert curve(build_tree(longer), last_token=True).ideal == 2


def test_generated_tokens_push_prompts_out_and_are_never_hit() -> None:
    trace = trace_of([[1, 2], [9], [1, 2]])
    trace.requests.output_tokens[:] = [1, 17, 1]
    # [9] and its 16 generated tokens with a slot own 2 blocks, so 1 and 2 stand third and fourth.
    assert curve(build_tree(trace), decode=True).hits.tolist()[:5] == [0, 0, 0, 1, 2]
    assert curve(build_tree(trace)).hits.tolist()[:4] == [0, 0, 1, 2]


def test_a_warm_up_fills_the_cache_and_is_not_counted() -> None:
    found = curve(tree_of([[1, 2], [1, 2], [1, 2], [1, 2]]), warm_up=0.5)
    assert (found.requests, found.accesses, found.ideal) == (2, 4, 4)
    with pytest.raises(ValueError, match=r"a warm-up of 1; it must be a share in \[0, 1\)"):
        curve(tree_of(ABC), warm_up=1)


def test_other_block_sizes_are_whole_blocks_of_the_prefix() -> None:
    # Two prompts of 5 blocks of 16 share 3: 48 tokens are 1 block of 32 and 6 of 8.
    tree = tree_of([[1, 2, 3, 4, 5], [1, 2, 3, 8, 9]])
    assert curve(tree, unit_tokens=32).ideal == 1
    assert curve(tree, unit_tokens=8).ideal == 6
    assert curve(tree, unit_tokens=32).accesses == 4


def test_the_order_of_arrival_decides_not_that_of_the_trace() -> None:
    tree = tree_of(ABC)
    # b first: then a and c are neighbours and share 2 of 3 blocks at once.
    assert curve(tree, order=np.array([1, 0, 2])).hits.tolist() == [0, 1, 2]


def test_a_part_of_the_requests_has_the_curve_of_a_trace_of_that_part() -> None:
    for seed in range(6):
        trace = random_trace(seed)
        part = np.arange(len(trace.requests))[seed % 3 :: 2]
        alone = build_tree(trace_of([trace.path(r) for r in part]))
        for compiled_too in (False, True):
            found = curve(build_tree(trace), order=part, compiled=compiled_too)
            assert found.hits.tolist() == curve(alone, compiled=False).hits.tolist()


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0, 3], "requests 0 to 3; the trace has 0 to 2"),
        ([-1, 0], "requests -1 to 0"),
        ([1, 1, 0], "request 1 comes 2 times"),
        ([True, False, True], "numbers are needed"),
        ([0.0], "numbers are needed"),
    ],
)
def test_an_order_that_names_no_requests_is_refused(order: list[int], said: str) -> None:
    tree = build_tree(trace_of([[1], [2], [1]]))
    for compiled_too in (False, True):
        with pytest.raises(ValueError, match=said):
            curve(tree, order=np.array(order), compiled=compiled_too)
        with pytest.raises(ValueError, match=said):
            Replay.of(tree, order=np.array(order), compiled=compiled_too)


def test_no_mismatch_against_an_ordered_dict_at_every_capacity() -> None:
    count = against_reference(3_000)
    assert (count.mismatches, count.examples) == (0, [])
    assert count.pairs >= 3_000
    assert count.with_hits > count.pairs // 2  # agreeing on misses alone proves nothing


def test_compiled_and_plain_results_are_identical() -> None:
    for trace in [random_trace(seed, n_requests=200) for seed in range(6)] + [
        chat_trace(1, n_accesses=20_000)
    ]:
        plain, fast = (build_tree(trace, compiled=compiled) for compiled in (False, True))
        for field in ("parent", "length", "last_edge", "start", "end", "head"):
            assert np.array_equal(getattr(plain, field), getattr(fast, field)), field
        for settings in ({}, {"forward": True}, {"last_token": True}, {"warm_up": 0.3}):
            one, two = (
                curve(plain, compiled=compiled, **settings)  # type: ignore[arg-type]
                for compiled in (False, True)
            )
            assert np.array_equal(one.hits, two.hits)


def test_the_tree_holds_every_path_and_no_block_twice() -> None:
    for seed in range(20):
        trace = random_trace(seed)
        tree = build_tree(trace)
        keys = prefix_keys(trace.path(r) for r in range(len(trace.requests)))
        again = prefix_keys(tree.ids_of(r).tolist() for r in range(len(trace.requests)))
        assert keys == again
        assert tree.n_blocks == len({key for path in keys for key in path})
        assert tree.n_accesses == sum(map(len, keys))
        assert len(tree.parent) <= 2 * len(trace.requests)


def test_a_longer_cache_never_hits_less() -> None:
    for seed in range(10):
        steps = np.diff(curve(build_tree(random_trace(seed))).hits)
        assert (steps >= 0).all()


def test_kernels_compile_without_a_cache_folder_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "from sim.curves.kernels.fenwick import prefix\n"
        "from sim.curves.jit import compile_kernel\n"
        "import numpy as np\n"
        "print(compile_kernel(prefix)(np.array([0, 5, 7]), 2))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file"), "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("7\n", "")


def test_the_reference_itself_by_hand() -> None:
    cache = ReferenceLru(3)
    assert [cache.serve(path) for path in ("ab", "cd", "ab", "cd")] == [0, 0, 1, 1]
    assert hits_at(["ab", "ab"], 0) == 0


def test_bands_by_hand() -> None:
    found = Curve(np.arange(101), 200, 10, 16, 3200)  # C hits at capacity C
    assert bands.watermark(found, 100) == (64, 80)
    assert bands.watermark(found, 99) == (63, 79)  # 63.36 and 79.2 chunks
    assert bands.partial_tail(found, 50) == (49, 50)
    assert bands.partial_tail(found, 0) == (0, 0)
    lower = Curve(np.arange(101) // 2, 200, 10, 16, 3200)
    assert bands.in_process(lower, found, 50) == bands.in_process(found, lower, 50)
    assert bands.in_process(lower, found, 50) == (25, 50)


# The compiled file.


def saved(tmp_path: Path, seed: int = 3) -> tuple[PrefixTree, Path]:
    tree = build_tree(random_trace(seed))
    path = tmp_path / f"t{compiled.SUFFIX}"
    compiled.save(tree, path, notes={"why": "test"})
    return tree, path


def about(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        said: dict[str, Any] = json.loads(archive["about"].tobytes())
    return said


def test_a_compiled_trace_comes_back_the_same(tmp_path: Path) -> None:
    for seed in range(10):
        tree, path = saved(tmp_path, seed)
        again = compiled.load(path)
        for field in ("parent", "length", "last_edge", "start", "end", "head"):
            assert np.array_equal(getattr(tree, field), getattr(again, field)), field
        assert np.array_equal(tree.requests.order(), again.requests.order())
        spread = tree.requests.started_over(1e-7, seed)  # some within the same nanosecond
        compiled.save(dataclasses.replace(tree, requests=spread), path)
        assert np.array_equal(spread.order(), compiled.load(path).requests.order())
        assert np.array_equal(tree.requests.input_tokens, again.requests.input_tokens)
        assert np.array_equal(curve(tree).hits, curve(again).hits)
        assert list(tmp_path.iterdir()) == [path]


def test_a_compiled_trace_says_what_it_is(tmp_path: Path) -> None:
    tree, path = saved(tmp_path)
    said = about(path)
    assert said["format"] == "kvcliff compiled trace"
    assert said["version"] == 2
    assert said["accesses"] == tree.n_accesses
    assert said["notes"] == {"why": "test"}
    assert compiled.is_compiled(path)


def test_another_version_and_damage_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = saved(tmp_path)
    content = path.read_bytes()
    for cut in range(0, len(content), 97):
        path.write_bytes(content[:cut])
        with pytest.raises(TraceError, match=r"t\.kvtrace\.npz: "):
            compiled.load(path)
    np.savez(tmp_path / "x.npz", a=np.zeros(1))
    with pytest.raises(TraceError, match=r"x\.npz: no compiled trace: it lacks about"):
        compiled.load(tmp_path / "x.npz")
    monkeypatch.setattr(compiled, "VERSION", 3)
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"version 2 of the format, but 3 is read here: compile"):
        compiled.load(path)


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("session", [0, 2**40]),
        ("session", [0, -1]),
        ("session", 3),
        ("length", [0.5]),
        ("is_next", [-1]),
        ("input_tokens", [-5]),
        ("output_tokens", [-1]),
        ("time", [[1]]),
    ],
)
def test_columns_no_trace_can_have_are_refused(tmp_path: Path, member: str, values: object) -> None:
    _, path = saved(tmp_path)
    with np.load(path) as archive:
        columns = dict(archive)
    size = len(columns[member])
    given = np.array(values)
    columns[member] = np.resize(given, size) if given.ndim == 1 else given
    with path.open("wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="damaged compiled trace"):
        compiled.load(path)


@pytest.mark.parametrize(
    "field",
    ["source", "block_tokens", "requests", "accesses", "starts_known", "time_unit_ns",
     "kv_bytes_per_token"],
)  # fmt: skip
def test_a_compiled_trace_that_says_nonsense_of_itself_is_refused(
    tmp_path: Path, field: str
) -> None:
    _, path = saved(tmp_path)
    with np.load(path) as archive:
        columns = dict(archive)
    for nonsense in ([], {}, -1, 1.5, float("nan"), 2**70):
        if field == "kv_bytes_per_token" and nonsense in (1.5, 2**70):
            continue
        said = about(path) | {field: nonsense}
        changed = columns | {"about": np.frombuffer(json.dumps(said).encode(), dtype=np.uint8)}
        broken = path.with_name(f"broken{compiled.SUFFIX}")
        with broken.open("wb") as file:
            np.savez(file, **changed)  # type: ignore[arg-type]
        with pytest.raises(TraceError, match=f"damaged compiled trace: it says no usable {field}"):
            compiled.load(broken)


def test_a_flipped_bit_changes_nothing_or_is_refused(tmp_path: Path) -> None:
    tree, path = saved(tmp_path)
    content = path.read_bytes()
    refused = 0
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            again = compiled.load(path)
        except TraceError:
            refused += 1
        else:
            assert np.array_equal(curve(tree).hits, curve(again).hits)
            assert np.array_equal(tree.requests.time_ns, again.requests.time_ns)
    assert refused > len(content) // 14


def test_a_compiled_trace_takes_a_twentieth_of_a_byte_an_access(tmp_path: Path) -> None:
    # Conversations of a few hundred blocks a request, 0.7 M accesses; the rest is the zip's own.
    tree = build_tree(chat_trace(5, n_accesses=700_000))
    path = tmp_path / f"t{compiled.SUFFIX}"
    compiled.save(tree, path)
    assert path.stat().st_size <= tree.n_accesses / 20


# What other tools read.


def test_a_mooncake_file_of_ours_gives_the_same_curve(tmp_path: Path) -> None:
    for seed, name in itertools.product(range(5), ("t.jsonl", "t.jsonl.gz")):
        tree = build_tree(random_trace(seed))
        convert(tree, "mooncake", tmp_path / name, compress=name.endswith(".gz"))
        again = build_tree(
            read_trace(str(tmp_path / name), block_tokens=tree.requests.block_tokens)
        )
        assert np.array_equal(curve(again).hits, curve(tree).hits)
        assert np.array_equal(again.requests.input_tokens, tree.requests.input_tokens)


def test_a_lookup_file_of_ours_gives_the_curve_in_chunks(tmp_path: Path) -> None:
    for seed in range(5):
        tree = build_tree(random_trace(seed))
        chunk = 2 * tree.requests.block_tokens
        convert(tree, "lmcache", tmp_path / "t", chunk_tokens=chunk, kv_bytes_per_token=96)
        again = build_tree(read_trace(str(tmp_path / "t")))
        expected = curve(tree, unit_tokens=chunk).hits
        found = curve(again).hits
        # The tree knows blocks behind the last whole chunk, the lookups do not: same hits.
        assert expected[: len(found)].tolist() == found.tolist()
        assert again.requests.kv_bytes_per_token in (96, None)


def test_lookups_have_the_fields_lmcache_logs() -> None:
    tree = tree_of([[1, 2, 3]])
    (event,) = lookup_events(tree, tree.requests.order(), 32, kv_bytes_per_token=64)
    assert event == {
        "timestamp": 0.0,
        "request_id": "request-0",
        "model_name": "trace",
        "chunk_size": 32,
        "seq_len": 48,
        "dtypes": ["int8"],
        "shapes": [[32, 64]],
        "chunk_hashes": [f"0x{1 * 16 + 15:016x}"],  # ends with block 1, whose last token is its 15
    }


def test_an_unknown_target_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target 'vllm' is not known; known: lmcache, mooncake"):
        convert(tree_of(ABC), "vllm", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
