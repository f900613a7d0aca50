"""How every chart looks, and how it becomes a file: for the report's charts and the traces' plots.

Charts are plain Vega-Lite documents; vl-convert renders them without a browser. Text and grid are
``currentColor``, so on a page light, dark and print need no second drawing; on paper that is ink.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.files import write_atomically
from harness.words_and_colours import DIM, INK, PAPER

Chart = dict[str, Any]
"""A Vega-Lite document, or a part of one."""

VEGA_LITE = "6.4"
ENDINGS = (".png", ".svg", ".html", ".json")
WIDTH, HEIGHT = 620, 340
"""Pixels of a plot on paper, the axes apart."""

FONT_SIZE = 12
FADED = 0.6
"""Opacity of lines that are no data."""

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_AXIS_COLOURS = ("labelColor", "titleColor", "domainColor", "tickColor", "gridColor")
_LABELS = {"labelColor": "currentColor", "titleColor": "currentColor",
           "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE,
           "titleFontWeight": "normal"}  # fmt: skip
THEME: Chart = {
    "font": "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {**_LABELS, **dict.fromkeys(_AXIS_COLOURS, "currentColor"), "titlePadding": 8,
             "gridOpacity": 0.12, "domainOpacity": 0.4, "tickOpacity": 0.4},
    "legend": {**_LABELS, "orient": "top", "title": None, "columns": 3},
    "text": {"fontSize": FONT_SIZE},
}  # fmt: skip
"""The ``config`` of every chart."""


def on_page(chart: Chart, *, height: int) -> Chart:
    """``chart`` for its place on a page: as wide as that, on the page's own ground.

    The page has the legends; the place has one text alternative: hundreds of marks read aloud
    would be noise.
    """
    config = THEME | {"aria": False, "legend": {"disable": True}}
    autosize = {"type": "fit-x", "contains": "padding"}
    return chart | {"width": "container", "height": height, "background": "transparent",
                    "autosize": autosize, "config": config}  # fmt: skip


def on_paper(chart: Chart, title: str | Sequence[str], about: str | Sequence[str] = ()) -> Chart:
    """``chart`` to stand alone, dark on white: its finding as the title, below it what it is about.

    As high as it says itself, else ``HEIGHT``.
    """
    heading = {"text": title, "subtitle": about, "anchor": "start", "fontSize": 15,
               "subtitleColor": DIM, "subtitleFontSize": FONT_SIZE, "offset": FONT_SIZE}  # fmt: skip
    whole = {"height": HEIGHT} | chart | {
        "$schema": _SCHEMA, "title": heading, "width": WIDTH, "background": PAPER, "padding": 12,
        "config": THEME,
    }  # fmt: skip
    # An image has no colour around it to take over; a picture inside a dark page has a light one.
    inked: Chart = json.loads(json.dumps(whole).replace('"currentColor"', f'"{INK}"'))
    return inked


_KINDS = {"Q": "quantitative", "N": "nominal", "O": "ordinal", "T": "temporal"}


def of(field: str, title: str | None = None, **more: Any) -> Chart:
    """What a channel shows: a field with its kind, as ``share:Q``."""
    name, _, kind = field.partition(":")
    titled = {} if title is None else {"title": title}
    return {"field": name, "type": _KINDS[kind], **titled, **more}


def colour_scale(colours: Mapping[str, str]) -> Chart:
    """The colour, or the shape, of each name."""
    return {"domain": list(colours), "range": list(colours.values())}


def layer(values: Sequence[Any], mark: Chart, **encoding: Any) -> Chart:
    """One layer of a chart, with its own values."""
    return {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high] where they are four; else 1, 2, 5, 10, …; else even steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps, enough in (((1,), 4), ((1, 2, 5), 3)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= enough:
            return ticks
    least = (high - low) / 5
    power_of_ten = 10.0 ** math.floor(math.log10(least))
    step = next(n * power_of_ten for n in (1, 2, 5, 10) if n * power_of_ten >= least)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def save(chart: Chart, path: Path) -> None:
    """Write ``chart`` as PNG, SVG, one offline HTML file or Vega-Lite JSON, by ``path``'s ending.

    InputError for another ending or a place that cannot be written.
    """
    check_ending(path)
    write_atomically(path, _rendered(chart, path.suffix))


def check_ending(path: Path) -> None:
    """Raise InputError unless ``path`` ends in one of ``ENDINGS``."""
    if path.suffix not in ENDINGS:
        raise InputError(f"the plot {str(path)!r} must end in {', '.join(ENDINGS)}")


def _rendered(chart: Chart, ending: str) -> bytes | str:
    if ending == ".json":
        return json.dumps(chart, indent=1) + "\n"
    import vl_convert

    if ending == ".png":
        return _packed(bytes(vl_convert.vegalite_to_png(chart, vl_version=VEGA_LITE, scale=2)))
    if ending == ".svg":
        return str(vl_convert.vegalite_to_svg(chart, vl_version=VEGA_LITE))
    return str(vl_convert.vegalite_to_html(chart, vl_version=VEGA_LITE, bundle=True))


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
