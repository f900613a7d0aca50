import csv
import errno
import gzip
import itertools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.charting import HEIGHT, save
from harness.cli import COMMANDS, command_line
from harness.errors import InputError
from harness.report import chart_specs
from harness.traces import plots
from harness.traces.compile import compile_trace
from harness.traces.convert import convert_trace
from harness.traces.curve import read_measured, run_curve
from harness.traces.describe import description
from harness.traces.load import Loaded, TraceOptions, load
from harness.traces.serving import Serving
from harness.traces.surface import run_surface
from harness.traces.tables import readable, write_csv
from harness.words_and_colours import PAPER
from sim.curves import compiled
from sim.curves.capacity import Ruler, spaced
from sim.curves.synthetic import random_trace, trace_of
from sim.curves.tree import build_tree
from tests.places import ROOT

# a, b, a again: see test_curves_surface for the stack by hand.
ROWS = [
    {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]},
    {"timestamp": 9, "input_length": 1024, "output_length": 1, "hash_ids": [8, 9]},
    {"timestamp": 20, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]},
]
MODEL = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 2


@pytest.fixture
def trace(tmp_path: Path) -> str:
    # Written out of order: arrival decides.
    rows = [ROWS[2], ROWS[0], ROWS[1]]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def curve_json(trace: str, at: str | None = None, **settings: Any) -> dict[str, Any]:
    return run_curve(load(trace, TraceOptions()), Serving(), at=at, **settings).json


def test_curve_json_by_hand(trace: str) -> None:
    content = curve_json(trace, "100,3,2,5")
    for field, value in {
        "requests": 3, "accesses": 10, "distinct_blocks": 6, "block_size": 512,
    }.items():  # fmt: skip
        assert content[field] == value
    # The stack before a's return is 8 9 1 2 3 4.
    assert [(p["gpu_blocks"], p["hit_blocks"]) for p in content["points"]] == [
        (100, 4), (3, 1), (2, 0), (5, 3)]  # fmt: skip
    assert content["ideal_hit_blocks"] == 4
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_a_trace_of_an_empty_prompt_has_no_hits_and_no_shares(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    output = tmp_path / "t.kvtrace.npz"
    compile_trace(str(tmp_path / "t.jsonl"), output, TraceOptions())
    for path in (tmp_path / "t.jsonl", output):
        content = curve_json(str(path), "0,5", targets=[0.95], policies=["arc", "belady"])
        assert [point["hit_blocks"] for point in content["points"]] == [0, 0]
        assert content["ideal_hit_share"] == 0
        (pair,) = run_surface(load(str(path), TraceOptions()), Serving(), gpu="1", host="1").json[
            "points"
        ]
        assert pair["computed_tokens"] == 3


def test_the_last_token_rule_is_off_unless_asked_for(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    point = run_curve(loaded, Serving(last_token=True), at="6").json["points"][0]
    assert point["hit_blocks"] == 3


def test_targets_name_the_capacity_for_a_share_of_the_ideal(trace: str) -> None:
    (target,) = curve_json(trace, "1", targets=[0.75])["targets"]
    assert (target["gpu_blocks"], target["hit_blocks"], target["gpu_tokens"]) == (5, 3, 2560)


def test_the_speed_up_is_labelled_a_bound_and_assumptions_are_spelt_out(trace: str) -> None:
    content = curve_json(trace, "6")
    # 4 of 10 blocks are hits: at most 1 / (1 − 0.4) times faster.
    assert content["points"][0]["prefill_speedup_upper_bound"] == pytest.approx(1 / 0.6)
    text = " ".join(content["assumptions"])
    for words in ("by arrival", "last block first", "no last-token rule", "a bound"):
        assert words in text


def test_capacities_below_the_longest_request_are_warned_about(trace: str) -> None:
    assert curve_json(trace, "4,9")["warnings"] == []
    (warning,) = curve_json(trace, "3,9")["warnings"]
    assert "1 of the GPU capacities are below the longest request's 4 blocks" in warning


def test_a_block_size_that_the_ids_contradict_is_refused(trace: str) -> None:
    # 4 ids for 2,048 tokens are Mooncake's 512 each; at 64 they would be a 32nd of the prompt.
    said = "4 ids for 2,048 tokens are blocks of 512 tokens, as Mooncake JSONL has them; 64 was"
    with pytest.raises(InputError, match=f":1: {said}"):
        load(trace, TraceOptions(block_tokens=64))
    assert load(trace, TraceOptions(block_tokens=512)).ruler.block_tokens == 512


def test_a_block_size_that_the_ids_fit_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 130, "hash_ids": [1, 2, 3]}))
    assert load(str(path), TraceOptions(block_tokens=64)).ruler.block_tokens == 64


def test_a_folder_says_what_of_it_was_not_read(trace: str, tmp_path: Path) -> None:
    (tmp_path / "b.ndjson").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    loaded = load(str(tmp_path), TraceOptions())
    assert len(loaded.tree.requests) == 4
    assert "the folder's 2 files are one trace, in order of name" in loaded.assumptions
    assert loaded.warnings == ("not read of the folder: LICENSE, more/",)


def test_a_file_packed_and_not_is_no_trace_of_two_files(trace: str, tmp_path: Path) -> None:
    packed = Path(f"{trace}.gz")
    packed.write_bytes(gzip.compress(Path(trace).read_bytes()))
    with pytest.raises(InputError, match=r"trace\.jsonl and .*trace\.jsonl\.gz are one file"):
        load(str(tmp_path), TraceOptions())


def test_a_time_scale_without_sessions_to_stretch_is_refused(trace: str) -> None:
    with pytest.raises(InputError, match="no session of several requests: it would change nothing"):
        load(trace, TraceOptions(time_scale=2))


def test_bands_and_policies_stand_beside_the_curve(trace: str) -> None:
    content = curve_json(trace, "5", with_bands=True, policies=["fifo", "belady"])
    (point,) = content["points"]
    assert point["partial_tail_hit_blocks"] == [2, 3]
    assert point["lmcache_mp_watermark_hit_blocks"] == [1, 2]  # curve(3.2) and curve(4)
    low, high = point["lmcache_in_process_hit_blocks"]
    assert low <= high == 3
    assert point["policies"]["belady"] == 4  # drop b, which never returns
    assert point["policies"]["fifo"] <= 4


def test_a_given_concurrency_replaces_the_serial_order(trace: str, tmp_path: Path) -> None:
    lives = tmp_path / "lives.csv"
    # Rows of the trace: 0 is a's return, 1 is a, 2 is b. All three overlap.
    lives.write_text("request,start_s,finish_s\n0,2,9\n1,0,9\n2,1,9\n")
    content = curve_json(trace, "6,7", concurrency=lives)
    assert content["exact_from_blocks"] == 6  # a and b at once, the second a holds a's blocks
    assert [point["hit_blocks"] for point in content["points"]] == [4, 4]


def test_a_byte_order_mark_in_the_lifetimes_is_no_part_of_them(trace: str, tmp_path: Path) -> None:
    lives = tmp_path / "lives.csv"
    lives.write_bytes(b"\xef\xbb\xbfrequest,start_s,finish_s\r\n0,2,9\r\n1,0,9\r\n2,1,9\r\n")
    assert curve_json(trace, "6", concurrency=lives)["exact_from_blocks"] == 6
    lives.write_bytes(b"request,start_s,finish_s\n0,\xff,9\n")
    with pytest.raises(InputError, match=r"lives.csv: not UTF-8 at byte 27"):
        curve_json(trace, "6", concurrency=lives)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"lives.csv:1: the header must be request,start_s,finish_s"),
        ("request,start\n", r"lives.csv:1: the header must be request,start_s,finish_s"),
        ("request,start_s,finish_s\n0,1,x\n", r"lives.csv:2: field 'finish_s' is 'x'"),
        ("request,start_s,finish_s\n0,1\n", r"lives.csv:2: 2 fields, but 3 in the header"),
        ("request,start_s,finish_s\n0,1,2,3\n", r"lives.csv:2: 4 fields, but 3 in the header"),
        ('request,start_s,finish_s\n0,"1"x,2\n', r"lives.csv:2: not CSV"),
        ("request,start_s,finish_s\n1e400,1,2\n", r"lives.csv:2: field 'request' is '1e400'"),
        ("request,start_s,finish_s\n0,2,1\n", r"lives.csv:2: request 0 from 2.0 to 1.0 s"),
        ("request,start_s,finish_s\n7,1,2\n", r"lives.csv:2: request 7"),
        ("request,start_s,finish_s\n0,1,nan\n", r"lives.csv:2: request 0 from 1.0 to nan"),
        ("request,start_s,finish_s\n0,1,2\n0,1,2\n", r"lives.csv:3: request 0 is there twice"),
        ("request,start_s,finish_s\n0,1,2\n", r"2 of 3 requests are missing, first 1"),
    ],
)
def test_wrong_lifetimes_are_named(trace: str, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lives.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        curve_json(trace, "6", concurrency=tmp_path / "lives.csv")


def test_surface_json_by_hand(trace: str) -> None:
    content = run_surface(load(trace, TraceOptions()), Serving(), gpu="3,6", host="0,5,6,8").json
    found = [
        (p["gpu_blocks"], p["host_blocks"], p["hit_blocks"], p["host_loaded_blocks"])
        for p in content["points"]
    ]
    # A GPU of 3 hits block 1. A host of 5 is cut to 3 after b, one of 6 to 4, b's 2 among them; one
    # of 8 stays below its watermark with all 6.
    assert found == [(3, 0, 1, 0), (3, 5, 1, 0), (3, 6, 1, 1), (3, 8, 1, 3), (6, 0, 4, 0),
                     (6, 5, 4, 0), (6, 6, 4, 0), (6, 8, 4, 0)]  # fmt: skip
    for point in content["points"]:
        tokens = [point[f"{s}_tokens"] for s in ("gpu_hit", "host_loaded", "computed")]
        assert sum(tokens) == content["prompt_tokens"] == 5120


def test_shares_are_of_the_prompt_tokens_in_curve_and_surface(tmp_path: Path) -> None:
    # Ten prompts of 100,000 tokens, of which three blocks of 512 are named: nine of them find
    # 1,536 tokens each, 1.3824 % of 1,000,000.
    rows = [{"timestamp": i, "input_length": 100_000, "hash_ids": [1, 2, 3]} for i in range(10)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(str(path), TraceOptions())
    content = run_curve(loaded, Serving(), at="3").json
    (point,) = content["points"]
    assert point["hit_share"] == content["ideal_hit_share"] == pytest.approx(0.013824)
    assert point["share_of_ideal"] == 1.0
    assert point["prefill_speedup_upper_bound"] == pytest.approx(1 / (1 - 0.013824))
    (pair,) = run_surface(loaded, Serving(), gpu="3", host="0").json["points"]
    assert 1 - pair["computed_share"] == pytest.approx(0.013824)
    assert description(loaded)["ideal_hit_share"] == pytest.approx(0.013824)


def test_a_block_that_a_prompt_does_not_fill_is_none(tmp_path: Path) -> None:
    # Four blocks listed, 100 tokens of the last one: three are whole, and vLLM caches no other.
    row = ROWS[0] | {"input_length": 3 * 512 + 100}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row | {"timestamp": t}) + "\n" for t in (0, 1)))
    loaded = load(str(path), TraceOptions())
    (point,) = run_curve(loaded, Serving(), at="9").json["points"]
    assert point["hit_blocks"] == 3
    assert point["hit_share"] == 3 * 512 / 3272
    (pair,) = run_surface(loaded, Serving(), gpu="9", host="9").json["points"]
    assert (pair["gpu_hit_tokens"], pair["computed_tokens"]) == (1536, 1636 + 100)


def test_a_compiled_trace_with_blocks_not_filled_is_to_be_compiled_again(tmp_path: Path) -> None:
    trace = trace_of([[1, 2]], input_tokens=[17])
    compiled.save(build_tree(trace), tmp_path / "t.kvtrace.npz")
    with pytest.raises(InputError, match="an earlier kvcliff counted: compile the trace again"):
        load(str(tmp_path / "t.kvtrace.npz"), TraceOptions())


def test_requests_that_warm_the_tiers_are_in_no_count(trace: str) -> None:
    # a and b only warm both tiers: a's return is 4 blocks of 512 tokens, all hits.
    loaded, how = load(trace, TraceOptions()), Serving(warm_up=0.67)
    for content in (
        run_curve(loaded, how, at="6").json,
        run_surface(loaded, how, gpu="6", host="1").json,
    ):
        assert (content["requests"], content["accesses"]) == (1, 4)
        assert content["points"][0]["hit_blocks"] == 4
    assert content["prompt_tokens"] == 2048


def test_a_surface_names_the_host_that_reaches_a_target(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    content = run_surface(loaded, Serving(), gpu="3,6", host="0,6,8", targets=[1.0]).json
    assert content["targets"] == [
        {"target": 1.0, "gpu_blocks": 3, "host_blocks": 8},
        {"target": 1.0, "gpu_blocks": 6, "host_blocks": 0},
    ]
    assert readable(content)["targets"][0] == {
        "target": "100.0%", "GPU blocks": 3, "host blocks": 8
    }  # fmt: skip


def test_a_host_of_another_kind_is_replayed_or_refused(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    # vLLM's own offloading evicts for room alone: 6 chunks hold a and b.
    run = run_surface(loaded, Serving(), gpu="0", host="6", host_kind="native")
    assert run.json["points"][0]["host_loaded_blocks"] == 4
    for wrong, said in (
        ({"host_kind": "simple"}, "known: lmcache-mp, lmcache, native"),
        ({"host_kind": "native", "watermark": 0.9}, "of lmcache-mp alone, not of native"),
        ({"watermark": 1.5}, "watermark is 1.5"),
        ({"targets": [2.0]}, "a target of 2.0"),
        ({"host_kind": "native", "host": "3"}, "the native host tier holds 3"),
    ):
        with pytest.raises(InputError, match=said):
            run_surface(loaded, Serving(), **{"gpu": "3", "host": "6"} | wrong)


def test_a_hosts_capacity_holds_whole_chunks(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    content = run_surface(loaded, Serving(), gpu="0", host="7", chunk_tokens=1024).json
    (point,) = content["points"]
    assert point["host_chunks"] == 3  # 7 × 512 tokens are 3 whole chunks, cut to b and a's first
    assert point["host_loaded_tokens"] == 1024


def test_a_host_no_larger_than_the_gpu_is_called_nearly_worthless(trace: str) -> None:
    content = run_surface(load(trace, TraceOptions()), Serving(), gpu="6", host="5").json
    assert any("no larger than the GPU tier" in warning for warning in content["warnings"])
    assert any("0.00%" in warning for warning in content["warnings"])


def test_compile_describe_and_curve_agree(trace: str, tmp_path: Path) -> None:
    output = tmp_path / "t.kvtrace.npz"
    made = compile_trace(trace, output, TraceOptions())
    described = description(load(str(output), TraceOptions()))
    for field in ("requests", "accesses", "distinct_blocks", "block_size", "prompt_tokens"):
        assert made[field] == described[field]
    assert described["ideal_hit_share"] == 0.4
    assert curve_json(str(output), "3,5")["points"] == curve_json(trace, "3,5")["points"]


def test_a_compiled_trace_cannot_change_its_blocks(trace: str, tmp_path: Path) -> None:
    output = tmp_path / "t.kvtrace.npz"
    compile_trace(trace, output, TraceOptions())
    with pytest.raises(
        InputError, match="its blocks and prompts are fixed; compile the trace again"
    ):
        load(str(output), TraceOptions(block_tokens=16))
    with pytest.raises(InputError, match=r"must end in \.kvtrace\.npz"):
        compile_trace(trace, tmp_path / "t.npz", TraceOptions())


def test_converted_traces_give_the_same_curve(trace: str, tmp_path: Path) -> None:
    for target in ("mooncake", "lmcache"):
        output = tmp_path / f"{target}.jsonl"
        assert convert_trace(load(trace, TraceOptions()), output, target)["requests"] == 3
        assert [p["hit_blocks"] for p in curve_json(str(output), "3,5,9")["points"]] == [1, 3, 4]
    for chunk in (0, 2**61):
        with pytest.raises(InputError, match=f"chunks of {chunk} tokens; they hold at least 1"):
            convert_trace(
                load(trace, TraceOptions()), tmp_path / "x", "lmcache", chunk_tokens=chunk
            )
    with pytest.raises(InputError, match="target 'x' is not known"):
        convert_trace(load(trace, TraceOptions()), tmp_path / "x", "x")


def test_sessions_without_starts_are_spread_and_that_is_said(tmp_path: Path) -> None:
    for name in "ab":
        request = {"t": 0.0, "in": 64, "out": 1, "hash_ids": [1]}
        session = {"id": name, "block_size": 64, "requests": [request]}
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    loaded = load(str(tmp_path), TraceOptions(spread_hours=2, seed=7))
    arrivals = loaded.tree.requests.arrivals_ns()
    assert ((arrivals >= 0) & (arrivals < 7200 * 10**9)).all()
    assert "2 sessions start at random moments of 2 h (seed 7)" in loaded.assumptions[1]
    again = load(str(tmp_path), TraceOptions(spread_hours=2, seed=7))
    assert again.tree.requests.arrivals_ns().tolist() == arrivals.tolist()
    with pytest.raises(InputError, match="a spread of -1 hours"):
        load(str(tmp_path), TraceOptions(spread_hours=-1))
    with pytest.raises(InputError, match=r"a spread of 3.6e\+12 s; 4.6"):
        load(str(tmp_path), TraceOptions(spread_hours=1e9))
    with pytest.raises(InputError, match="a time scale of 0"):
        load(str(tmp_path), TraceOptions(time_scale=0))
    for scale in (1e18, 1e300):
        with pytest.raises(InputError, match=r"a time scale of 1e\+.* puts sessions"):
            load(str(tmp_path), TraceOptions(time_scale=scale))


def test_gib_come_from_the_models_config(trace: str, model: Path) -> None:
    loaded = load(trace, TraceOptions(), model=model)
    gib_a_block = 512 * BYTES_PER_TOKEN / 2**30
    (point,) = run_curve(loaded, Serving(), at=f"{5 * gib_a_block} GiB").json["points"]
    assert point["gpu_blocks"] == 5
    assert point["gpu_gib"] == 5 * gib_a_block


def test_a_hub_id_whose_shape_comes_with_kvcliff_gives_gib(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    # 147,456 bytes a token of Qwen3-8B, 512 tokens a block: 1 GiB is 14.2 blocks.
    found = kvcliff("curve", trace, "--model", "Qwen/Qwen3-8B", "--gpu", "1 GiB")
    assert found["points"][0]["gpu_blocks"] == 14


def test_a_kv_dtype_without_a_model_is_refused(trace: str) -> None:
    with pytest.raises(InputError, match="a KV cache of fp8 means nothing without a model"):
        load(trace, TraceOptions(), kv_dtype="fp8")


def test_a_missing_trace_or_model_is_an_input_error(trace: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load(str(tmp_path / "no"), TraceOptions())
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load(trace, TraceOptions(), model=tmp_path / "no")


# Capacities as people write them.


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("0", [0]), ("100", [100]), (" 7 , 3 ", [7, 3]), ("5 blocks", [5]), ("2k", [2000]),
        ("1.5k blocks", [1500]), ("32 tokens", [2]), ("47tok", [2]), ("0.1M tokens", [6250]),
        ("1 GiB", [65_536]), ("0.5gib", [32_768]), ("1..100:3", [1, 10, 100]),
        ("16 tokens..64 tokens:2", [1, 4]),
    ],
)  # fmt: skip
def test_capacities_are_understood(text: str, blocks: list[int]) -> None:
    assert Ruler(16, bytes_per_token=1024.0).all(text) == blocks


@pytest.mark.parametrize(
    "text",
    ["9" * 30, "1..9" + "9" * 30 + ":3", "", ",", "1,,2", "1,", "-1", "+1", "1_000", "1e3", "1.5", "x", "5 chunks", "٣", "1..9",
     "9..1:3", "0..9:3", "1..9:1", "1..9:x", "1 k GiB x", "nan", "1 GB"],
)  # fmt: skip
def test_capacities_that_are_none_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"accepted:|whole number of blocks|must rise|below 2\*\*61"
    ):
        Ruler(16, bytes_per_token=1024.0).all(text)


def test_gib_without_a_model_say_how_to_give_one() -> None:
    with pytest.raises(ValueError, match="give --model CONFIG"):
        Ruler(16).all("1 GiB")


def test_spaced_capacities_are_whole_and_unique() -> None:
    assert spaced(1, 8, 100) == [1, 2, 3, 4, 5, 6, 7, 8]


# Plots and tables.


@pytest.fixture
def loaded(trace: str, model: Path) -> Loaded:
    return load(trace, TraceOptions(), model=model)


def test_the_text_of_a_mark_low_on_the_curve_stands_above_it_inside_the_plot(
    tmp_path: Path,
) -> None:
    # 90 blocks come twice in one order: 10 blocks hit nothing, so below the point is the axis.
    rows = [
        {"timestamp": i, "input_length": 512, "output_length": 1, "hash_ids": [i % 90]}
        for i in range(180)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    chart = plots.cliff(run_curve(load(str(path), TraceOptions()), Serving()), mark_blocks=10)
    marks = [part["mark"] for part in chart["layer"] if "your GPU" in part["mark"].get("text", ())]
    (mark,) = marks
    assert mark["text"] == ["your GPU", "0.0% of tokens", "5.12k tokens"]
    assert 0 < mark["y"] <= HEIGHT - 3 * mark["lineHeight"]
    assert mark["align"] == "left"


def test_plots_are_files_of_their_kind(loaded: Loaded, tmp_path: Path) -> None:
    chart = plots.cliff(run_curve(loaded, Serving()), mark_blocks=3)
    surface = run_surface(loaded, Serving())
    for name, plot in (
        ("cliff", chart),
        ("map", plots.heat_map(surface)),
        ("sources", plots.sources(run_surface(loaded, Serving(), gpu="3"))),
    ):
        save(plot, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    save(chart, tmp_path / "c.svg")
    svg = (tmp_path / "c.svg").read_text()
    for text in ("your GPU", "10.0% of tokens", "1.54k tokens", "95% of the ideal", "3.07k tokens",
                 "never evicting: 40.0%", "GiB"):  # fmt: skip
        assert text in svg


def test_the_html_needs_no_network(loaded: Loaded, tmp_path: Path) -> None:
    save(plots.cliff(run_curve(loaded, Serving())), tmp_path / "c.html")
    html = (tmp_path / "c.html").read_text()
    assert not re.search(r"<script[^>]+src=|<link[^>]+href=", html)


def test_measured_points_lie_over_the_prediction(loaded: Loaded, tmp_path: Path) -> None:
    file = tmp_path / "m.csv"
    file.write_text("gpu_blocks,hit_share\n3,0.1\n5,0.3\n", encoding="utf-8-sig")
    chart = plots.cliff(run_curve(loaded, Serving()), measured=read_measured(file))
    assert chart["layer"][-1]["data"]["values"] == [
        {"tokens": 1536, "share": 0.1},
        {"tokens": 2560, "share": 0.3},
    ]
    file.write_text("gpu_blocks,hit_share\n3,1.5\n")
    with pytest.raises(InputError, match=r"m.csv:2: a share of 1.5 at 3 blocks; shares are 0 to 1"):
        read_measured(file)


def lines_of(chart: dict[str, Any]) -> list[list[dict[str, float]]]:
    """The corners of each contour, without its white rim; the dotted line of equal sizes first."""
    return [
        layer["data"]["values"] for layer in chart["layer"]
        if layer["mark"]["type"] == "line" and layer["mark"].get("color") != PAPER
    ]  # fmt: skip


def test_contours_follow_the_cells_that_reach_a_share(loaded: Loaded) -> None:
    # Hosts of 4 to 8 find 3, 1, 2, 3, 4 blocks: into 4 no b fits beside what is left of a.
    sizes = {"gpu": "1,2,3,4,5,6", "host": "1,2,3,4,5,6,7,8"}
    chart = plots.heat_map(run_surface(loaded, Serving(), **sizes))
    diagonal, target, *rounds = lines_of(chart)
    assert [point["x"] == point["y"] for point in diagonal] == [True, True]
    # 4 of 10 blocks at most: contours at 38 %, 95 % of that, and 30, 20, 10 %. The last needs 3
    # blocks on the GPU or 4 in the host, whose cells begin half way from 2 and 3: at √6 and √12.
    assert len(rounds) == 3
    edge, height = 512 * 6**0.5, 512 * 12**0.5
    lowest = [(point["x"], point["y"]) for point in rounds[-1]]
    assert lowest[0] == pytest.approx((512, height))
    assert lowest[-2:] == [pytest.approx((edge, height)), pytest.approx((edge, 512))]
    # All four hits, of which 38 % of the blocks is no whole number, need 8 blocks.
    assert target[0]["y"] == pytest.approx(512 * 56**0.5)


def test_a_map_whose_tokens_are_mostly_computed_has_contours_and_labels_too(
    tmp_path: Path,
) -> None:
    # One block of sixty comes back, past twenty others: 1.7 % of the tokens.
    rows = [ROWS[0] | {"input_length": 20 * 512, "hash_ids": [first, *range(100 * i + 10, 100 * i + 29)], "timestamp": i}
            for i, first in enumerate((1, 2, 1))]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(str(tmp_path / "t.jsonl"), TraceOptions())
    chart = plots.heat_map(run_surface(loaded, Serving()))
    assert len(lines_of(chart)) > 1
    svg = rendered(chart, tmp_path)
    assert "2%: 95% of the ideal" in svg
    assert "95% of the possible hits need" in svg


def rendered(chart: dict[str, Any], folder: Path) -> str:
    save(chart, folder / "c.svg")
    return (folder / "c.svg").read_text()


def test_the_cliffs_axis_ends_a_little_above_its_ceiling(loaded: Loaded) -> None:
    chart = plots.cliff(run_curve(loaded, Serving()))  # 40 % of the blocks at most
    domains = [
        layer["encoding"]["y"]["scale"]["domain"] for layer in chart["layer"] if "encoding" in layer
    ]
    assert domains == [[0, 0.5]] * len(domains)
    assert chart["title"]["text"] == "95% of the possible hits need 3.07k tokens of GPU KV (" + (
        f"{6 * 512 * BYTES_PER_TOKEN / 2**30:.3g} GiB)")  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_a_cliffs_texts_cover_neither_its_curve_nor_each_other(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    trace = random_trace(seed, n_requests=draw.choice([3, 60, 400]), longest=draw.choice([4, 40]))
    tree = build_tree(trace)
    loaded = Loaded(tree, tree.requests.order(), Ruler(16), (), (), starts_known=True)
    run = run_curve(loaded, Serving())
    mark = draw.randint(1, 2 * tree.n_blocks)
    chart = plots.cliff(run, mark_blocks=mark)
    svg = rendered(chart, tmp_path)
    texts = [layer["mark"] for layer in chart["layer"] if "text" in layer["mark"]]
    assert all(mark["text"][0] in svg for mark in texts)
    top = chart["layer"][0]["encoding"]["y"]["scale"]["domain"][1]
    low, high = chart["layer"][3]["encoding"]["x"]["scale"]["domain"]
    boxes = []
    for note in texts:
        wide = max(map(len, note["text"])) * 6.5  # a letter is less than that on average
        left = note["x"] if note["align"] == "left" else note["x"] - wide
        boxes.append((left, note["y"], left + wide, note["y"] + 15 * len(note["text"])))
    for left, upper, right, lower in boxes:
        for pixel in range(int(left), min(int(right), 620)):
            blocks = low * (high / low) ** (pixel / 620) / 16
            share = run.curve.at(int(blocks)) / run.curve.accesses
            assert not upper < (1 - share / top) * 340 < lower, (pixel, share)
    for one, two in itertools.combinations(boxes, 2):
        assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


def test_one_gpu_capacity_gives_token_sources_by_host_capacity(loaded: Loaded) -> None:
    surface = run_surface(loaded, Serving(), gpu="3", host="1,5,6")
    chart = plots.surface_chart(surface)
    assert chart["layer"][0]["mark"]["type"] == "area"
    sums = Counter[int]()
    for row in chart["layer"][0]["data"]["values"]:
        sums[row["tokens"]] += row["share"]
    # 512, 2,560 and 3,072 tokens are 6 to 1 in two steps: the last is √6 wide, too.
    assert list(sums) == [512, 2560, 3072, pytest.approx(3072 * 6**0.5)]
    assert list(sums.values()) == pytest.approx([1.0] * 4)
    assert chart["layer"][0]["encoding"]["x"]["scale"]["domain"][1] == max(sums)
    assert chart["title"]["text"] == (
        f"1.54k tokens of GPU KV ({3 * 512 * BYTES_PER_TOKEN / 2**30:.3g} GiB) serve 10.0% of the "
        "prompt tokens; a host tier up to 10.0% more"
    )
    # A host of 4 finds 3 blocks, 2 of them behind the GPU's; one of 5 is cut to 1.
    fallen = plots.surface_chart(run_surface(loaded, Serving(), gpu="3", host="4,5"))
    assert fallen["title"]["text"].endswith("a host tier up to 20.0% more")
    with pytest.raises(InputError, match="at one GPU capacity, not at 2"):
        plots.sources(run_surface(loaded, Serving(), gpu="2,3", host="1"))


def test_a_source_has_one_word_and_one_colour_in_the_report_and_in_the_plots(
    loaded: Loaded,
) -> None:
    plot = plots.sources(run_surface(loaded, Serving(), gpu="3"))
    drawn = plot["layer"][0]["encoding"]["color"]["scale"]
    report = chart_specs.sources([], seqs=[])["layer"][0]["encoding"]["color"]["scale"]
    assert drawn == report
    assert dict(zip(drawn["domain"], drawn["range"], strict=True)) == {
        "computed": "#8b8f98", "GPU hit": "#2f7fd6", "host-loaded": "#d97706",
    }  # fmt: skip
    cliff = plots.cliff(run_curve(loaded, Serving()))
    assert "#2f7fd6" in [part["mark"].get("color") for part in cliff["layer"]]


def test_a_trace_without_reuse_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(ROWS[0]))
    loaded = load(str(tmp_path / "t.jsonl"), TraceOptions())
    for chart in (
        plots.cliff(run_curve(loaded, Serving())),
        plots.surface_chart(run_surface(loaded, Serving())),
    ):
        assert chart["title"]["text"] == "No prompt begins like an earlier one: nothing to keep"
        rendered(chart, tmp_path)


# Text.


def test_text_has_shares_and_all_that_was_asked_for(loaded: Loaded, trace: str) -> None:
    run = run_curve(
        loaded, Serving(), at="3", targets=[0.75], policies=["fifo", "lru"], with_bands=True
    )
    (point,) = readable(run.json)["points"]
    assert point["hits"] == "10.0%"
    assert (point["fifo"], point["lru"]) == (1, 1)
    assert point["partial_tail"] == "0–1"
    (target,) = readable(curve_json(trace, "3", targets=[0.75]))["targets"]
    assert (target["target"], target["GPU blocks"], target["of the ideal"]) == ("75.0%", 5, "75.0%")
    (pair,) = readable(run_surface(loaded, Serving(), gpu="3", host="8").json)["points"]
    assert [pair[name] for name in ("computed", "GPU hit", "host-loaded")] == [
        "60.0%", "10.0%", "30.0%"]  # fmt: skip


def test_a_large_surface_is_printed_in_part_and_says_so(loaded: Loaded) -> None:
    pairs = ",".join(map(str, range(1, 31)))
    content = readable(run_surface(loaded, Serving(), gpu=pairs, host=pairs).json)
    assert len(content["points"]) == 100
    assert content["pairs_shown"] == "100 of 900; --json or --csv FILE has all"
    ends = {(p["GPU blocks"], p["host blocks"]) for p in content["points"]}
    assert {(1, 1), (1, 30), (30, 1), (30, 30)} <= ends


def test_a_plot_of_another_kind_or_of_nothing_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    surface = run_surface(loaded, Serving(), gpu="1,2", host="1,2")
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.html, \.json"):
        save({}, tmp_path / "c.pdf")
    for gpu, kind in (("0", "host"), ("0,0", "host"), ("0,1", "pair of")):
        nothing = run_surface(loaded, Serving(), gpu=gpu, host="0")
        with pytest.raises(InputError, match=f"no {kind} capacit.* above 0 to plot"):
            plots.surface_chart(nothing)
    with pytest.raises(InputError, match="cannot be written: there is no folder"):
        save(plots.heat_map(surface), tmp_path / "no" / "c.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "trace.jsonl"]


# The command line.


@pytest.fixture
def kvcliff(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The trace commands as they are typed; returns what they print on stdout, read as JSON."""
    app = command_line(COMMANDS)

    def answer(*words: str) -> Any:
        app(args=[*words, "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    return answer


def test_scripts_get_the_promised_fields(kvcliff: Callable[..., Any], trace: str) -> None:
    content = kvcliff("curve", trace, "--gpu", "100,1,5,100")
    assert {name: content[name] for name in (
        "requests", "accesses", "distinct_blocks", "block_size")
    } == {"requests": 3, "accesses": 10, "distinct_blocks": 6, "block_size": 512}  # fmt: skip
    assert [{name: point[name] for name in ("gpu_blocks", "hit_blocks")}
            for point in content["points"]] == [
        {"gpu_blocks": 100, "hit_blocks": 4}, {"gpu_blocks": 1, "hit_blocks": 0},
        {"gpu_blocks": 5, "hit_blocks": 3}, {"gpu_blocks": 100, "hit_blocks": 4}]  # fmt: skip
    content = kvcliff("surface", trace, "--gpu", "3", "--host", "8,0")
    assert [{name: point[name] for name in (
        "gpu_blocks", "host_blocks", "hit_blocks", "host_loaded_blocks")}
            for point in content["points"]] == [
        {"gpu_blocks": 3, "host_blocks": 8, "hit_blocks": 1, "host_loaded_blocks": 3},
        {"gpu_blocks": 3, "host_blocks": 0, "hit_blocks": 1, "host_loaded_blocks": 0}]  # fmt: skip
    assert [content[name] for name in ("requests", "accesses", "distinct_blocks", "block_size")] == [
        3, 10, 6, 512]  # fmt: skip


def test_turns_of_a_conversation_are_joined_where_the_user_says_they_are_turns(
    kvcliff: Callable[..., Any], tmp_path: Path
) -> None:
    # 1,536 + 513 generated + 512 new: 2,561 tokens in 5 whole blocks, 3 of them hit; a GPU that keeps
    # the answer's one whole block finds a fourth.
    turns = str(tmp_path / "turns.jsonl")
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 1536, "output_length": 513,
         "hash_ids": [1, 2, 3]},
        {"session_id": "a", "timestamp": 5, "input_length": 512, "output_length": 9, "hash_ids": [4]},
    ]  # fmt: skip
    Path(turns).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="say --deltas or --no-deltas"):
        kvcliff("curve", turns)
    assert kvcliff("curve", turns, "--no-deltas")["accesses"] == 4
    content = kvcliff("curve", turns, "--deltas", "--gpu", "100")
    assert (content["accesses"], content["points"][0]["hit_blocks"]) == (8, 3)
    assert any("finds up to 1 more" in said for said in content["assumptions"])
    with pytest.raises(InputError, match="here later turns do"):
        kvcliff("curve", turns, "--deltas", "--decode")

    small, whole = str(tmp_path / "t.kvtrace.npz"), str(tmp_path / "whole.jsonl")
    assert kvcliff("compile", turns, small, "--deltas")["prompt_tokens"] == 1536 + 2561
    assert any("finds up to 1 more" in said for said in kvcliff("describe", small)["assumptions"])
    with pytest.raises(InputError, match="its blocks and prompts are fixed"):
        kvcliff("describe", small, "--deltas")
    kvcliff("convert", turns, whole, "--format", "mooncake", "--deltas")
    assert kvcliff("curve", whole, "--gpu", "100")["points"] == content["points"]


def test_nothing_is_written_when_one_of_the_files_cannot_be(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    for words in (
        ["--csv", str(tmp_path / "c.csv"), "--plot", str(tmp_path / "c.gif")],
        ["--plot", str(tmp_path / "c.svg"), "--mark", "1 token"],
        ["--csv", str(tmp_path / "c.csv"), "--measured", str(tmp_path / "none.csv")],
        ["--csv", str(tmp_path / "c.csv"), "--plot", str(tmp_path / "no" / "c.svg")],
        ["--csv", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.json")],
        ["--csv", trace],
    ):
        with pytest.raises(InputError):
            kvcliff("curve", trace, *words)
    nothing = ["--gpu", "0", "--host", "0", "--plot", str(tmp_path / "c.svg")]
    with pytest.raises(InputError, match="to plot"):
        kvcliff("surface", trace, *nothing, "--csv", str(tmp_path / "c.csv"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_trace_is_not_overwritten_by_what_is_made_of_it(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path
) -> None:
    before = Path(trace).read_bytes()
    (tmp_path / "link.jsonl").symlink_to(trace)
    for output in (trace, str(tmp_path / "link.jsonl")):
        with pytest.raises(InputError, match="is read by this command"):
            kvcliff("convert", trace, output)
    packed = str(tmp_path / "c.kvtrace.npz")
    kvcliff("compile", trace, packed)
    with pytest.raises(InputError, match="is read by this command"):
        kvcliff("compile", packed, packed)
    assert Path(trace).read_bytes() == before


WRITERS = {
    "t.jsonl": ["convert"],
    "t.jsonl.gz": ["convert"],
    "t.kvtrace.npz": ["compile"],
    "c.csv": ["curve", "--csv"],
    "c.svg": ["curve", "--plot"],
}


def write(kvcliff: Callable[..., Any], trace: str, out: Path) -> None:
    command, *option = WRITERS[out.name]
    kvcliff(command, trace, *option, str(out))


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_the_user_beside_the_output_is_left_alone(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out" / name
    out.parent.mkdir()
    mine = out.with_name(f"{name}.part")
    mine.write_text("mine")
    write(kvcliff, trace, out)
    assert mine.read_text() == "mine"
    assert sorted(p.name for p in out.parent.iterdir()) == [name, mine.name]


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_stays_a_link_and_its_target_gets_the_content(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    target = tmp_path / "elsewhere" / "real"
    target.parent.mkdir()
    target.write_text("old")
    out.symlink_to(target)
    write(kvcliff, trace, out)
    assert out.is_symlink()
    assert target.read_bytes() not in (b"old", b"")
    assert [p.name for p in target.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    kvcliff: Callable[..., Any],
    trace: str,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out" / name
    out.parent.mkdir()
    out.write_text("old")

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'"):
        write(kvcliff, trace, out)
    assert out.read_text() == "old"
    assert [p.name for p in out.parent.iterdir()] == [name]


def test_the_same_trace_is_converted_to_the_same_bytes(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path
) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        kvcliff("convert", trace, str(tmp_path / name))
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_no_output_takes_the_place_of_an_input(
    kvcliff: Callable[..., Any], trace: str, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(Path(trace).read_bytes())
    (folder / "b.jsonl").symlink_to(trace)
    for name, text in (
        ("m.csv", "gpu_blocks,hit_share\n3,0.1\n"),
        ("lives.csv", "request,start_s,finish_s\n0,2,9\n1,0,9\n2,1,9\n"),
    ):
        (tmp_path / name).write_text(text)
    measured, lives, model_csv = (str(tmp_path / n) for n in ("m.csv", "lives.csv", "config.json"))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for words in (
        ["convert", str(folder), str(folder / "a.jsonl")],
        ["convert", str(folder), trace],  # through the link in the folder
        ["convert", trace, str(model), "--model", str(model)],
        ["convert", trace, str(model), "--model", str(tmp_path)],
        ["curve", trace, "--measured", measured, "--csv", measured],
        ["curve", trace, "--concurrency", lives, "--csv", lives],
        ["curve", trace, "--model", str(model), "--csv", model_csv],
        ["curve", trace, "--model", str(tmp_path), "--plot", model_csv],
        ["surface", trace, "--model", str(model), "--csv", model_csv],
    ):
        with pytest.raises(InputError, match="is read by this command"):
            kvcliff(*words)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    kvcliff("convert", str(folder), str(folder / "new.txt"))


def test_plots_may_be_asked_for_by_their_kind(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path
) -> None:
    kvcliff("curve", trace, "--plot", str(tmp_path / "c.svg"), "--plot", str(tmp_path / "c.png"))
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_your_gpu_is_given_like_any_capacity(
    kvcliff: Callable[..., Any], trace: str, tmp_path: Path
) -> None:
    kvcliff("curve", trace, "--mark", "2k tokens", "--plot", str(tmp_path / "c.svg"))
    assert "1.54k tokens" in (tmp_path / "c.svg").read_text()  # three whole blocks


def test_the_guides_figures_are_those_of_the_committed_curve() -> None:
    guide = " ".join((ROOT / "docs/traces.md").read_text(encoding="utf-8").split())
    found = json.loads((ROOT / "results/real-curve.json").read_text(encoding="utf-8"))
    (target,) = [t for t in found["targets"] if t["target"] == 0.95]
    (point,) = [p for p in found["points"] if p["gpu_tokens"] == 200_000]
    (pair,) = found["with_host"]["points"]
    for text in (
        f"{found['requests']:,} agentic requests in 355 sessions started over 24 h",
        f"{found['with_host']['prompt_tokens'] / 1e9:.1f} G prompt tokens",
        f"95 % of the ideal hits need {target['gpu_tokens'] / 1e6:.2f} M tokens of KV",
        f"200 k tokens serves {point['hit_share']:.0%}".replace("%", " %"),
        f"of 2 M tokens behind it, {1 - pair['computed_share']:.0%}".replace("%", " %"),
    ):
        assert text in guide


def test_csv_has_one_line_a_point(loaded: Loaded, tmp_path: Path) -> None:
    content = run_curve(loaded, Serving(), at="3,5", policies=["fifo"]).json
    write_csv(content, tmp_path / "c.csv")
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [(row["gpu_blocks"], row["hit_blocks"]) for row in rows] == [("3", "1"), ("5", "3")]
    assert "policies" not in rows[0]
