import math
import re
from itertools import combinations, product

import pytest

from harness import words_and_colours
from harness.words_and_colours import (
    BASELINE_MARK,
    CONTROL_MARK,
    FAILED,
    OTHER_ARM_COLOURS,
    PAGE,
    PASS_COLOURS,
    PHASE_COLOURS,
    SOURCE_WORDS,
    SOURCES,
    START,
    TREATMENT_MARK,
    WARMUP,
    at_least,
    at_most,
)
from sim.split import SOURCE_CLASSES
from tests.places import ROOT

SOURCE_COLOURS = [source.colour for source in SOURCES]
ARM_COLOURS = [mark.colour for mark in (BASELINE_MARK, TREATMENT_MARK, CONTROL_MARK)]

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen with one kind of cone missing.
SIGHT: dict[str, Matrix] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# Oklab (Ottosson 2020): distances in it are differences as people see them.
_LMS: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_LAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def times(matrix: Matrix, vector: Vector) -> Vector:
    a, b, c = (sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def linear(colour: str) -> Vector:
    """Linear RGB of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    a, b, c = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return a, b, c


def difference(one: str, other: str, sight: str) -> float:
    """How different two colours look, 0 to 100: black and white."""

    def seen(colour: str) -> Vector:
        a, b, c = (min(1.0, max(0.0, part)) for part in times(SIGHT[sight], linear(colour)))
        long, medium, short = times(_LMS, (a, b, c))
        return times(_LAB, (long ** (1 / 3), medium ** (1 / 3), short ** (1 / 3)))

    return 100 * math.dist(seen(one), seen(other))


def contrast(one: str, other: str) -> float:
    low, high = sorted(
        sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))
        for colour in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("mode", "ground"), [("light", "#ffffff"), ("dark", "#0f1318")])
def test_every_data_colour_has_contrast_of_3_on_both_grounds(mode: str, ground: str) -> None:
    # WCAG 2.2, 1.4.11: graphical objects.
    assert PAGE[mode]["bg"] == ground
    drawn = [*SOURCE_COLOURS, *ARM_COLOURS, *OTHER_ARM_COLOURS, *PASS_COLOURS, FAILED]
    for colour in [*drawn, *PHASE_COLOURS.values()]:
        assert contrast(colour, ground) >= 3, colour


@pytest.mark.parametrize("mode", PAGE)
def test_every_text_colour_has_contrast_of_4_5_on_its_ground(mode: str) -> None:
    page = PAGE[mode]
    for name, ground in product(("fg", "dim", "good", "bad", "open", "link"), ("bg", "card")):
        assert contrast(page[name], page[ground]) >= 4.5, (name, ground)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    ("chart", "least"),
    [
        (SOURCE_COLOURS, 10),
        (ARM_COLOURS, 13),
        ([PHASE_COLOURS[START], PHASE_COLOURS[WARMUP], *PASS_COLOURS], 7),
    ],
    ids=["sources", "arms", "phases"],
)
def test_what_a_chart_tells_apart_by_colour_stays_apart_for_the_colour_blind(
    chart: list[str], least: float, sight: str
) -> None:
    for one, other in combinations(chart, 2):
        assert difference(one, other, sight) >= least, (one, other)


def test_a_difference_is_100_between_black_and_white_and_0_of_a_colour_to_itself() -> None:
    assert difference("#000000", "#ffffff", "protanopia") == pytest.approx(100, abs=0.1)
    assert difference("#123456", "#123456", "tritanopia") == 0
    # Of equal lightness: red and green are one colour to deuteranopes, and to no one else.
    assert difference("#d55e00", "#848b00", "deuteranopia") < 4 < 15
    assert difference("#d55e00", "#848b00", "all cones") > 15


def test_a_colour_says_one_thing() -> None:
    others = [*PASS_COLOURS, PHASE_COLOURS[START], FAILED]
    for one, other in product([*SOURCE_COLOURS, *ARM_COLOURS], others):
        assert one != other
    for one, other in product(SOURCE_COLOURS, ARM_COLOURS):
        assert difference(one, other, "all cones") >= 8, (one, other)


def test_no_colour_stands_outside_the_vocabulary() -> None:
    kinds = {".py", ".css", ".js", ".j2"}
    files = [
        file
        for package in ("harness", "servers", "sim", "scripts")
        for file in (ROOT / package).rglob("*")
        if file.suffix in kinds and file != ROOT / "harness" / "words_and_colours.py"
    ]
    assert len(files) > 100
    by_number = re.compile(r"#(?:[0-9a-f]{8}|[0-9a-f]{6}|[0-9a-f]{3,4})\b(?!-)", re.I)
    by_name = re.compile(r"""(?:color|fill|stroke|background)["']?\s*[:=]\s*["'](?!\W)(\w+)["']""")
    allowed = {"currentColor", "transparent"}
    found = [
        (file.relative_to(ROOT).as_posix(), match.group())
        for file in files
        for text in [file.read_text(encoding="utf-8")]
        for match in (*by_number.finditer(text), *by_name.finditer(text))
        if (match.groups() or ("",))[0] not in allowed
    ]
    assert found == []


def test_every_class_of_request_has_its_words() -> None:
    assert tuple(SOURCE_WORDS) == SOURCE_CLASSES
    assert SOURCE_WORDS["gpu+recomputed"] == "part GPU hit, rest recomputed"
    assert SOURCE_WORDS["host+recomputed"] == "part host-loaded, rest recomputed"
    assert SOURCE_WORDS["gpu+host+recomputed"] == "part GPU hit, part host-loaded, rest recomputed"
    assert SOURCE_WORDS["host"] == "host-loaded"


def test_every_constant_of_the_vocabulary_is_used() -> None:
    names = [name for name in vars(words_and_colours) if name.isupper()]
    assert len(names) > 10
    texts = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (ROOT / "harness").rglob("*.py")
        if file.name != "words_and_colours.py"
    )
    assert [name for name in names if not re.search(rf"\b{name}\b", texts)] == []


@pytest.mark.parametrize(
    ("ratio", "least", "most"),
    [
        (1.1269, "1.126", "1.127"),
        (0.0004, "0.000", "0.001"),
        (12.34, "12.3", "12.4"),
        (1_234.5, "1,234", "1,235"),
        (1e120, None, "more than 10,000"),
    ],
)
def test_a_bound_claims_no_more_than_was_found(ratio: float, least: str | None, most: str) -> None:
    assert at_most(ratio) == most
    assert least is None or at_least(ratio) == least
