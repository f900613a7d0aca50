"""Everything the harness shows a person: progress and findings on stderr, results on stdout."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.prompt import Confirm
from rich.table import Table

from harness.errors import KvcliffError
from harness.findings import Finding
from harness.journal import Row
from harness.plan import Experiment, SessionPlan
from servers.processes import LeftOver

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

SOURCE_WORDS = {
    "recomputed": "recomputed",
    "partial": "part GPU, rest elsewhere",
    "host": "host-loaded",
    "gpu": "GPU hit",
}


def show_error(error: KvcliffError) -> None:
    """What happened and what to do, on stderr."""
    err.print(f"kvcliff: {error}", style="bold red", markup=False, soft_wrap=True)
    if error.hint:
        err.print(f"  → {error.hint}", markup=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of progress or advice, on stderr."""
    err.print(text, markup=False, soft_wrap=True)


def show_json(content: Any) -> None:
    """A result for a program, on stdout."""
    print(json.dumps(content, indent=2))


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
    out.print(_ttft_table(summary))
    out.print(_token_table(summary))
    out.print(_source_table(summary))
    planned, good = (
        reconciliation["requests_planned"],
        reconciliation["requests_reconciled"],
    )
    largest = max(
        (
            abs(value)
            for request in reconciliation["requests"]
            for value in (request["residual"] or {}).values()
        ),
        default=0,
    )
    out.print(
        f"{good} of {planned} requests reconciled (warm-up included); largest residual against "
        f"the prediction: {largest} tokens",
        soft_wrap=True,
    )


def _ttft_table(summary: dict[str, Any]) -> Table:
    arms = _arms(summary)
    table = Table(title="TTFT in ms: p50 (min–max), n requests", title_justify="left")
    table.add_column("pass")
    for arm in arms:
        table.add_column(arm, justify="right")
    table.add_column("baseline ÷ lmcache [range over blocks]", justify="right")
    for name, cells in summary["passes"].items():
        row = [_ttft_text(cells["arms"].get(arm)) for arm in arms]
        table.add_row(name, *row, _ratio_text(cells["paired_ratio"]))
    return table


def _token_table(summary: dict[str, Any]) -> Table:
    arms = _arms(summary)
    table = Table(
        title="Prompt tokens: computed / GPU hit / host-loaded, all sessions of an arm",
        title_justify="left",
    )
    table.add_column("pass")
    for arm in arms:
        table.add_column(arm, justify="right")
    for name, cells in summary["passes"].items():
        texts = []
        for arm in arms:
            tokens = cells["arms"].get(arm, {}).get("tokens")
            texts.append(
                f"{tokens['computed']:,} / {tokens['gpu_hit']:,} / {tokens['host_loaded']:,}"
                if tokens
                else "–"
            )
        table.add_row(name, *texts)
    return table


def _source_table(summary: dict[str, Any]) -> Table:
    table = Table(title="TTFT in ms by source of the document's KV, all arms", title_justify="left")
    for heading in ("source", "n", "p50", "min–max"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for name, cell in summary["sources"].items():
        if cell["n"]:
            table.add_row(
                SOURCE_WORDS[name],
                str(cell["n"]),
                f"{cell['p50_ms']:.1f}",
                f"{cell['min_ms']:.1f}–{cell['max_ms']:.1f}",
            )
    return table


def _arms(summary: dict[str, Any]) -> list[str]:
    names = [arm for cells in summary["passes"].values() for arm in cells["arms"]]
    return list(dict.fromkeys(names))


def _ttft_text(cell: dict[str, Any] | None) -> str:
    if not cell or not cell["n"]:
        return "–"
    failed = f", {cell['failed']} failed" if cell["failed"] else ""
    return (
        f"{cell['p50_ms']:.1f} ({cell['min_ms']:.1f}–{cell['max_ms']:.1f}), n {cell['n']}{failed}"
    )


def _ratio_text(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "–"
    return (
        f"{ratio['ratio']:.2f} [{ratio['low']:.2f}–{ratio['high']:.2f}], "
        f"{len(ratio['blocks'])} blocks"
    )


def show_findings(findings: Sequence[Finding]) -> None:
    """Failed checks and warnings, on stderr; says so when there are none."""
    if not findings:
        say("findings: none; every check passed")
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        err.print(f"{finding.severity}: {finding.code}: {finding.message}", style=style,
                  markup=False, soft_wrap=True)  # fmt: skip
        say(f"  cause: {finding.cause}")
        say(f"  remedy: {finding.remedy}")


def show_plan(content: dict[str, Any]) -> None:
    """A plan's predicted splits, sizes and commands, on stdout."""
    out.print(f"plan {content['plan_id']}: {content['requests_per_session']} requests a session, "
              f"{len(content['sessions'])} sessions: {' '.join(content['sessions'])}",
              markup=False, soft_wrap=True)  # fmt: skip
    table = Table(title="Tiers in tokens (working set: documents only)", title_justify="left")
    for heading in ("arm", "working set", "GPU tier", "host tier", "GPU KV", "host tier memory"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm, size in content["tiers"].items():
        table.add_row(arm, f"{size['working_set_tokens']:,}", f"{size['gpu_tokens']:,}",
                      _or_dash(size["host_tokens"], ","), f"{size['gpu_bytes'] / 2**20:.0f} MiB",
                      "–" if size["host_gib"] is None else f"{size['host_gib']:g} GiB")  # fmt: skip
    out.print(table)
    table = Table(title="Predicted prompt tokens: computed / GPU hit / host-loaded, per session",
                  title_justify="left")  # fmt: skip
    table.add_column("pass")
    for arm in content["predicted"]:
        table.add_column(arm, justify="right")
    for name in next(iter(content["predicted"].values())):
        table.add_row(
            name, *(" / ".join(f"{t:,}" for t in arm[name].values())
                    for arm in content["predicted"].values())
        )  # fmt: skip
    out.print(table)
    for arm, commands in content["commands"].items():
        out.print(f"\nservers of {arm}:", markup=False)
        for command in commands:
            out.print("  " + " ".join(command), markup=False, soft_wrap=True)
    for warning in content["warnings"]:
        say(f"warning: {warning}")
    out.print(f"\nestimated duration: {content['estimate']}", markup=False, soft_wrap=True)


def _or_dash(value: int | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def show_checks(checks: Sequence[dict[str, Any]]) -> None:
    """What the doctor found, on stdout."""
    table = Table(title="doctor", title_justify="left")
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
