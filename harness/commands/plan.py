"""``kvcliff plan``: what a plan, or a deployment that is only described, would do."""

import os
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness import console
from harness.commands.arguments import AsJson, DummyWeights, PlanOrDemo
from harness.commands.derived import refresh
from harness.errors import InputError, MachineError

if TYPE_CHECKING:
    from harness.forecast.preview import Noise
    from harness.plan.experiment import Experiment


def plan(
    plan: PlanOrDemo = None,
    as_json: AsJson = False,
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
    like: Annotated[
        Path | None,
        typer.Option(help="A run whose sessions differed as those of this plan will."),
    ] = None,
    dummy_weights: DummyWeights = False,
) -> None:
    """Predict a plan's outcome; starts nothing."""
    if deployment:
        if plan or probe or like or dummy_weights:
            raise InputError(
                "--deployment is a question of its own",
                hint="leave out PLAN, --probe, --like and --dummy-weights",
            )
        _show_deployment(deployment, as_json=as_json)
        return
    from harness.forecast.preview import preview
    from harness.forecast.tables import show_plan

    experiment = resolve_plan(plan or "demo", cache_folder(), dummy_weights=dummy_weights)
    content = preview(experiment, probe=probe, like=_noise_of(like) if like else None)
    if as_json:
        console.show_json(content)
    else:
        show_plan(content)


def _noise_of(run: Path) -> "Noise":
    """How much the sessions of a run differed in the pass it was decided on."""
    from harness.forecast.preview import Noise
    from harness.verdict.schema import read_published

    refresh(run)
    evidence = read_published(run)[0].decision.evidence
    if evidence is None or evidence.noise is None:
        raise InputError(
            f"{run} has fewer than two pairs of sessions: how much they differ is not known",
            hint="leave out --like, or name a run of A B B A",
        )
    of_sessions = evidence.noise / sqrt(2)
    return Noise(of_sessions, f"sessions differ by {of_sessions:.1%}, as in {run.name}")


def _show_deployment(file: Path, *, as_json: bool) -> None:
    from harness.forecast.deployment import describe
    from harness.forecast.deployment_file import read_deployment

    described = describe(read_deployment(file))
    if as_json:
        console.show_json(described)
    else:
        console.show_paragraph(described["paragraph"])


def resolve_plan(name: str, cache: Path, *, dummy_weights: bool) -> "Experiment":
    """The preset or plan file ``name`` with everything decided that it leaves to the machine."""
    from harness.plan.experiment import resolve
    from harness.plan.files import load_plan

    plan = load_plan(name)
    if dummy_weights:
        model = plan.model.model_copy(update={"weights": "dummy"})
        plan = plan.model_copy(update={"model": model})
    return resolve(plan, cache_dir=cache)


def cache_folder() -> Path:
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
