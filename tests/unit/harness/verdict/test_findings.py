import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.plan.load import LoadSection
from harness.plan.requests import PlannedRequests
from harness.plan.rule import DecisionSection
from harness.record.row import NUMBERS, Row
from harness.verdict.finding_table import TABLE, Kind
from harness.verdict.findings import has_failed
from harness.verdict.importing import import_rows
from harness.verdict.reconcile import Reconciliation
from harness.verdict.schema import Finding, read_published
from tests.factory import (
    FACTS,
    PLAN,
    SERVERS,
    TIER_FACTS,
    account_of,
    failed,
    find,
    joined,
    make_plan,
    make_prediction,
    make_row,
    manifest_of,
    run_of,
    sound_rows,
    tier_row,
)
from tests.places import ROOT


def codes(run: Reconciliation) -> list[str]:
    return [finding.code for finding in find(run)]


def the_finding(run: Reconciliation) -> Finding:
    (finding,) = find(run)
    return finding


def test_a_sound_run_has_no_findings() -> None:
    assert find(run_of(sound_rows())) == []


def changed_rows(**changed: Any) -> list[Row]:
    """Sound rows, the tier's changed."""
    return [*sound_rows()[:2], tier_row(**{"output_sha256": "bb", **changed})]


def one_more(**changed: Any) -> Reconciliation:
    """A sound run and a row of document 1 of the baseline."""
    return run_of([*sound_rows(), make_row(**{"doc": 1, "output_sha256": "cc", **changed})])


def unforeseen(*rows: Row) -> Reconciliation:
    """A sound run with ``rows`` that nobody predicted."""
    return run_of([*sound_rows(), *rows], predictions=[*map(make_prediction, sound_rows())])


def with_weights(weights: str) -> Reconciliation:
    model = PLAN.model.model_copy(update={"weights": weights})
    return replace(run_of(sound_rows()), plan=PLAN.model_copy(update={"model": model}))


def under_load(rows: list[Row]) -> Reconciliation:
    load = LoadSection(rate=4.0)
    return replace(run_of(rows), plan=PLAN.model_copy(update={"load": load}))


def tier_server(**changed: Any) -> Reconciliation:
    """A sound run whose second server says something else of itself."""
    return run_of(sound_rows(), facts={"02-lmcache": {"facts": {**TIER_FACTS, **changed}}})


UNKNOWN_SOURCES = dict.fromkeys(("computed", "gpu_hit", "host_loaded"))

# The smallest run that gets each finding.
RUNS: dict[str, Callable[[], Reconciliation]] = {
    "missing-requests": lambda: run_of(
        sound_rows()[:2], predictions=[*map(make_prediction, sound_rows())]
    ),
    "missing-predictions": lambda: run_of(
        sound_rows(),
        predictions=[*map(make_prediction, sound_rows()[:2])],
        planned=[row.key for row in sound_rows()],
    ),
    "unplanned-requests": lambda: unforeseen(make_row(doc=9)),
    "failed-requests": lambda: run_of([*sound_rows(), Row.model_validate(failed(doc=1))]),
    "unattributed-requests": lambda: one_more(**UNKNOWN_SOURCES, unattributed="HTTP 500"),
    "residual": lambda: run_of(
        sound_rows(), predictions=[make_prediction(row, stored_tokens=7) for row in sound_rows()]
    ),
    "cold-hits": lambda: one_more(computed=488, gpu_hit=32),  # A47
    # A42: the server answers all the same.
    "tier-off": lambda: run_of(changed_rows(stored_tokens=0)),
    "baseline-used-host": lambda: one_more(**{"pass": "pass2-replay"}, computed=8, host_loaded=512),
    "outputs-differ": lambda: run_of(changed_rows(output_sha256="other")),
    "outputs-differ-in-batches": lambda: under_load(changed_rows(output_sha256="other")),
    "outputs-constant": lambda: run_of(
        [row.model_copy(update={"output_sha256": "same"}) for row in sound_rows()]
    ),
    "outputs-meaningless": lambda: with_weights("dummy"),
    "servers-unlike-plan": lambda: tier_server(block_size=64),
    "servers-differ": lambda: tier_server(vllm_version="0.33.0"),
    "ledgers-disagree": lambda: run_of(changed_rows(disagreement="vLLM says 512, LMCache 256")),
    "times-disagree": lambda: run_of(changed_rows(ttft_ms=9.0, server_ttft_ms=90.0)),
    "stores-dropped": lambda: run_of(
        changed_rows(
            counters_before={"host_alloc_failed_chunks": 1},
            counters_after={"host_alloc_failed_chunks": 9},
        )
    ),
    "no-effect-possible": lambda: run_of(
        changed_rows(computed=8, gpu_hit=512, host_loaded=0, loaded_bytes=0)
    ),
    "control-too-small": lambda: run_of(
        [
            *sound_rows(),
            tier_row(session="05-control", order=5, config="control", output_sha256="bb"),
        ]
    ),
    "reconnected": lambda: one_more(conn_reused=False),
    "client-late": lambda: one_more(loop="open", late_ms=51.0),
    "clocks-disagree": lambda: one_more(ttft_ms=50.0, server_ttft_ms=99.0),
    "gpu-memory-unread": lambda: run_of(
        sound_rows(), facts={"01-baseline": {"facts": FACTS, "unread_gpus": ["GPU 0"]}}
    ),
    "gpu-throttled": lambda: run_of(
        sound_rows(),
        facts={"01-baseline": {"facts": FACTS, "gpu": {"devices": [], "warnings": ["hot"]}}},
    ),
    "torn-journal": lambda: run_of(sound_rows(), notes=("j.jsonl: the last line has no line end",)),
}


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.code)
def test_every_row_of_the_table_is_found_somewhere_with_cause_and_remedy(
    kind: Kind, tmp_path: Path
) -> None:
    in_import = kind.code in IMPORTED_CODES
    findings = imported(tmp_path) if in_import else find(RUNS[kind.code]())
    (finding,) = [finding for finding in findings if finding.code == kind.code]
    assert finding.severity == kind.severity
    assert finding.message
    assert finding.cause
    assert finding.remedy


IMPORTED_CODES = (
    "unequal-sessions", "nothing-compared", "times-of-zero", "several-runs", "sessions-assumed",
)  # fmt: skip


def imported(tmp_path: Path) -> list[Finding]:
    """Of a file with everything against it that an import looks for."""
    source = tmp_path / "ttft.jsonl"
    row = {"config": "baseline", "pass": "p", "doc": 0, "doc_tokens": 9, "ttft_ms": 5.0}
    rows = ({**row, "total_ms": 6.0, "doc": doc, "run": doc} for doc in (0, 0, 1))
    lines = [
        json.dumps(row) + "\n"
        for row in (*rows, {**row, "doc": 2, "ttft_ms": 0.0, "total_ms": 0.0})
    ]
    source.write_text("".join(lines), encoding="utf-8")
    return read_published(import_rows(source, tmp_path / "results"))[1].findings


def test_a_finding_is_made_by_the_table_alone() -> None:
    # A code is a type of its own: a finding made of any other text is a type error.
    making = re.compile(r"\b(?:Code|Finding\.\w+)\(")
    files = [file for wing in ("harness", "scripts") for file in (ROOT / wing).rglob("*.py")]
    makers = [file.name for file in files if making.search(file.read_text(encoding="utf-8"))]
    assert makers == ["finding_table.py"]


def test_errors_come_first() -> None:
    run = run_of(changed_rows(conn_reused=False, stored_tokens=0), notes=("j.jsonl: torn",))
    assert codes(run) == ["tier-off", "reconnected", "torn-journal"]


def test_a_residual_of_one_token_is_an_error_that_names_request_and_size() -> None:
    rows = sound_rows()
    predictions = [make_prediction(row) for row in rows]
    predictions[2] = make_prediction(rows[2], computed=7, host_loaded=513)
    finding = the_finding(run_of(rows, predictions=predictions))
    assert finding.code == "residual"
    assert "02-lmcache/pass2-replay/0: computed +1, host_loaded -1" in finding.message


def test_bytes_that_are_not_the_predicted_whole_chunks_are_a_residual() -> None:
    rows = sound_rows()
    predictions = [make_prediction(row) for row in rows]
    predictions[2] = make_prediction(rows[2], loaded_bytes=1024)
    assert "loaded_bytes -512" in the_finding(run_of(rows, predictions=predictions)).message


def test_a_missing_row_is_an_error() -> None:
    # A70: delete one row; planned = recorded + missing.
    rows = sound_rows()
    finding = the_finding(run_of(rows[:1] + rows[2:], predictions=[*map(make_prediction, rows)]))
    assert finding.code == "missing-requests"
    assert "1 of 3 planned" in finding.message
    assert finding.severity == "error"


def test_a_missing_pass_is_an_error() -> None:
    # A70: delete one pass.
    rows = sound_rows()
    finding = the_finding(run_of(rows[:1], predictions=[*map(make_prediction, rows)]))
    assert finding.code == "missing-requests"
    assert "2 of 3 planned" in finding.message


def test_a_deleted_prediction_does_not_shrink_what_was_planned() -> None:
    # A70
    rows = sound_rows()
    run = run_of(rows, predictions=[*map(make_prediction, rows[:2])], planned=[r.key for r in rows])
    assert codes(run) == ["missing-predictions"]
    account = account_of(run)
    assert (account.planned, account.reconciled) == (3, 2)


def test_a_prediction_nobody_planned_is_an_error() -> None:
    rows = sound_rows()
    predictions = [*map(make_prediction, rows), make_prediction(rows[0], doc=7)]
    run = run_of(rows, predictions=predictions, planned=[r.key for r in rows])
    assert codes(run) == ["unplanned-requests"]


def test_stores_that_found_no_room_are_a_warning_with_their_chunks() -> None:
    # A41: LMCache drops the whole store and serves on.
    rows = sound_rows()
    after = {**(rows[2].counters_after or {}), "host_alloc_failed_chunks": 8}
    rows[2] = rows[2].model_copy(update={"counters_after": after})
    finding = the_finding(run_of(rows))
    assert (finding.code, finding.severity) == ("stores-dropped", "warning")
    assert "02-lmcache: LMCache found no room for 8 chunks" in finding.message


def test_a_new_connection_in_a_measured_request_is_a_warning() -> None:
    # A19
    rows = sound_rows()
    rows[0] = make_row(conn_reused=False)
    finding = the_finding(run_of(rows))
    assert (finding.code, finding.severity) == ("reconnected", "warning")
    assert "1 of 3" in finding.message


def test_a_failed_request_is_an_error_with_the_servers_own_words() -> None:
    rows = [*sound_rows(), Row.model_validate(failed(doc=1))]
    finding = the_finding(run_of(rows))
    assert finding.code == "failed-requests"
    assert "boom" in finding.message


def test_a_request_without_sources_is_an_error_not_a_zero() -> None:
    # A26
    row = make_row(computed=None, gpu_hit=None, host_loaded=None, unattributed="HTTP 500", doc=1)
    finding = the_finding(run_of([*sound_rows(), row]))
    assert finding.code == "unattributed-requests"
    assert "HTTP 500" in finding.message


def test_an_interrupted_session_owes_no_loads_of_requests_it_never_sent() -> None:
    cold = tier_row(**{"pass": "pass1-cold"}, computed=520, host_loaded=0, loaded_bytes=0)
    planned = [make_prediction(cold), make_prediction(tier_row())]
    assert codes(run_of([cold], predictions=planned)) == ["missing-requests"]


def test_the_remedy_for_missing_rows_can_be_pasted() -> None:
    rows = sound_rows()
    finding = the_finding(run_of(rows[:2], predictions=[*map(make_prediction, rows)]))
    assert "kvcliff run --resume results/run " in finding.remedy


def test_a_tier_that_loaded_nothing_when_loads_were_due_is_an_error() -> None:
    # A36, A42
    rows = sound_rows()
    rows[2] = tier_row(computed=520, host_loaded=0, loaded_bytes=0, output_sha256="bb")
    predictions = [make_prediction(row) for row in sound_rows()]
    assert "tier-off" in codes(run_of(rows, predictions=predictions))


def test_outputs_that_differ_between_arms_are_an_error() -> None:
    rows = sound_rows()
    rows[2] = tier_row(output_sha256="other")
    finding = the_finding(run_of(rows))
    assert finding.code == "outputs-differ"
    assert "1 of 2 prompts" in finding.message


def test_outputs_of_dummy_weights_are_not_judged_and_that_is_said() -> None:
    # Neither that they never vary nor that they differ says anything.
    rows = [row.model_copy(update={"output_sha256": "same"}) for row in sound_rows()]
    model = PLAN.model.model_copy(update={"weights": "dummy"})
    dummy = PLAN.model_copy(update={"model": model})
    for outputs in (rows, [*sound_rows()[:2], tier_row(output_sha256="other")]):
        finding = the_finding(replace(run_of(outputs), plan=dummy))
        assert (finding.code, finding.severity) == ("outputs-meaningless", "warning")
        assert "outputs of 2 prompts say nothing" in finding.message


def test_arms_with_different_kv_capacity_are_an_error_naming_both() -> None:
    # A43, A57
    facts = {"02-lmcache": {"facts": {**TIER_FACTS, "num_gpu_blocks": 30}}}
    findings = {f.code: f.message for f in find(run_of(sound_rows(), facts=facts))}
    assert set(findings) == {"servers-differ", "servers-unlike-plan"}
    assert "01-baseline 18, 02-lmcache 30" in findings["servers-differ"]
    assert findings["servers-unlike-plan"] == "02-lmcache: num_gpu_blocks 30, asked 18"


def test_the_controls_larger_gpu_tier_is_not_a_difference() -> None:
    assert codes(run_of(sound_rows())) == []


def test_an_engine_upgraded_between_sessions_is_an_error() -> None:
    facts = {"02-lmcache": {"facts": {**TIER_FACTS, "vllm_version": "0.33.0"}}}
    assert codes(run_of(sound_rows(), facts=facts)) == [
        "servers-unlike-plan",
        "servers-differ",
    ]


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ({}, "vllm_version unknown"),
        ({"facts": {**TIER_FACTS, "connector": None}}, "connector None"),
        ({"facts": {**TIER_FACTS, "block_size": 64}}, "block_size 64, asked 32"),
    ],
)
def test_servers_that_are_unknown_or_not_as_planned_are_an_error(
    session: dict[str, Any], said: str
) -> None:
    # A40, A70: a missing fact proves nothing.
    findings = {
        f.code: f.message for f in find(run_of(sound_rows(), facts={"02-lmcache": session}))
    }
    assert said in findings["servers-unlike-plan"]


def test_stored_tokens_that_are_not_the_predicted_ones_are_a_residual() -> None:
    rows = sound_rows()
    predictions = [make_prediction(row) for row in rows]
    predictions[2] = make_prediction(rows[2], stored_tokens=256)
    assert "stored_tokens +256" in the_finding(run_of(rows, predictions=predictions)).message


def test_a_plan_that_can_show_no_effect_is_a_warning_only() -> None:
    # A43: nothing to load in the tier arm.
    rows = [
        *sound_rows()[:2],
        tier_row(computed=8, gpu_hit=512, host_loaded=0, loaded_bytes=0, output_sha256="bb"),
    ]
    run = run_of(rows)
    assert codes(run) == ["no-effect-possible"]
    assert not has_failed(find(run))


def test_the_pass_that_is_decided_on_tells_whether_an_effect_is_possible() -> None:
    # The tier loads in the third pass alone; the rule decides on the second, as no other is named.
    plan = make_plan(
        order='order = ["baseline", "lmcache"]', passes='passes = ["fwd", "fwd", "rev"]'
    )
    idle = {"computed": 8, "gpu_hit": 512, "host_loaded": 0, "loaded_bytes": 0}
    rows = [
        *sound_rows()[:2],
        tier_row(**idle, output_sha256="bb"),
        tier_row(**{"pass": "pass3-reverse"}, doc=1, output_sha256="cc"),
    ]
    (finding,) = [f for f in find(replace(run_of(rows), plan=plan)) if f.code[:2] == "no"]
    assert "to load nothing from the host tier in pass2-replay" in finding.message
    third = plan.model_copy(update={"decision": DecisionSection(pass_name="pass3-reverse")})
    assert "no-effect-possible" not in codes(replace(run_of(rows), plan=third))


def native_run(rows: list[Row], **unknown: str) -> Reconciliation:
    """Like ``run_of`` with vLLM's own offloading as the tier; ``unknown``: why no prediction."""
    plan = make_plan(order='order = ["baseline", "native", "native", "baseline"]')
    native = {**TIER_FACTS, "connector": "OffloadingConnector"}
    sessions = {"01-baseline": SERVERS["01-baseline"], "02-native": {"facts": native}}
    numbers = dict.fromkeys(NUMBERS) if unknown else {}
    predictions = [make_prediction(row, **numbers, **unknown) for row in rows]
    run = run_of(rows, predictions=predictions)
    return replace(run, plan=plan, manifest=manifest_of(sessions))


def native_row(**changed: Any) -> Row:
    common = {
        "session": "02-native",
        "config": "native",
        "connector": "OffloadingConnector",
        "stored_tokens": None,
    }
    return tier_row(**{**common, **changed})


def test_a_tier_whose_stores_are_not_counted_is_judged_by_its_loads() -> None:
    assert codes(native_run([native_row(output_sha256="bb"), make_row()])) == []
    idle = [native_row(host_loaded=0, computed=520, loaded_bytes=0, output_sha256="bb")]
    predictions = [make_prediction(row, host_loaded=512, computed=8) for row in idle]
    run = native_run(idle)
    run = replace(run, requests=joined([r.key for r in run.requests], idle, predictions))
    assert "tier-off" in codes(run)


def test_another_connector_than_the_plans_is_an_error_naming_both() -> None:
    run = native_run([native_row()])
    run.manifest.sessions["02-native"].facts.connector = "SimpleCPUOffloadConnector"
    (message,) = [f.message for f in find(run) if f.code == "servers-unlike-plan"]
    assert "SimpleCPUOffloadConnector, asked OffloadingConnector" in message


@pytest.mark.parametrize(
    ("make", "changed", "said"),
    [
        (tier_row, {"connector": "none"}, "connector none in the rows, asked LMCacheMPConnector"),
        (make_row, {"connector": "LMCacheMPConnector"}, "connector LMCacheMPConnector in the rows"),
        (make_row, {"chunk_tokens": 256}, "chunk_tokens 256 in the rows, without a host tier"),
    ],
)
def test_rows_of_another_server_than_the_plans_are_an_error(
    make: Callable[..., Row], changed: dict[str, Any], said: str
) -> None:
    run = run_of([make(**changed)])
    messages = [f.message for f in find(run) if f.code == "servers-unlike-plan"]
    assert len(messages) == 1
    assert said in messages[0]


def test_a_tier_nobody_predicts_that_did_nothing_all_session_is_an_error() -> None:
    # A42: nothing was due by any prediction, so what came again and was found nowhere tells.
    nowhere = {"host_loaded": 0, "computed": 520, "loaded_bytes": 0, "output_sha256": "bb"}
    idle, hit = native_row(**nowhere), native_row(doc=1, output_sha256="cc")
    assert codes(native_run([make_row(), idle], why_not="timing")) == ["tier-off"]
    # Once it loads it works; what the GPU tier has, or comes for the first time, asks for nothing.
    assert codes(native_run([make_row(), idle, hit], why_not="timing")) == []
    in_gpu = native_row(**{**nowhere, "computed": 8, "gpu_hit": 512})
    assert codes(native_run([make_row(), in_gpu], why_not="timing")) == []
    first = native_row(**{**nowhere, "pass": "pass1-cold", "output_sha256": "aa"})
    assert codes(native_run([make_row(output_sha256="aa"), first], why_not="timing")) == []


def test_without_an_exact_prediction_the_sources_still_have_to_sum_to_the_prompt() -> None:
    run = native_run([native_row(output_sha256="bb"), make_row()], why_not="a matter of timing")
    assert codes(run) == []
    assert [request.residual for request in run.requests] == [None, None]
    account = account_of(run)
    assert account.reconciled == 2
    whys = {counted.why_not_predicted for counted in account.passes.values()}
    assert whys == {"a matter of timing"}
    lost = native_run(
        [make_row(**failed(session="02-native", config="native", order=2))], why_not="timing"
    )
    assert account_of(lost).reconciled == 0


def test_every_planned_request_has_its_place_and_no_other_has_one() -> None:
    plan = make_plan(
        order='order = ["baseline", "lmcache", "control"]',
        documents="documents = 3",
        passes='passes = ["fwd", "rev"]',
        warmup_documents="warmup_documents = 2",
        more="[control]\nnum_gpu_blocks = 99\ndocuments = 2",
    )
    planned = PlannedRequests(plan)
    keys = list(planned)
    assert len(planned) == len(keys) == 2 * (2 + 2 * 3) + (2 + 2 * 2)
    assert all(key in planned for key in keys)
    assert keys[5:8] == [("01-baseline", "pass2-reverse", doc) for doc in (2, 1, 0)]
    strangers = [
        ("04-baseline", "pass1-cold", 0), ("01-baseline", "pass3-replay", 0),
        ("01-baseline", "pass1-cold", 3), ("03-control", "pass1-cold", 2),
        ("01-baseline", "warmup", 2),
    ]  # fmt: skip
    assert not any(key in planned for key in strangers)
