"""Time to first token from a request's token split, fitted on measured requests.

    TTFT = overhead + b·n + g·n·(c + n/2)  +  setup + bytes/BW + k·chunks
                      prefill of n tokens     load from the host; nothing when no chunk moves
                      after c cached ones

n·(c + n/2) is the number of (query, key) pairs causal attention computes, up to n/2. ``setup`` is
what a load costs whatever its size. One prefill step a prompt is assumed
(``max_num_batched_tokens`` at least the longest prompt), and one request in flight.

Times are seconds. What the calibration rows cannot tell apart is decided exactly, in rationals,
and a prediction that depends on it says so.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, inf, sqrt

from sim.latency.linear import Span, inverse

# In order of who stays when two cannot be told apart: the later one is then taken as 0.
NAMES = ("overhead", "per_token", "per_byte", "load_setup", "per_pair", "per_chunk")
UNITS = ("s", "s/token", "s/byte", "s", "s/token pair", "s/chunk")
LEVEL = 0.95
_ROUNDS = 3  # the second settles six digits at 10 % noise (300 rows of 7 token splits)
_DETERMINED = 1e-9  # a row with a leverage this close to 1 sets its own fit: no residual to learn

METHOD = (
    "least squares of the relative errors (weights 1/fitted², "
    f"{_ROUNDS} rounds), all coefficients ≥ 0"
)
INTERVAL_METHOD = (
    f"fitted × (1 ± q·√(1 + leverage)); q: the ⌈{LEVEL}·(n + 1)⌉-th smallest of the n calibration "
    "rows' |relative residual| / √(1 − leverage); none when n is too small for that rank. Rows of "
    "one session are not independent, so the level is nominal"
)

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one request makes the server do: ``computed`` tokens after ``cached`` ones.

    ``loaded_bytes`` in ``loaded_chunks`` chunks come from the host first; their tokens are cached
    ones by the time of prefill.
    """

    computed: int
    cached: int
    loaded_bytes: int = 0
    loaded_chunks: int = 0

    def __post_init__(self) -> None:
        if min(self.computed - 1, self.cached, self.loaded_bytes, self.loaded_chunks) < 0:
            raise ValueError(f"{self}: counts are at least 0, and one token is always computed")
        if (self.loaded_bytes == 0) != (self.loaded_chunks == 0):
            raise ValueError(f"{self} has bytes without chunks, or chunks without bytes")

    @property
    def doubled(self) -> tuple[int, ...]:
        """The request's features, in the order of NAMES, times two: whole numbers."""
        n = self.computed
        loads = 2 * (self.loaded_chunks > 0)
        pairs = n * (2 * self.cached + n)
        return (2, 2 * n, 2 * self.loaded_bytes, loads, pairs, 2 * self.loaded_chunks)

    @property
    def features(self) -> Vector:
        """What each coefficient is multiplied with, in the order of NAMES."""
        return tuple(value / 2 for value in self.doubled)


@dataclass(frozen=True, slots=True)
class Coefficient:
    """``used``: what predictions multiply with. ``standard_error`` None: not identified.

    ``status``: ``identified``; ``at zero`` (the fit puts it at its bound, or cannot tell it from
    the others to working precision); ``only together`` (``used`` is right only where the others of
    its group come with it); ``never seen`` (no row has any of it). Only an identified one is a
    measurement by itself.
    """

    name: str
    unit: str
    used: float
    standard_error: float | None
    status: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds; the fit's standard error (None: no rows to spare); what no row determines of it."""

    value_s: float
    standard_error_s: float | None
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    """A predicted TTFT with its ``LEVEL`` interval, never a measured one.

    ``low_s``, ``high_s`` None: too few calibration rows, or extrapolated. ``assumed`` says what the
    calibration does not cover; empty for a prediction inside it.
    """

    ttft_s: float
    low_s: float | None
    high_s: float | None
    assumed: tuple[str, ...]

    @property
    def label(self) -> str:
        """``predicted`` or ``extrapolated``."""
        return "extrapolated" if self.assumed else "predicted"


@dataclass(frozen=True, slots=True)
class _Fit:
    """Coefficients in the order of NAMES; ``inverse`` of the weighted normal matrix of ``columns``.

    ``columns`` are all that the rows determine, or only those above 0 where rounding hides the
    others. ``scale`` are the columns' largest values: the solving is done on columns in [0, 1].
    """

    used: Vector
    columns: tuple[int, ...]
    inverse: tuple[Vector, ...]
    scale: Vector

    def value(self, features: Sequence[float]) -> float:
        return sum(x * b for x, b in zip(features, self.used, strict=True))

    def variance(self, features: Sequence[float]) -> float:
        """x'(X'WX)⁻¹x: variance of a combination of coefficients, in units of the residuals'."""
        x = [features[i] / self.scale[i] for i in self.columns]
        terms = (
            a * b * c
            for a, row in zip(x, self.inverse, strict=True)
            for b, c in zip(row, x, strict=True)
        )
        return max(0.0, sum(terms))

    def leverage(self, features: Sequence[float]) -> float:
        """How much a row of its own would pull its fit: 0 not at all, 1 alone."""
        value = self.value(features)
        return self.variance(features) / (value * value) if value > 0 else inf


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """A fitted model. ``quantile`` and ``sigma`` are relative; None when rows are too few.

    ``ranges``: smallest and largest of each quantity in the calibration rows. ``n``: those rows;
    ``n_shapes``: how many different token splits they have.
    """

    coefficients: tuple[Coefficient, ...]
    groups: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]
    n: int
    n_shapes: int
    sigma: float | None
    quantile: float | None
    _fit: _Fit
    _span: Span

    def predict(self, shape: Shape) -> PredictedTtft:
        """The TTFT of ``shape``, extrapolated where the calibration does not cover it."""
        features = shape.features
        value = self._fit.value(features)
        assumed = (*self.beyond(shape), *self._assumed(shape.doubled))
        if assumed or self.quantile is None:
            return PredictedTtft(value, None, None, assumed)
        half = value * self.quantile * sqrt(1 + self._fit.leverage(features))
        return PredictedTtft(value, max(0.0, value - half), value + half, ())

    def beyond(self, shape: Shape) -> list[str]:
        """Which quantities of ``shape`` are outside what the calibration rows have."""
        return [
            f"{name} is {value:,.0f}, calibrated are {low:,.0f} to {high:,.0f}"
            for name, value in _quantities(shape).items()
            for low, high in [self.ranges[name]]
            if not low <= value <= high
        ]

    def difference(self, *, of: Shape, minus: Shape) -> Estimate:
        """Seconds ``of`` takes longer than ``minus``."""
        doubled = [a - b for a, b in zip(of.doubled, minus.doubled, strict=True)]
        features = [value / 2 for value in doubled]
        error = None if self.sigma is None else self.sigma * sqrt(self._fit.variance(features))
        return Estimate(self._fit.value(features), error, tuple(self._assumed(doubled)))

    def _assumed(self, doubled: Sequence[int]) -> list[str]:
        """What the rows do not determine of a combination of coefficients, in words."""
        lacking = [NAMES[i] for i in self._span.lacking(doubled)]
        if not lacking:
            return []
        return [f"the calibration rows do not show {' or '.join(lacking)} by itself: taken as 0"]


def fit(rows: Iterable[tuple[Shape, float]]) -> LatencyModel:
    """The model that fits ``rows``, with TTFT in seconds, best; ValueError for none, or a TTFT ≤ 0."""
    cells = _cells(rows)
    shapes = list(cells)
    span = Span()
    for shape in shapes:
        span.add(shape.doubled)
    found = _reweighted(cells, span.pivots)
    n = sum(len(times) for times in cells.values())
    sigma, quantile = _spread(cells, found, n)
    seen = [_quantities(shape) for shape in shapes]
    return LatencyModel(
        coefficients=tuple(_coefficient(i, found, span, sigma) for i in range(len(NAMES))),
        groups=tuple(_groups(span)),
        ranges={q: (min(s[q] for s in seen), max(s[q] for s in seen)) for q in seen[0]},
        n=n,
        n_shapes=len(shapes),
        sigma=sigma,
        quantile=quantile,
        _fit=found,
        _span=span,
    )


Cells = Mapping[Shape, Sequence[float]]


def _cells(rows: Iterable[tuple[Shape, float]]) -> Cells:
    """Times in seconds by shape: rows of one shape share a weight and a fitted value."""
    cells: dict[Shape, list[float]] = defaultdict(list)
    for shape, ttft_s in rows:
        if not 0 < ttft_s < inf:
            raise ValueError(f"a TTFT of {ttft_s} s cannot be fitted: it must be above 0")
        cells[shape].append(ttft_s)
    if not cells:
        raise ValueError("no calibration rows: there is nothing to fit")
    return cells


def _quantities(shape: Shape) -> dict[str, float]:
    """What a prediction may not leave the calibrated range of."""
    return {
        "computed tokens": shape.computed,
        "cached tokens": shape.cached,
        "token pairs": shape.features[4],
        "loaded bytes": shape.loaded_bytes,
        "loaded chunks": shape.loaded_chunks,
    }


def _reweighted(cells: Cells, columns: Sequence[int]) -> _Fit:
    """Least squares of relative errors: weight 1/fitted², first by the shapes' mean times.

    TTFT noise grows with TTFT; unweighted, the slow rows' noise would drown the fast rows.
    """
    reference = {shape: sum(times) / len(times) for shape, times in cells.items()}
    for _ in range(_ROUNDS):
        found = _non_negative(cells, reference, columns)
        for shape in cells:
            value = found.value(shape.features)
            reference[shape] = value if value > 0 else reference[shape]
    return found


def _non_negative(cells: Cells, reference: Mapping[Shape, float], columns: Sequence[int]) -> _Fit:
    """The best coefficients ≥ 0, others than ``columns`` being 0.

    The optimum is the plain least squares solution on the coefficients it has above 0. There are
    at most 2⁶ sets of those, so all are solved, and the best that is ≥ 0 is taken. Its uncertainty
    is that of all ``columns``: one at its bound of 0 may be above it by as much as its error.
    """
    largest = [max(shape.features[i] for shape in cells) for i in range(len(NAMES))]
    scale = tuple(value or 1.0 for value in largest)
    normal, right = _normal_equations(cells, reference, scale)
    best, used = _Fit((0.0,) * len(NAMES), (), (), scale), (0.0,) * len(NAMES)
    least = 0.0  # the squared error less what no coefficient changes: Σ w·y²
    for free in (set_ for k in range(len(columns)) for set_ in combinations(columns, k + 1)):
        solving = inverse([[normal[i][j] for j in free] for i in free])
        if solving is None:
            continue
        solved = [sum(a * right[j] for a, j in zip(row, free, strict=True)) for row in solving]
        explained = -sum(b * right[i] for b, i in zip(solved, free, strict=True))
        if min(solved) >= 0 and explained < least:
            least = explained
            found = dict(zip(free, solved, strict=True))
            used = tuple(found.get(i, 0.0) / scale[i] for i in range(len(NAMES)))
            best = _Fit(used, free, solving, scale)
        if len(free) == len(columns):
            best = _Fit(used, free, solving, scale)
    return best


def _normal_equations(
    cells: Cells, reference: Mapping[Shape, float], scale: Vector
) -> tuple[list[list[float]], list[float]]:
    """X'WX and X'Wy of the scaled columns, with weights 1/reference²."""
    size = len(scale)
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for shape, times in cells.items():
        weight = 1 / reference[shape] ** 2
        x = [value / unit for value, unit in zip(shape.features, scale, strict=True)]
        for i in range(size):
            right[i] += weight * x[i] * sum(times)
            for j in range(size):
                normal[i][j] += weight * len(times) * x[i] * x[j]
    return normal, right


def _spread(cells: Cells, found: _Fit, n: int) -> tuple[float | None, float | None]:
    """Relative standard deviation of the residuals, and the quantile INTERVAL_METHOD names."""
    squares, distances = 0.0, []
    for shape, times in cells.items():
        value = found.value(shape.features)
        if value <= 0:
            raise ValueError(f"the fit gives {shape} no time at all: its rows contradict the model")
        left = 1 - found.leverage(shape.features)
        residuals = [abs(time / value - 1) for time in times]
        squares += sum(r * r for r in residuals)
        if left > _DETERMINED:
            distances += [r / sqrt(left) for r in residuals]
    spare = n - len(found.columns)
    sigma = sqrt(squares / spare) if spare > 0 else None
    rank = ceil(LEVEL * (len(distances) + 1))
    return sigma, sorted(distances)[rank - 1] if rank <= len(distances) else None


def _coefficient(i: int, found: _Fit, span: Span, sigma: float | None) -> Coefficient:
    alone = [int(i == j) for j in range(len(NAMES))]
    error = None
    if span.is_empty(i):
        status = "never seen"
    elif span.lacking(alone):
        status = "only together"
    else:
        status = "identified" if found.used[i] else "at zero"
        if i in found.columns and sigma is not None:
            error = sigma * sqrt(found.variance(alone))
    return Coefficient(NAMES[i], UNITS[i], found.used[i], error, status)


def _groups(span: Span) -> list[str]:
    """Each set of coefficients the rows tell only combinations of, in words."""
    groups: list[set[int]] = []
    for tied in span.ties():
        apart = [group for group in groups if not group & tied]
        groups = [*apart, tied.union(*(group for group in groups if group & tied))]
    return [
        f"{', '.join(NAMES[i] for i in sorted(group))}: the rows determine "
        f"{len(group & set(span.pivots))} combination(s) of these {len(group)}, not each"
        for group in groups
    ]
