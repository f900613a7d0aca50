"""Everything the harness shows a person: progress and findings on stderr, results on stdout."""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.prompt import Confirm
from rich.table import Table

from harness.errors import KvcliffError
from harness.experiment import Experiment, SessionPlan
from harness.files import dump_json
from harness.findings import Finding
from harness.journal import Row
from harness.watch import View
from servers.processes import LeftOver

# In a file or a pipe the tables need no folding to the width of a terminal that is not there.
out = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 110)
err = Console(stderr=True, highlight=False)

SOURCE_WORDS = {
    "recomputed": "recomputed",
    "gpu+recomputed": "part GPU hit, rest recomputed",
    "gpu+host": "part GPU hit, rest host-loaded",
    "host": "host-loaded",
    "gpu": "GPU hit",
}


def show_error(error: KvcliffError) -> None:
    """What happened and what to do, on stderr."""
    err.print(_printable(f"kvcliff: {error}"), style="bold red", markup=False, soft_wrap=True)
    if error.hint:
        err.print(f"  → {error.hint}", markup=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of progress or advice, on stderr."""
    err.print(_printable(text), markup=False, soft_wrap=True)


def _printable(text: str) -> str:
    """``text`` without the control characters a server's message may hold."""
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in text)


def show_json(content: Any) -> None:
    """A result for a program, on stdout."""
    print(json.dumps(content, indent=2))


def show_line(record: dict[str, Any]) -> None:
    """One JSON line of a result that is streamed, on stdout."""
    sys.stdout.write(dump_json(record) + "\n")


def show_text(text: str) -> None:
    """A paragraph of a result, on stdout."""
    out.print(text, markup=False)


class RunProgress:
    """Follows a run: a bar per session on a terminal, one plain line per event elsewhere."""

    def __init__(self, experiment: Experiment) -> None:
        self._sessions = len(experiment.sessions)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
            console=err,
            disable=not err.is_terminal,
        )
        self._task: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def session_starts(self, session: SessionPlan, *, requests: int) -> None:
        """A session's servers are being started."""
        title = f"session {session.order}/{self._sessions} {session.arm.name}"
        self._task = self._bars.add_task(title, total=requests, last="starting servers")
        self._line(f"{title}: starting servers")

    def session_ready(self, session: SessionPlan, *, start_s: float) -> None:
        """The servers answered."""
        self._bars.update(self._task, last=f"ready after {start_s:.0f} s")
        self._line(f"session {session.order}/{self._sessions}: ready after {start_s:.0f} s")

    def row(self, row: Row) -> None:
        """One request was journalled."""
        ttft = "failed" if row.ttft_ms is None else f"{row.ttft_ms:.0f} ms"
        text = f"{row.pass_name} document {row.doc}: {ttft}"
        self._bars.update(self._task, advance=1, last=text)
        if row.seq % 10 == 0:
            elapsed = time.monotonic() - self._began
            self._line(f"  {row.session} request {row.seq}, {text} ({elapsed:.0f} s so far)")

    def _line(self, text: str) -> None:
        if not err.is_terminal:
            say(text)


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
    from harness.compare import comparison_rows  # here: charts take a second to import

    table = _table(
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


def _table(title: str, *columns: str) -> Table:
    """Columns of names aligned left, numbers right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        min_width=len(title),
    )
    for column in columns:
        is_name = column in ("pass", "arm", "source", "tier")
        table.add_column(column, justify="left" if is_name else "right")
    return table


def _pass_table(summary: dict[str, Any]) -> Table:
    table = _table(
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
        return _table(f"TTFT ratio: none, because no arm is compared with {base}")
    table = _table(
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
    table = _table(
        "TTFT in ms by source of the document's KV, all arms", "source", "n", "p50", "min–max"
    )
    for name, cell in summary["sources"].items():
        table.add_row(SOURCE_WORDS[name], str(cell["n"]), *_times(cell))
    return table


def _times(cell: dict[str, Any]) -> tuple[str, str]:
    if not cell["n"]:
        return ("–", "–")
    return (_ms(cell["p50_ms"]), f"{_ms(cell['min_ms'])}–{_ms(cell['max_ms'])}")


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


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


def show_plan(content: dict[str, Any]) -> None:
    """A plan's predicted splits, sizes and commands, on stdout."""
    requests = content["requests"]
    out.print(f"plan {content['plan_id']}: {requests['measured']} requests measured "
              f"({requests['sent']} with the warm-up) in {len(content['sessions'])} sessions: "
              f"{' '.join(content['sessions'])}", markup=False, soft_wrap=True)  # fmt: skip
    out.print(_model_line(content["model"]), markup=False, soft_wrap=True)
    out.print(_tier_table(content["tiers"]))
    out.print(_memory_table(content["memory"]))
    if content["predicted"]:
        out.print(_prediction_table(content["predicted"], content["documents"]))
    for arm, reason in content["not_predicted"].items():
        say(f"{arm} is not predicted: {reason}")
    if content["cliff"]["gpu"] is None:
        say(content["cliff"]["why_not"])
    else:
        out.print(_cliff_table(content["cliff"]))
    if content["expected"]:
        out.print(_expected_table(content["expected"]["passes"]))
        _say_expected(content["expected"])
    for arm, commands in content["commands"].items():
        out.print(f"\nservers of {arm}:", markup=False)
        for command, env in zip(commands, content["environments"][arm], strict=True):
            out.print("  " + _shell_line(command, env), markup=False, soft_wrap=True)
    for warning in content["warnings"]:
        say(f"warning: {warning}")
    out.print(f"\nestimated duration: {content['estimate']}", markup=False, soft_wrap=True)


def _model_line(model: dict[str, Any]) -> str:
    text = (
        f"model {model['path']}, shape from {model['shape_from']}: {model['bytes_per_token']:,} "
        f"bytes of KV a token in {model['dtype']}"
    )
    if model["weights"] == "dummy":
        return text + "; dummy weights: times and token sources are real, outputs mean nothing"
    return text + ("; vLLM will download it" if model["is_download"] else "")


def _shell_line(command: Sequence[str], env: Mapping[str, str | None]) -> str:
    """The command as a shell takes it, with the variables that are unset and set for it."""
    unset = [word for name, value in env.items() if value is None for word in ("-u", name)]
    changed = [f"{name}={value}" for name, value in env.items() if value is not None]
    return shlex.join(["env", *unset, *changed, *command])


def _memory_table(memory: dict[str, Any]) -> Table:
    table = _table(
        "Memory one session needs, in GiB (GPU and host: estimates)",
        *("arm", "GPU", "weights", "KV pool", "host", "pinned tier", "/dev/shm"),
    )
    fields = ("gpu_bytes", "weights_bytes", "pool_bytes", "host_bytes", "tier_bytes", "shm_bytes")
    for arm, needs in memory.items():
        sizes = ("–" if needs[field] is None else f"{needs[field] / 2**30:.2f}" for field in fields)
        table.add_row(arm, *sizes)
    return table


def _expected_table(passes: dict[str, Any]) -> Table:
    arms = list(dict.fromkeys(arm for content in passes.values() for arm in content["arms"]))
    table = _table(
        "Expected TTFT in ms, median of a pass: an estimate, nothing is measured",
        *("pass", *arms, "baseline ÷ treatment, by document"),
    )
    for name, content in passes.items():
        times = (content["arms"].get(arm) for arm in arms)
        ratio = "–" if content["ratio"] is None else f"{content['ratio']:.2f}"
        table.add_row(name, *("–" if t is None else _ms(t["p50_ms"]) for t in times), ratio)
    return table


def _say_expected(expected: dict[str, Any]) -> None:
    out.print(f"expected by {expected['from']}", markup=False, soft_wrap=True)
    if expected["is_beyond_probe"]:
        say(
            "warning: some prompts are beyond what the probe measured: their times are extrapolated"
        )


def _tier_table(tiers: dict[str, Any]) -> Table:
    table = _table(
        "Tiers (working set: the documents, and questions that stay in their prompts)",
        *("arm", "working set", "GPU tier", "host tier"),
    )
    for arm, size in tiers.items():
        host = "–"
        if size["host_gib"] is not None:
            tokens = size["host_tokens"] or 0
            host = f"{tokens:,} tokens, {size['host_gib']:g} GiB ({size['host_kind']})"
        gpu = f"{size['gpu_tokens']:,} tokens, {size['gpu_bytes'] / 2**30:.3g} GiB"
        table.add_row(arm, f"{size['working_set_tokens']:,} tokens", gpu, host)
    return table


def _prediction_table(predicted: dict[str, Any], documents: dict[str, Any]) -> Table:
    table = _table(
        "Predicted prompt tokens by source, one session of each arm; documents in the order read",
        *("pass", "arm", "computed", "GPU hit", "host", "source"),
    )
    for name in next(iter(predicted.values())):
        for arm, passes in predicted.items():
            tokens = passes[name]
            runs = (f"{r['documents']} {SOURCE_WORDS[r['source']]}" for r in documents[arm][name])
            table.add_row(
                name, arm,
                *(f"{tokens[source]:,}" for source in ("computed", "gpu_hit", "host_loaded")),
                " · ".join(runs),
            )  # fmt: skip
        table.add_section()
    return table


def _cliff_table(cliff: dict[str, Any]) -> Table:
    table = _table(
        "The cliff: the smallest tier that serves every replay in full, beside what is planned",
        *("tier", "full from", "planned", "full"),
    )
    gpu, host = cliff["gpu"], cliff["host"]
    for arm, planned in gpu["planned"].items():
        full_from = gpu["full_from_by_arm"][arm]
        cells = _cliff_cells(full_from, planned, unit="blocks", of=gpu["reusable_tokens"])
        table.add_row(f"GPU, {arm}", *cells)
    if host is not None:
        cells = _cliff_cells(
            host["full_from"], host["planned"], unit="chunks", of=host["reusable_tokens"]
        )
        table.add_row("host", *cells)
    return table


def _cliff_cells(
    full: dict[str, Any], planned: dict[str, Any], *, unit: str, of: int
) -> tuple[str, str, str]:
    """The last three cells of a row; ``of``: tokens that a tier without end would serve."""
    texts = [
        f"{size[unit]:,} {unit}, {size['tokens']:,} tokens, {size['gib']:.3g} GiB"
        for size in (full, planned)
    ]
    if not of:
        return ("no size: nothing to serve", texts[1], "–")
    return (texts[0], texts[1], "yes" if planned["is_full"] else "no")


class ReadProgress:
    """How far a trace has been read, with the time left; on a terminal only, gone when done."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._task = self._bars.add_task("reading", total=None)

    def __enter__(self) -> "ReadProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def told(self, done: int, total: int | None, name: str) -> None:
        """``done`` of ``total`` bytes (None: not known) are read; ``name`` is the file now."""
        self._bars.update(self._task, completed=done, total=total, description=f"reading {name}")


def show_trace(content: dict[str, Any]) -> None:
    """What a trace command found: what is known, points and targets as tables, assumptions last."""
    lists = {name: rows for name, rows in content.items() if isinstance(rows, list)}
    for name, value in content.items():
        if name in ("schema", *lists) or value is None or isinstance(value, dict):
            continue
        label = f"{name[:-2]}, s" if name.endswith("_s") else name
        out.print(f"{label.replace('_', ' ')}: {_plain(value)}", markup=False, soft_wrap=True)
    for name in ("points", "targets"):
        rows = lists.get(name)
        if rows:
            columns = [k for k, v in rows[0].items() if not isinstance(v, dict | list)]
            table = _table(name, *(column.replace("_", " ") for column in columns))
            for row in rows:
                table.add_row(*(_plain(row[column]) for column in columns))
            out.print(table)
    for text in lists.get("assumptions", []):
        out.print(f"assumed: {text}", markup=False, soft_wrap=True)
    for text in lists.get("warnings", []):
        say(f"warning: {text}")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else "–" if value is None else str(value)


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


def show_checks(checks: Sequence[dict[str, Any]]) -> None:
    """What the doctor found, on stdout."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading)
    for check in checks:
        mark = {"ok": "ok", "warning": "warn", "error": "FAIL"}[check["status"]]
        table.add_row(mark, check["what"], check["found"], check["remedy"] or "")
    out.print(table)


def show_leftovers(leftovers: Mapping[Path, Sequence[LeftOver]]) -> None:
    """Processes an earlier, killed run left behind, by run folder, on stderr."""
    for run, processes in leftovers.items():
        say(f"servers of the run in {run} are still alive:")
        for left in processes:
            say(f"  pid {left.identity.pid}: {left.role} of session {left.session}: {left.command}")


def ask(question: str) -> bool:
    """Ask on the terminal; anything but yes is no."""
    return Confirm.ask(question, console=err, default=False)
