"""A run in the formats other tools read: CSV, Parquet, vLLM's bench result, llm-d's report.

What a format asks for and a run did not measure is left out or empty, never made up.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

from harness.errors import InputError
from harness.files import refuse_missing_folder, replacing, write_atomically, write_json
from harness.record.folder import RunFolder
from harness.record.row import Row

FORMS = ("csv", "parquet", "vllm-bench", "llmd")
_RAW = ("counters_before", "counters_after")  # nested, and in the journal for who needs them
COLUMNS = tuple(field.alias or name for name, field in Row.model_fields.items() if name not in _RAW)
# vLLM publishes times in seconds per request and ms in aggregate (vllm/benchmarks/serve.py, 0.32).
_S_PER_MS = 1e-3


def export(run: Path, form: str, out: Path, notes: list[str] | None = None) -> list[Path]:
    """Write the measured rows of ``run`` as ``form``; the paths written.

    ``csv`` and ``parquet`` write the file ``out``; ``vllm-bench`` and ``llmd`` write one file a
    session into the folder ``out``, because each of theirs describes one server. Torn last lines of
    journals are said in ``notes``. InputError for an unknown form or a run without a measured row;
    MachineError when a library is missing.
    """
    if form not in FORMS:
        raise InputError(f"format {form!r} is none of {', '.join(FORMS)}")
    folder = RunFolder(run)
    folder.check_seals()
    if form in ("csv", "parquet"):
        if out.suffix in (".csv", ".parquet") and out.suffix != f".{form}":
            raise InputError(
                f"{out} is named as another format than {form}",
                hint=f"say --format {out.suffix[1:]}, or end the name in .{form}",
            )
        refuse_missing_folder(out)  # before reading for a minute
    version = str(folder.read_manifest().environment.get("kvcliff"))
    model = folder.read_plan().model.path
    writers: dict[str, Callable[[Sequence[Row], Path], list[Path]]] = {
        "csv": _write_csv,
        "parquet": _write_parquet,
        "vllm-bench": partial(_by_session, partial(vllm_bench, model=model)),
        "llmd": partial(_by_session, partial(llmd_report, version=version)),
    }
    rows = [row for row in folder.rows(notes) if row.phase == "measure"]
    if not rows:
        raise InputError(f"{run} has no measured row to export")
    return writers[form](rows, out)


def _write_csv(rows: Sequence[Row], out: Path) -> list[Path]:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({n: _unarmed(v) for n, v in row.model_dump(by_alias=True).items()})
    write_atomically(out, text.getvalue())
    return [out]


def _unarmed(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula gets an apostrophe in front."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _write_parquet(rows: Sequence[Row], out: Path) -> list[Path]:
    # Here: the import costs a tenth of a second, and only this format needs it.
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    records = [row.model_dump(by_alias=True) for row in rows]
    # Of the field, not of the values: a column of nulls has its type too, and files of two runs
    # can be read as one.
    schema = pyarrow.schema([(name, _PARQUET[_json_type(name)]) for name in COLUMNS])
    columns = {name: [record[name] for record in records] for name in COLUMNS}
    table = pyarrow.table(columns, schema=schema)
    with replacing(out) as path:
        pyarrow.parquet.write_table(table, path)
    return [out]


_PARQUET = {"integer": "int64", "number": "float64", "string": "string", "boolean": "bool"}


@cache
def _json_type(column: str) -> str:
    """The type of a journal field by its JSON Schema, null left aside."""
    field = Row.model_json_schema()["properties"][column]
    types = [part["type"] for part in field.get("anyOf", [field])]
    return str(next(name for name in types if name != "null"))


def _by_session(
    content: Callable[[Sequence[Row]], dict[str, Any]], rows: Sequence[Row], out: Path
) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for session, part in groupby(rows, key=lambda row: row.session):
        written.append(out / f"{session}.json")
        write_json(written[-1], content(list(part)))
    return written


def vllm_bench(rows: Sequence[Row], *, model: str) -> dict[str, Any]:
    """One session as ``vllm bench serve --save-result --save-detailed`` writes it.

    ``itls`` hold the gap between the two tokens where two were asked for; else they are empty:
    single gaps were not recorded. Failed requests have zeros, as vLLM writes them.
    """
    good = [row for row in rows if row.complete and row.ttft_ms is not None]
    duration_s = _duration_s(rows)
    total_input = sum(row.prompt_tokens for row in good)
    total_output = sum(row.output_tokens or 0 for row in good)
    return {
        "date": f"{datetime.fromtimestamp(rows[0].sent_unix_ns / 1e9, UTC):%Y%m%d-%H%M%S}",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": rows[0].session,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": len(rows),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(rows) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": _rate(len(good), duration_s),
        "request_goodput": None,
        "output_throughput": _rate(total_output, duration_s),
        "total_token_throughput": _rate(total_input + total_output, duration_s),
        **_details(rows),
        **_aggregate("ttft", [row.ttft_ms or 0 for row in good]),
        **_aggregate("tpot", _tpots_ms(good)),
        **_aggregate("e2el", [row.total_ms or 0 for row in good]),
    }


def _details(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """What ``--save-detailed`` adds: a list each, one entry a request."""
    return {
        "input_lens": [row.prompt_tokens for row in rows],
        "output_lens": [row.output_tokens or 0 for row in rows],
        "ttfts": [_seconds(row.ttft_ms) if row.complete else 0.0 for row in rows],
        "itls": [_gaps_s(row) for row in rows],
        "latencies": [_seconds(row.total_ms) if row.complete else 0.0 for row in rows],
        "start_times": [row.sent_unix_ns / 1e9 for row in rows],
        "generated_texts": ["" for _ in rows],
        "errors": [row.error or "" for row in rows],
    }


def _seconds(ms: float | None) -> float:
    return (ms or 0.0) * _S_PER_MS


def _gaps_s(row: Row) -> list[float]:
    if not row.complete or row.output_tokens != 2 or row.total_ms is None or row.ttft_ms is None:
        return []
    return [(row.total_ms - row.ttft_ms) * _S_PER_MS]


def _tpots_ms(good: Sequence[Row]) -> list[float]:
    """Time per output token after the first, where there is one."""
    return [
        ((row.total_ms or 0) - (row.ttft_ms or 0)) / (row.output_tokens - 1)
        for row in good
        if row.output_tokens and row.output_tokens > 1
    ]


def _duration_s(rows: Sequence[Row]) -> float:
    ended = max(row.sent_unix_ns + int((row.total_ms or 0) * 1e6) for row in rows)
    return (ended - min(row.sent_unix_ns for row in rows)) / 1e9


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _aggregate(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"mean_{name}_ms": mean(values),
        f"median_{name}_ms": median(values),
        f"std_{name}_ms": pstdev(values),
    }


def llmd_report(rows: Sequence[Row], *, version: str) -> dict[str, Any]:
    """One session as an llm-d Benchmark Report v0.2; absent fields were not measured."""
    first = rows[0]
    duration_s = _duration_s(rows)
    began = min(row.sent_unix_ns for row in rows) / 1e9
    return {
        "version": "0.2",
        "run": {
            "uid": f"{first.run}/{first.session}",
            "eid": first.run,
            "time": {
                "start": datetime.fromtimestamp(began, UTC).isoformat(),
                "end": datetime.fromtimestamp(began + duration_s, UTC).isoformat(),
                "duration": f"PT{duration_s:.6f}S",
            },
            "keywords": [first.config],
        },
        "scenario": {"load": _load(rows, version)},
        "results": {"request_performance": {"aggregate": _performance(rows)}},
    }


def _performance(rows: Sequence[Row]) -> dict[str, Any]:
    good = [row for row in rows if row.complete and row.ttft_ms is not None]
    outputs = [row.output_tokens for row in good if row.output_tokens is not None]
    return {
        "requests": _present(
            total=len(rows),
            failures=sum(row.error is not None for row in rows),
            incomplete=sum(not row.complete for row in rows),
            input_length=_statistics([row.prompt_tokens for row in rows], "count"),
            output_length=_statistics(outputs, "count"),
        ),
        "latency": _present(
            time_to_first_token=_statistics([row.ttft_ms or 0 for row in good], "ms"),
            time_per_output_token=_statistics(_tpots_ms(good), "ms/token"),
            request_latency=_statistics([row.total_ms or 0 for row in good], "ms"),
        ),
    }


def _load(rows: Sequence[Row], version: str) -> dict[str, Any]:
    lengths = sorted({row.prompt_tokens for row in rows})
    return {
        "metadata": {"description": "documents replayed one request at a time"},
        "standardized": {
            "tool": "kvcliff",
            "tool_version": version,
            "source": "random",
            "input_seq_len": {
                "distribution": "fixed" if len(lengths) == 1 else "other",
                "value": median(lengths),
                "min": lengths[0],
                "max": max(1, lengths[-1]),
            },
            "concurrency": 1,
        },
        "native": {"config": {"passes": list(dict.fromkeys(row.pass_name for row in rows))}},
    }


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _statistics(values: Iterable[float], units: str) -> dict[str, Any] | None:
    found = sorted(values)
    if not found:
        return None
    return {
        "units": units,
        "mean": mean(found),
        "stddev": pstdev(found),
        "min": found[0],
        "p50": median(found),
        "max": found[-1],
    }
