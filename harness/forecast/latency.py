"""Expected times to first token of a plan, before anything is measured: estimates, and called so.

The equation is ``sim.latency.model``'s. Its coefficients come from a prior (arithmetic at an assumed rate
and copies at an assumed bandwidth), or from a file of ``scripts/pcie_probe.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import InputError
from harness.files import describe_invalid, load_json
from harness.plan.arms import BASELINE
from harness.plan.experiment import Experiment
from servers.arms import Arm
from servers.tiers.registry import SERVED
from sim.dense import DenseShape
from sim.latency.model import NAMES, LatencyModel, Shape, fit
from sim.predict import Prediction

# The prior is a data-centre GPU: 989 TFLOP/s of dense bf16 (H100 and H200, data sheet) at 55 %,
# and pinned copies over PCIe 5 x16. None of it is measured here; a small card is ten times slower.
PRIOR_PEAK_FLOPS = 989e12
PRIOR_UTILIZATION = 0.55
PRIOR_BYTES_PER_S = 50e9
# What is neither prefill nor load: HTTP, scheduling, sampling, the first event.
REQUEST_S = 0.010
# Finding, pinning and scattering a chunk, besides its bytes; vLLM's own tiers copy small blocks.
CHUNK_S: Mapping[str, float] = {kind: tier.prior_chunk_s for kind, tier in SERVED.items()}
# A session on a GPU: interpreter, CUDA, profiling, compiling and graphs, stop.
START_S = 75.0
PIN_S_PER_GIB = 0.5
WEIGHTS_BYTES_PER_S = 1e9

# Of different sizes, for a constant, a slope and a curvature; one more tells of their fit.
_LEAST_PREFILLS = 4

Seconds = Annotated[float, Field(ge=1e-9, lt=86_400)]
ProbeSize = Annotated[int, Field(ge=1, le=2**50)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class ProbeMachine(_Part):
    """Whose figures these are; ``gpu`` None on a dry run."""

    device: Literal["cuda", "cpu"]
    gpu: str | None
    torch: str


class ProbeShape(_Part):
    """Sizes of the layers measured."""

    layers: ProbeSize
    hidden: ProbeSize
    intermediate: ProbeSize
    heads: ProbeSize
    kv_heads: ProbeSize
    head_dim: ProbeSize


class ProbeCopy(_Part):
    """One size, direction and kind of host memory."""

    n_bytes: Annotated[int, Field(alias="bytes", ge=1, le=2**50)]
    pinned: bool
    direction: Literal["h2d", "d2h"]
    median_s: Seconds


class ProbePrefill(_Part):
    """All layers for ``new`` tokens after ``cached`` ones."""

    new: ProbeSize
    cached: Annotated[int, Field(ge=0, le=2**50)]
    median_s: Seconds


class Probe(_Part):
    """A file of ``scripts/pcie_probe.py``; what it fitted itself is not used, its rows are."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    kind: Literal["kvcliff-probe"]
    created: str
    machine: ProbeMachine
    shape: ProbeShape
    copies: Annotated[list[ProbeCopy], Field(min_length=2)]
    prefill: Annotated[list[ProbePrefill], Field(min_length=_LEAST_PREFILLS)]


@dataclass(frozen=True, slots=True)
class Expectation:
    """Coefficients of ``sim.latency.model.NAMES``, chunk cost by tier kind, and where they are from.

    ``prefill`` is the fit of a probe, for telling what lies beyond it; None for a prior.
    """

    coefficients: Mapping[str, float]
    chunk_s: Mapping[str, float]
    source: str
    prefill: LatencyModel | None = None

    def ttft_s(self, shape: Shape, tier: str | None) -> float:
        """Seconds to the first token."""
        rates = {**self.coefficients, "per_chunk": self.chunk_s.get(tier or "", 0.0)}
        return sum(
            value * rates.get(name, 0.0) for name, value in zip(NAMES, shape.features, strict=True)
        )

    def is_beyond_probe(self, shapes: Sequence[Shape]) -> bool:
        """Whether any of them computes more, or after more, than the probe measured."""
        model = self.prefill
        if model is None:
            return False
        most = {name: high for name, (_, high) in model.ranges.items()}
        return any(
            shape.computed > most["computed tokens"]
            or shape.cached > most["cached tokens"]
            or shape.computed * (shape.cached + shape.computed / 2) > most["token pairs"]
            for shape in shapes
        )


def read_probe(path: Path) -> Probe:
    """A probe file; InputError says what is wrong with it."""
    hint = "make one with: python scripts/pcie_probe.py OUT.json --config CONFIG.json"
    try:
        content = load_json(path.read_bytes(), where=str(path))
        return Probe.model_validate(content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except ValidationError as error:
        raise InputError(f"{path}: {describe_invalid(error)}", hint=hint) from None


def expectation_of(experiment: Experiment, probe: Path | None) -> Expectation | None:
    """By the probe file, or by the prior; None where there is no prior.

    The prior is for the CUDA build and the models ``sim.dense`` counts. InputError for a probe of
    another model or, for the CUDA build, of a dry run.
    """
    if probe is not None:
        return _by_probe(experiment, read_probe(probe), probe)
    shape = dense_shape(experiment)
    if shape is None or experiment.plan.server.build != "gpu":
        return None
    rate = PRIOR_PEAK_FLOPS * PRIOR_UTILIZATION
    return Expectation(
        {
            "overhead": REQUEST_S,
            "per_token": shape.flop_per_token / rate,
            "per_pair": shape.flop_per_pair / rate,
            "per_byte": 1 / PRIOR_BYTES_PER_S,
        },
        CHUNK_S,
        f"a prior for a data-centre GPU, not for this machine: {PRIOR_PEAK_FLOPS / 1e12:.0f} "
        f"TFLOP/s at {PRIOR_UTILIZATION:.0%}, {PRIOR_BYTES_PER_S / 1e9:.0f} GB/s from the host, "
        f"{1e3 * REQUEST_S:.0f} ms a request, {1e3 * CHUNK_S['lmcache']:g} ms a chunk of LMCache "
        "(--probe takes measured figures)",
    )


def dense_shape(experiment: Experiment) -> DenseShape | None:
    """What prefill of the plan's model costs; None where that is not counted."""
    return DenseShape.from_config(experiment.model.read_config())


def shapes_of(experiment: Experiment, predictions: Sequence[Prediction]) -> list[Shape]:
    """What each predicted request makes the server do."""
    return [
        Shape(
            max(1, p.split.computed),  # vLLM's own tier counts the last token as loaded, too
            p.split.gpu_hit + p.split.host_loaded,
            p.loaded_chunks * experiment.chunk_bytes,
            p.loaded_chunks,
        )
        for p in predictions
    ]


def expected_passes(
    experiment: Experiment,
    predictions: Mapping[str, Sequence[Prediction]],
    expected: Expectation,
) -> dict[str, Any]:
    """By pass: each arm's median, least and most TTFT in ms, and the paired ratio.

    ``ratio``: baseline ÷ treatment by document, the median of those; null without both.
    """
    times = {
        name: _seconds_by_pass(experiment, experiment.arms[name], found, expected)
        for name, found in predictions.items()
    }
    passes: dict[str, Any] = {}
    treatment = experiment.treatment.name
    measured = (r.pass_name for r in experiment.workload if r.phase == "measure")
    for pass_name in dict.fromkeys(measured):
        of_pass = {arm: by[pass_name] for arm, by in times.items() if pass_name in by}
        passes[pass_name] = {
            "arms": {arm: _spread_ms(list(by.values())) for arm, by in of_pass.items()},
            "ratio": _ratio(of_pass.get(BASELINE), of_pass.get(treatment)),
        }
    return passes


def duration_s(
    experiment: Experiment,
    predictions: Mapping[str, Sequence[Prediction]],
    expected: Expectation,
    *,
    weights_bytes: int | None,
) -> float:
    """Seconds of the whole run on a GPU, a download excepted."""
    total = 0.0
    for session in experiment.sessions:
        host = session.arm.host
        total += START_S + (PIN_S_PER_GIB * host.gib if host else 0.0)
        if experiment.plan.model.weights == "auto":
            total += (weights_bytes or 0) / WEIGHTS_BYTES_PER_S
        for shape in shapes_of(experiment, predictions.get(session.arm.name, ())):
            total += expected.ttft_s(shape, host.kind if host else None)
    return total


def _by_probe(experiment: Experiment, probe: Probe, path: Path) -> Expectation:
    _check_probe(experiment, probe, path)
    if len({(row.new, row.cached) for row in probe.prefill}) < _LEAST_PREFILLS:
        raise InputError(f"{path} has prefill of fewer than {_LEAST_PREFILLS} sizes")
    prefill = fit((Shape(row.new, row.cached), row.median_s) for row in probe.prefill)
    rates = {c.name: c.used for c in prefill.coefficients}
    copies = _copies_to_device(probe, path)
    load = fit(
        # A copy is a load of one chunk beside one token; the constant is its latency.
        (Shape(1, 0, row.n_bytes, 1), row.median_s)
        for row in copies
    )
    copied = {c.name: c.used for c in load.coefficients}
    kind = "pinned" if copies[0].pinned else "pageable"
    bandwidth = f"{1 / copied['per_byte'] / 1e9:.3g} GB/s" if copied["per_byte"] else "no limit"
    name = probe.machine.gpu or "a CPU (dry run)"
    return Expectation(
        {
            "overhead": REQUEST_S + rates["overhead"],
            "per_token": rates["per_token"],
            "per_pair": rates["per_pair"],
            "per_byte": copied["per_byte"],
        },
        dict.fromkeys(CHUNK_S, copied["overhead"]),
        f"{path}, measured with torch {probe.machine.torch} on {name}, {probe.created}: prefill "
        f"fitted to {prefill.n} sizes, {kind} copies {bandwidth} and "
        f"{1e6 * copied['overhead']:.0f} µs a chunk; {1e3 * REQUEST_S:.0f} ms a request are assumed, "
        "and engines add to both",
        prefill,
    )


def _check_probe(experiment: Experiment, probe: Probe, path: Path) -> None:
    if experiment.plan.server.build == "gpu" and probe.machine.device != "cuda":
        raise InputError(
            f"{path} is a dry run on a CPU; it says nothing about a GPU",
            hint="run scripts/pcie_probe.py on the machine with the GPU",
        )
    shape = dense_shape(experiment)
    fields = ProbeShape.model_fields
    asked = {name: getattr(shape, name) for name in fields} if shape else None
    if asked != probe.shape.model_dump():
        raise InputError(
            f"{path} measured layers of {probe.shape}, the plan's model has "
            f"{ProbeShape(**asked) if asked else 'layers that are not counted here'}",
            hint="probe the plan's own model: python scripts/pcie_probe.py OUT.json --config "
            f"{experiment.model.config}",
        )


def _copies_to_device(probe: Probe, path: Path) -> list[ProbeCopy]:
    """Copies to the device, from pinned memory where there are any, as both engines have it."""
    loads = [row for row in probe.copies if row.direction == "h2d"]
    pinned = [row for row in loads if row.pinned]
    found = pinned or loads
    if len({row.n_bytes for row in found}) < 2:
        raise InputError(f"{path} has copies to the device of fewer than two sizes")
    return found


def _seconds_by_pass(
    experiment: Experiment, arm: Arm, predictions: Sequence[Prediction], expected: Expectation
) -> dict[str, dict[int, float]]:
    """Seconds by pass and document."""
    times: dict[str, dict[int, float]] = {}
    requests = experiment.workload_of(arm)
    tier = arm.host.kind if arm.host else None
    for request, shape in zip(requests, shapes_of(experiment, predictions), strict=True):
        seconds = expected.ttft_s(shape, tier)
        times.setdefault(request.pass_name, {})[request.doc] = seconds
    return times


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50_ms": 1e3 * median(seconds), "min_ms": 1e3 * min(seconds), "max_ms": 1e3 * max(seconds)
    }  # fmt: skip


def _ratio(base: Mapping[int, float] | None, tier: Mapping[int, float] | None) -> float | None:
    if not base or not tier:
        return None
    return median(seconds / tier[doc] for doc, seconds in base.items())
