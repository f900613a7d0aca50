"""Plots of curves and surfaces, as Vega-Lite charts to stand on paper."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from harness.charting import FADED, HEIGHT, WIDTH, Chart, colour_scale, layer, of, on_paper
from harness.errors import InputError
from harness.traces.axes import kv, nice_bound, rimmed, share_axis, sizes, tokens_axis
from harness.traces.curve import CurveRun
from harness.traces.load import Loaded
from harness.traces.surface import SurfaceRun
from harness.words_and_colours import (
    COMPUTED,
    DIM,
    GPU_HIT,
    HOST_LOADED,
    INK,
    NOT_COMPUTED,
    PAPER,
    SOURCES,
)
from sim.curves.capacity import spaced

_Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the plot."""

TARGET = 0.95
"""Share of the ideal whose capacity the plots are about."""

_SAMPLES = 400
"""Capacities a whole curve is drawn from."""

_MARGIN = 80
"""Pixels a text may stand out of the plot to the right."""

_CHARACTER, _LINE = 7.2, 15.0
"""Pixels a letter and a line of 12 px take at most, in the fonts of ``charting.THEME``."""


def cliff(
    run: CurveRun,
    *,
    mark_blocks: int | None = None,
    measured: Sequence[tuple[int, float]] = (),
) -> Chart:
    """Share of the prompt tokens served from the GPU against its capacity, log x.

    Shows the ceiling, the capacity for 95 % of it, ``mark_blocks``, "your GPU", and ``measured``
    points (GPU blocks, hit share). With a model the x axis carries GiB under the tokens.
    """
    loaded, block = run.loaded, run.loaded.ruler.block_tokens
    ideal = run.curve.share(run.curve.ideal) or 0.0
    knee = run.curve.capacity_for(TARGET) if run.curve.ideal else 0
    points = [_named(run, knee, f"{TARGET:.0%} of the ideal")] if knee else []
    if mark_blocks:
        points.append(_named(run, mark_blocks, "your GPU"))
    n_blocks = max(loaded.tree.n_blocks, 1)
    drawn = spaced(max(n_blocks // 5000, 1), n_blocks, _SAMPLES)
    line = [{"tokens": c * block, "share": run.curve.share(run.curve.at(c)) or 0.0}
            for c in sorted({*drawn, *(p["blocks"] for p in points)})]  # fmt: skip
    dots = [{"tokens": blocks * block, "share": share} for blocks, share in measured]
    top = nice_bound(max([ideal, *(dot["share"] for dot in dots)]))
    x = tokens_axis("GPU KV capacity", loaded, [row["tokens"] for row in [*line, *dots]])
    y = share_axis("prompt tokens served from the GPU", top)
    _place(points, line, x["scale"]["domain"], top)
    ceiling = {"share": ideal, "text": f"never evicting: {ideal:.1%}"}
    layers = [
        layer([ceiling], {"type": "rule", "color": DIM, "strokeDash": [5, 4]}, y=y),
        # Above the ceiling, where no curve comes.
        *rimmed(ceiling, {"x": 6, "dy": -9}, DIM, y=y),
        layer(points, {"type": "rule", "color": INK, "opacity": FADED, "strokeDash": [2, 3]}, x=x, y=y,
               y2={"datum": 0}),
        layer(line, {"type": "line", "color": GPU_HIT.colour, "strokeWidth": 2.5}, x=x, y=y),
        layer(points, {"type": "point", "filled": True, "size": 90, "color": INK,
                        "opacity": 1}, x=x, y=y),
        *(_note(point, x, y) for point in points),
        *([layer(dots, {"type": "point", "shape": "cross", "size": 110, "strokeWidth": 2.5,
                         "color": INK}, x=x, y=y)] if dots else []),
    ]  # fmt: skip
    return on_paper({"layer": layers}, _cliff_title(run, knee), _about(loaded, dots))


def _cliff_title(run: CurveRun, knee: int) -> str:
    if not knee:
        return "No prompt begins like an earlier one: nothing to keep"
    needed = kv(run.loaded, knee * run.curve.unit_tokens, "GPU")
    return f"{TARGET:.0%} of the possible hits need {needed}"


def _about(loaded: Loaded, dots: Sequence[Any] = ()) -> str:
    """The subtitle: what was replayed."""
    tree = loaded.tree
    said = (f"{tree.requests.source}: {len(tree.requests):,} "
            f"request{'s' * (len(tree.requests) != 1)}, {tree.n_accesses:,} blocks "
            f"of {loaded.ruler.block_tokens} tokens, {tree.n_blocks:,} distinct")  # fmt: skip
    return said + ("; crosses: measured" if dots else "")


def _named(run: CurveRun, blocks: int, name: str) -> Chart:
    share = run.curve.share(run.curve.at(blocks)) or 0.0
    tokens = blocks * run.loaded.ruler.block_tokens
    return {
        "blocks": blocks,
        "tokens": tokens,
        "share": share,
        "text": [name, f"{share:.1%} of tokens", *sizes(run.loaded, tokens)],
    }


def _place(
    points: Sequence[Chart], line: Sequence[Chart], domain: tuple[float, float], top: float
) -> None:
    """Give each point's text a place ("x", "y" of its upper corner, "align") clear of the curve.

    Beside the line dropped from the point, as high as is free: to the right of a rising curve that
    is right below the point; where the plot ends well before the text does, to the line's left.
    Above the point where it lies too low for that.
    """
    low, high = np.log(domain[0]), np.log(domain[1])

    def pixels(rows: Sequence[Chart]) -> tuple[Any, Any]:
        x = (np.log([row["tokens"] for row in rows]) - low) / (high - low) * WIDTH
        return x, (1 - np.array([row["share"] for row in rows]) / top) * HEIGHT

    curve = pixels(line)
    drops = [(x - 3, y, x + 3, float(HEIGHT)) for x, y in zip(*pixels(points), strict=True)]
    texts: list[_Box] = []
    for number, point in enumerate(points):
        at, first = drops[number][0] + 3, drops[number][1] + 8
        wide, tall = max(map(len, point["text"])) * _CHARACTER, len(point["text"]) * _LINE
        lowest = HEIGHT - tall - 4
        below = np.arange(min(first, lowest), lowest + 1, 6.0)
        boxes = [(left, y, left + wide, y + tall)
                 for heights in (below, np.arange(first - 16 - tall, 4.0, -6.0))
                 for left in (at + 9, at - 9 - wide) if 0 < left < WIDTH + _MARGIN - wide
                 for y in heights]  # fmt: skip
        taken = [*texts, *drops[:number], *drops[number + 1 :]]
        free = (box for box in boxes if _is_free(box, curve, taken))
        # Where nothing is free, right below: rather over something than left out.
        box = next(free, (at + 9, first, at + 9 + wide, first + tall))
        texts.append(box)
        is_right = box[0] > at
        point |= {"x": box[0] if is_right else box[2], "y": box[1],
                  "align": "left" if is_right else "right"}  # fmt: skip


def _is_free(box: _Box, curve: tuple[Any, Any], taken: Sequence[_Box]) -> bool:
    """Whether neither the curve nor a taken box comes within a few pixels of ``box``."""
    left, top, right, bottom = box
    heights = np.interp(np.linspace(left - 4, right + 4, 60), *curve)
    is_crossed = heights.min() < bottom + 4 and heights.max() > top - 4
    return not is_crossed and all(
        right < x or x2 < left or bottom < y or y2 < top for x, y, x2, y2 in taken
    )


def _note(point: Chart, x: Chart, y: Chart) -> Chart:
    """The text of a placed point."""
    mark = {"type": "text", "align": point["align"], "baseline": "top", "fontSize": 12,
            "lineHeight": _LINE, "color": INK, "x": point["x"], "y": point["y"],
            "text": point["text"]}  # fmt: skip
    return {"data": {"values": [{}]}, "mark": mark}


def surface_chart(run: SurfaceRun) -> Chart:
    """The map of a surface; with a single GPU capacity the token sources there."""
    is_map = len({point["gpu_blocks"] for point in run.json["points"]}) > 1
    return heat_map(run) if is_map else sources(run)


def sources(run: SurfaceRun) -> Chart:
    """Prompt tokens by source, stacked, against host capacity, at the one GPU capacity there is."""
    loaded, block = run.loaded, run.loaded.ruler.block_tokens
    capacities = sorted({point["gpu_blocks"] for point in run.json["points"]})
    if len(capacities) != 1:
        raise InputError(f"token sources are drawn at one GPU capacity, not at {len(capacities)}")
    points = sorted(run.json["points"], key=lambda point: point["host_blocks"])
    points = [point for point in points if point["host_blocks"] > 0]
    if not points:
        raise InputError("the surface has no host capacity above 0 to plot")
    total = max(run.surface.prompt_tokens, 1)
    rows = [
        {"tokens": tokens, "source": source.word, "order": order,
         "share": point[f"{source.field}_tokens"] / total}
        for tokens, point in _steps(points, block)
        for order, source in enumerate((GPU_HIT, HOST_LOADED, COMPUTED))
    ]  # fmt: skip
    x = tokens_axis("host KV capacity", loaded, [row["tokens"] for row in rows])
    y = share_axis("prompt tokens by source", 1.0) | {"stack": "zero"}
    colours = colour_scale({source.word: source.colour for source in SOURCES})
    color = of("source:N", legend={"orient": "right", "columns": 1}, scale=colours)
    mark = {"type": "area", "interpolate": "step-after"}
    area = layer(rows, mark, x=x, y=y, color=color, order=of("order:Q"))
    # A larger host tier may load less: what does not fit beside the rest is not stored.
    most = max(points, key=lambda point: point["host_loaded_tokens"])
    said = (
        f"{kv(loaded, capacities[0] * block, 'GPU')} serve {most['gpu_hit_tokens'] / total:.1%} of "
        f"the prompt tokens; a host tier up to {most['host_loaded_tokens'] / total:.1%} more"
    )
    return on_paper({"layer": [area]}, said, _about(loaded))


def _steps(points: Sequence[Chart], block: int) -> list[tuple[float, Chart]]:
    """Where each point's step begins, in tokens, and where the last one ends: as wide as the others."""
    begins = [point["host_blocks"] * block for point in points]
    width = (begins[-1] / begins[0]) ** (1 / max(len(begins) - 1, 1))
    return [*zip(begins, points, strict=True), (begins[-1] * max(width, 1.1), points[-1])]


def heat_map(run: SurfaceRun) -> Chart:
    """Share of prompt tokens not computed, for every pair, with contours at round shares."""
    loaded, block = run.loaded, run.loaded.ruler.block_tokens
    points = [p for p in run.json["points"]
              if p["gpu_blocks"] > 0 and p["host_blocks"] > 0 and p["computed_share"] is not None]  # fmt: skip
    if not points:
        raise InputError("the surface has no pair of capacities above 0 to plot")
    gpu = _borders(sorted({p["gpu_blocks"] * block for p in points}))
    host = _borders(sorted({p["host_blocks"] * block for p in points}))
    cells = [
        {"x": gpu[p["gpu_blocks"] * block][0], "x2": gpu[p["gpu_blocks"] * block][1],
         "y": host[p["host_blocks"] * block][0], "y2": host[p["host_blocks"] * block][1],
         "served": (p["gpu_hit_tokens"] + p["host_loaded_tokens"]) / run.surface.prompt_tokens}
        for p in points
    ]  # fmt: skip
    x = tokens_axis("GPU KV capacity", loaded, [end for pair in gpu.values() for end in pair])
    y = tokens_axis("host KV capacity", loaded, [end for pair in host.values() for end in pair])
    x, y = x | {"field": "x"}, y | {"field": "y"}
    shares = [cell["served"] for cell in cells]
    served = of(
        "served:Q",
        scale={"range": NOT_COMPUTED, "domain": [min(shares), max(*shares, min(shares) + 0.01)]},
        legend={
            "orient": "right",
            "format": ".1~%",
            "title": ["prompt tokens", "not computed"],
            "gradientLength": 200,
        },
    )
    rects = layer(_overlapping(cells, x, y), {"type": "rect", "clip": True}, x=x, y=y,
                   x2={"field": "x2"}, y2={"field": "y2"}, color=served)  # fmt: skip
    target = TARGET * run.json["ideal_served_tokens"] / run.surface.prompt_tokens
    ends = [max(min(gpu.values())[0], min(host.values())[0]),
            min(max(gpu.values())[1], max(host.values())[1])]  # fmt: skip
    equal = layer([{"x": end, "y": end} for end in ends if ends[0] < ends[1]],
                   {"type": "line", "color": INK, "strokeDash": [2, 4]}, x=x, y=y)  # fmt: skip
    about = [_about(loaded), "dotted: host = GPU; a host tier below it adds almost nothing"]
    layers = [rects, equal, *_contours(cells, x, y, target=target)]
    return on_paper({"layer": layers}, _surface_title(run), about)


def _borders(capacities: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Where each capacity's cell begins and ends on a log axis: half way to its neighbours."""
    logs = np.log(np.array(capacities, dtype=np.float64))
    ends = [logs[0], *(logs[1:] + logs[:-1]) / 2, logs[-1]]
    if len(logs) == 1:
        ends = [logs[0] - 0.1, logs[0] + 0.1]
    return dict(zip(capacities, pairwise(np.exp(ends).tolist()), strict=True))


def _overlapping(cells: Sequence[Chart], x: Chart, y: Chart) -> list[Chart]:
    """The cells a pixel larger to the right and the top: else the background shines through."""
    by_x, by_y = (
        (axis["scale"]["domain"][1] / axis["scale"]["domain"][0]) ** (1 / pixels)
        for axis, pixels in ((x, WIDTH), (y, HEIGHT))
    )
    return [cell | {"x2": cell["x2"] * by_x, "y2": cell["y2"] * by_y} for cell in cells]


def _surface_title(run: SurfaceRun) -> str | list[str]:
    """How much of the GPU tier alone would do, and of the host tiers drawn behind the smallest."""
    alone, most = run.gpu_alone(), run.json["ideal_served_tokens"]
    if not alone.ideal or not most:
        return "No prompt begins like an earlier one: nothing to keep"
    gpu = kv(run.loaded, alone.capacity_for(TARGET) * alone.unit_tokens, "GPU")
    smallest = min(point["gpu_blocks"] for point in run.json["points"])
    reach = [
        point["host_blocks"]
        for point in run.json["points"]
        if point["gpu_blocks"] == smallest
        and point["gpu_hit_tokens"] + point["host_loaded_tokens"] >= TARGET * most
    ]
    said = [f"{TARGET:.0%} of the possible hits need {gpu}"]
    if reach:
        block = run.loaded.ruler.block_tokens
        host = kv(run.loaded, min(reach) * block, "host")
        return [*said, f"or {host} ({run.json['host_kind']})"]
    return [*said, f"no {run.json['host_kind']} host tier drawn reaches that"]


def _contours(cells: Sequence[Chart], x: Chart, y: Chart, *, target: float) -> list[Chart]:
    """Along the cells' edges, where round shares and ``target`` are reached; each with a label."""
    served = [cell["served"] for cell in cells]
    step = next(
        step for step in (0.2, 0.1, 0.05, 0.02, 0.01) if max(served) / step >= 3 or step == 0.01
    )
    rounds = [round(k * step, 2) for k in range(1, 100) if k * step < max(served)]
    levels = [level for level in rounds if abs(level - target) > step / 3] + [target]
    low, high = np.log(y["scale"]["domain"])
    layers, heights = [], list[float]()
    for level in levels[::-1]:  # the target first: its label has the first choice
        path = _contour(cells, level)
        if not path:
            continue
        width = 2.5 if level == target else 1.0
        for style in ({"color": PAPER, "strokeWidth": width + 2, "opacity": FADED},
                      {"color": INK, "strokeWidth": width}):  # fmt: skip
            layers.append(layer(path, {"type": "line", **style}, x=x, y=y, order=of("at:Q")))
        height = float((np.log(path[0]["y"]) - low) / (high - low) * HEIGHT)
        if all(abs(height - other) > _LINE for other in heights):
            heights.append(height)
            text = f"{level:.0%}" + (f": {TARGET:.0%} of the ideal" if level == target else "")
            # Above the point it belongs to, or below at the plot's top.
            place = {"dx": 6, "dy": -9 if height < HEIGHT - 20 else 10, "fontWeight": "bold"}
            layers += rimmed({**path[0], "text": text}, place, INK, x=x, y=y)
    return layers


def _contour(cells: Sequence[Chart], level: float) -> list[Chart]:
    """The border of the cells that reach ``level``, from the left; empty where all or none do."""
    least: dict[tuple[float, float], float] = {}
    for cell in cells:
        if cell["served"] >= level:
            column = cell["x"], cell["x2"]
            least[column] = min(least.get(column, math.inf), cell["y"])
    columns, bottom = sorted(least), min(cell["y"] for cell in cells)
    if not columns or least[columns[0]] == bottom == least[columns[-1]]:
        return []
    ends = [(columns[0][0], max(cell["y2"] for cell in cells))] if (
        columns[0][0] > min(cell["x"] for cell in cells)) else []  # fmt: skip
    for left, right in columns:
        ends += [(left, least[left, right])]
        if least[left, right] == bottom:
            break
        ends += [(right, least[left, right])]
    return [{"x": x, "y": y, "at": at} for at, (x, y) in enumerate(ends)]
