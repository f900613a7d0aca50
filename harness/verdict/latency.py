"""Does the latency model hold on a run? Fit on its calibration rows, test on all its others.

Which rows calibrate is decided by pass, arm and token split alone, never by a time. Predicted and
measured stay apart: the answer holds predictions, and how far they were off.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from harness.errors import InputError
from harness.plan.arms import BASELINE, CONTROL
from harness.record.folder import RunFolder
from harness.record.row import Row
from harness.verdict import latency_result as results
from sim.latency.break_even import LoadOrRecompute, break_even_chunks, load_or_recompute
from sim.latency.model import (
    INTERVAL_METHOD,
    LEVEL,
    METHOD,
    Estimate,
    LatencyModel,
    PredictedTtft,
    Shape,
    fit,
)

SCHEMA = 1  # history: 1 = first published
CALIBRATION_RULE = (
    "calibration rows: the first pass of every arm; all passes of the control; of the "
    "treatment's other passes every second row of each token split, the first included, in run order. "
    "The other complete rows with known sources are held out"
)
GB = 1e9
Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Tested:
    """A held-out row: what was predicted before its time was looked at, and the time."""

    row: Row
    prediction: PredictedTtft
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1: above 0 the prediction was too slow."""
        return self.prediction.ttft_s / self.measured_s - 1

    @property
    def is_covered(self) -> bool | None:
        """Whether the interval holds the measured time; None without an interval."""
        low, high = self.prediction.low_s, self.prediction.high_s
        return None if low is None or high is None else low <= self.measured_s <= high


def check_folder(path: Path, notes: list[str] | None = None) -> results.LatencyCheck:
    """``check_rows`` of a run folder's journals; InputError when nothing in it can calibrate.

    Torn last lines are said in ``notes``.
    """
    folder = RunFolder(path)
    rows = list(folder.rows(notes))
    if not rows:
        raise InputError(
            f"{path}: its {len(folder.journals())} journals hold no row",
            hint="put them back, or measure it: kvcliff run --resume",
        )
    if any(row.loop != "serial" for row in rows):
        raise InputError(
            f"{path}: its requests were in flight together, so a TTFT is not that of a token split "
            "alone",
            hint="fit on a run of the same plan without [load]",
        )
    return check_rows(rows, run=folder.name, where=str(path))


def check_rows(rows: Iterable[Row], *, run: str, where: str) -> results.LatencyCheck:
    """The fit, its errors on held-out rows, and where loading beats computing.

    InputError, naming ``where`` they came from, when no row can calibrate.
    """
    usable, left_out = _usable(rows)
    calibration, held_out = split_rows(usable)
    if not calibration:
        raise InputError(
            f"{where} has no row to calibrate on: {len(usable)} complete rows with known sources",
            hint="measure a cold pass to its end",
        )
    model = fit((shape_of(row), _seconds(row)) for row in calibration)
    tested = [Tested(row, model.predict(shape_of(row)), _seconds(row)) for row in held_out]
    inside = [test for test in tested if test.prediction.label == "predicted"]
    outside = [test for test in tested if test.prediction.label == "extrapolated"]
    return results.LatencyCheck(
        run=run,
        schema_version=SCHEMA,
        method=METHOD,
        interval_method=INTERVAL_METHOD,
        interval_level=LEVEL,
        calibration_rule=CALIBRATION_RULE,
        calibration=_calibration(model, calibration),
        left_out=dict(left_out),
        coefficients={c.name: c for c in model.coefficients},
        only_together=list(model.groups),
        held_out=results.HeldOut(
            **errors_of(inside).as_json(),
            by_split=_by_split(inside),
            by_session={
                name: errors_of(group)
                for name, group in _grouped(inside, lambda test: test.row.session).items()
            },
        ),
        extrapolated=_by_split(outside),
        break_even=_break_even(model, calibration),
    )


def split_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Calibration and held-out rows by CALIBRATION_RULE; ``rows`` in run order."""
    first_pass = rows[0].pass_name if rows else None
    calibration: list[Row] = []
    held_out: list[Row] = []
    met: Counter[Shape] = Counter()
    for row in rows:
        if row.pass_name == first_pass or row.config == CONTROL:
            is_held_out = False
        elif row.config == BASELINE:
            is_held_out = True
        else:
            met[shape_of(row)] += 1
            is_held_out = met[shape_of(row)] % 2 == 0
        (held_out if is_held_out else calibration).append(row)
    return calibration, held_out


def shape_of(row: Row) -> Shape:
    """What an attributed row made the server do."""
    assert row.computed is not None
    cached = (row.gpu_hit or 0) + (row.host_loaded or 0)
    loaded = row.loaded_bytes or 0
    return Shape(row.computed, cached, loaded, loaded // row.chunk_bytes if row.chunk_bytes else 0)


def errors_of(tested: Sequence[Tested]) -> results.Errors:
    """``n``, median and worst absolute error in percent, signed median, coverage; n 0: only n."""
    if not tested:
        return results.Errors(n=0)
    percents = [100 * test.error for test in tested]
    covered = [test.is_covered for test in tested if test.is_covered is not None]
    return results.Errors(
        n=len(tested),
        median_absolute_percentage_error=median(abs(p) for p in percents),
        worst_absolute_percentage_error=max(abs(p) for p in percents),
        median_percentage_error=median(percents),
        n_with_interval=len(covered),
        interval_coverage=sum(covered) / len(covered) if covered else None,
    )


def _usable(rows: Iterable[Row]) -> tuple[list[Row], Counter[str]]:
    """Rows with a time and a split, in run order; the others counted by why they are not."""
    usable, left_out = [], Counter[str]()
    for row in sorted(rows, key=lambda row: (row.order, row.session, row.seq)):
        reason = _unusable(row)
        if reason is None:
            usable.append(row)
        else:
            left_out[reason] += 1
    return usable, left_out


def _unusable(row: Row) -> str | None:
    is_sized = bool(row.loaded_bytes) == bool(row.host_loaded) and (
        not row.loaded_bytes or bool(row.chunk_bytes)
    )
    reasons = {
        "warm-up": row.phase != "measure",
        "incomplete": not row.complete or not row.ttft_ms,
        "token sources unknown": not row.is_attributed,
        "ledgers disagree": row.disagreement is not None,
        "a connection was set up": not row.conn_reused,
        "bytes of the load unknown": not is_sized,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _seconds(row: Row) -> float:
    assert row.ttft_ms is not None
    return row.ttft_ms / 1e3


def _calibration(model: LatencyModel, rows: Sequence[Row]) -> results.Calibration:
    return results.Calibration(
        n=model.n,
        n_token_splits=model.n_shapes,
        n_by_arm=dict(Counter(row.config for row in rows)),
        relative_residual_sd=model.sigma,
        interval_quantile=model.quantile,
        ranges=dict(model.ranges),
    )


def _by_split(tested: Sequence[Tested]) -> list[results.SplitErrors]:
    """One entry an arm and token split."""
    groups = _grouped(tested, lambda test: (test.row.config, shape_of(test.row)))
    return [_split_errors(arm, shape, group) for (arm, shape), group in groups.items()]


def _split_errors(arm: str, shape: Shape, group: Sequence[Tested]) -> results.SplitErrors:
    prediction = group[0].prediction
    return results.SplitErrors(
        arm=arm,
        **asdict(shape),
        label=prediction.label,
        assumed=list(prediction.assumed),
        predicted_ms=1e3 * prediction.ttft_s,
        predicted_low_ms=_ms(prediction.low_s),
        predicted_high_ms=_ms(prediction.high_s),
        measured_p50_ms=median(1e3 * test.measured_s for test in group),
        **errors_of(group).as_json(),
    )


def _grouped(tested: Sequence[Tested], of: Callable[[Tested], Group]) -> dict[Group, list[Tested]]:
    groups: dict[Group, list[Tested]] = defaultdict(list)
    for test in tested:
        groups[of(test)].append(test)
    return groups


def _break_even(model: LatencyModel, rows: Sequence[Row]) -> results.BreakEven:
    """Load against recompute at the break-even and at the largest load, both predicted."""
    largest = int(model.ranges["loaded chunks"][1])
    sizes = {(r.chunk_tokens, r.chunk_bytes) for r in rows if r.loaded_bytes}
    if len(sizes) != 1:
        why = "no calibration row loads" if not sizes else f"{len(sizes)} chunk sizes in one run"
        return results.BreakEven(from_tokens=None, statement=f"not established: {why}", sizes=[])
    ((chunk_tokens, chunk_bytes),) = sizes
    assert chunk_tokens
    assert chunk_bytes
    unit = {"chunk_tokens": chunk_tokens, "chunk_bytes": chunk_bytes}
    first = break_even_chunks(model, **unit)
    chunks = sorted({first or largest, largest})
    compared = [load_or_recompute(model, chunks=count, **unit) for count in chunks]
    return results.BreakEven(
        from_tokens=first * chunk_tokens if first else None,
        statement="\n".join(
            [_verdict(first, chunk_tokens, compared), *(_rates(size, model) for size in compared)]
        ),
        sizes=[_size(size) for size in compared],
    )


def _verdict(first: int | None, chunk_tokens: int, compared: Sequence[LoadOrRecompute]) -> str:
    label = _label(compared[0]).capitalize()
    if first is None:
        largest = compared[-1]
        error_s = largest.saved.standard_error_s
        if error_s is not None and largest.saved.value_s < -2 * error_s:
            return (
                f"{label}: up to the {largest.tokens:,} tokens calibrated, no load from the host "
                "beats computing."
            )
        return (
            f"{label}: no break-even is established, because at the largest load calibrated "
            f"({largest.tokens:,} tokens) the saving is within twice its standard error, or the "
            "fit has no such error or gives a load no time at all."
        )
    floor = ", one chunk, the smallest load there is" if first == 1 else ""
    return (
        f"{label}: from {first * chunk_tokens:,} tokens{floor}, a load from the host beats "
        "computing."
    )


def _label(size: LoadOrRecompute) -> results.Label:
    return "extrapolated" if size.assumed else "predicted"


def _rates(size: LoadOrRecompute, model: LatencyModel) -> str:
    """One size in words, with what is assumed for it."""
    assumed = f" (assumed: {'; '.join(size.assumed)})" if size.assumed else ""
    return (
        f"{size.tokens:,} tokens: {_in_ms(size.recompute)} to compute at "
        f"{size.prefill_tokens_per_s:,.0f} tokens/s, {_in_ms(size.load)} to load at "
        f"{_gb_per_s(size.load_bytes_per_s)}; break-even at "
        f"{size.needed_bytes_per_s / GB:.3g} GB/s (± standard error, fitted on {model.n} rows){assumed}."
    )


def _gb_per_s(rate: float) -> str:
    return f"{rate / GB:.3g} GB/s" if math.isfinite(rate) else "an unknown rate"


def _in_ms(time: Estimate) -> str:
    """Milliseconds with the standard error of the fit, where there is one."""
    error = time.standard_error_s
    spread = "" if error is None else f" ± {1e3 * error:.1f}"
    return f"{1e3 * time.value_s:.1f}{spread} ms"


def _size(size: LoadOrRecompute) -> results.LoadSize:
    return results.LoadSize(
        label=_label(size),
        tokens=size.tokens,
        loaded_bytes=size.loaded_bytes,
        recompute_ms=1e3 * size.recompute.value_s,
        load_ms=1e3 * size.load.value_s,
        saved_ms=1e3 * size.saved.value_s,
        recompute_standard_error_ms=_ms(size.recompute.standard_error_s),
        load_standard_error_ms=_ms(size.load.standard_error_s),
        saved_standard_error_ms=_ms(size.saved.standard_error_s),
        prefill_tokens_per_s=_finite(size.prefill_tokens_per_s),
        load_gb_per_s=_finite(size.load_bytes_per_s / GB),
        needed_gb_per_s=_finite(size.needed_bytes_per_s / GB),
        assumed=list(size.assumed),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _finite(rate: float) -> float | None:
    """None for the rate of something that takes no time: JSON has no infinity."""
    return rate if rate < float("inf") else None
