import csv
import json
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.record.row import Row
from harness.report.export import COLUMNS, export, llmd_report, vllm_bench
from tests.factory import failed, make_row
from tests.folder import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_csv_has_every_measured_row_and_reads_back_to_the_same_numbers(
    run: Path, tmp_path: Path
) -> None:
    (path,) = export(run, "csv", tmp_path / "rows.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16  # 4 sessions × 2 passes × 2 documents; warm-up is not measured
    assert tuple(rows[0]) == COLUMNS
    assert (rows[0]["config"], float(rows[0]["ttft_ms"]), rows[0]["error"]) == (
        "baseline",
        100.0,
        "",
    )


def test_csv_text_cannot_become_a_formula(run: Path, tmp_path: Path) -> None:
    path = run / "journal-01-baseline.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[1])
    record.update(ttft_ms=None, total_ms=None, complete=False, error="=cmd()")
    lines[1] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out,) = export(run, "csv", tmp_path / "rows.csv")
    assert "'=cmd()" in out.read_text(encoding="utf-8")


def test_one_file_a_session_where_a_format_describes_one_server(run: Path, tmp_path: Path) -> None:
    for form in ("vllm-bench", "llmd"):
        written = export(run, form, tmp_path / form)
        assert [path.name for path in written] == [
            "01-baseline.json",
            "02-lmcache.json",
            "03-lmcache.json",
            "04-baseline.json",
        ]


def two_rows() -> list[Row]:
    """A complete request of 100 + 10 ms and a failed one, two seconds later."""
    return [
        make_row(sent_unix_ns=1_000_000_000_000_000_000),
        Row.model_validate(failed(doc=1, sent_unix_ns=1_000_000_002_000_000_000)),
    ]


def test_the_vllm_result_counts_failures_and_is_in_seconds_per_request() -> None:
    result = vllm_bench(two_rows(), model="tiny")
    assert (result["completed"], result["failed"], result["num_prompts"]) == (1, 1, 2)
    assert (result["ttfts"], result["itls"]) == (
        [pytest.approx(0.1), 0.0],
        [[pytest.approx(0.01)], []],
    )
    assert (result["median_ttft_ms"], result["median_tpot_ms"]) == (100.0, 10.0)
    assert (result["duration"], result["errors"]) == (2.0, ["", "boom"])
    assert result["date"] == "20010909-014640"


def test_gaps_that_were_not_recorded_are_not_made_up() -> None:
    assert vllm_bench([make_row(output_tokens=8)], model="tiny")["itls"] == [[]]


def test_no_aggregate_is_made_from_failures_alone() -> None:
    rows = [Row.model_validate(failed())]
    assert not [name for name in vllm_bench(rows, model="tiny") if name.endswith("_ms")]
    report = llmd_report(rows, version="0.1.0")
    assert report["results"]["request_performance"]["aggregate"]["latency"] == {}


def test_the_llmd_report_has_the_names_and_units_of_version_0_2() -> None:
    report = llmd_report(two_rows(), version="0.1.0")
    assert report["version"] == "0.2"
    assert report["run"]["uid"] == "r/01-baseline"
    assert report["run"]["time"]["duration"] == "PT2.000000S"
    aggregate = report["results"]["request_performance"]["aggregate"]
    assert aggregate["requests"]["total"] == 2
    assert (aggregate["requests"]["failures"], aggregate["requests"]["incomplete"]) == (1, 1)
    assert aggregate["latency"]["time_to_first_token"] == {
        "units": "ms", "mean": 100.0, "stddev": 0.0, "min": 100.0, "p50": 100.0, "max": 100.0,
    }  # fmt: skip
    load = report["scenario"]["load"]["standardized"]
    assert (load["tool"], load["source"], load["concurrency"]) == ("kvcliff", "random", 1)
    assert load["input_seq_len"] == {"distribution": "fixed", "value": 520, "min": 520, "max": 520}


def test_an_unknown_format_names_the_known_ones(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="csv, parquet, vllm-bench, llmd"):
        export(run, "xlsx", tmp_path / "x")


def test_a_run_without_a_measured_row_exports_nothing(run: Path, tmp_path: Path) -> None:
    for path in run.glob("journal-*"):
        path.unlink()
    with pytest.raises(InputError, match="no measured row"):
        export(run, "csv", tmp_path / "rows.csv")
    assert not (tmp_path / "rows.csv").exists()


def test_parquet_holds_every_measured_row_with_its_types(run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    (path,) = export(run, "parquet", tmp_path / "rows.parquet")
    table = pyarrow.parquet.read_table(path)
    (csv_path,) = export(run, "csv", tmp_path / "rows.csv")
    assert table.num_rows == len(csv_path.read_text().splitlines()) - 1 > 0
    assert str(table.schema.field("ttft_ms").type) == "double"
    assert str(table.schema.field("computed").type) == "int64"


def test_parquet_columns_without_a_value_have_their_type_so_that_runs_can_be_read_as_one(
    run: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet

    (path,) = export(run, "parquet", tmp_path / "rows.parquet")
    schema = pyarrow.parquet.read_schema(path)
    assert schema.names == list(COLUMNS)
    assert [str(schema.field(name).type) for name in ("error", "cached_tokens")] == [
        "string",
        "int64",
    ]


def test_an_interrupted_parquet_leaves_the_old_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet

    out = tmp_path / "rows.parquet"
    out.write_bytes(b"old")

    def full(_table: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, "parquet", out)
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_folder_that_is_not_there_is_named_as_the_user_named_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^nowhere/rows cannot be written: there is no folder no"):
        export(run, form, Path("nowhere/rows"))


@pytest.mark.parametrize(("form", "name"), [("csv", "out.parquet"), ("parquet", "out.csv")])
def test_a_file_named_as_another_format_is_refused(tmp_path: Path, form: str, name: str) -> None:
    run = write_run(tmp_path)
    with pytest.raises(InputError, match=f"{name} is named as another format than {form}"):
        export(run, form, tmp_path / name)
    assert not (tmp_path / name).exists()
