"""Which of a row's columns the report's table of requests shows, and how."""

from dataclasses import dataclass
from typing import assert_never, get_args

from harness.record.row import Sample, SampleColumn

_NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers; ``form`` is the format of one."""

    name: SampleColumn
    heading: str
    form: str

    def cell(self, row: Sample | None) -> str:
        """The row's number; a dash where it was not measured."""
        value = None if row is None else getattr(row, self.name)
        return _NOTHING if value is None else format(value, self.form)


def request_columns() -> list[Column]:
    """The columns of numbers, in the order of a row's fields."""
    return [column for name in get_args(SampleColumn) if (column := _column(name))]


def _column(name: SampleColumn) -> Column | None:
    """None: said in another way, or not at all."""
    match name:
        case "ttft_ms":
            return Column(name, "TTFT, ms", ".1f")
        case "loaded_bytes":
            return Column(name, "bytes", "d")
        case "session" | "pass_name" | "doc":
            return None  # they name the request
        case "computed" | "gpu_hit" | "host_loaded":
            return None  # together, beside what was predicted
        case "complete" | "error" | "unattributed":
            return None  # the outcome
        case "config" | "order" | "seq" | "phase" | "sent_unix_ns":
            return None
        case "doc_tokens" | "prompt_tokens" | "stored_tokens" | "total_ms" | "settle_ms":
            return None
        case _:
            assert_never(name)
