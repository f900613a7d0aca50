"""What ``kvcliff latency`` says of a run: the fit, its errors on held-out rows, the break-even."""

from typing import Literal

from pydantic import Field

from harness.verdict.measured import Result
from sim.latency.model import Coefficient

Label = Literal["predicted", "extrapolated"]


class Errors(Result):
    """How far predictions were off, in percent of the measured time; only ``n`` when it is 0."""

    n: int
    median_absolute_percentage_error: float | None = None
    worst_absolute_percentage_error: float | None = None
    median_percentage_error: float | None = None
    n_with_interval: int | None = None
    interval_coverage: float | None = None


class SplitErrors(Errors):
    """The held-out rows of one arm and token split: the prediction, the measured median beside it."""

    arm: str = Field(alias="config")
    computed: int
    cached: int
    loaded_bytes: int
    loaded_chunks: int
    label: str
    assumed: list[str]
    predicted_ms: float
    predicted_low_ms: float | None
    predicted_high_ms: float | None
    measured_p50_ms: float


class HeldOut(Errors):
    """All held-out rows that the calibration covers, and the same by split and by session."""

    by_split: list[SplitErrors]
    by_session: dict[str, Errors]


class Calibration(Result):
    """The rows the model was fitted on; ``ranges``: least and most of each quantity."""

    n: int
    n_token_splits: int
    n_by_arm: dict[str, int]
    relative_residual_sd: float | None
    interval_quantile: float | None
    ranges: dict[str, tuple[float, float]]


class LoadSize(Result):
    """Loading against computing one number of tokens, both predicted; null: no time at all."""

    label: Label
    tokens: int
    loaded_bytes: int
    recompute_ms: float
    load_ms: float
    saved_ms: float
    recompute_standard_error_ms: float | None
    load_standard_error_ms: float | None
    saved_standard_error_ms: float | None
    prefill_tokens_per_s: float | None
    load_gb_per_s: float | None
    needed_gb_per_s: float | None
    assumed: list[str]


class BreakEven(Result):
    """From how many tokens loading beats computing; null where that is not established."""

    from_tokens: int | None
    statement: str
    sizes: list[LoadSize]


class LatencyCheck(Result):
    """What ``kvcliff latency --json`` prints.

    Held-out rows that the calibration does not cover are in ``extrapolated`` with what was
    assumed, and in no other figure.
    """

    run: str
    schema_version: int = Field(alias="schema")
    method: str
    interval_method: str
    interval_level: float
    calibration_rule: str
    calibration: Calibration
    left_out: dict[str, int]
    coefficients: dict[str, Coefficient]
    only_together: list[str]
    held_out: HeldOut
    extrapolated: list[SplitErrors]
    break_even: BreakEven
