"""A new run folder: the plan, the predictions and their seals, before anything is measured."""

from collections.abc import Sequence
from pathlib import Path

from harness.files import write_atomically, write_lines
from harness.machine.facts import machine_facts
from harness.plan.experiment import Experiment, SessionPlan
from harness.plan.load import WHY_NOT_PREDICTED
from harness.record.folder import PLAN_FILE, PREDICTION_FILE, RunFolder
from harness.record.manifest import Manifest, utc_now
from harness.record.row import SCHEMA, PredictedRow
from harness.record.seals import file_digest
from sim.predict import NotPredictable, Prediction


def create_run(experiment: Experiment, results: Path) -> RunFolder:
    """A new run folder with the resolved plan, the predictions and an empty manifest."""
    facts = machine_facts()  # before the folder exists: it would make the checkout look changed
    folder = RunFolder.begun_now(results, experiment.plan_id)
    folder.create()
    write_atomically(folder.path / PLAN_FILE, experiment.plan.to_toml())
    write_lines(
        folder.path / PREDICTION_FILE, (row.to_json() for row in predicted_rows(experiment))
    )
    sealed = {name: file_digest(folder.path / name) for name in (PLAN_FILE, PREDICTION_FILE)}
    Manifest(
        schema_version=SCHEMA,
        run=folder.name,
        plan_id=experiment.plan_id,
        sealed=sealed,
        shape=experiment.model.identity.decode(),
        sessions={},
        **{"created": utc_now(), **facts},
    ).write(folder.path)
    return folder


def predicted_rows(experiment: Experiment) -> list[PredictedRow]:
    """What every request of the run should show, warm-up included, in order."""
    return [row for session in experiment.sessions for row in _predicted(experiment, session)]


def _predicted(experiment: Experiment, session: SessionPlan) -> list[PredictedRow]:
    requests = experiment.workload_of(session.arm)
    predictions: Sequence[Prediction | None] = [None] * len(requests)
    why_not: str | None = WHY_NOT_PREDICTED
    if experiment.plan.load is None:
        try:
            predictions, why_not = experiment.predictions(session.arm), None
        except NotPredictable as error:
            why_not = str(error)
    chunk_tokens = experiment.plan.host.chunk_tokens
    return [
        PredictedRow(
            schema_version=SCHEMA,
            session=session.name,
            pass_name=request.pass_name,
            doc=request.doc,
            computed=found.split.computed if found else None,
            gpu_hit=found.split.gpu_hit if found else None,
            host_loaded=found.split.host_loaded if found else None,
            stored_tokens=found.stored_chunks * chunk_tokens if found else None,
            loaded_bytes=found.loaded_chunks * experiment.chunk_bytes if found else None,
            why_not=why_not,
        )
        for request, found in zip(requests, predictions, strict=True)
    ]
