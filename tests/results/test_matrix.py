"""The live matrix, from its committed journals: no engine runs here.

``scripts/matrix.py`` measured these runs. Their predictions were written before the measurement;
the simulator as it is now must still say the same, and wrong rules must be caught.
"""

import json
from pathlib import Path

import pytest

from harness.plan.experiment import Experiment
from harness.plan.files import read_plan
from harness.plan.presets import preset_names
from harness.record.folder import RunFolder
from harness.record.row import Row
from harness.verdict.reconcile import Reconciliation, reconcile
from scripts.matrix import PLANS, newest_runs, show_table
from scripts.mutations import (
    MUTATIONS,
    RECORD,
    Mutation,
    caught,
    compared,
    experiment_of,
    matrix_runs,
    record,
)
from tests.factory import find

Runs = list[tuple[RunFolder, Experiment]]
Sources = tuple[int | None, int | None, int | None]

CHUNK_BYTES = 256 * 12_288  # tokens a chunk x KV bytes a token of the tiny model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cache = tmp_path_factory.mktemp("cache")
    found = [(run, experiment_of(run, cache)) for run in matrix_runs()]
    assert found != []
    return found


@pytest.fixture(scope="module")
def reconciled(runs: Runs) -> dict[str, Reconciliation]:
    return {experiment.plan.name: reconcile(run) for run, experiment in runs}


def rows_in(run: Reconciliation) -> list[Row]:
    return [request.row for request in run.requests if request.row is not None]


def rows_of(
    reconciled: dict[str, Reconciliation], plan: str, name: str, *, arm: str = "lmcache-mp"
) -> dict[int, Row]:
    """The rows of one pass of one arm, by document."""
    rows = {r.doc: r for r in rows_in(reconciled[plan]) if (r.config, r.pass_name) == (arm, name)}
    assert rows != {}
    return rows


def sources(row: Row) -> Sources:
    return (row.computed, row.gpu_hit, row.host_loaded)


def test_every_plan_of_the_matrix_has_one_run_that_measured_it(runs: Runs) -> None:
    plans = {plan.name: plan for plan in map(read_plan, sorted(PLANS.glob("*.toml")))}
    assert sorted(experiment.plan.name for _, experiment in runs) == sorted(plans)
    for _, experiment in runs:
        written, measured = plans[experiment.plan.name], experiment.plan
        # What the machine resolved aside, the run asked exactly what the plan's file asks.
        resolved = ("engine", "build", "dtype")
        machine = {name: getattr(measured.server, name) for name in resolved}
        assert measured == written.model_copy(
            update={
                "server": written.server.model_copy(update=machine),
                "workload": written.workload.model_copy(update={"vocab": measured.workload.vocab}),
            }
        )


def test_the_matrix_is_no_preset_and_its_plans_are_named_like_their_files() -> None:
    files = sorted(PLANS.glob("*.toml"))
    assert len(files) >= 8
    assert [read_plan(file).name for file in files] == [f"matrix-{file.stem}" for file in files]
    assert not any(name.startswith("matrix") for name in preset_names())


def test_over_four_hundred_live_requests_reconcile_with_residual_zero(
    reconciled: dict[str, Reconciliation],
) -> None:
    requests = [request for run in reconciled.values() for request in run.requests]
    assert len(requests) >= 400
    assert all(request.is_reconciled for request in requests)
    residuals = [request.residual or {} for request in requests]
    measures = {"computed", "gpu_hit", "host_loaded", "stored_tokens", "loaded_bytes"}
    assert sum(set(residual) == measures for residual in residuals) >= 300  # with a host tier
    assert {value for residual in residuals for value in residual.values()} == {0}


def test_no_run_of_the_matrix_has_an_error_and_stores_are_dropped_where_the_plan_says(
    reconciled: dict[str, Reconciliation],
) -> None:
    findings = {name: find(run) for name, run in reconciled.items()}
    assert [f for found in findings.values() for f in found if f.severity == "error"] == []
    dropped = {
        name for name, found in findings.items() for f in found if f.code == "stores-dropped"
    }
    assert dropped == {"matrix-host-half-noop", "matrix-host-one-chunk-short-noop"}


def test_the_simulator_as_it_is_now_predicts_every_journal(runs: Runs) -> None:
    for run, experiment in runs:
        assert [r.key for r in compared(run, experiment) if not r.is_reconciled] == []


def test_the_worked_example_comes_out_live_as_worked_by_hand(
    reconciled: dict[str, Reconciliation],
) -> None:
    plan = "matrix-worked-example"
    cold = rows_of(reconciled, plan, "pass1-cold")
    assert {sources(row) for row in cold.values()} == {(3020, 0, 0)}
    replay = rows_of(reconciled, plan, "pass2-replay")
    assert {sources(row) for row in replay.values()} == {(204, 0, 2816)}  # 11 chunks
    reverse = rows_of(reconciled, plan, "pass3-reverse")
    assert [sources(reverse[doc]) for doc in range(8)] == [
        (204, 0, 2816),
        (204, 896, 1920),  # 28 blocks left: 599 - 6 x 94 - 1 reused - 6 for new questions
        *[(44, 2976, 0)] * 6,
    ]
    # 896 tokens end inside the fourth chunk, so chunks 4 to 11 move: 8 chunks for 1,920 tokens.
    assert reverse[1].loaded_bytes == 8 * CHUNK_BYTES


def test_a_gpu_tier_one_block_short_of_the_working_set_loads_one_block_of_every_document(
    reconciled: dict[str, Reconciliation],
) -> None:
    equal = rows_of(reconciled, "matrix-gpu-equal", "pass3-reverse")
    short = rows_of(reconciled, "matrix-gpu-one-block-short", "pass2-replay")
    assert [sources(equal[doc]) for doc in range(8)] == [(20, 768, 0)] * 8
    assert [sources(short[doc]) for doc in range(8)] == [(20, 736, 32)] * 8


def test_a_host_tier_one_chunk_short_of_the_working_set_never_has_the_last_document(
    reconciled: dict[str, Reconciliation],
) -> None:
    equal = rows_of(reconciled, "matrix-host-equal-noop", "pass2-replay")
    short = rows_of(reconciled, "matrix-host-one-chunk-short-noop", "pass2-replay")
    assert [sources(equal[doc]) for doc in range(8)] == [(20, 0, 768)] * 8
    assert [sources(short[doc]) for doc in range(8)] == [(20, 0, 768)] * 7 + [(788, 0, 0)]


def test_a_prompt_that_comes_back_whole_still_computes_its_last_token(
    reconciled: dict[str, Reconciliation],
) -> None:
    # 768 tokens are 6 blocks of 128 and 3 chunks. Alone, a full GPU hit loses its last block.
    alone = rows_of(reconciled, "matrix-repeats", "pass3-reverse", arm="baseline")
    assert sources(alone[7]) == (128, 640, 0)
    tier = rows_of(reconciled, "matrix-repeats", "pass3-reverse")
    assert sources(tier[7]) == (1, 640, 127)
    assert tier[7].loaded_bytes == CHUNK_BYTES
    assert sources(tier[0]) == (1, 0, 767)


def test_a_conversation_computes_no_more_than_its_new_turn_while_both_tiers_keep_it(
    reconciled: dict[str, Reconciliation],
) -> None:
    rows = [row for row in rows_in(reconciled["matrix-growth"]) if row.phase == "measure"]
    assert sorted({row.prompt_tokens for row in rows}) == [550, 700, 850, 1000, 1150, 1300]
    # The turn just asked comes again: 700 tokens are 10 blocks of 64 and 60 tokens, 150 are new.
    newest = rows_of(reconciled, "matrix-growth", "pass3-reverse")[5]
    assert sources(newest) == (850 - 640, 640, 0)


def test_the_matrix_covers_block_sizes_evictions_and_mixed_hits(
    reconciled: dict[str, Reconciliation],
) -> None:
    assert {run.plan.server.block_size for run in reconciled.values()} == {32, 64, 128}
    assert {run.plan.host.policy for run in reconciled.values()} == {"LRU", "noop"}
    evicting = {
        name: evicted for name, run in reconciled.items() if (evicted := _evicted_chunks(run))
    }
    assert set(evicting) == {"matrix-growth", "matrix-host-equal-lru", "matrix-host-half-lru"}
    assert sum(evicting.values()) > 100
    rows = [row for run in reconciled.values() for row in rows_in(run)]
    assert sum(bool(row.gpu_hit and row.host_loaded) for row in rows) >= 20


def _evicted_chunks(run: Reconciliation) -> int:
    return max((row.counters_after or {}).get("host_evicted_chunks", 0) for row in rows_in(run))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_wrong_rule_is_contradicted_by_the_journals_and_gone_afterwards(
    runs: Runs, mutation: Mutation
) -> None:
    assert sum(caught(mutation, runs).values()) > 0
    assert caught(Mutation("none", ()), runs) == {}


def test_the_mutation_record_says_which_plan_catches_which_wrong_rule(runs: Runs) -> None:
    assert len(MUTATIONS) == 5
    assert json.loads(Path(RECORD).read_text(encoding="utf-8")) == record(runs)


def test_the_table_of_the_matrix_says_that_every_request_reconciled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show_table(newest_runs())
    assert "442 of 442 requests of 13 plans reconciled" in capsys.readouterr().out
