"""The report: one HTML file that needs no network, Markdown for a pull request, charts as files.

It renders ``summary.json`` and ``reconcile.json`` and computes nothing: every number on the page
is a JSON pointer into one of them, and stands in the page with its full precision beside it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from harness.charting import VEGA_LITE, on_paper, save
from harness.errors import InputError
from harness.files import write_atomically
from harness.report import charts
from harness.report.columns import request_columns
from harness.verdict.schema import ReconcileFile, Summary, read_published
from harness.words_and_colours import (
    FAILED,
    PAGE,
    REQUEST_SOURCES,
    SOURCE_WORDS,
    SOURCES,
    at_least,
    at_most,
)
from sim.units import GIB

_MOST_REQUESTS = 2_000  # rows of the table of requests; the files have them all
_MOST_BYTES = 6_000_000
_NOTHING = "–"


def write_report(
    run: Path, out: Path, *, png: bool = False, svg: bool = False, markdown: bool = False
) -> list[Path]:
    """Write ``out`` (HTML) and, beside it, what else is asked for; the paths written, in order.

    Charts are ``<out>-<chart>.png`` and ``.svg``.
    InputError when a published file cannot be read; nothing is written then.
    """
    summary, reconciliation = read_published(run)
    write_atomically(out, render_html(summary, reconciliation))
    written = [out]
    if markdown:
        path = out.with_suffix(".md")
        write_atomically(path, render_markdown(summary, reconciliation))
        written.append(path)
    endings = [ending for ending, is_wanted in ((".svg", svg), (".png", png)) if is_wanted]
    # Each to stand alone.
    for figure in charts.figures(summary, reconciliation) if endings else ():
        for ending in endings:
            path = out.with_name(f"{out.stem}-{figure.name}{ending}")
            save(on_paper(figure.spec, figure.title), path)
            written.append(path)
    return written


def render_html(summary: Summary, reconciliation: ReconcileFile) -> str:
    """The whole page. Everything that came from a file is escaped; no address is ever fetched.

    Fewer marks and rows where long names would make it too large, so that it stays below 6 MB;
    InputError when no less can be shown.
    """
    for share in (1, 2, 4, 8):
        page = _render(summary, reconciliation, share)
        if len(page.encode()) <= _MOST_BYTES:
            return page
    raise InputError(
        f"the report would be {len(page.encode()) / 1e6:.1f} MB, more than {_MOST_BYTES / 1e6:.0f}"
    )


def _render(summary: Summary, reconciliation: ReconcileFile, share: int) -> str:
    """The page with one ``share``-th of the marks and rows it may have."""
    found = charts.figures(summary, reconciliation, most=charts.MOST_MARKS // share)
    shown = charts.thinned(reconciliation.requests, _MOST_REQUESTS // share)
    listed = reconciliation.model_dump(by_alias=True, exclude={"requests"})
    number = _number({"s": summary.model_dump(by_alias=True), "r": listed})
    return _template("report.html").render(
        s=summary,
        r=reconciliation,
        n=number,
        span=partial(_span, number),
        figures=_by_kind(found),
        requests=shown,
        columns=request_columns(),
        arms=charts.arms_of(summary).items(),
        failed=FAILED,
        sources=SOURCES,
        phases=list(charts.phase_colours(summary)),
        source_words=SOURCE_WORDS,
        source_parts=REQUEST_SOURCES,
        fact=_fact,
        rule=summary.decision.rule.model_dump(by_alias=True),
        css=Markup(_page_colours() + _asset("report.css")),  # ours, not data
        script=Markup(_asset("report.js")),
        vega=Markup(_vega()),
        specs=[figure.spec for figure in found],
    )


def render_markdown(summary: Summary, reconciliation: ReconcileFile) -> str:
    """A summary for a pull request: verdict, passes, checks, what is not established."""
    return _template("report.md").render(
        s=summary,
        r=reconciliation,
        ms=_ms,
        ratio=_ratio,
        at_least=at_least,
        at_most=at_most,
        count=_count,
        md=_markdown_text,
    )


def _template(name: str) -> Template:
    environment = Environment(
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(_asset(f"{name}.j2"))


def _asset(name: str) -> str:
    return (resources.files("harness.report") / "assets" / name).read_text(encoding="utf-8")


def _page_colours() -> str:
    """The palette as CSS variables: light, dark where the reader's system is, and for print."""
    light, dark, paper = (
        ":root {" + "".join(f" --{name}:{colour};" for name, colour in PAGE[mode].items()) + " }"
        for mode in ("light", "dark", "print")
    )
    return (
        f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n@media print {{ {paper} }}\n"
    )


@cache
def _vega() -> str:
    """Vega, Vega-Lite and the embedder as one script, from the installed vl-convert."""
    # The snippet keeps the bundler from dropping what nothing else uses.
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    # Inside a script element these would end it, or hide its end.
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _by_kind(found: Iterable[charts.Figure]) -> dict[str, list[tuple[int, charts.Figure]]]:
    kinds: dict[str, list[tuple[int, charts.Figure]]] = {
        kind: [] for kind in ("ttft", "paired", "sources", "cliff", "timeline")
    }
    for index, figure in enumerate(found):
        kinds[figure.kind].append((index, replace(figure, spec={})))
    return kinds


def _number(files: Mapping[str, Any]) -> Callable[..., Markup]:
    """``n("s", "passes", …, kind="ms")``: what the pointer names, shown and in full precision.

    A list among the steps is the beginning of a pointer.
    """
    formats: dict[str, Callable[[Any], str]]
    formats = {
        "ms": _ms, "ratio": _ratio, "count": _count, "gib": _gib,
        "at_least": at_least, "at_most": at_most,
    }  # fmt: skip

    def number(*parts: Any, kind: str) -> Markup:
        steps = [step for part in parts for step in (part if isinstance(part, list) else [part])]
        value: Any = files
        for step in steps:
            value = _step(value, step)
        if value is None:
            return Markup(f'<span class="none" title="not measured">{_NOTHING}</span>')
        pointer = "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in steps)
        return Markup('<data value="{}" data-path="{}" data-kind="{}">{}</data>').format(
            json.dumps(value), pointer, kind, formats[kind](value)
        )

    return number


def _span(
    number: Callable[..., Markup], *parts: Any, low: str, high: str, kind: str, word: str = "–"
) -> Markup:
    """Both ends; one where they look the same, one dash where there is none."""
    ends = [number(*parts, end, kind=kind) for end in (low, high)]
    is_one = any("data-path" not in end for end in ends)
    if is_one or ends[0].striptags() == ends[1].striptags():
        return ends[0]
    return Markup(word).join(ends)


def _step(value: Any, step: Any) -> Any:
    """One step of a pointer; what is absent is None."""
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None


def _ms(value: float) -> str:
    digits = 1 if abs(value) < 1_000 else 0
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def _ratio(value: float) -> str:
    """Two decimals; below 0.1 two significant digits, so that little is never shown as nothing."""
    return f"{value:.2g}" if abs(value) < 0.095 else f"{value:,.2f}"


def _gib(value: float) -> str:
    """Three significant digits, or whole GiB where that is more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _fact(name: str, value: Any) -> str:
    """A value of the environment for a person: GiB, three digits, yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{_gib(value / GIB)} GiB"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return _NOTHING if value is None else str(value)


def _count(value: float) -> str:
    return f"{value:,}".replace("-", "−")


def _markdown_text(text: object) -> str:
    """Text that no Markdown reader takes for markup, a table cell's end or HTML."""
    shown = str(text).replace("\n", " ").replace("\r", " ")
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_[]|":
        shown = shown.replace(sign, f"\\{sign}")
    return shown
