import random
from math import sqrt

import pytest

from sim.latency.break_even import break_even_chunks, load_or_recompute
from sim.latency.model import (
    LatencyModel,
    Shape,
    fit,
)

# seconds: 20 ms, 0.1 ms a token, 2 GB/s, 3 ms a load, 10 ns a token pair, 0.2 ms a chunk
TRUE = {
    "overhead": 0.02, "per_token": 1e-4, "per_byte": 5e-10, "load_setup": 3e-3,
    "per_pair": 1e-8, "per_chunk": 2e-4,
}  # fmt: skip
MIB = 2**20


def true_s(shape: Shape) -> float:
    n, c = shape.computed, shape.cached
    load = 3e-3 + shape.loaded_bytes * 5e-10 + shape.loaded_chunks * 2e-4
    return 0.02 + 1e-4 * n + 1e-8 * n * (c + n / 2) + (load if shape.loaded_chunks else 0)


def exact(*shapes: Shape) -> list[tuple[Shape, float]]:
    return [(shape, true_s(shape)) for shape in shapes]


def status(model: LatencyModel) -> dict[str, str]:
    return {c.name: c.status for c in model.coefficients}


VARIED = (
    Shape(100, 0), Shape(1_000, 0), Shape(4_000, 0), Shape(500, 3_000),
    # chunks of 2 MiB and, the last of a prompt, of less: bytes and chunks can be told apart
    Shape(500, 256, 2 * MIB, 1), Shape(500, 1_024, 8 * MIB, 4), Shape(500, 1_000, 7 * MIB, 4),
)  # fmt: skip


def test_known_coefficients_are_found_when_the_rows_vary_in_everything() -> None:
    model = fit(exact(*VARIED))
    assert status(model) == dict.fromkeys(TRUE, "identified")
    assert {c.name: c.used for c in model.coefficients} == pytest.approx(TRUE, rel=1e-6)
    assert model.groups == ()
    asked = Shape(2_000, 1_000, 4 * MIB, 2)
    # 20 + 200 + 2000·(1000 + 1000)·1e-5 + 3 + 4·1048576·5e-7 + 0.4 ms
    assert model.predict(asked).ttft_s == pytest.approx(0.265497152, rel=1e-9)


def test_noise_stays_within_a_few_standard_errors_of_the_truth() -> None:
    draw = random.Random(3)
    shapes = [
        Shape(draw.randrange(1, 8_192), draw.randrange(30_000), chunks * 2 * MIB - missing, chunks)
        for chunks in [draw.randrange(1, 40) if draw.random() < 0.7 else 0 for _ in range(600)]
        for missing in [draw.randrange(MIB) if chunks else 0]
    ]
    model = fit((s, true_s(s) * draw.gauss(1, 0.03)) for s in shapes)
    assert model.sigma == pytest.approx(0.03, rel=0.15)
    for coefficient in model.coefficients:
        assert coefficient.standard_error is not None
        off = abs(coefficient.used - TRUE[coefficient.name])
        assert off < 3.5 * coefficient.standard_error, coefficient


def test_cold_rows_of_one_length_tell_only_their_sum() -> None:
    model = fit((Shape(2_068, 0), t) for t in (0.6, 0.7))
    assert status(model) == {
        "overhead": "only together", "per_token": "only together", "per_pair": "only together",
        "per_byte": "never seen", "load_setup": "never seen", "per_chunk": "never seen",
    }  # fmt: skip
    assert model.groups == (
        "overhead, per_token, per_pair: the rows determine 1 combination(s) of these 3, not each",
    )
    assert model.predict(Shape(2_068, 0)).ttft_s == pytest.approx(0.65)


def test_chunks_of_one_size_tell_a_chunks_cost_but_not_the_bandwidth() -> None:
    loads = [Shape(500, 256 * k, 2 * MIB * k, k) for k in (1, 8)]
    model = fit(exact(*VARIED[:4], *loads))
    assert {name for name, how in status(model).items() if how == "only together"} == {
        "per_byte", "per_chunk",
    }  # fmt: skip
    assert model.groups == (
        "per_byte, per_chunk: the rows determine 1 combination(s) of these 2, not each",
    )
    # Four whole chunks need only the combination; the same bytes in three chunks need each.
    whole = Shape(500, 1_024, 8 * MIB, 4)
    assert model.predict(whole).ttft_s == pytest.approx(true_s(whole), rel=1e-9)
    (assumed,) = model.predict(Shape(500, 1_024, 8 * MIB, 3)).assumed
    assert "do not show per_chunk by itself" in assumed


def test_whole_hits_and_cold_rows_do_not_tell_tokens_from_pairs_so_part_hits_assume() -> None:
    # Without pairs the two say 1 ms a token and no overhead.
    model = fit([(Shape(1_000, 0), 1.0), (Shape(100, 900), 0.1)])
    part = Shape(550, 450)
    asked = model.predict(part)
    (assumed,) = asked.assumed
    assert "do not show per_pair by itself: taken as 0" in assumed
    assert (asked.label, asked.low_s, asked.high_s) == ("extrapolated", None, None)
    assert asked.ttft_s == pytest.approx(0.55)


def test_a_longer_prompt_than_any_calibrated_is_extrapolated() -> None:
    model = fit(exact(*VARIED))
    longer = Shape(4_001, 0)
    asked = model.predict(longer)
    assert "computed tokens is 4,001, calibrated are 100 to 4,000" in asked.assumed
    assert asked.label == "extrapolated"
    assert asked.ttft_s == pytest.approx(true_s(longer), rel=1e-6)


def test_a_load_that_seems_to_save_time_costs_nothing_rather_than_less() -> None:
    loads = [
        (Shape(100, 900, MIB, 1), 0.08),
        (Shape(100, 900, 2 * MIB, 2), 0.08),
    ]
    model = fit([(Shape(100, 900), 0.1), *loads])
    assert [c.used for c in model.coefficients if c.name in ("per_byte", "load_setup")] == [0, 0]
    assert status(model)["load_setup"] == "at zero"


def test_a_slow_prompt_off_the_line_does_not_bend_the_fast_ones() -> None:
    # Not weighted, the straight line through these is 0.044 + 0.000893·n: 33 % off at 100 tokens.
    times = {100: 0.1, 1_000: 1.0, 2_000: 1.8}
    model = fit((Shape(n, 0), t) for n, t in times.items())
    assert model.predict(Shape(100, 0)).ttft_s == pytest.approx(0.1, rel=0.05)


def test_the_interval_is_the_residuals_rank_widened_by_leverage() -> None:
    model = fit((Shape(10, 0), t) for t in [0.9, 1.1] * 10)
    # 20 rows of one shape: fitted 1.0, every |residual| 0.1, leverage 1/20
    found = model.predict(Shape(10, 0))
    half = 0.1 / sqrt(1 - 1 / 20) * sqrt(1 + 1 / 20)
    assert (found.low_s, found.high_s) == pytest.approx((1 - half, 1 + half))
    assert found.label == "predicted"


def test_eighteen_rows_are_too_few_for_a_95_percent_interval() -> None:
    # ⌈0.95 · 19⌉ = 19 of 18 residuals; with 19 rows it is the largest.
    shape = Shape(10, 0)
    assert fit([(shape, 1.0)] * 18).predict(shape).low_s is None
    assert fit([(shape, 1.0)] * 19).predict(shape).low_s == pytest.approx(1.0)


def test_a_row_that_alone_decides_its_fit_teaches_nothing_about_the_spread() -> None:
    rows = [(Shape(10, 0), t) for t in [0.9, 1.1] * 10]
    alone = (Shape(10, 100, MIB, 1), 1.5)
    assert fit([*rows, alone]).quantile == pytest.approx(0.1 / sqrt(0.95))


def test_an_extrapolation_has_no_interval_however_many_rows_there_are() -> None:
    model = fit([(Shape(10, 0), 1.0)] * 30)
    assert model.predict(Shape(10, 0)).low_s is not None
    assert model.predict(Shape(11, 0)).low_s is None


def test_the_interval_covers_what_it_says_on_rows_not_used_for_the_fit() -> None:
    draw = random.Random(5)

    def noisy(count: int) -> list[tuple[Shape, float]]:
        shapes = [draw.choice(VARIED) for _ in range(count)]
        return [(shape, true_s(shape) * draw.gauss(1, 0.1)) for shape in shapes]

    model = fit(noisy(500))
    covered = 0
    for shape, ttft_s in noisy(2_000):
        found = model.predict(shape)
        assert found.low_s is not None
        assert found.high_s is not None
        covered += found.low_s <= ttft_s <= found.high_s
    assert 0.93 < covered / 2_000 < 0.97


def line(chunk_s: float) -> LatencyModel:
    """1 ms a token; loads: 500 ms, then ``chunk_s`` for each chunk of 100 tokens and 1 MB."""
    rows = [(Shape(n, 0), n / 1_000) for n in (10, 500, 1_500)]
    loads = [(Shape(10, 100 * k, 10**6 * k, k), 0.01 + 0.5 + chunk_s * k) for k in (1, 5, 10)]
    return fit([*rows, *loads])


def test_break_even_is_where_setup_and_chunks_cost_less_than_prefill() -> None:
    # Saved: 100 ms − 20 ms a chunk, less 500 ms once: 6 chunks −20 ms, 7 chunks +60 ms.
    model = line(0.02)
    assert break_even_chunks(model, chunk_tokens=100, chunk_bytes=10**6) == 7
    seven = load_or_recompute(model, chunks=7, chunk_tokens=100, chunk_bytes=10**6)
    assert seven.saved.value_s == pytest.approx(0.06)
    assert seven.prefill_tokens_per_s == pytest.approx(1_000)
    assert seven.load_bytes_per_s == pytest.approx(7e6 / 0.64)
    assert seven.needed_bytes_per_s == pytest.approx(1e7)  # 1,000 tokens/s × 10 kB a token
    assert seven.assumed == ()


def test_there_is_no_break_even_when_no_calibrated_load_is_faster() -> None:
    assert break_even_chunks(line(0.06), chunk_tokens=100, chunk_bytes=10**6) is None


def test_a_break_even_is_where_the_saving_exceeds_twice_its_error() -> None:
    # Loads of 20 and 22 chunks, 30 ms off either way, say little about small ones: 3 chunks
    # seem to save 85 ms, 300 − 215, give or take 313 ms; 22 save 1,890 ms for sure.
    rows = [(Shape(n, 0), n / 1_000) for n in (10, 500, 1_000, 2_210)]
    off = {20: (-0.03, 0.03), 22: (0.03, -0.03)}
    loads = [
        (Shape(10, 100 * k, 10**6 * k, k), 0.21 + 0.005 * k + late_s)
        for k, both in off.items()
        for late_s in both
    ]
    model, unit = fit([*rows, *loads]), {"chunk_tokens": 100, "chunk_bytes": 10**6}
    three = load_or_recompute(model, chunks=3, **unit)
    assert three.saved.value_s == pytest.approx(0.085)
    assert three.saved.standard_error_s == pytest.approx(0.313, abs=0.001)
    first = break_even_chunks(model, **unit)
    assert first is not None
    assert first > 3
    assert not load_or_recompute(model, chunks=first - 1, **unit).is_established
    assert all(load_or_recompute(model, chunks=k, **unit).is_established for k in range(first, 23))


def test_a_break_even_size_beyond_the_calibrated_loads_says_so() -> None:
    eleven = load_or_recompute(line(0.02), chunks=11, chunk_tokens=100, chunk_bytes=10**6)
    assert "loading: loaded chunks is 11, calibrated are 0 to 10" in eleven.assumed
    assert not any(why.startswith("computing") for why in eleven.assumed)


def test_break_even_of_a_load_size_the_rows_do_not_tell_says_what_it_assumes() -> None:
    hit, cold = (Shape(20, 2_048), 0.03), (Shape(2_068, 0), 0.65)
    model = fit([hit, cold, (Shape(20, 2_048, 8 * MIB, 8), 0.06)])
    unit = {"chunk_tokens": 256, "chunk_bytes": MIB}
    # All eight chunks are the three rows' own differences; four need pairs and setup apart.
    assert load_or_recompute(model, chunks=8, **unit).saved.value_s == pytest.approx(0.59)
    assert load_or_recompute(model, chunks=8, **unit).assumed == ()
    four = load_or_recompute(model, chunks=4, **unit).assumed
    assert any("per_pair" in why for why in four)
    assert any("load_setup" in why for why in four)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((0, 5), "one token is always computed"),
        ((5, -1), "counts are at least 0"),
        ((5, 0, 100, 0), "bytes without chunks"),
        ((5, 0, 0, 1), "chunks without bytes"),
    ],
)
def test_an_impossible_request_is_refused(counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape(*counts)


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="no calibration rows"):
        fit([])
    with pytest.raises(ValueError, match="must be above 0"):
        fit([(Shape(5, 0), 0.0)])
