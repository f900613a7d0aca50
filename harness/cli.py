"""The command ``kvcliff``: run, plan, reconcile, summarize, doctor."""

import errno
import importlib.metadata
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from harness import console
from harness.errors import InputError, KvcliffError, MachineError
from harness.files import refuse_evidence, refuse_missing_folder, write_json
from harness.forecast.deployment import describe
from harness.forecast.deployment_file import read_deployment
from harness.forecast.preview import preview
from harness.forecast.requests import is_refused, predict_file
from harness.forecast.tables import show_plan
from harness.machine.doctor import check_machine
from harness.machine.leftovers import deal_with_leftovers, one_at_a_time
from harness.machine.room import check_room
from harness.machine.tables import show_checks
from harness.measure.create import create_run
from harness.measure.progress import RunProgress
from harness.measure.session import run_sessions, write_ttft
from harness.plan.experiment import Experiment, check_build, resolve
from harness.plan.files import load_plan, preset_names, read_plan
from harness.record.folder import PLAN_FILE, RunFolder
from harness.report.export import FORMS
from harness.report.export import export as export_rows
from harness.report.tables import Watching, show_comparison, show_findings, show_latency, show_run
from harness.report.watch import watch as watch_run
from harness.traces.cli import add_to as add_trace_commands
from harness.verdict.findings import has_failed
from harness.verdict.importing import import_rows
from harness.verdict.latency import check_folder
from harness.verdict.publish import publish
from servers.errors import ServerError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_INTERRUPTED = 130  # the shell's code for SIGINT, which the parser returns for Ctrl-C

_RESULTS = Path("results")
_MAY_REPEAT = {
    "--target",
    "--policy",
    "--plot",
    "--png",
    "--svg",
    "--html",
}  # options that collect their values
_PLAN_HELP = f"Preset ({', '.join(preset_names())}) or path of a plan.toml."

PlanName = Annotated[str, typer.Argument(help=_PLAN_HELP)]
PlanOrDemo = Annotated[
    str | None, typer.Argument(help=f"{_PLAN_HELP}  [default: demo]", show_default=False)
]
RunPath = Annotated[Path, typer.Argument(help="Run folder, e.g. results/<UTC>-<plan id>.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DummyWeights = Annotated[
    bool,
    typer.Option(
        "--dummy-weights", help="Weights made up by vLLM: no download, and outputs mean nothing."
    ),
]


def _say_version(is_asked: bool) -> None:
    if is_asked:
        console.show_text(f"kvcliff {importlib.metadata.version('kvcliff')}")
        raise typer.Exit


@app.callback()
def options(
    _verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show where in the code an error was raised.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_say_version
        ),
    ] = False,
) -> None:
    """Find a workload's KV-cache cliff and measure what a host-memory tier behind it saves."""


@app.command()
def run(
    plan: PlanOrDemo = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder the run folder is created in.  [default: results]", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Measure only what is missing in this run folder."),
    ] = None,
    end_leftovers: Annotated[
        bool,
        typer.Option(
            "--end-leftovers", help="End servers a killed run left behind without asking."
        ),
    ] = False,
    dummy_weights: DummyWeights = False,
) -> None:
    """Measure a plan on fresh servers, then report."""
    if resume and (plan or results or dummy_weights):
        raise InputError(
            "--resume goes on with its run's own plan and folder",
            hint="leave out PLAN and --results, and --dummy-weights",
        )
    results = resume.absolute().parent if resume else results or _RESULTS
    deal_with_leftovers(results, end=end_leftovers)
    cache_dir = _cache_dir()
    if resume:
        begun, experiment = _resumed(resume, cache_dir)
    else:
        begun = None
        experiment = _resolved(plan or "demo", cache_dir, dummy_weights=dummy_weights)
    check_build(experiment.plan)
    with one_at_a_time(cache_dir):  # before there is a folder: a refused run leaves none
        check_room(experiment)
        folder = begun or create_run(experiment, results)
        _measure(experiment, folder, cache_dir)
    write_ttft(folder)
    failed = _report(folder, as_json=False)
    console.say(f"run folder: {folder.path}")
    raise typer.Exit(1 if failed else 0)


def _resolved(name: str, cache_dir: Path, *, dummy_weights: bool) -> Experiment:
    plan = load_plan(name)
    if dummy_weights:
        model = plan.model.model_copy(update={"weights": "dummy"})
        plan = plan.model_copy(update={"model": model})
    return resolve(plan, cache_dir=cache_dir)


def _measure(experiment: Experiment, folder: RunFolder, cache_dir: Path) -> None:
    console.say(f"run folder: {folder.path}")
    try:
        with folder.lock(), RunProgress(experiment) as progress:
            run_sessions(experiment, folder, cache_dir=cache_dir, progress=progress)
    except KeyboardInterrupt:
        console.say(f"interrupted; go on with: kvcliff run --resume {folder.path}")
        raise


def _resumed(path: Path, cache_dir: Path) -> tuple[RunFolder, Experiment]:
    folder = RunFolder(path)
    folder.check_seals()
    manifest = folder.read_manifest()
    experiment = resolve(read_plan(path / PLAN_FILE), cache_dir=cache_dir)
    if experiment.plan_id != manifest["plan_id"]:
        raise InputError(
            f"{path} was begun as {manifest['plan_id']}, on this machine its plan is "
            f"{experiment.plan_id}: the model or this kvcliff is another one",
            hint="resume it where and with what it was begun, or start a new run",
        )
    return folder, experiment


@app.command()
def plan(
    plan: PlanOrDemo = None,
    as_json: Json = False,
    deployment: Annotated[
        Path | None,
        typer.Option(
            help="Answer for a deployment that is only described (DEPLOYMENT.toml) instead."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="Expect times by a file of scripts/pcie_probe.py, not by a prior."),
    ] = None,
    dummy_weights: DummyWeights = False,
) -> None:
    """Predict a plan's outcome; starts nothing."""
    if deployment and (plan or probe or dummy_weights):
        raise InputError(
            "--deployment is a question of its own",
            hint="leave out PLAN, --probe and --dummy-weights",
        )
    if deployment:
        described = describe(read_deployment(deployment))
        if as_json:
            console.show_json(described)
        else:
            console.show_text(described["paragraph"])
        return
    experiment = _resolved(plan or "demo", _cache_dir(), dummy_weights=dummy_weights)
    content = preview(experiment, probe=probe)
    if as_json:
        console.show_json(content)
    else:
        show_plan(content)


@app.command()
def predict(
    spec: Annotated[Path, typer.Argument(help="SPEC.json: engine, block size, capacities.")],
    requests: Annotated[
        str, typer.Argument(help="REQUESTS.jsonl, one prompt a line; - reads stdin.")
    ],
) -> None:
    """Predict requests, one JSON line each; exit code 1 when a line is refused."""
    n_refused = 0
    for row in predict_file(spec, requests, say=console.say):
        console.show_line(row)
        n_refused += is_refused(row)
    if n_refused:
        console.say(f"not predicted: {n_refused} of the requests; their lines say why")
    raise typer.Exit(1 if n_refused else 0)


@app.command(name="reconcile")
def reconcile_command(run: RunPath, as_json: Json = False) -> None:
    """Check a run; exit code 1 when a check fails."""
    evidence = publish(RunFolder(run), write=_write)
    content = evidence.reconciliation
    if as_json:
        console.show_json(content.as_json())
    else:
        console.say(
            f"{content.requests_reconciled} of {content.requests_planned} requests reconciled"
        )
    show_findings(evidence.findings)
    raise typer.Exit(1 if has_failed(evidence.findings) else 0)


@app.command()
def summarize(run: RunPath, as_json: Json = False) -> None:
    """Show the tables of a run."""
    raise typer.Exit(1 if _report(RunFolder(run), as_json=as_json) else 0)


@app.command()
def report(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write.  [default: RUN/report.html]", show_default=False),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write each chart as PNG.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also write each chart as SVG.")] = False,
    md: Annotated[
        bool, typer.Option("--md", help="Also write Markdown for a pull request.")
    ] = False,
) -> None:
    """Write the report of a run as one HTML file."""
    from harness.report.html import write_report  # here: charts take a second to import

    if out is not None:
        refuse_missing_folder(out)
    out = out or run / "report.html"
    if out.suffix != ".html":
        raise InputError(f"--out is {str(out)!r}; the report's name must end in .html")
    refuse_evidence(out)
    if (run / PLAN_FILE).exists():  # an imported run has no plan: its files are as imported
        publish(RunFolder(run), write=_write)
    for path in write_report(run, out, png=png, svg=svg, markdown=md):
        console.show_text(str(path))


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Two or more run folders, the first is the base.")
    ],
    as_json: Json = False,
) -> None:
    """Say what changed between runs; refuses what must not be compared."""
    from harness.report.compare import compare as compare_runs

    for run in runs:
        if (run / PLAN_FILE).exists():  # summaries are made anew: journals are the only truth
            publish(RunFolder(run), write=_write)
    comparison = compare_runs(runs)
    if as_json:
        console.show_json(comparison.as_json())
    else:
        show_comparison(comparison)


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="File, or folder for vllm-bench and llmd.")],
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMS)}.")] = "csv",
) -> None:
    """Write a run in a format other tools read."""
    if not out.is_dir():
        refuse_evidence(out)
    for path in export_rows(run, form, out):
        console.show_text(str(path))


@app.command(name="import")
def import_command(
    source: Annotated[Path, typer.Argument(help="A ttft.jsonl that kvcliff did not write.")],
    results: Annotated[Path, typer.Option(help="Folder the run folder is created in.")] = _RESULTS,
) -> None:
    """Make a run folder from someone else's measurements."""
    console.show_text(str(import_rows(source, results)))


@app.command()
def watch(run: RunPath) -> None:
    """Follow a running experiment."""
    with Watching() as watching:
        watch_run(run, watching.show)


@app.command()
def latency(run: RunPath, as_json: Json = False) -> None:
    """Fit TTFT to a run's token splits."""
    check = check_folder(run)
    if as_json:
        console.show_json(check.as_json())
    else:
        show_latency(check)


@app.command()
def doctor(
    plan: PlanName = "demo",
    as_json: Json = False,
    results: Annotated[
        Path, typer.Option(help="Folder whose runs are searched for left-over servers.")
    ] = _RESULTS,
) -> None:
    """Say whether this machine can run a plan."""
    checks = check_machine(results, plan)
    if as_json:
        console.show_json({"schema": 1, "checks": checks})
    else:
        show_checks(checks)
    raise typer.Exit(3 if any(check["status"] == "error" for check in checks) else 0)


def _report(folder: RunFolder, *, as_json: bool) -> bool:
    """Reconcile, summarize, write both files, show both; True when a check failed."""
    evidence = publish(folder, write=_write)
    if as_json:
        console.show_json(evidence.summary.as_json())
    else:
        show_run(evidence.summary, evidence.reconciliation)
    show_findings(evidence.findings)
    return has_failed(evidence.findings)


def _write(path: Path, content: Any) -> None:
    """Write a derived file; a run on read-only storage can be read all the same, and says so."""
    try:
        write_json(path, content)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        console.say(f"not written: {path}: {error.strerror}")


add_trace_commands(app)


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without "–" must not cost a result
    sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        _refuse_repeated_options(words)
        return app(args=words, standalone_mode=False, prog_name="kvcliff") or 0
    except typer.TyperException as error:
        error.show()  # type: ignore[attr-defined]  # every subclass raised has it
        return InputError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has left, as `head` does; keep Python from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KvcliffError, ServerError, OSError) as error:
        if {"-v", "--verbose"} & set(words):
            traceback.print_exception(error)
        shown = _shown(error)
        console.show_error(shown)
        return shown.exit_code


def _shown(error: KvcliffError | ServerError | OSError) -> KvcliffError:
    if isinstance(error, KvcliffError):
        return error
    if isinstance(error, ServerError):
        return MachineError(str(error), hint=error.hint)
    place = f"{error.filename}: " if error.filename else ""
    return MachineError(
        f"{place}{error.strerror or error}",
        hint="check the path, its permissions and the free space; what was written before is kept",
    )


def _refuse_repeated_options(words: list[str]) -> None:
    """The parser would let the last one win without a word."""
    names = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    repeated = sorted({name for name in names if names.count(name) > 1} - _MAY_REPEAT)
    if repeated:
        raise InputError(f"{repeated[0]} is given {names.count(repeated[0])} times; once is enough")
