import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness import curve_plots
from harness.curve_commands import Replay, run_curve, run_surface, write_csv
from harness.curve_traces import Loaded, TraceOptions, compile_trace, convert_trace, describe, load
from harness.errors import InputError
from sim.curves.capacity import Ruler, spaced

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
    return run_curve(load(trace, TraceOptions()), Replay(), at=at, **settings).json


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
        assert content["ideal_hit_share"] is None
        (pair,) = run_surface(load(str(path), TraceOptions()), Replay(), gpu="1", host="1").json[
            "points"
        ]
        assert pair["computed_tokens"] == 3


def test_the_last_token_rule_is_off_unless_asked_for(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    point = run_curve(loaded, Replay(last_token=True), at="6").json["points"][0]
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


def test_a_wrong_block_size_is_warned_about(trace: str) -> None:
    loaded = load(trace, TraceOptions(block_tokens=1024))
    (warning,) = loaded.notes
    assert "3 of 3 requests list more blocks than their prompt fills at 1024" in warning


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request,start\n", r"lives.csv:1: the header must be request,start_s,finish_s"),
        ("request,start_s,finish_s\n0,1,x\n", r"lives.csv:2: .* something else than numbers"),
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
    content = run_surface(load(trace, TraceOptions()), Replay(), gpu="3,6", host="0,5,6").json
    found = [
        (p["gpu_blocks"], p["host_blocks"], p["hit_blocks"], p["host_loaded_blocks"])
        for p in content["points"]
    ]
    # GPU of 3 hits block 1; a host of 5 holds 1 2 3, of 6 all four.
    assert found == [(3, 0, 1, 0), (3, 5, 1, 2), (3, 6, 1, 3), (6, 0, 4, 0), (6, 5, 4, 0),
                     (6, 6, 4, 0)]  # fmt: skip
    for point in content["points"]:
        tokens = [point[f"{s}_tokens"] for s in ("gpu_hit", "host_loaded", "computed")]
        assert sum(tokens) == content["prompt_tokens"] == 5120


def test_a_hosts_capacity_holds_whole_chunks(trace: str) -> None:
    loaded = load(trace, TraceOptions())
    content = run_surface(loaded, Replay(), gpu="0", host="5", chunk_tokens=1024).json
    (point,) = content["points"]
    assert point["host_chunks"] == 2  # 5 × 512 tokens are 2 whole chunks: b and a's first
    assert point["host_loaded_tokens"] == 1024


def test_a_host_no_larger_than_the_gpu_is_called_nearly_worthless(trace: str) -> None:
    content = run_surface(load(trace, TraceOptions()), Replay(), gpu="6", host="5").json
    assert any("no larger than the GPU tier" in warning for warning in content["warnings"])
    assert any("0.00%" in warning for warning in content["warnings"])


def test_compile_describe_and_curve_agree(trace: str, tmp_path: Path) -> None:
    output = tmp_path / "t.kvtrace.npz"
    made = compile_trace(trace, output, TraceOptions())
    described = describe(str(output), TraceOptions())
    for field in ("requests", "accesses", "distinct_blocks", "block_size", "prompt_tokens"):
        assert made[field] == described[field]
    assert described["ideal_hit_share"] == 0.4
    assert curve_json(str(output), "3,5")["points"] == curve_json(trace, "3,5")["points"]


def test_a_compiled_trace_cannot_change_its_blocks(trace: str, tmp_path: Path) -> None:
    output = tmp_path / "t.kvtrace.npz"
    compile_trace(trace, output, TraceOptions())
    for options in (TraceOptions(full_blocks=True), TraceOptions(block_tokens=16)):
        with pytest.raises(InputError, match="its blocks are fixed; compile the trace again"):
            load(str(output), options)
    with pytest.raises(InputError, match=r"must end in \.kvtrace\.npz"):
        compile_trace(trace, tmp_path / "t.npz", TraceOptions())


def test_converted_traces_give_the_same_curve(trace: str, tmp_path: Path) -> None:
    for target in ("mooncake", "lmcache"):
        output = tmp_path / f"{target}.jsonl"
        assert convert_trace(trace, output, target, TraceOptions())["requests"] == 3
        assert [p["hit_blocks"] for p in curve_json(str(output), "3,5,9")["points"]] == [1, 3, 4]
    with pytest.raises(InputError, match="target 'x' is not known"):
        convert_trace(trace, tmp_path / "x", "x", TraceOptions())


def test_sessions_without_starts_are_spread_and_that_is_said(tmp_path: Path) -> None:
    for name in "ab":
        request = {"t": 0.0, "in": 64, "out": 1, "hash_ids": [1]}
        session = {"id": name, "block_size": 64, "requests": [request]}
        (tmp_path / f"{name}.json").write_text(json.dumps(session))
    loaded = load(str(tmp_path), TraceOptions(spread_hours=2, seed=7))
    arrivals = loaded.tree.requests.arrivals_s()
    assert ((arrivals >= 0) & (arrivals < 7200)).all()
    assert "2 sessions start at random moments of 2 h (seed 7)" in loaded.said[1]
    again = load(str(tmp_path), TraceOptions(spread_hours=2, seed=7))
    assert again.tree.requests.arrivals_s().tolist() == arrivals.tolist()
    with pytest.raises(InputError, match="a spread of -1 hours"):
        load(str(tmp_path), TraceOptions(spread_hours=-1))
    with pytest.raises(InputError, match="a time scale of 0"):
        load(str(tmp_path), TraceOptions(time_scale=0))


def test_gib_come_from_the_models_config(trace: str, model: Path) -> None:
    loaded = load(trace, TraceOptions(), model=model)
    gib_a_block = 512 * BYTES_PER_TOKEN / 2**30
    (point,) = run_curve(loaded, Replay(), at=f"{5 * gib_a_block} GiB").json["points"]
    assert point["gpu_blocks"] == 5
    assert point["gpu_gib"] == 5 * gib_a_block


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
    ["", ",", "1,,2", "1,", "-1", "+1", "1_000", "1e3", "1.5", "x", "5 chunks", "٣", "1..9",
     "9..1:3", "0..9:3", "1..9:1", "1..9:x", "1 k GiB x", "nan", "1 GB"],
)  # fmt: skip
def test_capacities_that_are_none_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"accepted:|whole number of blocks|must rise"):
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


def test_plots_are_files_of_their_kind(loaded: Loaded, tmp_path: Path) -> None:
    chart = curve_plots.cliff(run_curve(loaded, Replay()), mark_blocks=3)
    surface = run_surface(loaded, Replay())
    for name, plot in (
        ("cliff", chart),
        ("map", curve_plots.heat_map(surface)),
        ("sources", curve_plots.sources(surface, gpu_blocks=3)),
    ):
        curve_plots.save(plot, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    curve_plots.save(chart, tmp_path / "c.svg")
    svg = (tmp_path / "c.svg").read_text()
    assert "your GPU: 10.0% at 1,536 tokens" in svg
    assert "95 % of the ideal: 40.0%" in svg
    assert "GiB" in svg


def test_the_html_needs_no_network(loaded: Loaded, tmp_path: Path) -> None:
    curve_plots.save(curve_plots.cliff(run_curve(loaded, Replay())), tmp_path / "c.html")
    html = (tmp_path / "c.html").read_text()
    assert not re.search(r"<script[^>]+src=|<link[^>]+href=", html)


def test_measured_points_lie_over_the_prediction(loaded: Loaded) -> None:
    chart = curve_plots.measured_over_predicted(run_curve(loaded, Replay()), [(3, 0.1), (5, 0.3)])
    assert chart["layer"][-1]["data"]["values"] == [
        {"tokens": 1536, "share": 0.1},
        {"tokens": 2560, "share": 0.3},
    ]


def test_contours_say_the_least_host_that_reaches_a_share(loaded: Loaded) -> None:
    surface = run_surface(loaded, Replay(), gpu="1..6:6", host="1..6:6")
    lines = [layer for layer in curve_plots.heat_map(surface)["layer"]
             if isinstance(layer["mark"], dict) and layer["mark"]["type"] == "line"]  # fmt: skip
    # 40 % of the tokens is all there is to serve: below the lowest contour of 50 %.
    assert lines == []


def test_a_plot_of_another_kind_or_of_nothing_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    surface = run_surface(loaded, Replay(), gpu="1,2", host="1,2")
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.html, \.json"):
        curve_plots.save({}, tmp_path / "c.pdf")
    with pytest.raises(InputError, match="no GPU capacity of 5 blocks"):
        curve_plots.sources(surface, gpu_blocks=5)
    with pytest.raises(InputError, match="cannot write"):
        curve_plots.save(curve_plots.heat_map(surface), tmp_path / "no" / "c.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "trace.jsonl"]


def test_csv_has_one_line_a_point(loaded: Loaded, tmp_path: Path) -> None:
    content = run_curve(loaded, Replay(), at="3,5", policies=["fifo"]).json
    write_csv(content, tmp_path / "c.csv")
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [(row["gpu_blocks"], row["hit_blocks"]) for row in rows] == [("3", "1"), ("5", "3")]
    assert "policies" not in rows[0]
