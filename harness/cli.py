"""The command ``kvcliff``: run, plan, reconcile, summarize, doctor."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from harness import console
from harness.doctor import check_machine
from harness.errors import InputError, KvcliffError, MachineError
from harness.findings import find, has_failed, write_reconciliation
from harness.journal import write_json
from harness.leftovers import deal_with_leftovers
from harness.plan import load_plan, preset_names, read_plan, resolve
from harness.preview import preview
from harness.reconcile import reconcile
from harness.runfolder import PLAN_FILE, RunFolder
from harness.session import create_run, run_sessions
from harness.stats import summarize as summarize_rows
from servers.errors import ServerError

app = typer.Typer(
    help="Find a workload's KV-cache cliff and measure what a host-memory tier behind it saves.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130  # the shell's code for SIGINT, which the parser returns for Ctrl-C

PlanName = Annotated[
    str, typer.Argument(help=f"Preset ({', '.join(preset_names())}) or path of a plan.toml.")
]
RunPath = Annotated[Path, typer.Argument(help="Run folder, e.g. results/<UTC>-<plan id>.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def run(
    plan: PlanName = "demo",
    results: Annotated[Path, typer.Option(help="Folder the run folder is created in.")] = Path(
        "results"
    ),
    resume: Annotated[
        Path | None,
        typer.Option(help="Measure only what is missing in this run folder; PLAN is not read."),
    ] = None,
    end_leftovers: Annotated[
        bool,
        typer.Option(help="End servers a killed run left behind without asking."),
    ] = False,
) -> None:
    """Measure a plan on fresh servers, session by session, then reconcile and report."""
    deal_with_leftovers(resume.parent if resume else results, end=end_leftovers)
    cache_dir = _cache_dir()
    if resume is None:
        experiment = resolve(load_plan(plan), cache_dir=cache_dir)
        folder = create_run(experiment, results)
    else:
        folder = RunFolder(resume)
        folder.read_manifest()
        experiment = resolve(read_plan(folder.path / PLAN_FILE), cache_dir=cache_dir)
    console.say(f"run folder: {folder.path}")
    with folder.lock(), console.RunProgress(experiment) as progress:
        run_sessions(experiment, folder, cache_dir=cache_dir, progress=progress)
    failed = _report(folder, as_json=False)
    console.say(f"run folder: {folder.path}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def plan(plan: PlanName = "demo", as_json: Json = False) -> None:
    """Predict a plan: token sources per pass, tiers, commands, duration. Starts nothing."""
    content = preview(resolve(load_plan(plan), cache_dir=_cache_dir()))
    if as_json:
        console.show_json(content)
    else:
        console.show_plan(content)


@app.command(name="reconcile")
def reconcile_command(run: RunPath, as_json: Json = False) -> None:
    """Check every request of a run against its prediction; exit code 1 when a check fails."""
    folder = RunFolder(run)
    result = reconcile(folder)
    findings = find(result)
    content = write_reconciliation(folder, result, findings)
    if as_json:
        console.show_json(content)
    else:
        console.say(
            f"{content['requests_reconciled']} of {content['requests_planned']} requests reconciled"
        )
    console.show_findings(findings)
    raise typer.Exit(1 if has_failed(findings) else 0)


@app.command()
def summarize(run: RunPath, as_json: Json = False) -> None:
    """Write summary.json and show the tables of a run."""
    raise typer.Exit(1 if _report(RunFolder(run), as_json=as_json) else 0)


@app.command()
def doctor(
    as_json: Json = False,
    results: Annotated[
        Path, typer.Option(help="Folder whose runs are searched for left-over servers.")
    ] = Path("results"),
) -> None:
    """Say whether this machine can run the demo, and what to do where it cannot."""
    checks = check_machine(results)
    if as_json:
        console.show_json({"schema": 1, "checks": checks})
    else:
        console.show_checks(checks)
    raise typer.Exit(3 if any(check["status"] == "error" for check in checks) else 0)


def _report(folder: RunFolder, *, as_json: bool) -> bool:
    """Reconcile, summarize, write both files, show both; True when a check failed."""
    result = reconcile(folder)
    findings = find(result)
    reconciliation = write_reconciliation(folder, result, findings)
    summary = summarize_rows(
        result.rows,
        run=folder.name,
        plan_id=result.manifest["plan_id"],
        block_size=result.plan.server.block_size,
    )
    write_json(folder.path / "summary.json", summary)
    if as_json:
        console.show_json(summary)
    else:
        console.show_run(summary, reconciliation)
    console.show_findings(findings)
    return has_failed(findings)


def _cache_dir() -> Path:
    """Where the tiny model and the engines' own caches live between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "kvcliff"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot create the cache folder {folder}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    return folder


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    # The same way out as Ctrl-C: servers are stopped and the journal stays readable.
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the only place where errors become messages and exit codes."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> Any:
    words = sys.argv[1:] if argv is None else argv
    try:
        _refuse_repeated_options(words)
        status = app(args=words, standalone_mode=False, prog_name="kvcliff") or 0
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]  # every subclass raised has it
        return 2
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except ServerError as error:
        console.show_error(MachineError(str(error), hint=error.hint))
        return MachineError.exit_code
    except KvcliffError as error:
        console.show_error(error)
        return error.exit_code
    if status == _INTERRUPTED:
        console.say("interrupted; what was measured is kept: kvcliff run --resume RUN_FOLDER")
    return status


def _refuse_repeated_options(words: list[str]) -> None:
    """The parser would let the last one win without a word."""
    names = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{repeated[0]} is given {names.count(repeated[0])} times; once is enough")
