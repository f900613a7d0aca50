"""Vega-Lite specifications of the report's charts, from rows that are ready to draw.

Arms differ in shape as well as colour (``harness.words_and_colours``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.charting import FADED, FONT_SIZE, Chart, colour_scale, layer, log_ticks, of, on_page
from harness.forecast.cliff import Cliff, CliffPoint
from harness.plan.arms import BASELINE, CONTROL
from harness.words_and_colours import (
    BASELINE_MARK,
    CONTROL_MARK,
    FAILED,
    OTHER_ARM_COLOURS,
    OTHER_ARM_SHAPES,
    SOURCES,
    TREATMENT_MARK,
    Mark,
)

Rows = Sequence[Mapping[str, Any]]


def arm_marks(arms: Sequence[str], treatment: str | None) -> dict[str, Mark]:
    """A mark for each arm, no two alike: baseline, treatment, control, the others by position."""
    known = {BASELINE: BASELINE_MARK, treatment: TREATMENT_MARK, CONTROL: CONTROL_MARK}
    others = [arm for arm in arms if arm not in known]
    marks = {arm: known[arm] for arm in arms if arm in known}
    shapes = list(OTHER_ARM_SHAPES.items())
    for i, arm in enumerate(others):
        marks[arm] = Mark(OTHER_ARM_COLOURS[i % len(OTHER_ARM_COLOURS)], *shapes[i % len(shapes)])
    return marks


def ttft(values: Rows, *, arms: Mapping[str, Mark], domain: Sequence[float]) -> Chart:
    """TTFT by position in the pass; ``values`` have ``n, ttft, arm, failed`` and the tooltip."""
    place = {
        "x": _counted("n:Q", "request in the pass"),
        "y": _log("ttft:Q", "TTFT, ms (log)", domain),
        "tooltip": [of(f"{name}:N", title) for name, title in _TTFT_TOOLTIP],
    }
    good, bad = ([v for v in values if v["failed"] is failed] for failed in (False, True))
    point = {"type": "point", "filled": True, "size": 42, "opacity": 0.85}
    cross = {"type": "point", "shape": "cross", "size": 60, "color": FAILED, "angle": 45}
    layers = [layer(good, point, **place, **_arm_encoding(arms))]
    if bad:
        layers.append(layer(bad, cross | {"filled": True}, **place))
    return on_page({"layer": layers}, height=230)


_TTFT_TOOLTIP = (
    ("session", "session"), ("doc", "document"), ("time", "TTFT"), ("split", "measured"),
    ("predicted", "predicted"), ("bytes", "bytes loaded"), ("error", "error"),
)  # fmt: skip


def paired(
    documents: Rows, *, quotient: str, domain: Sequence[float], threshold: float | None
) -> Chart:
    """Ratio and range per document, with lines at 1 and at ``threshold`` where it fits.

    ``quotient`` says in words which arm is over which.
    """
    title = f"{quotient} (log)"
    place = {
        "x": _counted("doc:Q", "document"),
        "tooltip": [
            of("doc:Q", "document"),
            of("ratio:Q", quotient, format=".3f"),
            of("low:Q", format=".3f"),
            of("high:Q", format=".3f"),
            of("n_blocks:Q", "blocks"),
        ],
    }
    levels = [(1.0, [1, 0])]
    if threshold is not None and domain[0] <= threshold <= domain[1]:
        levels.append((threshold, [5, 4]))
    lines = [
        layer([{"level": level}], _rule(strokeDash=dash), y=_log("level:Q", title, domain))
        for level, dash in levels
    ]
    bar = {"type": "rule", "color": TREATMENT_MARK.colour, "strokeWidth": 2}
    point = {"type": "point", "color": TREATMENT_MARK.colour, "filled": True, "size": 50}
    y = _log("low:Q", title, domain)
    bars = {"mark": bar, "encoding": {**place, "y": y, "y2": {"field": "high"}}}
    points = {"mark": point, "encoding": {**place, "y": _log("ratio:Q", title, domain)}}
    return on_page({"data": {"values": documents}, "layer": [*lines, bars, points]}, height=210)


def sources(values: Rows, *, seqs: Sequence[int]) -> Chart:
    """Tokens by source, measured upwards and predicted downwards.

    ``values``: one bar each, with ``seq, where, source, kind, tokens, signed``. ``seqs``: the
    requests that are drawn; about eight have a label, however many there are.
    """
    labelled = list(seqs[:: max(1, len(seqs) // 8)])
    sparse = {"labelAngle": 0, "grid": False, "values": labelled, "ticks": False}
    signed = {"labelExpr": "format(abs(datum.value), '~s')", "tickCount": 5}
    colours = {source.word: source.colour for source in SOURCES}
    bars = layer(
        values,
        {"type": "bar"},
        x=of("seq:O", "request of the session", axis=sparse),
        y=of("signed:Q", "predicted · measured", axis=signed),
        color=of("source:N", scale=colour_scale(colours)),
        tooltip=[
            of("where:N", "request"),
            of("kind:N"),
            of("source:N"),
            of("tokens:Q", format=","),
        ],
    )
    zero = {"type": "rule", "color": "currentColor", "strokeWidth": 1.5}
    return on_page({"layer": [bars, layer([{"zero": 0}], zero, y=of("zero:Q"))]}, height=140)


def cliff(curve: Cliff, *, arms: Mapping[str, Mark]) -> Chart:
    """Predicted shares as lines, measured ones as marks, this plan and the working set as rules."""
    size = "GPU tier, tokens"
    marks = _arm_encoding(arms)
    x = of("gpu_tokens:Q", size, axis={"format": "~s", "grid": False, "tickCount": 7})
    share = f"{curve.pass_name}: share computed"
    axis = {"format": ".0%", "tickCount": 5}
    place = {
        "x": x,
        "y": of("share:Q", share, axis=axis, scale={"domain": [0, 1]}),
        "tooltip": [
            of("arm:N"),
            of("gpu_tokens:Q", size, format=","),
            of("share:Q", "computed", format=".2%"),
        ],
    }
    named = [
        {"gpu_tokens": curve.gpu_tokens, "what": "this plan"},
        {"gpu_tokens": curve.working_set_tokens, "what": "working set"},
    ]
    word = {"type": "text", "color": "currentColor", "align": "left", "dx": 4, "baseline": "top"}
    line = {"type": "line", "strokeWidth": 2}
    point = {"type": "point", "filled": True, "size": 130, "opacity": 1}
    layers = [
        layer(_shares(curve.points), line, **place, color=marks["color"]),
        layer(named, _rule(strokeDash=[4, 4]), x=x),
        layer(named, word | {"fontSize": FONT_SIZE}, x=x, y={"value": 4}, text=of("what:N")),
        layer(_shares(curve.measured), point, **place, **marks),
    ]
    return on_page({"layer": layers}, height=240)


def _shares(points: Sequence[CliffPoint]) -> Rows:
    return [point.model_dump(exclude_unset=True) for point in points]


def timeline(spans: Rows, *, colours: Mapping[str, str], n_sessions: int) -> Chart:
    """One bar a phase, one line a session, on the wall clock in UTC."""
    clock = {"format": "%H:%M:%S", "tickCount": 5, "labelOverlap": True}
    bars = layer(
        spans,
        {"type": "bar", "height": {"band": 0.7}},
        x=of("began_unix_ms:T", "time (UTC)", scale={"type": "utc"}, axis=clock),
        x2={"field": "ended_unix_ms"},
        y=of("session:N", sort=None) | {"title": None},
        color=of("phase:N", scale=colour_scale(colours)),
        tooltip=[of("session:N"), of("phase:N")],
    )
    return on_page(bars, height=34 * n_sessions + 10)


def _counted(field: str, title: str) -> Chart:
    """An axis of whole numbers."""
    scale = {"zero": False, "nice": False, "padding": 10}
    return of(field, title, scale=scale, axis={"tickMinStep": 1, "grid": False})


def _log(field: str, title: str, domain: Sequence[float]) -> Chart:
    scale = {"type": "log", "domain": list(domain), "nice": False}
    return of(field, title, scale=scale, axis={"format": ",~g", "values": log_ticks(*domain)})


def _rule(**style: Any) -> Chart:
    """A line that is no data."""
    return {"type": "rule", "color": "currentColor", "opacity": FADED, **style}


def _arm_encoding(arms: Mapping[str, Mark]) -> dict[str, Chart]:
    """Channels ``color`` and ``shape``."""
    colours = colour_scale({arm: mark.colour for arm, mark in arms.items()})
    shapes = colour_scale({arm: mark.shape for arm, mark in arms.items()})
    return {"color": of("arm:N", scale=colours), "shape": of("arm:N", scale=shapes)}
