import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.charts import figures, thinned
from harness.errors import InputError
from harness.evidence import publish
from harness.report import read_published, render_html, render_markdown, write_report
from harness.runfolder import RunFolder
from tests.folder import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path)
    publish(RunFolder(folder))
    return folder


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def rendered(run: Path, change: Change) -> str:
    summary, reconciliation = read_published(run)
    change(summary, reconciliation)
    return render_html(summary, reconciliation)


def test_a_number_stands_in_the_page_as_shown_and_in_full(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["passes"]["pass2-replay"]["arms"]["baseline"]["p50_ms"] = 1234.56789

    page = rendered(run, change)
    path = "s/passes/pass2-replay/arms/baseline/p50_ms"
    assert f'<data value="1234.56789" data-path="{path}" data-kind="ms">1,235</data>' in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-0.04, "0.0"), (-1.25, "−1.2"), (999.94, "999.9"), (1234.5, "1,234"), (-2500.0, "−2,500")],
)
def test_a_time_is_shown_with_one_decimal_below_a_second_and_no_negative_zero(
    run: Path, value: float, shown: str
) -> None:
    # A68: -1.25 is exact in binary, and Python rounds half to even.
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["decision"]["cost"]["store_cost"]["median_ms"] = value

    assert f'store_cost/median_ms" data-kind="ms">{shown}</data>' in rendered(run, change)


def test_what_was_not_measured_is_a_dash_never_a_zero(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["decision"]["evidence"] = None
        summary["decision"]["cost"]["store_cost"] = None

    page = rendered(run, change)
    assert 'data-path="s/decision/evidence' not in page
    assert 'data-path="s/decision/cost/store_cost' not in page
    assert "no pair of documents" in page


@pytest.mark.parametrize("verdict", ["supported", "not supported", "not decided"])
def test_the_verdict_is_the_first_thing_said(run: Path, verdict: str) -> None:
    page = rendered(run, lambda s, _: s["decision"].update(verdict=verdict))
    assert f'id="verdict">{verdict.capitalize()}<' in page


def test_reasons_stand_beside_an_open_verdict(run: Path) -> None:
    reason = {"code": "control-moved", "message": "it moved by 1.4"}
    page = rendered(run, lambda s, _: s["decision"].update(verdict="not decided", reasons=[reason]))
    assert "<code>control-moved</code>: it moved by 1.4" in page


def test_markup_in_a_name_is_text(run: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"

    def change(summary: dict[str, Any], reconciliation: dict[str, Any]) -> None:
        summary["run"] = hostile
        reconciliation["requests"][1]["error"] = hostile
        reconciliation["requests"][1]["reconciled"] = False
        summary["environment"]["cpu"] = hostile

    page = rendered(run, change)
    assert hostile not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 3


def test_nothing_in_the_charts_can_end_their_script(run: Path) -> None:
    def change(_: dict[str, Any], reconciliation: dict[str, Any]) -> None:
        for request in reconciliation["requests"]:
            request["error"] = "</script><script>alert(1)</script>"

    page = rendered(run, change)
    specs = re.search(r'id="specs">(.*?)</script>', page, re.S)
    assert specs is not None
    assert "<" not in specs[1]
    assert "</script><script>alert(1)" in json.dumps(json.loads(specs[1]))


def test_a_pass_whose_name_has_a_slash_is_still_found(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["passes"]["a/b~c"] = summary["passes"].pop("pass1-cold")

    assert 'data-path="s/passes/a~1b~0c/arms/baseline/n"' in rendered(run, change)


def test_a_failed_request_is_drawn_as_failed_and_listed(run: Path) -> None:
    summary, reconciliation = read_published(run)
    failed = next(r for r in reconciliation["requests"] if r["pass"] == "pass2-replay")
    failed.update(complete=False, ttft_ms=None, error="boom", reconciled=False)
    page = render_html(summary, reconciliation)
    chart = next(f for f in figures(summary, reconciliation) if f.name == "ttft-pass2-replay")
    rows = chart.spec["data"]["values"]
    assert (len(rows), [row["failed"] for row in rows].count(True)) == (8, 1)
    assert len(chart.spec["layer"]) == 2  # one for the crosses
    assert '<span class="bad">boom</span>' in page


def test_one_chart_for_each_pass_and_session_and_the_rows_they_stand_for(run: Path) -> None:
    found = figures(*read_published(run))
    assert {f.name: f.n_rows for f in found if f.kind in ("ttft", "sources")} == {
        "ttft-pass1-cold": 8,
        "ttft-pass2-replay": 8,
        "sources-01-baseline": 5,
        "sources-02-lmcache": 5,
        "sources-03-lmcache": 5,
        "sources-04-baseline": 5,
    }
    assert [f.name for f in found if f.kind == "cliff"] == ["cliff"]


def test_thinning_keeps_the_order_and_stays_below_the_limit() -> None:
    assert list(thinned(range(10), 4)) == [0, 3, 6, 9]
    assert list(thinned(range(4), 4)) == [0, 1, 2, 3]
    assert list(thinned([], 4)) == []


def test_charts_and_markdown_are_written_beside_the_page(run: Path) -> None:
    written = write_report(run, run / "report.html", png=True, svg=True, markdown=True)
    assert [path.name for path in written[:2]] == ["report.html", "report.md"]
    assert all(path.stat().st_size > 200 for path in written)
    pngs = [path for path in written if path.suffix == ".png"]
    assert len(pngs) == len(figures(*read_published(run))) == len(written) // 2 - 1
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pngs)


def test_markdown_cannot_be_broken_by_a_name(run: Path) -> None:
    summary, reconciliation = read_published(run)
    summary["passes"]["a|b`c<b>\n# x"] = summary["passes"].pop("pass1-cold")
    text = render_markdown(summary, reconciliation)
    assert "a\\|b\\`c&lt;b&gt; # x" in text
    assert "\n# x" not in text


def test_markdown_says_verdict_ratio_and_limits(run: Path) -> None:
    text = render_markdown(*read_published(run))
    assert text.startswith("### kvcliff: supported\n")
    assert "| pass2-replay | 100.0 ms (n 4) | 10.0 ms (n 4) | 10.00 | 10.00–10.00 |" in text
    assert "This run does not establish:\n- " in text


@pytest.mark.parametrize("name", ["summary.json", "reconcile.json"])
def test_a_run_that_is_not_published_is_an_error_that_says_what_to_do(run: Path, name: str) -> None:
    (run / name).unlink()
    with pytest.raises(InputError, match=f"cannot read .*{name}") as error:
        write_report(run, run / "report.html")
    assert error.value.hint is not None
    assert "kvcliff summarize" in error.value.hint
    assert not (run / "report.html").exists()


def test_an_unknown_version_of_a_file_is_refused(run: Path) -> None:
    content = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps({**content, "schema": 2}), encoding="utf-8")
    with pytest.raises(InputError, match="schema is not 1"):
        read_published(run)
