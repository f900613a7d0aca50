"""``kvcliff run``: measure a plan, or what is missing of it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness import console
from harness.commands.arguments import RESULTS, DummyWeights, Gate, PlanOrDemo
from harness.commands.derived import show_summary
from harness.commands.plan import cache_folder, resolve_plan
from harness.errors import InputError
from servers.errors import ServerError

if TYPE_CHECKING:
    from harness.plan.experiment import Experiment
    from harness.record.folder import RunFolder


def run(
    plan: PlanOrDemo = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of the run folders.  [default: results]", show_default=False),
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
    gate: Gate = False,
) -> None:
    """Measure a plan on fresh servers, then report."""
    from harness.machine.leftovers import end_or_refuse_leftovers
    from harness.measure.session import write_ttft

    if resume and (plan or results or dummy_weights):
        raise InputError(
            "--resume goes on with its run's own plan and folder",
            hint="leave out PLAN and --results, and --dummy-weights",
        )
    results = resume.absolute().parent if resume else results or RESULTS
    end_or_refuse_leftovers(results, end=end_leftovers)
    cache = cache_folder()
    if resume:
        begun, experiment = _resumed(resume, cache)
    else:
        begun = None
        experiment = resolve_plan(plan or "demo", cache, dummy_weights=dummy_weights)
    folder = _measure(experiment, begun, results, cache)
    write_ttft(folder)
    console.say(f"run folder: {folder.path}")
    raise typer.Exit(show_summary(folder, gate=gate))


def _measure(
    experiment: "Experiment", begun: "RunFolder | None", results: Path, cache: Path
) -> "RunFolder":
    """Measure what is missing in the folder ``begun``, or everything in a new one of ``results``."""
    from harness.machine.leftovers import one_at_a_time
    from harness.machine.room import check_room
    from harness.measure.create import create_run
    from harness.measure.progress import RunProgress
    from harness.measure.session import run_sessions
    from harness.plan.experiment import check_build

    check_build(experiment.plan)
    with one_at_a_time(cache):  # before there is a folder: a refused run leaves none
        check_room(experiment)
        folder = begun or create_run(experiment, results)
        console.say(f"run folder: {folder.path}")
        again = f"kvcliff run --resume {shlex.quote(str(folder.path))}"
        try:
            with folder.lock(), RunProgress(experiment) as progress:
                run_sessions(experiment, folder, cache_dir=cache, progress=progress)
        except KeyboardInterrupt:
            console.say(f"interrupted; go on with: {again}")
            raise
        except ServerError as error:
            error.hint = f"{error.hint}; then go on with: {again}"
            raise
    return folder


def _resumed(path: Path, cache: Path) -> "tuple[RunFolder, Experiment]":
    from harness.plan.experiment import resolve
    from harness.record.folder import RunFolder

    folder = RunFolder(path)
    experiment = resolve(folder.read_plan(), cache_dir=cache)
    manifest = folder.read_manifest()
    if experiment.plan_id != manifest.plan_id:
        raise InputError(
            f"{path} was begun as {manifest.plan_id}, on this machine its plan is "
            f"{experiment.plan_id}: the model or this kvcliff is another one",
            hint="resume it where and with what it was begun, or start a new run",
        )
    return folder, experiment
