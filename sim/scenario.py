"""The lab's command line: read documents in passes through one GPU + CPU cache, count the hits.

Prints exactly one JSON object; runs without installation, from any directory. Exit
status: 0 fine, 2 bad arguments, 3 standard output cannot be written.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypedDict

if TYPE_CHECKING or __package__:
    from sim.kvsim import TwoTierCache
else:  # run as a file; PYTHONSAFEPATH would keep its own folder off the path
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from kvsim import TwoTierCache

ORDERS = ("fwd", "rev")

_MAX_DOCS = 10_000_000  # more would fill memory with the answer instead of giving one
_MAX_TOKENS = 10**18 - 1  # 18 digits: int() itself refuses only from 4,301 digits on
_WHOLE_NUMBERS = {  # flag: (lowest, highest, default, help)
    "--gpu": (0, _MAX_TOKENS, 21520, "GPU tier capacity in tokens; 0 = off"),
    "--docs": (1, _MAX_DOCS, 10, "number of documents"),
    "--tokens": (1, _MAX_TOKENS, 5011, "size of every document in tokens"),
    "--cpu": (0, _MAX_TOKENS, 0, "CPU tier capacity in tokens; 0 = no CPU tier"),
}
_FLAGS = (*_WHOLE_NUMBERS, "--passes")


class PassResult(TypedDict):
    """Documents of one pass by where they were found; ``hit_docs``: those hit, in reading order."""

    order: str
    gpu_hits: int
    cpu_hits: int
    misses: int
    hit_docs: list[int]


def run_scenario(
    *, gpu: int, docs: int, tokens: int, passes: Sequence[str], cpu: int
) -> dict[str, list[PassResult]]:
    """Read documents 0 … docs-1, each of size ``tokens``, in ``passes`` through ONE cache.

    ``gpu``, ``cpu``: capacities in tokens. A pass is ``fwd`` (from 0 in order) or ``rev``; raises
    ValueError for another word or a negative size. ``passes`` of the answer are in their order.
    """
    cache = TwoTierCache(gpu, cpu)
    return {"passes": [_read_pass(cache, order, docs=docs, tokens=tokens) for order in passes]}


def _read_pass(cache: TwoTierCache, order: str, *, docs: int, tokens: int) -> PassResult:
    if order not in ORDERS:
        raise ValueError(f"pass is {order!r}; it must be one of {', '.join(ORDERS)}")
    found = {"gpu": 0, "cpu": 0, "miss": 0}
    hit_docs = []
    for doc in range(docs) if order == "fwd" else reversed(range(docs)):
        source = cache.access(doc, tokens)
        found[source] += 1
        if source != "miss":
            hit_docs.append(doc)
    return {
        "order": order,
        "gpu_hits": found["gpu"],
        "cpu_hits": found["cpu"],
        "misses": found["miss"],
        "hit_docs": hit_docs,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); returns the exit status."""
    parser = _build_parser()
    words = _join_values(parser, sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"argument {unknown[0]!r} is not known; accepted: {', '.join(_FLAGS)}")
    return _write_stdout(json.dumps(run_scenario(**vars(args))) + "\n")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line and no usage text: the caller may be a script that shows the last line only.
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    def print_help(self, file: object = None) -> None:
        self.exit(_write_stdout(self.format_help()))


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scenario.py",
        description="Count the cache hits of documents read in passes; prints one JSON object.",
        allow_abbrev=False,
    )
    for flag, (low, high, default, text) in _WHOLE_NUMBERS.items():
        parser.add_argument(
            flag,
            type=partial(_whole_number, low, high),
            default=default,
            metavar="N",
            help=f"{text} (whole number, {low} to {high}; default {default})",
        )
    parser.add_argument(
        "--passes",
        type=_pass_list,
        default=("fwd", "fwd", "rev"),
        metavar="LIST",
        help="fwd (from document 0) or rev, separated by commas (default fwd,fwd,rev)",
    )
    return parser


def _join_values(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """``--gpu -5x`` as ``--gpu=-5x``, which argparse reports with its value, not as missing one.

    Ends the program when a flag comes twice (argparse would take the last) or has no value.
    """
    joined: list[str] = []
    seen: set[str] = set()
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in _FLAGS:
            joined.append(word)
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                parser.error(f"argument {flag} has no value; accepted: one value after it")
            value = following
        if flag in seen:
            parser.error(f"argument {flag} is given again, as {value!r}; accepted: only once")
        seen.add(flag)
        joined.append(f"{flag}={value}")
    return joined


def _whole_number(low: int, high: int, text: str) -> int:
    # int() alone would take 1_000, " 5 ", +5 and non-ASCII digits.
    if re.fullmatch("[0-9]{1,18}", text) and low <= int(text) <= high:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} cannot be used; accepted: a whole number from {low} to {high}, digits only"
    )


def _pass_list(text: str) -> tuple[str, ...]:
    items = tuple(item.strip() for item in text.split(","))
    for item in items:
        if item not in ORDERS:
            fault = f"{item!r} is unknown" if item else "an item is empty"
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot be used, {fault}; accepted: {' or '.join(ORDERS)}, "
                "separated by commas"
            )
    return items


def _write_stdout(text: str) -> int:
    """Write and flush ``text``; returns 0, or 3 with a line on stderr when it cannot be written."""
    try:
        if sys.stdout is None:  # started with it closed
            raise OSError("it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:
            # Python flushes once more at exit and would print a traceback for the same fault.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if sys.stderr is not None:
            sys.stderr.write(f"scenario.py: error: cannot write standard output: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
