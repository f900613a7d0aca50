import json
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.plan.files import parse_plan
from harness.record.folder import RunFolder
from harness.record.journal import read_journal, walk_predictions
from harness.record.manifest import read_manifest
from harness.record.row import SCHEMA
from harness.record.versions import plan_as_today
from tests.factory import PLAN_TOML, make_record, write_journal

MANIFEST = {
    "schema": 2, "run": "r", "plan_id": "p-1", "sealed": {}, "shape": None, "cpu": "a CPU",
    "sessions": {"01-baseline": {"started": "2026-01-01T00:00:00+00:00", "start_s": 3.5}},
}  # fmt: skip


def test_a_row_of_schema_1_said_null_where_the_server_had_no_connector(tmp_path: Path) -> None:
    path = write_journal(tmp_path / "j.jsonl", make_record(schema=1, connector=None))
    (row,) = read_journal(path)
    assert (row.connector, row.schema_version) == ("none", SCHEMA)


def test_what_the_first_rows_did_not_record_is_unknown_and_not_none(tmp_path: Path) -> None:
    record = make_record(schema=1)
    del record["connector"], record["cached_tokens"]
    (row,) = read_journal(write_journal(tmp_path / "j.jsonl", record))
    assert (row.connector, row.cached_tokens) == (None, None)


def test_a_row_of_schema_2_was_sent_alone_and_attributed_by_counters(tmp_path: Path) -> None:
    new = ("queue_ms", "loop", "late_ms", "attributed_by", "named_from")
    lost = {"computed": None, "gpu_hit": None, "host_loaded": None, "unattributed": "not settled"}
    for changed, attributed_by in (({}, "counters"), (lost, None)):
        record = make_record(schema=2, **changed)
        old = {name: value for name, value in record.items() if name not in new}
        (row,) = read_journal(write_journal(tmp_path / "j.jsonl", old))
        assert (row.loop, row.late_ms, row.queue_ms) == ("serial", None, None)
        assert (row.attributed_by, row.named_from) == (attributed_by, None)


def test_a_row_of_todays_schema_must_have_every_column(tmp_path: Path) -> None:
    record = make_record()
    del record["connector"]
    with pytest.raises(InputError, match="line 1: connector: Field required"):
        read_journal(write_journal(tmp_path / "j.jsonl", record))


def test_one_journal_may_hold_rows_of_several_schemas(tmp_path: Path) -> None:
    rows = [make_record(schema=1, connector=None), make_record(doc=1)]
    assert [row.connector for row in read_journal(write_journal(tmp_path / "j.jsonl", *rows))] == [
        "none", "none",
    ]  # fmt: skip


@pytest.mark.parametrize("version", [0, -1, True, "2", 2.0, None, []])
def test_a_version_that_is_none_is_named_with_those_there_are(
    tmp_path: Path, version: object
) -> None:
    path = write_journal(tmp_path / "j.jsonl", make_record(schema=version))
    with pytest.raises(InputError, match=r"line 1: schema is .*; this kvcliff reads 1 to 3"):
        read_journal(path)


def test_a_prediction_without_a_version_is_of_schema_1(tmp_path: Path) -> None:
    path = tmp_path / "prediction.jsonl"
    record = {
        "session": "01-baseline", "pass": "pass1-cold", "doc": 0, "computed": 520, "gpu_hit": 0,
        "host_loaded": 0, "stored_tokens": 512, "transferred_bytes": 2048,
    }  # fmt: skip
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    (prediction,) = walk_predictions(path)
    assert (prediction.loaded_bytes, prediction.why_not) == (2048, None)


def test_a_plan_that_names_no_engine_is_of_the_first_runs() -> None:
    first = PLAN_TOML.replace('engine = "0.32.0"\n', "")
    first = first.replace('[arms.lmcache]\ntier = "lmcache-mp"\n', "")
    plan = parse_plan(first.encode(), where="plan.toml", migrate=plan_as_today)
    assert plan.server.engine == "0.32.0"
    assert plan.arm("lmcache").tier == "lmcache-mp"
    # A plan of today's is as it was written: its arm lmcache is the tier of that name.
    today = PLAN_TOML.replace('[arms.lmcache]\ntier = "lmcache-mp"\n', "")
    plan = parse_plan(today.encode(), where="plan.toml", migrate=plan_as_today)
    assert plan.arm("lmcache").tier == "lmcache"


def write_manifest(folder: Path, **changed: object) -> Path:
    content = {name: value for name, value in {**MANIFEST, **changed}.items() if value is not ...}
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_manifest_of_the_first_runs_takes_the_folders_name(tmp_path: Path) -> None:
    manifest = read_manifest(write_manifest(tmp_path, schema=1, run=..., sealed=...))
    assert (manifest.run, manifest.sealed) == (tmp_path.name, {})
    with pytest.raises(InputError, match="run: Field required"):
        read_manifest(write_manifest(tmp_path, run=...))


def test_what_nobody_reads_in_a_manifest_is_kept(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    facts = {"ended": "2026-01-01T00:10:00+00:00", "more": [1]}
    RunFolder(tmp_path).note_session("01-baseline", facts)
    written = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert written["cpu"] == "a CPU"
    assert written["sessions"]["01-baseline"] == {
        "started": "2026-01-01T00:00:00+00:00", "start_s": 3.5,
        "ended": "2026-01-01T00:10:00+00:00", "more": [1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("session", "field"),
    [
        ({"started": "yesterday"}, "started"),
        ({"ended": "2026-01-01T00:00:00"}, "ended"),
        ({"start_s": -1.0}, "start_s"),
        ({"facts": {"num_gpu_blocks": [18]}}, "facts.num_gpu_blocks"),
        ({"gpu": {"devices": [{}], "warnings": []}}, "gpu.devices.0"),
        ({"commands": "vllm serve"}, "commands"),
        ({"commands": [{"role": "vllm", "argv": ["vllm"]}]}, "commands.0.env_diff"),
        ({"commands": [{"role": "vllm", "argv": [1], "env_diff": {}}]}, "commands.0.argv.0"),
        (3, "sessions.01-baseline"),
    ],
)
def test_an_edited_manifest_is_refused_by_field(
    tmp_path: Path, session: object, field: str
) -> None:
    with pytest.raises(InputError, match=f"manifest.json: .*{field}"):
        read_manifest(write_manifest(tmp_path, sessions={"01-baseline": session}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpus", [{}]), ("gpus", "one"), ("cpu", 5), ("cores", []), ("created", "garbage")],
)
def test_an_edited_machine_of_a_manifest_is_refused_by_field(
    tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(InputError, match=f"manifest.json: {field}"):
        read_manifest(write_manifest(tmp_path, **{field: value}))


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"schema": 1', '{"schema": true}'])
def test_a_manifest_that_is_none_is_refused_by_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_key_that_comes_twice_is_refused_however_its_colon_is_written(tmp_path: Path) -> None:
    # As many '":' as keys: each of two keys comes once with a blank before its colon.
    line = json.dumps(make_record()).replace('"seq": 1', '"seq": 1, "seq" : 1')
    (tmp_path / "j.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="key 'seq' appears twice"):
        read_journal(tmp_path / "j.jsonl")
