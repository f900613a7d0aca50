"""Summarise a journal of measured requests: time to first token by arm and pass, and the ratio.

``summarize.py INPUT.jsonl OUTPUT.json``; standard library only, runs without
installation, from any directory. Exit status: 0 fine, 1 summary written but failed rows were left
out, 2 the input or an argument cannot be used and nothing was written.
"""

import argparse
import json
import math
import os
import secrets
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

ARMS = ("baseline", "lmcache")
"""The two values of ``config`` that are compared; the ratio is the first over the second."""

STAND_IN = "lmcache-mp"
"""Read as ``lmcache`` where a journal has no row of that: LMCache's server, as kvcliff calls it."""

_NUMBER = "a finite number >= 0"
_TEXT = "a non-empty string"
_DOC = "an integer or a non-empty string"


class SummaryError(Exception):
    """Input that cannot be summarised, or an output that cannot be written; one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One journal line. Times in ms; ``is_complete`` False means its times count nowhere.

    ``session``: None where the format has none; then the same document may come repeatedly.
    """

    config: str
    pass_name: str
    doc: int | str
    ttft_ms: float | None
    is_complete: bool
    session: int | str | None
    run: object
    is_zero: bool


@dataclass(slots=True)
class Tally:
    """What the rows of one journal add up to, before any statistic.

    ``ttft_ms`` and ``docs`` hold complete rows of the two arms by (config, pass); ``failed``
    counts incomplete rows of every config, ``others`` all rows of the configs not compared.
    ``passes``: names, and the line of each one's first complete row. ``stand_in``: the rows of
    ``STAND_IN``, counted as ``lmcache``'s. ``zeros``: rows with a time of 0; ``runs``: values of the
    field ``run``.
    """

    ttft_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    docs: dict[tuple[str, str], Counter[int | str]] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    stand_in: "Tally | None" = None
    zeros: int = 0
    runs: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Summary:
    """``tables``: the output object. ``notices``: what is absent or left out, a line each."""

    tables: dict[str, dict[str, dict[str, float]]]
    notices: list[str]
    n_failed: int

    @property
    def exit_status(self) -> int:
        """0, or 1 when rows of failed requests were left out."""
        return 1 if self.n_failed else 0

    def render(self) -> str:
        """The output file's text."""
        return json.dumps(self.tables, indent=2, allow_nan=False) + "\n"


def summarize(lines: Iterable[bytes], *, name: str) -> Summary:
    """Summarise the journal ``lines`` (each with its LF, as a binary file yields them).

    p50 is ``statistics.median``, the mean ``statistics.mean`` (exact arithmetic, rounded once, so that
    neither row order nor Python version can tip a last digit); ratios are baseline over lmcache of unrounded
    values. Raises SummaryError, starting with ``name`` and the line number, for a row that cannot
    be used, and when no row is left to summarise.
    """
    tally = Tally()
    seen: _Seen = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = _parse_line(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            if row is not None:
                _refuse_repeat(row, number, seen)
                _count(row, tally, number)
        except _RowError as error:
            raise SummaryError(f"{name} line {number}: {error}") from None
    notices = _let_stand_in(tally)
    if not tally.ttft_ms:
        left_out = f"{sum(tally.failed.values())} failed, {sum(tally.others.values())} of others"
        raise SummaryError(
            f"{name}: no complete row of {' or '.join(ARMS)} ({left_out}); accepted: at least one"
        )
    return _summarize_tally(tally, notices, name=name)


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8), all of it or nothing; raises SummaryError if it cannot.

    A symbolic link keeps pointing where it did. Devices and pipes are refused: they would be
    replaced by a file.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise SummaryError(
                f"OUTPUT {path} is not a regular file; accepted: a file to (re)write"
            )
        _replace(target, text)
    except (OSError, RuntimeError) as error:  # RuntimeError: resolve() met a loop of links
        raise SummaryError(
            f"OUTPUT {path} cannot be written: {_why(error)}; accepted: a file in a writable folder"
        ) from None


def read_error(path: Path, error: Exception) -> SummaryError:
    """The one wording for an INPUT that cannot be opened or read."""
    return SummaryError(
        f"INPUT {path} cannot be read: {_why(error)}; accepted: a journal, one JSON object a line"
    )


def complain(message: str, *, program: str = "summarize.py") -> None:
    """Write ``message`` to stderr as exactly one line; silent where stderr is closed."""
    if sys.stderr is not None:
        sys.stderr.write(f"{program}: {' '.join(message.splitlines())}\n")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose error is one line, exit status 2; no abbreviated flags."""

    def __init__(self, *, prog: str, description: str, accepted: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self._accepted = accepted

    def error(self, message: str) -> NoReturn:
        """End the program."""
        complain(f"error: {message}; accepted: {self._accepted}", program=self.prog)
        self.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); returns the exit status."""
    parser = OneLineParser(
        prog="summarize.py",
        description="Median and mean time to first token by arm and pass, and baseline / lmcache.",
        accepted="INPUT.jsonl OUTPUT.json",
    )
    parser.add_argument("input", metavar="INPUT.jsonl", type=Path, help="measured rows")
    parser.add_argument("output", metavar="OUTPUT.json", type=Path, help="(re)written whole")
    args = parser.parse_args(argv)
    try:
        summary = _summarize_file(args.input, output=args.output)
        write_atomically(args.output, summary.render())
    except SummaryError as error:
        complain(f"error: {error}")
        return 2
    for notice in summary.notices:
        complain(notice)
    return summary.exit_status


def _summarize_file(path: Path, *, output: Path) -> Summary:
    try:
        if output.exists() and path.samefile(output):
            raise SummaryError(
                f"OUTPUT {output} is INPUT itself, which would be lost; accepted: another file"
            )
        with path.open("rb") as stream:  # a binary file ends lines at LF only, never at U+2028
            return summarize(stream, name=str(path))
    except OSError as error:
        raise read_error(path, error) from None


def _replace(target: Path, text: str) -> None:
    # In the same folder, so that the last step is a rename; a fixed length, so that it fits.
    temporary = target.with_name(f".summarize-{secrets.token_hex(8)}.tmp")
    with temporary.open("x", encoding="utf-8") as stream:
        try:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _RowError(Exception):
    """Why one line cannot be used, without file and line number."""


def _parse_line(line: bytes) -> Row | None:
    """The row of one line; None for a blank one."""
    if not line.strip(b" \t\r\n"):
        return None
    try:
        row = json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    # ValueError: bad JSON, UTF-8, or an integer of over 4,300 digits.
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise _RowError(f"not valid JSON: {error}; accepted: one JSON object") from None
        raise _RowError(
            f"the last line is torn (no line end, not valid JSON: {error}), its writer was cut "
            "off; accepted: a journal of whole lines"
        ) from None
    if not isinstance(row, dict):
        raise _RowError(f"it holds {_shown(row)}; accepted: one JSON object")
    return _read_row(row)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        repeated = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
        raise _RowError(f"field {_shown(repeated[0])} comes twice; accepted: once")
    return members


def _refuse_constant(text: str) -> NoReturn:
    raise _RowError(f"it holds the number {text}, which is not JSON; accepted: finite numbers")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _RowError(f"it holds the number {text[:40]}, too large; accepted: finite numbers")
    return number


def _read_row(row: dict[str, Any]) -> Row:
    is_complete = row.get("complete", True)
    _require(isinstance(is_complete, bool), row, "complete", "true or false, or no such field")
    is_complete = is_complete and row.get("ok") is not False  # as some writers call it
    has_error = _is_text(row.get("error"))
    if is_complete and has_error:
        _require(row.get("ttft_ms") is None, row, "error", "none beside a complete answer")
        is_complete = False
    _require(row.get("phase") != "warmup", row, "phase", "measured rows only (see ttft.jsonl)")
    for name in ("config", "pass"):
        _require(_is_text(row.get(name)), row, name, _TEXT)
    for arm in (*ARMS, STAND_IN):
        is_misspelt = row["config"] != arm and row["config"].strip().casefold() == arm
        _require(not is_misspelt, row, "config", _shown(arm))
    _require(_is_text(row.get("doc")) or _is_integer(row.get("doc")), row, "doc", _DOC)
    _require(_is_number(row.get("doc_tokens")), row, "doc_tokens", _NUMBER)
    for name in ("ttft_ms", "total_ms"):
        is_null = not is_complete and name in row and row[name] is None
        _require(is_null or _is_number(row.get(name)), row, name, _NUMBER)
    session = row.get("session")
    session_fits = session is None or _is_text(session) or _is_integer(session)
    _require(session_fits, row, "session", f"{_DOC}, or no such field")
    return Row(
        config=row["config"],
        pass_name=row["pass"],
        doc=row["doc"],
        ttft_ms=None if row["ttft_ms"] is None else float(row["ttft_ms"]),
        is_complete=is_complete,
        session=session,
        run=row.get("run"),
        is_zero=is_complete and 0 in (row["ttft_ms"], row["total_ms"]),
    )


def _require(is_met: bool, row: dict[str, Any], name: str, accepted: str) -> None:
    if not is_met:
        found = f"is {_shown(row[name])}" if name in row else "is missing"
        raise _RowError(f'field "{name}" {found}; accepted: {accepted}')


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value)) and value >= 0
    except OverflowError:  # an integer no float can hold
        return False


def _shown(value: object) -> str:
    """``value`` as JSON, ASCII only (one line on any terminal), cut at 60 characters."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of over 4,300 digits cannot be printed
        text = "a very long number"
    return text if len(text) <= 60 else f"{text[:57]}..."


_Seen = dict[tuple[str, int | str, str], dict[int | str, int]]
"""Line of each document by config, session and pass: nested, a million rows take 150 MB, not 350."""


def _refuse_repeat(row: Row, number: int, seen: _Seen) -> None:
    if row.session is None:
        return
    walk = (row.config, row.session, row.pass_name)
    first = seen.setdefault(walk, {}).setdefault(row.doc, number)
    if first != number:
        key = (*walk, row.doc)
        raise _RowError(
            f"config, session, pass and doc {_shown(key)} are those of line {first}; "
            "accepted: one row for each"
        )


def _count(row: Row, tally: Tally, number: int) -> None:
    cell = (row.config, row.pass_name)
    tally.zeros += row.is_zero
    if row.run is not None:
        tally.runs.add(_shown(row.run))
    if not row.is_complete:
        tally.failed[cell] += 1
    if row.config == STAND_IN:
        tally.stand_in = tally.stand_in or Tally()
        _count(replace(row, config=ARMS[1]), tally.stand_in, number)
    if row.config not in ARMS:
        tally.others[row.config] += 1
    elif row.is_complete and row.ttft_ms is not None:
        tally.passes.setdefault(row.pass_name, number)
        tally.ttft_ms.setdefault(cell, []).append(row.ttft_ms)
        tally.docs.setdefault(cell, Counter())[row.doc] += 1


def _let_stand_in(tally: Tally) -> list[str]:
    """Take the stand-in's rows where ``lmcache`` has none, not even a failed one; says so."""
    arm, other = ARMS[1], tally.stand_in
    if other is None or any(cell[0] == arm for cell in (*tally.ttft_ms, *tally.failed)):
        return []
    n_rows = tally.others.pop(STAND_IN)
    for pass_name in [name for config, name in tally.failed if config == STAND_IN]:
        tally.failed[arm, pass_name] = tally.failed.pop((STAND_IN, pass_name))
    tally.ttft_ms |= other.ttft_ms
    tally.docs |= other.docs
    lines = {**other.passes}
    for pass_name, line in tally.passes.items():
        lines[pass_name] = min(line, lines.get(pass_name, line))
    tally.passes = dict(sorted(lines.items(), key=lambda item: item[1]))
    return [f"{arm} is read from the {n_rows} {_rows(n_rows)} of {STAND_IN}"]


def _summarize_tally(tally: Tally, notices: list[str], *, name: str) -> Summary:
    notices = [*notices, *_left_out(tally)]
    centres = {cell: _centres(times, f"{name}: {cell}") for cell, times in tally.ttft_ms.items()}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for arm in ARMS:
        tables[arm] = {
            pass_name: {
                "n": len(tally.ttft_ms[arm, pass_name]),
                "p50_ms": round(centres[arm, pass_name]["p50"], 1),
                "mean_ms": round(centres[arm, pass_name]["mean"], 1),
            }
            for pass_name in tally.passes
            if (arm, pass_name) in centres
        }
        if not tables[arm]:
            notices.append(f"{arm}: no complete row, so no figures and no ratio")
    tables["ratio"] = {}
    for pass_name in tally.passes if all(tables[arm] for arm in ARMS) else ():
        missing = [arm for arm in ARMS if pass_name not in tables[arm]]
        if missing:
            notices.append(f"{pass_name}: no complete row of {missing[0]}, so no ratio")
            continue
        _compare_documents(pass_name, tally, notices.append)
        ratios = _ratios(pass_name, centres, notices.append)
        if ratios:
            tables["ratio"][pass_name] = ratios
    return Summary(tables, notices, sum(tally.failed.values()))


def _left_out(tally: Tally) -> list[str]:
    failed = [
        f"{config} {pass_name}: {n} failed {_rows(n)} left out of the times"
        for (config, pass_name), n in tally.failed.items()
    ]
    others = [
        f"config {_shown(config)}: {n} {_rows(n)}, not part of the comparison"
        for config, n in tally.others.items()
    ]
    zeros = [f"{tally.zeros} {_rows(tally.zeros)} with a time of 0 ms"] if tally.zeros else []
    runs = [f"rows of {len(tally.runs)} runs: {', '.join(sorted(tally.runs))}"]
    return failed + others + zeros + (runs if len(tally.runs) > 1 else [])


def _rows(n: int) -> str:
    return "row" if n == 1 else "rows"


def _centres(times_ms: list[float], where: str) -> dict[str, float]:
    try:
        centres = {"p50": statistics.median(times_ms), "mean": statistics.mean(times_ms)}
    except OverflowError:
        centres = {"p50": math.inf}
    if not all(math.isfinite(value) for value in centres.values()):
        raise SummaryError(f"{where}: ttft_ms too large to average; accepted: times in ms")
    return centres


def _ratios(
    pass_name: str,
    centres: dict[tuple[str, str], dict[str, float]],
    say: Callable[[str], object],
) -> dict[str, float]:
    """baseline / lmcache of one pass, each with two decimals; what cannot be formed is said."""
    ratios = {}
    above, below = (centres[arm, pass_name] for arm in ARMS)
    for kind in ("p50", "mean"):
        if below[kind] == 0:
            say(f"{pass_name}: the {kind} of lmcache is 0 ms, so no {kind} ratio")
        elif not math.isfinite(above[kind] / below[kind]):
            say(f"{pass_name}: the {kind} ratio is too large for a number, so none")
        else:
            ratios[kind] = round(above[kind] / below[kind], 2)
    return ratios


def _compare_documents(pass_name: str, tally: Tally, say: Callable[[str], object]) -> None:
    """Say where the two arms' complete rows are not of the same documents equally often."""
    baseline, lmcache = (tally.docs[arm, pass_name] for arm in ARMS)
    if baseline != lmcache:
        differing = [doc for doc in baseline | lmcache if baseline[doc] != lmcache[doc]]
        say(
            f"{pass_name}: the arms' complete documents differ: baseline has {baseline.total()} "
            f"rows, lmcache {lmcache.total()}; unequal for {_shown(differing)}"
        )


if __name__ == "__main__":
    sys.exit(main())
