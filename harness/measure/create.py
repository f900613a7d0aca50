"""A new run folder: the plan, the predictions and their seals, before anything is measured."""

from datetime import UTC, datetime
from pathlib import Path

from harness.errors import InputError
from harness.files import write_atomically, write_lines
from harness.machine.facts import machine_facts
from harness.plan.experiment import Experiment, SessionPlan
from harness.record.folder import PLAN_FILE, PREDICTION_FILE, RunFolder, file_digest
from harness.record.row import PREDICTED_NUMBERS, PredictedRow
from sim.predict import NotPredictable


def create_run(experiment: Experiment, results: Path) -> RunFolder:
    """A new run folder with the resolved plan, the predictions and an empty manifest."""
    facts = machine_facts()  # before the folder exists: it would make the checkout look changed
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = RunFolder(results / f"{stamp}-{experiment.plan_id}")
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise InputError(
            f"{folder.path} exists already: a run of this plan started in this very second",
            hint="start again",
        ) from None
    write_atomically(folder.path / PLAN_FILE, experiment.plan.to_toml())
    write_lines(
        folder.path / PREDICTION_FILE, (row.to_json() for row in predicted_rows(experiment))
    )
    folder.write_manifest(
        {
            "schema": 1,
            "created": _now(),
            "run": folder.name,
            "plan_id": experiment.plan_id,
            **facts,
            "sealed": {
                name: file_digest(folder.path / name) for name in (PLAN_FILE, PREDICTION_FILE)
            },
            "sessions": {},
        }
    )
    return folder


def predicted_rows(experiment: Experiment) -> list[PredictedRow]:
    """What every request of the run should show, warm-up included, in order."""
    return [row for session in experiment.sessions for row in _predicted(experiment, session)]


def _predicted(experiment: Experiment, session: SessionPlan) -> list[PredictedRow]:
    requests = experiment.workload_of(session.arm).requests
    try:
        predictions = experiment.predictions(session.arm)
    except NotPredictable as error:
        unknown = dict.fromkeys(PREDICTED_NUMBERS)
        return [
            PredictedRow(session=session.name, pass_name=request.pass_name, doc=request.doc,
                         why_not=str(error), **unknown)
            for request in requests
        ]  # fmt: skip
    chunk_tokens = experiment.plan.host.chunk_tokens
    return [
        PredictedRow(
            session=session.name,
            pass_name=request.pass_name,
            doc=request.doc,
            computed=prediction.split.computed,
            gpu_hit=prediction.split.gpu_hit,
            host_loaded=prediction.split.host_loaded,
            stored_tokens=prediction.stored_chunks * chunk_tokens,
            transferred_bytes=prediction.loaded_chunks * experiment.chunk_bytes,
        )
        for request, prediction in zip(requests, predictions, strict=True)
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
