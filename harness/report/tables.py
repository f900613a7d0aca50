"""What the readers of a run show in a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from harness.console import _printable, err, out, say, table_of
from harness.report.compare import comparison_rows
from harness.report.watch import View
from harness.verdict.findings import Finding
from harness.vocabulary import SOURCE_WORDS, ms


def show_run(summary: dict[str, Any], reconciliation: dict[str, Any]) -> None:
    """The result tables of a run, on stdout."""
    for table in (_pass_table(summary), _ratio_table(summary), _source_table(summary)):
        out.print(table)
    residuals = [r["largest"] for r in reconciliation["by_pass"] if r["largest"]]
    tokens = [abs(v) for r in residuals for name, v in r.items() if name != "loaded_bytes"]
    n_bytes = [abs(r["loaded_bytes"]) for r in residuals if "loaded_bytes" in r]
    out.print(
        f"{reconciliation['requests_reconciled']} of {reconciliation['requests_planned']} requests "
        "reconciled, warm-up included; largest residual against the prediction: "
        f"{max(tokens, default='none measured,')} tokens, {max(n_bytes, default='no')} bytes",
        soft_wrap=True,
    )
    for group in reconciliation["not_predicted"]:
        out.print(
            f"of {group['requests']} requests in {', '.join(group['sessions'])} only the sums were "
            f"checked: {group['why']}",
            markup=False,
            soft_wrap=True,
        )


def show_comparison(content: dict[str, Any]) -> None:
    """What changed between runs, on stdout."""

    table = table_of(
        "TTFT, medians of session medians in ms (sessions), later runs against the first",
        *("pass", "arm", "run", "first", "later", "later ÷ first", "range", "says"),
    )
    for position, name in enumerate(content["runs"], start=1):
        out.print(f"run {position}: {name}", markup=False, soft_wrap=True)
    for row in comparison_rows(content):
        table.add_row(*row)
    out.print(table)


class Watching:
    """A live view of a run on a terminal; elsewhere one line for every look with news."""

    def __init__(self) -> None:
        self._live = Live(console=out, auto_refresh=False, transient=False)
        self._seen = -1

    def __enter__(self) -> "Watching":
        if out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, view: View) -> None:
        """Draw what is known of the run now."""
        recorded = sum(got for _, got, _ in view.sessions)
        planned = sum(due for _, _, due in view.sessions)
        last = view.last and f"last: {view.last.session} {view.last.pass_name} {view.last.doc}"
        line = f"{view.run}: {recorded} of {planned} requests; {last or 'nothing measured yet'}"
        if out.is_terminal:
            tables = (_pass_table(view.summary), _ratio_table(view.summary))
            self._live.update(Group(line, *tables), refresh=True)
        elif recorded != self._seen:
            out.print(line, markup=False, soft_wrap=True)
        self._seen = recorded


def _pass_table(summary: dict[str, Any]) -> Table:
    table = table_of(
        "TTFT in ms, and prompt tokens by source (all sessions of the arm)",
        *("pass", "arm", "n", "p50", "min–max", "computed", "GPU hit", "host"),
    )
    for name, cells in summary["passes"].items():
        for arm, cell in cells["arms"].items():
            tokens = cell["tokens"]
            n = f"{cell['n']}" + (f" (+{cell['failed']} failed)" if cell["failed"] else "")
            table.add_row(
                name, arm, n, *_times(cell),
                *(f"{tokens[source]:,}" for source in ("computed", "gpu_hit", "host_loaded")),
            )  # fmt: skip
        table.add_section()
    return table


def _ratio_table(summary: dict[str, Any]) -> Table:
    base, treatment = summary["compared"]
    if treatment is None:
        return table_of(f"TTFT ratio: none, because no arm is compared with {base}")
    table = table_of(
        f"TTFT {base} ÷ {treatment}, paired by document (above 1: {treatment} is faster)",
        *("pass", "ratio", "range over A B pairs", "pairs"),
    )
    for name, cells in summary["passes"].items():
        ratio = cells["paired_ratio"]
        if ratio is None:
            table.add_row(name, "–", "–", "0")
            continue
        is_one = len(ratio["blocks"]) == 1
        spread = "–" if is_one else f"{ratio['low']:.2f}–{ratio['high']:.2f}"
        table.add_row(name, f"{ratio['ratio']:.2f}", spread, str(len(ratio["blocks"])))
    return table


def _source_table(summary: dict[str, Any]) -> Table:
    table = table_of(
        "TTFT in ms by source of the document's KV, all arms", "source", "n", "p50", "min–max"
    )
    for name, cell in summary["sources"].items():
        table.add_row(SOURCE_WORDS[name], str(cell["n"]), *_times(cell))
    return table


def _times(cell: dict[str, Any]) -> tuple[str, str]:
    if not cell["n"]:
        return ("–", "–")
    return (ms(cell["p50_ms"]), f"{ms(cell['min_ms'])}–{ms(cell['max_ms'])}")


def show_findings(findings: Sequence[Finding]) -> None:
    """Failed checks and warnings, on stderr; says so when there are none."""
    if not findings:
        say("findings: none; every check passed")
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        err.print(_printable(f"{finding.severity}: {finding.code}: {finding.message}"), style=style,
                  markup=False, soft_wrap=True)  # fmt: skip
        say(f"  cause: {finding.cause}")
        say(f"  remedy: {finding.remedy}")


def show_latency(content: dict[str, Any]) -> None:
    """How well the latency model holds on a run, and its break-even, on stdout."""
    held_out = content["held_out"]
    out.print(
        f"fitted on {content['calibration']['n']} requests, tested on {held_out['n']} others: "
        f"median error {_percent(held_out.get('median_absolute_percentage_error'))}, "
        f"largest {_percent(held_out.get('worst_absolute_percentage_error'))}",
        soft_wrap=True,
    )
    if n_outside := sum(split["n"] for split in content["extrapolated"]):
        out.print(f"{n_outside} more are unlike those it was fitted on, and not counted")
    out.print(content["break_even"]["statement"], markup=False, soft_wrap=True)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} %"
