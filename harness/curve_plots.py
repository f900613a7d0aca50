"""Plots of curves and surfaces: Vega-Lite charts, rendered by vl-convert without a browser.

The charts are plain Vega-Lite documents: importing Altair to write them would cost half of the two
seconds a cold `kvcliff curve TRACE --png` may take.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.curve_commands import CurveRun, SurfaceRun
from harness.curve_traces import writing
from harness.errors import InputError

Chart = dict[str, Any]

ENDINGS = (".png", ".svg", ".html", ".json")
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_BLUE, _ORANGE, _GREEN, _GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
_SOURCES = {"computed": "#cbd5e0", "GPU hit": _BLUE, "host-loaded": _ORANGE}
_LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Shares of the tokens not computed at which the surface gets a contour."""


def cliff(run: CurveRun, *, mark_blocks: int | None = None, title: str = "") -> Chart:
    """Share of the prompt blocks served from the GPU against its capacity, log x.

    Shows the ceiling, the capacity for 95 % of it, and ``mark_blocks``, "your GPU". The x axis is
    in tokens, with GiB below the token counts where the model is known.
    """
    block = run.loaded.ruler.block_tokens
    total = max(run.curve.accesses, 1)
    line = [{"tokens": c * block, "share": run.curve.at(c) / total} for c in run.samples()]
    knee = run.curve.capacity_for(0.95) if run.curve.ideal else 0
    points = [_named(run, knee, "95 % of the ideal")] if knee else []
    if mark_blocks:
        points.append(_named(run, mark_blocks, "your GPU"))
    x = _tokens_axis("GPU KV capacity", run.loaded.ruler.gib(1), block)
    layers = [
        _layer(line, {"type": "line", "color": _BLUE, "strokeWidth": 2.5}, x=x, y=_share_axis(
            "prompt blocks served from the GPU")),
        _layer([{"share": run.curve.ideal / total}],
               {"type": "rule", "color": _GREY, "strokeDash": [5, 4]}, y=_share_axis(None)),
        _layer([{"share": run.curve.ideal / total, "text":
                 f"never evicting: {run.curve.ideal / total:.1%}"}],
               {"type": "text", "align": "left", "dy": -7, "color": _GREY, "x": 6},
               y=_share_axis(None), text={"field": "text"}),
        _layer(points, {"type": "point", "filled": True, "size": 90, "color": _ORANGE}, x=x,
               y=_share_axis(None)),
        *_labels(points, x, middle=line[len(line) // 2]["tokens"] if line else 0),
    ]  # fmt: skip
    return _chart(title or "Cliff: GPU capacity against prefix-cache hits", layers)


def sources(run: SurfaceRun, *, gpu_blocks: int, title: str = "") -> Chart:
    """Prompt tokens by source, stacked, against host capacity, at one GPU capacity."""
    rows = [
        {"tokens": point["host_blocks"] * run.loaded.ruler.block_tokens, "source": name,
         "share": point[field] / max(run.surface.prompt_tokens, 1), "order": order}
        for point in run.json["points"]
        if point["gpu_blocks"] == gpu_blocks and point["host_blocks"] > 0
        for order, (name, field) in enumerate(
            (("GPU hit", "gpu_hit_tokens"), ("host-loaded", "host_loaded_tokens"),
             ("computed", "computed_tokens")))
    ]  # fmt: skip
    if not rows:
        raise InputError(f"the surface has no GPU capacity of {gpu_blocks} blocks to plot")
    block = run.loaded.ruler.block_tokens
    x = _tokens_axis("host KV capacity", run.loaded.ruler.gib(1), block)
    y = {"field": "share", "type": "quantitative", "stack": "zero",
         "scale": {"domain": [0, 1]},
         "axis": {"format": "%", "title": "prompt tokens by source"}}  # fmt: skip
    color = {
        "field": "source",
        "type": "nominal",
        "scale": {"domain": list(_SOURCES), "range": list(_SOURCES.values())},
        "legend": {"title": None},
    }
    area = _layer(rows, {"type": "area", "interpolate": "linear"}, x=x, y=y, color=color,
                  order={"field": "order", "type": "quantitative"})  # fmt: skip
    at = f" at {gpu_blocks * block:,} GPU tokens"
    return _chart(title or "Token sources" + at, [area])


def heat_map(run: SurfaceRun, *, title: str = "") -> Chart:
    """Share of prompt tokens not computed, for every pair, with contours at round shares."""
    block = run.loaded.ruler.block_tokens
    points = [p for p in run.json["points"] if p["gpu_blocks"] > 0 and p["host_blocks"] > 0]
    gpu = _borders(sorted({p["gpu_blocks"] for p in points}))
    host = _borders(sorted({p["host_blocks"] for p in points}))
    cells = [
        {"x": gpu[p["gpu_blocks"]][0] * block, "x2": gpu[p["gpu_blocks"]][1] * block,
         "y": host[p["host_blocks"]][0] * block, "y2": host[p["host_blocks"]][1] * block,
         "served": 1 - p["computed_share"]}
        for p in points if p["computed_share"] is not None
    ]  # fmt: skip
    if not cells:
        raise InputError("the surface has no pair of capacities above 0 to plot")
    x = {**_tokens_axis("GPU KV capacity", run.loaded.ruler.gib(1), block), "field": "x"}
    y = {**_tokens_axis("host KV capacity", run.loaded.ruler.gib(1), block), "field": "y"}
    color = {
        "field": "served",
        "type": "quantitative",
        "scale": {"scheme": "viridis"},
        "legend": {"format": "%", "title": "tokens not computed"},
    }
    layers = [
        _layer(cells, {"type": "rect"}, x=x, y=y, x2={"field": "x2"}, y2={"field": "y2"},
               color=color)
    ]  # fmt: skip
    layers += _contours(points, block, x, y)
    return _chart(title or "GPU × host capacity: prompt tokens not computed", layers)


def measured_over_predicted(
    run: CurveRun, measured: Sequence[tuple[int, float]], *, title: str = ""
) -> Chart:
    """The predicted curve with measured points (GPU blocks, hit share) over it."""
    block = run.loaded.ruler.block_tokens
    chart = cliff(run, title=title or "Measured hits over the predicted curve")
    points = [{"tokens": blocks * block, "share": share} for blocks, share in measured]
    x = _tokens_axis("GPU KV capacity", run.loaded.ruler.gib(1), block)
    chart["layer"].append(
        _layer(points, {"type": "point", "shape": "cross", "size": 130, "color": _GREEN,
                        "strokeWidth": 2}, x=x, y=_share_axis(None))
    )  # fmt: skip
    return chart


def save(chart: Chart, path: Path) -> None:
    """Write ``chart`` as PNG, SVG, one offline HTML file or Vega-Lite JSON, by ``path``'s ending.

    The file is whole or absent. Raises InputError for another ending or a place that cannot be
    written.
    """
    if path.suffix not in ENDINGS:
        raise InputError(f"the plot {str(path)!r} must end in {', '.join(ENDINGS)}")
    content = _RENDER[path.suffix](chart)
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _png(chart: Chart) -> bytes:
    import vl_convert

    return _packed(bytes(vl_convert.vegalite_to_png(chart, scale=2)))


def _packed(png: bytes) -> bytes:
    """The same picture in a quarter of the bytes: vl-convert 1.9 hardly compresses its pixels."""
    parts, pixels, at = [png[:8]], b"", 8
    while at < len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            pixels += png[at + 8 : end - 4]
        else:
            parts.append(png[at:end])
        at = end
    body = b"IDAT" + zlib.compress(zlib.decompress(pixels), 6)
    size, check = len(body) - 4, zlib.crc32(body)
    parts.insert(-1, size.to_bytes(4, "big") + body + check.to_bytes(4, "big"))
    return b"".join(parts)


def _svg(chart: Chart) -> bytes:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(chart)).encode()


def _html(chart: Chart) -> bytes:
    import vl_convert

    return str(vl_convert.vegalite_to_html(chart, bundle=True)).encode()


def _json(chart: Chart) -> bytes:
    return (json.dumps(chart, indent=1) + "\n").encode()


_RENDER: dict[str, Callable[[Chart], bytes]] = {
    ".png": _png,
    ".svg": _svg,
    ".html": _html,
    ".json": _json,
}


def _chart(title: str, layers: list[Chart]) -> Chart:
    return {
        "$schema": _SCHEMA,
        "title": {"text": title, "anchor": "start", "fontSize": 15},
        "width": 620,
        "height": 340,
        "background": "white",
        "config": {"font": "DejaVu Sans, Arial, sans-serif", "axis": {"gridOpacity": 0.5}},
        "layer": layers,
    }


def _layer(values: Sequence[Any], mark: Chart, **encoding: Any) -> Chart:
    return {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}


def _share_axis(title: str | None) -> Chart:
    axis: Chart = {"field": "share", "type": "quantitative"}
    if title:
        axis |= {"scale": {"domain": [0, 1]}, "axis": {"format": "%", "title": title}}
    return axis


def _tokens_axis(title: str, gib_per_block: float | None, block_tokens: int) -> Chart:
    """A log axis in tokens; with a model each label carries the GiB under the tokens."""
    label: Chart = {"title": f"{title} (tokens)", "format": "~s", "tickCount": 6}
    if gib_per_block is not None:
        per_token = gib_per_block / block_tokens
        label["title"] = f"{title} (tokens, GiB of KV)"
        label["labelExpr"] = (
            f"[format(datum.value, '~s'), format(datum.value * {per_token!r}, '.3~r') + ' GiB']"
        )
    return {
        "field": "tokens",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False},
        "axis": label,
    }


def _labels(points: Sequence[Chart], x: Chart, *, middle: float) -> list[Chart]:
    """The points' texts, below them and towards the middle, with a white rim over the curve."""
    layers = []
    for is_right in (False, True):
        side = [point for point in points if (point["tokens"] > middle) == is_right]
        place = {"type": "text", "dy": 16, "align": "right" if is_right else "left",
                 "dx": -8 if is_right else 8}  # fmt: skip
        for rim in ({"stroke": "white", "strokeWidth": 4}, {"color": "#1a202c"}):
            layers.append(_layer(side, place | rim, x=x, y=_share_axis(None),
                                 text={"field": "text"}))  # fmt: skip
    return layers


def _named(run: CurveRun, blocks: int, name: str) -> dict[str, Any]:
    tokens, gib = blocks * run.loaded.ruler.block_tokens, run.loaded.ruler.gib(blocks)
    size = f"{tokens:,} tokens" + (f" = {gib:,.1f} GiB" if gib is not None else "")
    share = run.curve.at(blocks) / max(run.curve.accesses, 1)
    return {"tokens": tokens, "share": share, "text": f"{name}: {share:.1%} at {size}"}


def _borders(capacities: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Where each capacity's cell begins and ends on a log axis: half way to its neighbours."""
    logs = np.log(np.array(capacities, dtype=np.float64))
    middles = (logs[1:] + logs[:-1]) / 2
    low = np.concatenate([logs[:1], middles])
    high = np.concatenate([middles, logs[-1:]])
    if len(logs) == 1:
        low, high = logs - 0.1, logs + 0.1
    return {
        c: (float(a), float(b))
        for c, a, b in zip(capacities, np.exp(low), np.exp(high), strict=True)
    }


def _contours(points: Sequence[dict[str, Any]], block: int, x: Chart, y: Chart) -> list[Chart]:
    """Per level, the smallest host capacity that reaches it, against GPU capacity."""
    layers = []
    for level in _LEVELS:
        least: dict[int, int] = {}
        for point in sorted(points, key=lambda p: -int(p["host_blocks"])):
            if point["computed_share"] is not None and 1 - point["computed_share"] >= level:
                least[point["gpu_blocks"]] = point["host_blocks"]
        # Where the smallest host drawn is enough the border has left the plot: once is enough.
        smallest = min(point["host_blocks"] for point in points)
        shown = [(g, h) for g, h in sorted(least.items()) if h > smallest]
        shown += [(g, h) for g, h in sorted(least.items()) if h == smallest][:1]
        line = [{"x": g * block, "y": h * block, "text": f"{level:.0%}"} for g, h in shown]
        if line:
            layers.append(_layer(line, {"type": "line", "color": "white", "strokeWidth": 1.5, "interpolate": "step-after"},
                                 x=x, y=y))  # fmt: skip
            layers.append(_layer(line[:1], {"type": "text", "color": "white", "dx": 14, "dy": -7},
                                 x=x, y=y, text={"field": "text"}))  # fmt: skip
    return layers
