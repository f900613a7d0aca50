"""Run the sessions of an experiment: fresh servers for each, a journal each, and the run folder."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from harness.files import write_lines
from harness.measure.kv_events import EventSocket
from harness.measure.load import LoadContext, LoadedSession
from harness.measure.progress import RunProgress
from harness.measure.replay import Doors, SessionContext, replay
from harness.measure.settle import Scraper
from harness.measure.stream import open_client
from harness.plan.experiment import Experiment, SessionPlan
from harness.record.folder import ROWS_FILE, RunFolder
from harness.record.journal import JournalWriter
from harness.record.manifest import utc_now
from harness.record.row import Row
from servers.command import Command
from servers.gpu.devices import devices_of
from servers.gpu.samples import sampled
from servers.launch import Running, launch
from servers.probe import ServerFacts, probe


def run_sessions(
    experiment: Experiment, folder: RunFolder, *, cache_dir: Path, progress: RunProgress
) -> None:
    """Measure every session that has no complete journal yet, in order."""
    for session in experiment.sessions:
        if _is_complete(folder, session, experiment):
            continue
        _set_aside(folder.journal(session.name))
        _measure(experiment, session, folder, cache_dir=cache_dir, progress=progress)


def write_ttft(folder: RunFolder) -> None:
    """``ttft.jsonl``: the measured rows of all journals, in session order."""
    write_lines(
        folder.path / ROWS_FILE,
        (row.to_json() for row in folder.rows() if row.phase == "measure"),
    )


def _is_complete(folder: RunFolder, session: SessionPlan, experiment: Experiment) -> bool:
    """Whether the session's journal has every request, in order, and nothing torn after it."""
    notes: list[str] = []
    if not folder.journal(session.name).exists():
        return False
    keys = [row.key for row in folder.session_rows(session.name, notes)]
    planned = [(session.name, *request.key) for request in experiment.workload_of(session.arm)]
    return keys == planned and not notes


def _set_aside(journal: Path) -> None:
    """Keep what a cut-short session measured under a name that no reader takes for a session."""
    if not journal.exists():
        return
    names = (journal.with_name(f"cut-{attempt}-{journal.name}") for attempt in count(1))
    journal.rename(next(name for name in names if not name.exists()))


def _measure(
    experiment: Experiment,
    session: SessionPlan,
    folder: RunFolder,
    *,
    cache_dir: Path,
    progress: RunProgress,
) -> None:
    progress.session_starts(session, requests=len(experiment.workload_of(session.arm)))
    started = utc_now()
    with (
        sampled(devices_of(session.arm, os.environ)) as gpu,
        _events(experiment) as events,
        launch(
            session.arm,
            log_stem=folder.path / f"server-{session.name}",
            ledger=folder.ledger,
            cache_dir=cache_dir,
            deadline_s=experiment.plan.deadlines.start_s,
            session=session.name,
            events_port=events.port if events else None,
        ) as running,
    ):
        facts = probe(running, session.arm)
        gpu.mark("ready")
        noted = _session_facts(running, facts, folder=folder, cache_dir=cache_dir)
        folder.note_session(session.name, {"started": started, **noted})
        progress.session_ready(session, start_s=running.start_s)
        _replay(experiment, session, folder, running, facts.connector, events=events,
                on_row=progress.row)  # fmt: skip
        gpu.mark("end")
    folder.note_session(
        session.name, {"ended": utc_now(), "gpu": gpu.record(), "unread_gpus": running.unread_gpus}
    )


def _events(experiment: Experiment) -> AbstractContextManager[EventSocket | None]:
    """Where vLLM's KV events arrive, for a plan that needs them."""
    return nullcontext() if experiment.plan.load is None else EventSocket()


def _replay(
    experiment: Experiment,
    session: SessionPlan,
    folder: RunFolder,
    running: Running,
    connector: str | None,
    *,
    events: EventSocket | None,
    on_row: Callable[[Row], None],
) -> None:
    host, deadlines = session.arm.host, experiment.plan.deadlines
    context = SessionContext(
        run=folder.name,
        session=session.name,
        order=session.order,
        config=session.arm.name,
        kind=host.kind if host else None,
        connector=connector,
        model_name=running.model_name,
        chunk_tokens=host.chunk_tokens if host else None,
        chunk_bytes=experiment.chunk_bytes if host else None,
        request_s=deadlines.request_s,
        settle_s=deadlines.settle_s,
        has_events=events is not None,
    )
    workload = experiment.workload_of(session.arm)
    with (
        JournalWriter(folder.journal(session.name)) as journal,
        open_client(running.base_url, deadline_s=context.request_s) as client,
        Scraper(
            running.base_url,
            lmcache_url=running.lmcache_url,
            kind=context.kind,
            model_name=running.model_name,
        ) as scraper,
    ):
        doors = Doors(client, scraper)
        if events is None:
            replay(workload, context, doors=doors, journal=journal, on_row=on_row,
                   check_alive=running.check_alive)  # fmt: skip
            return
        LoadedSession(
            context,
            _load_context(experiment, session, running),
            doors,
            events,
            journal,
            on_row,
            running.check_alive,
        ).run(workload)


def _load_context(experiment: Experiment, session: SessionPlan, running: Running) -> LoadContext:
    plan, arm = experiment.plan, session.arm
    assert plan.load is not None, "events are listened to under load alone"
    return LoadContext(
        load=plan.load,
        seed=plan.workload.seed,
        base_url=running.base_url,
        block_size=arm.server.block_size,
        is_caching=arm.prefix_caching,
    )


def _session_facts(
    running: Running, facts: ServerFacts, *, folder: RunFolder, cache_dir: Path
) -> dict[str, Any]:
    places = {
        str(folder.path.resolve()): "$RUN",
        str(cache_dir.resolve()): "$CACHE",
        running.commands[0].env["TMPDIR"]: "$TMPDIR",
        sys.prefix: "$VENV",
        str(Path.cwd()): "$CHECKOUT",
        str(Path.home()): "$HOME",
    }
    return {
        "start_s": running.start_s,
        "facts": asdict(facts),
        "commands": [_portable(command, places) for command in running.commands],
    }


def _portable(command: Command, places: dict[str, str]) -> dict[str, Any]:
    """Argv and environment changes of a server, machine-specific folders replaced by names."""

    def named(text: str) -> str:
        for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
            if len(place) > 1:  # "/" as home or working folder, in containers
                text = re.sub(rf"{re.escape(place)}(?=/|:|$)", name, text)
        return text

    return {
        "role": command.role,
        "argv": [named(word) for word in command.argv],
        "env_diff": {
            name: None if value is None else named(value)
            for name, value in command.env_diff.items()
        },
    }
