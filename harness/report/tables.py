"""What the readers of a run show in a terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table

from harness.console import say
from harness.report.compare import Comparison, comparison_rows
from harness.report.watch import View
from harness.terminal import out, table_of
from harness.verdict.latency_result import LatencyCheck
from harness.verdict.measured import Cell, LoadCell, Statistics
from harness.verdict.schema import Decision, Finding, ReconcileFile, Summary
from harness.verdict.under_load import rows_of
from harness.words_and_colours import SOURCE_WORDS, ms


def show_run(statistics: Summary, reconciliation: ReconcileFile) -> None:
    """The result tables of a run, on stdout."""
    for table in (_pass_table(statistics), _ratio_table(statistics), _source_table(statistics)):
        out.print(table)
    if statistics.load is not None:
        out.print(_load_table(statistics.load))
        for cell in statistics.load:
            out.print(load_sentence(cell), soft_wrap=True)
    residuals = [part.largest for part in reconciliation.by_pass if part.largest]
    tokens = [abs(v) for largest in residuals for name, v in largest.items() if name != _BYTES]
    n_bytes = [abs(largest[_BYTES]) for largest in residuals if _BYTES in largest]
    largest_said = (
        f"largest residual against the prediction: {max(tokens)} tokens, "
        f"{max(n_bytes, default='no')} bytes"
        if tokens
        else "none was predicted"
    )
    out.print(
        f"{reconciliation.requests_reconciled} of {reconciliation.requests_planned} requests "
        f"reconciled, warm-up included; {largest_said}",
        soft_wrap=True,
    )
    for group in reconciliation.not_predicted:
        out.print(
            f"of {group.requests} requests in {', '.join(group.sessions)} only the sums were "
            f"checked: {group.why}",
            soft_wrap=True,
        )


_BYTES = "loaded_bytes"  # the one residual that is no number of tokens


def show_comparison(comparison: Comparison) -> None:
    """What changed between runs, on stdout."""
    table = table_of(
        "TTFT, means of session medians in ms (sessions), later runs against the first",
        *("pass", "arm", "run", "first", "later", "later ÷ first", "95 % interval", "says"),
    )
    for position, name in enumerate(comparison.runs, start=1):
        verdict = comparison.verdicts[position - 1]
        out.print(f"run {position}: {name}: {verdict}", soft_wrap=True)
    for path, values in comparison.across.items():
        out.print(f"{path}: {' → '.join(map(str, values))}", soft_wrap=True)
    for row in comparison_rows(comparison):
        table.add_row(*row)
    out.print(table)
    ratios = table_of(
        "TTFT baseline ÷ treatment by run", "pass", *map(str, range(1, 1 + len(comparison.runs)))
    )
    for name, by_run in comparison.ratios.items():
        ratios.add_row(
            name, *(f"{r.ratio:.2f} [{r.low:.2f}–{r.high:.2f}]" if r else "–" for r in by_run)
        )
    out.print(ratios)


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
            tables = (_pass_table(view.statistics), _ratio_table(view.statistics))
            self._live.update(Group(line, *tables), refresh=True)
        elif recorded != self._seen:
            out.print(line, soft_wrap=True)
        self._seen = recorded


def _pass_table(statistics: Statistics) -> Table:
    table = table_of(
        "TTFT in ms, and prompt tokens by source (all sessions of the arm)",
        *("pass", "arm", "n", "p50", "min–max", "computed", "GPU hit", "host"),
    )
    for name, content in statistics.passes.items():
        for arm, cell in content.arms.items():
            tokens = cell.tokens
            n = f"{cell.n}" + (f" (+{cell.failed} failed)" if cell.failed else "")
            table.add_row(
                name, arm, n, *_times(cell),
                f"{tokens.computed:,}", f"{tokens.gpu_hit:,}", f"{tokens.host_loaded:,}",
            )  # fmt: skip
        table.add_section()
    return table


def _ratio_table(statistics: Statistics) -> Table:
    base, treatment = statistics.compared
    if treatment is None:
        return table_of(f"TTFT ratio: none, because no arm is compared with {base}")
    table = table_of(
        f"TTFT {base} ÷ {treatment}, paired by document (above 1: {treatment} is faster)",
        *("pass", "ratio", "range over A B pairs", "pairs"),
    )
    for name, content in statistics.passes.items():
        pairs = content.paired_ratio
        if pairs is None:
            table.add_row(name, "–", "–", "0")
            continue
        spread = "–" if len(pairs.blocks) == 1 else f"{pairs.low:.2f}–{pairs.high:.2f}"
        table.add_row(name, f"{pairs.ratio:.2f}", spread, str(len(pairs.blocks)))
    return table


def _source_table(statistics: Statistics) -> Table:
    base, treatment = statistics.compared
    arms = [session.arm for session in statistics.sessions]
    heads = [f"{arm} (n)" for arm in dict.fromkeys(arms)]
    price = [f"{treatment} − {base}"] if treatment else []
    table = table_of(
        "Median TTFT in ms by source of the document's KV; the difference is of the same documents",
        *("source", *heads, *price),
    )
    for name, source in statistics.sources.items():
        cells = (source.by_arm.get(arm) for arm in dict.fromkeys(arms))
        medians = (f"{_times(cell)[0]} ({cell.n})" if cell else "–" for cell in cells)
        by = source.price_ms
        added = "–" if by is None else f"{by.median:+.1f} [{by.low:+.1f} to {by.high:+.1f}]"
        table.add_row(SOURCE_WORDS[name], *medians, *[added for _ in price])
    return table


def _load_table(cells: Sequence[LoadCell]) -> Table:
    table = table_of(
        "Under load, in ms: TTFT, vLLM's own queue time, and time per output token (medians)",
        *("pass", "arm", "source", "n", "TTFT p50", "p90", "p99", "queue", "per token"),
    )
    last = ""
    for cell, name, source in rows_of(cells):
        if last and cell.pass_name != last:
            table.add_section()
        last = cell.pass_name
        ttft, queue, per_token = source.ttft_ms, source.queue_ms, source.tpot_ms
        percentiles = (None, None, None) if ttft is None else (ttft.p50, ttft.p90, ttft.p99)
        shown = (*percentiles, queue and queue.p50, per_token and per_token.p50)
        table.add_row(
            cell.pass_name, cell.arm, SOURCE_WORDS.get(name, name), str(source.n),
            *("–" if value is None else ms(value) for value in shown),
        )  # fmt: skip
    return table


def load_sentence(cell: LoadCell) -> str:
    """How much of the load one arm bore in one pass."""
    parts = [f"{cell.done_per_s:.2f} answers/s" if cell.done_per_s is not None else "no answer"]
    if cell.offered_per_s is not None:
        parts[0] += f" of {cell.offered_per_s:.2f} asked"
    if cell.output_tokens_per_s is not None:
        parts.append(f"{cell.output_tokens_per_s:.1f} output tokens/s")
    if cell.mean_in_flight is not None:
        parts.append(f"{cell.mean_in_flight:.1f} in flight on average")
    if cell.good is not None and cell.good_per_s is not None:
        parts.append(f"{cell.good} of {cell.n} within the SLO, {cell.good_per_s:.2f}/s")
    if cell.late_ms is not None:
        parts.append(f"sent {cell.late_ms.p50:.1f} ms after due, at most {cell.late_ms.max:.1f}")
    return f"{cell.pass_name}, {cell.arm}: {', '.join(parts)}"


def _times(cell: Cell) -> tuple[str, str]:
    """Median and ends; dashes where no request is complete."""
    if cell.p50_ms is None or cell.min_ms is None or cell.max_ms is None:
        return ("–", "–")
    return (ms(cell.p50_ms), f"{ms(cell.min_ms)}–{ms(cell.max_ms)}")


def show_findings(findings: Sequence[Finding]) -> None:
    """Failed checks and warnings, on stderr; says so when there are none."""
    if not findings:
        say("findings: none; every check passed")
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        say(f"{finding.severity}: {finding.code}: {finding.message}", style=style)
        say(f"  cause: {finding.cause}")
        say(f"  remedy: {finding.remedy}")


def show_verdict(decision: Decision) -> None:
    """What the run says of the plan's question, and why, on stdout: its last line."""
    end = "" if decision.claim.endswith("?") else "."
    out.print(f"\n{decision.claim}{end}", soft_wrap=True)
    out.print(f"{decision.verdict}: {decision.because}", soft_wrap=True)


def show_latency(check: LatencyCheck) -> None:
    """How well the latency model holds on a run, and its break-even, on stdout."""
    held_out = check.held_out
    out.print(
        f"fitted on {check.calibration.n} requests, tested on {held_out.n} others: "
        f"median error {_percent(held_out.median_absolute_percentage_error)}, "
        f"largest {_percent(held_out.worst_absolute_percentage_error)}",
        soft_wrap=True,
    )
    if n_outside := sum(split.n for split in check.extrapolated):
        out.print(f"{n_outside} more are unlike those it was fitted on, and not counted")
    out.print(check.break_even.statement, soft_wrap=True)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} %"
