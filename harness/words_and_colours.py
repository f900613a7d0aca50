"""One word and one colour for each thing the harness shows, wherever it shows it.

No colour is written anywhere else. What is drawn on the page keeps 3:1 contrast on its light and on
its dark ground (WCAG 2.2, 1.4.11), and what one chart tells apart by colour stays apart for every
kind of colour blindness (``tests/unit/harness/test_words_and_colours.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

from sim.split import SOURCE_CLASSES


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompt tokens came from. ``field``: its name in JSON, less any ``_tokens``."""

    field: str
    word: str
    colour: str


COMPUTED = Source("computed", "computed", "#8b8f98")
GPU_HIT = Source("gpu_hit", "GPU hit", "#2f7fd6")
HOST_LOADED = Source("host_loaded", "host-loaded", "#d97706")
SOURCES = (COMPUTED, GPU_HIT, HOST_LOADED)


def _parts_of(source_class: str) -> tuple[Source, ...]:
    parts = {"recomputed": COMPUTED, "gpu": GPU_HIT, "host": HOST_LOADED}
    return tuple(parts[part] for part in source_class.split("+"))


REQUEST_SOURCES = {name: _parts_of(name) for name in SOURCE_CLASSES}
"""The classes of ``sim.split``: where a request's document came from, every part of it."""


def _in_words(parts: tuple[Source, ...]) -> str:
    # A document's tokens were there before: computing them is computing them again.
    *first, last = ("recomputed" if part is COMPUTED else part.word for part in parts)
    return ", ".join([*(f"part {word}" for word in first), f"rest {last}" if first else last])


SOURCE_WORDS = {name: _in_words(parts) for name, parts in REQUEST_SOURCES.items()}


@dataclass(frozen=True, slots=True)
class Mark:
    """How an arm is drawn: ``shape`` as Vega names it, ``glyph`` the same as text."""

    colour: str
    shape: str
    glyph: str


BASELINE_MARK = Mark("#94691a", "circle", "●")
TREATMENT_MARK = Mark("#7a4dff", "square", "■")
CONTROL_MARK = Mark("#d0229b", "triangle-up", "▲")

# Seven colours and four shapes have no common factor: 28 arms of an import before a mark repeats.
OTHER_ARM_COLOURS = ("#a855f7", "#db2777", "#65a30d", "#a16207", "#64748b", "#0891b2", "#7c6f64")
OTHER_ARM_SHAPES = {
    "diamond": "◆", "triangle-down": "▼",
    "triangle-right": "▶\ufe0e", "triangle-left": "◀\ufe0e",  # \ufe0e: as text, never an emoji
}  # fmt: skip

START, WARMUP, STOP = "start", "warmup", "stop"
PHASE_COLOURS = {START: "#71757d", WARMUP: "#b88100", STOP: "#71757d"}
# By position, since passes have any name; unlike every source's and arm's colour.
PASS_COLOURS = ("#12a55c", "#9537be", "#0d7321", "#eb47ba", "#ba52ff")

FAILED = "#dc2626"
NOT_COMPUTED = ("#f1f7f2", "#3f8f63")
"""Ends of the ramp of a share of tokens that were not computed, from none to most."""

PAPER, INK, DIM = "#ffffff", "#1a1d21", "#5b6470"

PAGE = {
    "light": {
        "bg": PAPER, "fg": INK, "dim": DIM, "line": "#dde1e6", "card": "#f6f7f9",
        "good": "#047857", "bad": "#b91c1c", "open": "#92600a", "link": "#1d4ed8",
    },
    "dark": {
        "bg": "#0f1318", "fg": "#e6e9ed", "dim": "#9aa4b1", "line": "#2a313a", "card": "#171c23",
        "good": "#34d399", "bad": "#f87171", "open": "#fbbf24", "link": "#93c5fd",
    },
    "print": {
        "bg": PAPER, "fg": "#000000", "dim": "#444444", "line": "#bbbbbb", "card": PAPER,
        "good": "#065f46", "bad": "#991b1b", "open": "#78500a", "link": "#000000",
    },
}  # fmt: skip
"""The report's CSS variables in each mode."""


def ms(value: float) -> str:
    """Milliseconds for people: one decimal below 100."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def at_least(ratio: float) -> str:
    """A lower bound of a ratio, rounded down: no more is claimed than was found."""
    return _bound(ratio, floor)


def at_most(ratio: float) -> str:
    """An upper bound of a ratio, rounded up; one that says nothing any more, as such."""
    return _bound(ratio, ceil) if ratio <= 10_000 else "more than 10,000"


def _bound(ratio: float, whole: Callable[[float], int]) -> str:
    digits = 3 if ratio < 10 else 1 if ratio < 1_000 else 0
    return f"{whole(ratio * 10**digits) / 10**digits:,.{digits}f}"
