"""What the plots of traces share: a chart's frame, its axes, and capacities in words."""

import math
from collections.abc import Sequence
from typing import Any

from harness.traces.load import Loaded

Chart = dict[str, Any]
"""A Vega-Lite document, or a part of one."""

BLUE, ORANGE, GREEN, GREY, INK = "#2b6cb0", "#c05621", "#2f855a", "#718096", "#1a202c"
WIDTH, HEIGHT = 620, 340
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"


def framed(title: str | list[str], about: str | list[str], layers: list[Chart]) -> Chart:
    """A whole chart: the finding as its title, below it what it is ``about``."""
    return {
        "$schema": _SCHEMA,
        "title": {"text": title, "subtitle": about, "anchor": "start", "fontSize": 15,
                  "subtitleColor": GREY, "subtitleFontSize": 12, "offset": 12},
        "width": WIDTH,
        "height": HEIGHT,
        "background": "white",
        "padding": 12,
        "config": {"font": "DejaVu Sans, Arial, sans-serif",
                   "axis": {"gridOpacity": 0.5, "labelFontSize": 12, "titleFontSize": 12,
                            "titleFontWeight": "normal", "titlePadding": 10},
                   "legend": {"labelFontSize": 12, "titleFontSize": 12,
                              "titleFontWeight": "normal"}},
        "layer": layers,
    }  # fmt: skip


def layer(values: Sequence[Any], mark: Chart, **encoding: Any) -> Chart:
    """One layer of a chart, with its own values."""
    return {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}


def share_axis(title: str, top: float) -> Chart:
    """An axis of shares from 0 to ``top``, with ticks up to 100 %."""
    return {
        "field": "share",
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"format": "~%", "title": title, "tickCount": 6,
                 "values": [tick for tick in _even_ticks(top) if tick <= 1]},
    }  # fmt: skip


def nice_bound(share: float) -> float:
    """Upper end of an axis of shares: room for a line of text above ``share``, at most 1.1."""
    return next(bound for bound in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6,
                                    0.7, 0.8, 0.9, 1.0, 1.1) if bound >= min(share * 1.08, 1.1))  # fmt: skip


def _even_ticks(top: float) -> list[float]:
    step = next(step for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if top / step <= 6.5)
    return [round(k * step, 4) for k in range(int(top / step + 1e-9) + 1)]


def tokens_axis(title: str, loaded: Loaded, tokens: Sequence[float]) -> Chart:
    """A log axis over ``tokens``; with a model each label carries the GiB under the tokens."""
    low, high = min(tokens), max(tokens)
    if low == high:
        low, high = low / 2, high * 2
    label: Chart = {"title": f"{title} (tokens)", "format": "~s", "values": _log_ticks(low, high)}
    gib_per_block = loaded.ruler.gib(1)
    if gib_per_block is not None:
        per_token = gib_per_block / loaded.ruler.block_tokens
        label["title"] = f"{title} (tokens, GiB of KV)"
        label["labelExpr"] = (
            f"[format(datum.value, '~s'), format(datum.value * {per_token!r}, ',.2~r') + ' GiB']"
        )
    return {
        "field": "tokens",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "domain": [low, high]},
        "axis": label,
    }


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 times them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]
        if len(ticks) >= 4:
            return ticks
    return [low, math.sqrt(low * high), high] if len(ticks) < 2 else ticks


def kv(loaded: Loaded, tokens: int, tier: str) -> str:
    """A capacity of a tier in one line."""
    size, *gib = sizes(loaded, tokens)
    return f"{size} of {tier} KV" + "".join(f" ({text})" for text in gib)


def sizes(loaded: Loaded, tokens: int) -> list[str]:
    """A capacity in tokens and, with a model, in GiB."""
    gib = loaded.ruler.gib_of(tokens)
    said = [f"{_short(tokens)} tokens"]
    return said if gib is None else [*said, f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"]


def _short(tokens: float) -> str:
    """A number of tokens in three digits: 1.93M."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= scale * 0.9995:
            return f"{tokens / scale:.3g}{letter}"
    return f"{tokens:g}"


def rimmed(colour: str) -> tuple[Chart, Chart]:
    """A text twice, first its white rim: readable over lines and cells."""
    return {"stroke": "white", "strokeWidth": 3}, {"color": colour}
