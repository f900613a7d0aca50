import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.record.folder import RunFolder
from harness.record.row import NUMBERS
from harness.report import charts
from harness.report import html as report
from harness.report.chart_specs import arm_marks, sources
from harness.report.charts import figures, thinned
from harness.report.html import render_html, render_markdown, write_report
from harness.verdict.publish import publish
from harness.verdict.schema import ReconcileFile, Summary, read_published
from tests.folder import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path)
    publish(RunFolder(folder))
    return folder


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def rendered(run: Path, change: Change) -> str:
    return render_html(*changed(run, change))


def changed(run: Path, change: Change) -> tuple[Summary, ReconcileFile]:
    """The published files as they would be with other content."""
    summary, reconciliation = (file.as_json() for file in read_published(run))
    change(summary, reconciliation)
    return Summary.model_validate(summary), ReconcileFile.model_validate(reconciliation)


@pytest.mark.parametrize("name", ["summary.json", "reconcile.json"])
def test_a_published_file_with_a_field_taken_out_is_refused_by_name(run: Path, name: str) -> None:
    content = json.loads((run / name).read_text(encoding="utf-8"))
    del (content["sessions"] if name == "summary.json" else content["requests"])[0]["session"]
    (run / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=rf"{name} was changed: .*\.0\.session: Field required"):
        read_published(run)


def test_names_that_would_make_the_page_too_large_leave_fewer_marks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, reconciliation = read_published(run)
    monkeypatch.setattr(charts, "MOST_MARKS", 16)
    whole = render_html(summary, reconciliation)
    monkeypatch.setattr(report, "_MOST_BYTES", len(whole.encode()) - 1)
    page = render_html(summary, reconciliation)
    assert len(page.encode()) < len(whole.encode())
    assert "4 of 8 drawn, every k-th" in page
    monkeypatch.setattr(report, "_MOST_BYTES", 1_000)
    with pytest.raises(InputError, match=r"the report would be .* MB, more than"):
        render_html(summary, reconciliation)


def test_more_documents_than_are_listed_are_not_called_absent(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        for content in summary["passes"].values():
            content["paired_ratio"]["documents"] = None
        summary["decision"]["evidence"]["n_documents"] = 3000

    assert "the documents are more than 1,000" in rendered(run, change)


def test_about_eight_requests_of_a_session_are_labelled_however_many_were_left_out() -> None:
    seqs = list(range(1, 6001, 16))  # every 16th: none of them is a multiple of the step
    bar = {"where": "p", "source": "computed", "kind": "measured", "tokens": 1, "signed": 1}
    values = [{"seq": seq, **bar} for seq in seqs]
    spec = sources(values, seqs=seqs)
    labelled = spec["layer"][0]["encoding"]["x"]["axis"]["values"]
    assert labelled[:2] == [1, 737]
    assert set(labelled) <= set(seqs)
    assert 7 <= len(labelled) <= 9


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
        reconciliation["requests"][1]["row"]["error"] = hostile
        reconciliation["requests"][1]["reconciled"] = False
        summary["environment"]["cpu"] = hostile

    page = rendered(run, change)
    assert hostile not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 3


def test_nothing_in_the_charts_can_end_their_script(run: Path) -> None:
    def change(_: dict[str, Any], reconciliation: dict[str, Any]) -> None:
        for request in reconciliation["requests"]:
            request["row"]["error"] = "</script><script>alert(1)</script>"

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
    def change(_: dict[str, Any], reconciliation: dict[str, Any]) -> None:
        failed = next(r for r in reconciliation["requests"] if r["pass"] == "pass2-replay")
        failed["row"].update(complete=False, ttft_ms=None, error="boom")
        failed["reconciled"] = False

    summary, reconciliation = changed(run, change)
    page = render_html(summary, reconciliation)
    chart = next(f for f in figures(summary, reconciliation) if f.name == "ttft-pass2-replay")
    points, crosses = (layer["data"]["values"] for layer in chart.spec["layer"])
    assert ([row["failed"] for row in points], [row["failed"] for row in crosses]) == (
        [False] * 7,
        [True],
    )
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
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["passes"]["a|b`c<b>\n# x"] = summary["passes"].pop("pass1-cold")

    text = render_markdown(*changed(run, change))
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


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (4, "written by a newer kvcliff, schema 4; this one reads 1 to 3"),
        (1, "is an older kvcliff's, schema 1"),
        (0, "schema is 0"),
        (None, "schema is None"),
        (True, "schema is True"),
    ],
)
def test_a_version_is_looked_at_before_anything_else_in_the_file(
    run: Path, schema: object, said: str
) -> None:
    (run / "summary.json").write_text(json.dumps({"schema": schema}), encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_published(run)


def test_no_two_arms_share_a_mark_and_the_known_ones_keep_theirs() -> None:
    arms = ["baseline", "native", "control", *(f"x{i}" for i in range(28))]
    marks = arm_marks(arms, "native")
    assert len(set(marks.values())) == len(arms) == 31
    assert marks["baseline"] == arm_marks(["baseline"], None)["baseline"]
    assert marks["native"] == arm_marks(["lmcache"], "lmcache")["lmcache"]


def test_an_empty_pair_or_span_is_one_dash(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["passes"]["pass1-cold"]["paired_ratio"] = None
        summary["passes"]["pass1-cold"]["arms"]["baseline"].update(min_ms=None, max_ms=None)
        summary["decision"]["cost"].update(store_cost=None)

    cells = re.findall(r"<td.*?</td>", rendered(run, change), re.S)
    texts = [re.sub(r"<[^>]*>", "", cell) for cell in cells]
    assert len(texts) > 100
    assert [text for text in texts if "–––" in text or "– to –" in text] == []


@pytest.mark.parametrize(
    ("gib", "shown"),
    [
        (0.5, "0.5"),
        (0.4931640625, "0.493"),
        (40.0, "40"),
        (1234.5678, "1,235"),
        (0.00049, "0.00049"),
    ],
)
def test_gib_are_rounded_to_three_digits(run: Path, gib: float, shown: str) -> None:
    page = rendered(run, lambda s, _: s["decision"]["cost"].update(host_gib=gib))
    assert f'host_gib" data-kind="gib">{shown}</data>' in page


@pytest.mark.parametrize(
    ("median", "high", "said"),
    [
        (0.0, 0.0, "nothing measurable to pay back"),
        (0.0042, 0.0051, ">0.0042</data> replays (at most "),
        (None, None, "a replay saves nothing that pays it back"),
    ],
)
def test_the_price_is_paid_back_in_words_that_are_never_zero_replays(
    run: Path, median: float | None, high: float | None, said: str
) -> None:
    replays = {"median": median, "low": median, "high": high}
    page = rendered(run, lambda s, _: s["decision"]["cost"].update(break_even_replays=replays))
    assert said in page
    assert "0.00 replays" not in re.sub(r"<[^>]*>", "", page.split("<script")[0])


def test_a_name_of_190_characters_is_broken_instead_of_widening_the_page(run: Path) -> None:
    long = "p" * 190

    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["passes"][long] = summary["passes"].pop("pass1-cold")

    assert f'<span class="long">{long}</span>' in rendered(run, change)


def unpredicted(summary: dict[str, Any], reconciliation: dict[str, Any]) -> None:
    """As if 02-lmcache had no exact prediction."""
    why = "a matter of timing"
    for request in reconciliation["requests"]:
        if request["session"] == "02-lmcache":
            nothing = dict.fromkeys(NUMBERS) | {"why_not": why}
            request.update(predicted=nothing, residual=None)
    for part in reconciliation["by_pass"]:
        if part["session"] == "02-lmcache":
            part.update(largest=None, why_not_predicted=why)
    reconciliation["not_predicted"] = [{"why": why, "sessions": ["02-lmcache"], "requests": 5}]


def test_where_there_is_no_exact_prediction_the_report_says_why_and_what_was_checked(
    run: Path,
) -> None:
    text = re.sub(r"<[^>]*>", "", rendered(run, unpredicted).split("<script")[0])
    assert "No exact prediction for 5 requests of 02-lmcache: a matter of timing." in text
    assert "reconciled means that the sources sum to the prompt" in text
    assert text.count("no exact prediction") >= 3  # a line for each of its passes
    assert "sums to the prompt" in text
    found = {f.name: f for f in figures(*changed(run, unpredicted))}
    assert "no exact prediction" in found["sources-02-lmcache"].label
    bars = found["sources-02-lmcache"].spec["layer"][0]["data"]["values"]
    assert {bar["kind"] for bar in bars} == {"measured"}
    tips = [v["predicted"] for v in found["ttft-pass2-replay"].spec["layer"][0]["data"]["values"]]
    assert "no exact prediction: a matter of timing" in tips
    assert "No exact prediction for 5 requests" in render_markdown(*changed(run, unpredicted))


@pytest.mark.parametrize("name", ["native", "none"])
def test_a_treatment_is_called_by_its_name(run: Path, name: str) -> None:
    for path in (run / "summary.json", run / "reconcile.json"):
        text = path.read_text(encoding="utf-8").replace("lmcache", name)
        path.write_text(text, encoding="utf-8")
    summary, reconciliation = changed(run, lambda s, _: s["decision"]["cost"].update(host_gib=None))
    text = re.sub(r"<[^>]*>", "", render_html(summary, reconciliation).split("<script")[0])
    assert f"baseline ÷ {name}, pass2-replay" in text
    assert f"What {name} costs, and when it pays" in text
    assert f"price of {name}" in text
    assert "host tier, TTFT" not in render_markdown(summary, reconciliation)
    assert f"| {name}, TTFT p50 |" in render_markdown(summary, reconciliation)


def test_without_a_treatment_the_report_compares_nothing(run: Path) -> None:
    def change(summary: dict[str, Any], _: dict[str, Any]) -> None:
        summary["compared"] = ["baseline", None]
        for content in summary["passes"].values():
            content["paired_ratio"] = None
        summary["decision"]["evidence"] = None

    assert "no arm is compared" in rendered(run, change)


def test_foreign_names_that_differ_in_signs_alone_get_charts_of_their_own(run: Path) -> None:
    new = {"pass1-cold": "a/b", "pass2-replay": "a b"}

    def change(summary: dict[str, Any], reconciliation: dict[str, Any]) -> None:
        summary["passes"] = {new[name]: content for name, content in summary["passes"].items()}
        for request in reconciliation["requests"]:
            request["pass"] = new.get(request["pass"], "w")

    names = [f.name for f in figures(*changed(run, change))]
    assert {"ttft-a-b", "ttft-a-b-2"} <= set(names)
    assert len(names) == len(set(names))


def bounded(summary: dict[str, Any], _reconciliation: dict[str, Any]) -> None:
    """Bounds, and a session set aside, under a verdict that another obstacle prevents."""
    summary["decision"]["evidence"] |= {
        "at_least": 1.25, "at_most": 3.5, "set_aside": {
            "session": "02-lmcache", "factor": 3.0, "first_factor": 2.9,
            "verdict_with_it": "not decided",
        },
    }  # fmt: skip


def test_the_bounds_and_the_session_set_aside_are_said_beside_the_ratio(run: Path) -> None:
    page, markdown = rendered(run, bounded), render_markdown(*changed(run, bounded))
    text = re.sub("<[^>]+>", "", page)
    said = "without 02-lmcache and its pair, which are set aside"
    assert f"bounds of the ratio: at least 1.250, at most 3.500, {said}" in text
    assert f"at least 1.250, at most 3.500, {said}." in markdown
