"""What the plots of traces share: their axes, capacities in words, and text that stays readable."""

from collections.abc import Sequence

from harness.charting import Chart, layer, log_ticks, of
from harness.traces.load import Loaded
from harness.words_and_colours import PAPER


def share_axis(title: str, top: float) -> Chart:
    """An axis of shares from 0 to ``top``, with ticks up to 100 %."""
    step = next(step for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if top / step <= 6.5)
    ticks = [round(k * step, 4) for k in range(int(min(top, 1) / step + 1e-9) + 1)]
    axis = {"format": "~%", "title": title, "tickCount": 6, "values": ticks}
    return of("share:Q", scale={"domain": [0, top], "nice": False}, axis=axis)


def nice_bound(share: float) -> float:
    """Upper end of an axis of shares: room for a line of text above ``share``, at most 1.1."""
    return next(bound for bound in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6,
                                    0.7, 0.8, 0.9, 1.0, 1.1) if bound >= min(share * 1.08, 1.1))  # fmt: skip


def tokens_axis(title: str, loaded: Loaded, tokens: Sequence[float]) -> Chart:
    """A log axis over ``tokens``; with a model each label carries the GiB under the tokens."""
    low, high = min(tokens), max(tokens)
    if low == high:
        low, high = low / 2, high * 2
    label: Chart = {"title": f"{title} (tokens)", "format": "~s", "values": log_ticks(low, high)}
    per_token = loaded.ruler.gib(1)
    if per_token is not None:
        label["title"] = f"{title} (tokens, GiB of KV)"
        label["labelExpr"] = (
            f"[format(datum.value, '~s'), format(datum.value * {per_token!r}, ',.2~r') + ' GiB']"
        )
    return of("tokens:Q", scale={"type": "log", "nice": False, "domain": [low, high]}, axis=label)


def kv(loaded: Loaded, tokens: int, tier: str) -> str:
    """A capacity of a tier in one line."""
    size, *gib = sizes(loaded, tokens)
    return f"{size} of {tier} KV" + "".join(f" ({text})" for text in gib)


def sizes(loaded: Loaded, tokens: int) -> list[str]:
    """A capacity in tokens and, with a model, in GiB."""
    gib = loaded.ruler.gib(tokens)
    said = [f"{_short(tokens)} tokens"]
    return said if gib is None else [*said, f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"]


def _short(tokens: float) -> str:
    """A number of tokens in three digits: 1.93M."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= scale * 0.9995:
            return f"{tokens / scale:.3g}{letter}"
    return f"{tokens:g}"


def rimmed(label: Chart, place: Chart, colour: str, **encoding: Chart) -> list[Chart]:
    """``label``'s text at its place twice, first its white rim: readable over lines and cells."""
    return [
        layer(
            [label],
            {"type": "text", "align": "left", **place, **ink},
            text={"field": "text"},
            **encoding,
        )
        for ink in ({"stroke": PAPER, "strokeWidth": 3}, {"color": colour})
    ]
