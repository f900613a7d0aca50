"""Vega-Lite specifications of the report's charts, from rows that are ready to draw.

Arms differ in shape as well as colour (``harness.vocabulary``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from harness.charting import FADED, FONT_SIZE, log_ticks, on_page
from harness.forecast.cliff import Cliff, CliffPoint
from harness.plan.arms import BASELINE, CONTROL
from harness.vocabulary import (
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


def ttft_spec(
    values: Rows, *, arms: Mapping[str, Mark], domain: Sequence[float], legend: bool
) -> dict[str, Any]:
    """TTFT by position in the pass; ``values`` have ``n, ttft, arm, failed`` and the tooltip."""
    base = _chart(values).encode(
        x=_counted("n:Q", "request in the pass"),
        y=_log("ttft:Q", "TTFT, ms (log)", domain),
        tooltip=[alt.Tooltip(f"{name}:N", title=title) for name, title in _TTFT_TOOLTIP],
    )
    colour, shape = _arm_encoding(arms, legend)
    good = base.transform_filter("!datum.failed").mark_point(filled=True, size=42, opacity=0.85)
    layers = [good.encode(color=colour, shape=shape)]
    if any(value["failed"] for value in values):
        bad = base.transform_filter("datum.failed").mark_point(
            shape="cross", size=60, color=FAILED, angle=45, filled=True
        )
        layers.append(bad)
    return _spec(alt.layer(*layers), height=230)


_TTFT_TOOLTIP = (
    ("session", "session"), ("doc", "document"), ("time", "TTFT"), ("split", "measured"),
    ("predicted", "predicted"), ("bytes", "bytes loaded"), ("error", "error"),
)  # fmt: skip


def paired_spec(
    documents: Rows, *, quotient: str, domain: Sequence[float], threshold: float | None
) -> dict[str, Any]:
    """Ratio and range per document, with lines at 1 and at ``threshold`` where it fits.

    ``quotient`` says in words which arm is over which.
    """
    base = _chart(documents).encode(
        x=_counted("doc:Q", "document"),
        tooltip=[
            alt.Tooltip("doc:Q", title="document"),
            alt.Tooltip("ratio:Q", title=quotient, format=".3f"),
            alt.Tooltip("low:Q", format=".3f"),
            alt.Tooltip("high:Q", format=".3f"),
            alt.Tooltip("n_blocks:Q", title="blocks"),
        ],
    )
    title = f"{quotient} (log)"
    bars = base.mark_rule(color=TREATMENT_MARK.colour, strokeWidth=2)
    points = base.mark_point(color=TREATMENT_MARK.colour, filled=True, size=50)
    levels = [(1.0, [1, 0])]
    if threshold is not None and domain[0] <= threshold <= domain[1]:
        levels.append((threshold, [5, 4]))
    lines = [
        _chart([{"level": level}])
        .mark_rule(color="currentColor", opacity=FADED, strokeDash=dash)
        .encode(y=_log("level:Q", title, domain))
        for level, dash in levels
    ]
    layers = (
        bars.encode(y=_log("low:Q", title, domain), y2="high:Q"),
        points.encode(y=_log("ratio:Q", title, domain)),
    )
    return _spec(alt.layer(*lines, *layers), height=210)


def _counted(field: str, title: str) -> alt.X:
    """An axis of whole numbers."""
    scale = alt.Scale(zero=False, nice=False, padding=10)
    return alt.X(field, title=title, scale=scale, axis=alt.Axis(tickMinStep=1, grid=False))


def _log(field: str, title: str, domain: Sequence[float]) -> alt.Y:
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    axis = alt.Axis(format=",~g", values=log_ticks(*domain))
    return alt.Y(field, title=title, scale=scale, axis=axis)


def sources_spec(values: Rows, *, seqs: Sequence[int], legend: bool) -> dict[str, Any]:
    """Tokens by source, measured upwards and predicted downwards.

    ``values``: one bar each, with ``seq, where, source, kind, tokens, signed``. ``seqs``: the
    requests that are drawn.
    """
    colour = alt.Color(
        "source:N",
        scale=alt.Scale(
            domain=[source.word for source in SOURCES], range=[source.colour for source in SOURCES]
        ),
        legend=alt.Legend(orient="top", title=None) if legend else None,
    )
    y = alt.Y(
        "signed:Q",
        title="predicted · measured",
        axis=alt.Axis(labelExpr="format(abs(datum.value), '~s')", tickCount=5),
    )
    bars = (
        _chart(values)
        .mark_bar()
        .encode(
            x=alt.X("seq:O", title="request of the session", axis=_sparse_axis(seqs)),
            y=y,
            color=colour,
            tooltip=[
                alt.Tooltip("where:N", title="request"),
                alt.Tooltip("kind:N"),
                alt.Tooltip("source:N"),
                alt.Tooltip("tokens:Q", format=","),
            ],
        )
    )
    zero = _chart([{"zero": 0}]).mark_rule(color="currentColor", strokeWidth=1.5)
    return _spec(bars + zero.encode(y=alt.Y("zero:Q")), height=140)


def _sparse_axis(seqs: Sequence[int]) -> alt.Axis:
    """About eight labels however many requests there are."""
    labelled = list(seqs[:: max(1, len(seqs) // 8)])
    return alt.Axis(labelAngle=0, grid=False, values=labelled, ticks=False)


def cliff_spec(curve: Cliff, *, arms: Mapping[str, Mark], legend: bool) -> dict[str, Any]:
    """Predicted shares as lines, measured ones as marks, this plan and the working set as rules."""
    colour, shape = _arm_encoding(arms, legend)
    x = alt.X(
        "gpu_tokens:Q",
        title="GPU tier, tokens",
        axis=alt.Axis(format="~s", grid=False, tickCount=7),
    )
    y = alt.Y(
        "share:Q",
        title=f"{curve.pass_name}: share computed",
        axis=alt.Axis(format=".0%", tickCount=5),
        scale=alt.Scale(domain=[0, 1]),
    )
    tooltip = [
        alt.Tooltip("arm:N"),
        alt.Tooltip("gpu_tokens:Q", title="GPU tier, tokens", format=","),
        alt.Tooltip("share:Q", title="computed", format=".2%"),
    ]
    lines = _chart(_marks(curve.points)).mark_line(strokeWidth=2)
    points = _chart(_marks(curve.measured)).mark_point(filled=True, size=130, opacity=1)
    return _spec(
        alt.layer(
            lines.encode(x=x, y=y, color=colour, tooltip=tooltip),
            *_named_levels(curve, x),
            points.encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip),
        ),
        height=240,
    )


def _marks(points: Sequence[CliffPoint]) -> Rows:
    return [point.model_dump(exclude_unset=True) for point in points]


def _named_levels(curve: Cliff, x: alt.X) -> list[Any]:
    """Vertical lines with their names: this plan's GPU tier, and the working set."""
    base = _chart(
        [
            {"gpu_tokens": curve.gpu_tokens, "what": "this plan"},
            {"gpu_tokens": curve.working_set_tokens, "what": "working set"},
        ]
    )
    rules = base.mark_rule(color="currentColor", strokeDash=[4, 4], opacity=FADED)
    words = base.mark_text(
        color="currentColor", align="left", dx=4, baseline="top", fontSize=FONT_SIZE
    )
    return [rules.encode(x=x), words.encode(x=x, y=alt.value(4), text="what:N")]


def timeline_spec(
    spans: Rows, *, colours: Mapping[str, str], n_sessions: int, legend: bool
) -> dict[str, Any]:
    """One bar a phase, one line a session, on the wall clock in UTC."""
    chart = (
        _chart(spans)
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X(
                "began_unix_ms:T",
                title="time (UTC)",
                scale=alt.Scale(type="utc"),
                axis=alt.Axis(format="%H:%M:%S", tickCount=5, labelOverlap=True),
            ),
            x2="ended_unix_ms",
            y=alt.Y("session:N", title=None, sort=None),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=list(colours), range=list(colours.values())),
                legend=alt.Legend(orient="top", title=None, columns=3) if legend else None,
            ),
            tooltip=[alt.Tooltip("session:N"), alt.Tooltip("phase:N")],
        )
    )
    return _spec(chart, height=34 * n_sessions + 10)


def _arm_encoding(arms: Mapping[str, Mark], legend: bool) -> tuple[alt.Color, alt.Shape]:
    key = alt.Legend(orient="top", title=None) if legend else None
    return (
        alt.Color(
            "arm:N",
            scale=alt.Scale(domain=list(arms), range=[mark.colour for mark in arms.values()]),
            legend=key,
        ),
        alt.Shape(
            "arm:N",
            scale=alt.Scale(domain=list(arms), range=[mark.shape for mark in arms.values()]),
            legend=key,
        ),
    )


def _chart(values: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """A chart of ``values``, which stay inside its specification."""
    return alt.Chart(alt.Data(values=list(values)))  # type: ignore[no-untyped-call]


def _spec(chart: Any, *, height: int) -> dict[str, Any]:
    return on_page(chart.to_dict(validate=False), height=height)
