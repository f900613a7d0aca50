"""The committed run's report in a real browser."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.record.folder import RunFolder
from harness.report.html import write_report
from harness.verdict.importing import import_rows
from harness.verdict.publish import publish
from tests.places import ROOT
from tests.results.browser import Browser, find_chromium

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH; Debian: apt-get install chromium"
)
VIEWS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the newest committed run, published and rendered."""
    newest = sorted((ROOT / "results").glob("*-demo-*/manifest.json"))[-1].parent
    folder = tmp_path_factory.mktemp("report") / newest.name
    shutil.copytree(newest, folder)
    publish(RunFolder(folder))
    write_report(folder, folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def published(run: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / name).read_text(encoding="utf-8"))
    return content


def test_the_report_is_one_file_below_6_mb_that_refers_to_itself_only(
    run: Path, browser: Browser
) -> None:
    assert 500_000 < (run / "report.html").stat().st_size < 6_000_000
    browser.show(run / "report.html", width=1280)
    references = browser.evaluate(
        "[...document.querySelectorAll('[src],[href],[action]')].map("
        "e => e.getAttribute('src') ?? e.getAttribute('href') ?? e.getAttribute('action'))"
    )
    assert len(references) > 10
    assert [ref for ref in references if not ref.startswith("#") and ref != "data:,"] == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_the_report_draws_without_an_error_and_asks_for_nothing_but_itself(
    run: Path, browser: Browser, width: int, scheme: str
) -> None:
    browser.said.clear()
    browser.asked.clear()
    browser.show(run / "report.html", width=width, scheme=scheme)
    charts = browser.evaluate("document.querySelectorAll('[data-chart]').length")
    assert charts >= 9
    assert browser.evaluate("document.documentElement.dataset.drawn") == str(charts)
    assert browser.said == []
    others = [url for url in browser.asked if not url.startswith("data:")]
    assert others == [(run / "report.html").as_uri()]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_is_wider_than_the_window(
    run: Path, browser: Browser, width: int, scheme: str
) -> None:
    browser.show(run / "report.html", width=width, scheme=scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    widest = browser.evaluate(
        "Math.max(...[...document.querySelectorAll('.chart svg')]"
        ".map(s => s.getBoundingClientRect().right))"
    )
    assert 0.5 * width < widest <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_axes_follow_the_colour_scheme_with_contrast(
    run: Path, browser: Browser, scheme: str
) -> None:
    browser.show(run / "report.html", width=1280, scheme=scheme)
    text, ground, axis = (
        [int(part) for part in rgb.removeprefix("rgb(").rstrip(")").split(",")]
        for rgb in browser.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,"
            "getComputedStyle(document.querySelector('.role-axis-label text')).fill]"
        )
    )
    assert (sum(ground) < 200) is (scheme == "dark")
    assert abs(sum(text) - sum(ground)) > 500
    assert axis == text


def test_the_ttft_charts_have_a_mark_for_each_measured_row_and_for_no_other(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=1280)
    marks = browser.evaluate(
        "document.querySelectorAll('[data-kind=ttft] .mark-symbol.role-mark path').length"
    )
    rows = (run / "ttft.jsonl").read_text(encoding="utf-8").splitlines()
    assert marks == len(rows) == 150


def test_the_source_charts_have_a_bar_for_each_source_measured_and_predicted(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=1280)
    bars = browser.evaluate(
        "document.querySelectorAll('[data-kind=sources] .mark-rect.role-mark path').length"
    )
    requests = published(run, "reconcile.json")["requests"]
    sources = ("computed", "gpu_hit", "host_loaded")
    due = [r[side][s] for r in requests for side in ("row", "predicted") for s in sources]
    assert bars == sum(tokens > 0 for tokens in due) > 2 * 160


def test_every_number_on_the_page_is_the_one_in_the_published_files(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=1280)
    shown = browser.evaluate(
        "[...document.querySelectorAll('data')].map("
        "d => [d.dataset.path, d.dataset.kind, d.value, d.textContent])"
    )
    assert len(shown) > 200
    files = {"s": published(run, "summary.json"), "r": published(run, "reconcile.json")}
    for pointer, kind, value, text in shown:
        found: Any = files
        for step in pointer.split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found[int(step)] if isinstance(found, list) else found[step]
        assert json.loads(value) == found, pointer
        seen = float(text.replace(",", "").replace("−", "-"))
        tolerance = {
            "ms": 0.0500001 if abs(found) < 1_000 else 0.5, "ratio": 0.0050001,
            "gib": 0.005 * found, "at_least": 0.001 if found < 10 else 0.1,
            "at_most": 0.001 if found < 10 else 0.1,
        }  # fmt: skip
        assert seen <= found or kind != "at_least", (pointer, text)
        assert seen >= found or kind != "at_most", (pointer, text)
        assert abs(seen - found) <= tolerance.get(kind, 0), (pointer, text)


def test_the_table_of_requests_has_a_row_for_each_planned_request(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=1280)
    rows = browser.evaluate("document.querySelectorAll('#requests tr').length")
    assert rows == len(published(run, "reconcile.json")["requests"]) == 160


def test_every_chart_has_a_text_alternative_and_every_wide_table_can_be_reached_by_keyboard(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=390)
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart')].every(c => c.getAttribute('role') === 'img'"
        " && c.getAttribute('aria-label').length > 30)"
    )
    unreachable = browser.evaluate(
        "[...document.querySelectorAll('table')].filter("
        "t => !t.closest('#vg-tooltip-element') && !t.closest('.scroll[tabindex=\"0\"]')).length"
    )
    assert unreachable == 0
    headings = browser.evaluate(
        "[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])"
    )
    steps = itertools.pairwise(headings)
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in steps)


def test_names_of_190_characters_widen_no_page(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"config": arm, "pass": name, "doc": doc, "doc_tokens": 512, "ttft_ms": 100.0 + doc,
         "total_ms": 300.0, "session": f"{i}-{arm}"[:200]}
        for i, arm in enumerate(["baseline", "a" * 190, "control"])
        for name in ("p" * 190, "pass2-replay")
        for doc in range(3)
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = import_rows(tmp_path / "t.jsonl", tmp_path)
    write_report(folder, folder / "report.html")
    for width in (1280, 390):
        browser.said.clear()
        browser.show(folder / "report.html", width=width)
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.said == []


def test_a_narrow_log_axis_has_two_labels_or_more(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"config": arm, "pass": "pass2-replay", "doc": doc, "doc_tokens": 512,
         "ttft_ms": 110.0 + doc, "total_ms": 300.0}
        for arm in ("baseline", "lmcache-mp")
        for doc in range(3)
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = import_rows(tmp_path / "t.jsonl", tmp_path)
    write_report(folder, folder / "report.html")
    for width in (1280, 390):
        browser.show(folder / "report.html", width=width)
        labels = browser.evaluate(
            "[...document.querySelectorAll('[data-kind=ttft] .role-axis, [data-kind=paired] "
            ".role-axis')].map(a => [...a.querySelectorAll('.role-axis-label text')]"
            ".filter(t => t.textContent && +getComputedStyle(t).opacity).length)"
            ".filter(n => n > 0)"
        )
        assert len(labels) == 4  # two charts of two axes
        assert min(labels) >= 2


def test_every_data_cell_has_a_header_for_its_row_and_its_column(
    run: Path, browser: Browser
) -> None:
    browser.show(run / "report.html", width=1280)
    without = browser.evaluate(
        "[...document.querySelectorAll('main tbody tr')].filter(r => !r.querySelector('th')"
        " && !r.querySelector('td[colspan]')).length"
    )
    assert without == 0
    assert browser.evaluate("[...document.querySelectorAll('main th')].every(t => t.scope)")


def test_a_page_with_hostile_names_shows_them_as_text_and_runs_nothing(
    run: Path, browser: Browser, tmp_path: Path
) -> None:
    hostile = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>"
    for name in ("summary.json", "reconcile.json"):
        content = published(run, name)
        content["run"] = hostile
        if name == "reconcile.json":
            content["requests"][5]["row"]["error"] = hostile
            content["requests"][5]["session"] = hostile
            finding = dict.fromkeys(("code", "message", "cause", "remedy"), hostile)
            content["findings"] = [{**finding, "severity": "error"}]
        else:
            content["passes"][hostile] = content["passes"].pop("pass1-cold")
            content["environment"][hostile] = hostile
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    write_report(tmp_path, tmp_path / "report.html")
    browser.asked.clear()
    browser.show(tmp_path / "report.html", width=1280)
    assert browser.evaluate("window.hit === undefined && document.images.length === 0")
    assert browser.evaluate("document.querySelector('h1').textContent") == (
        f"kvcliff report · {hostile}"
    )
    assert [u for u in browser.asked if not u.startswith(("data:", "file:"))] == []
