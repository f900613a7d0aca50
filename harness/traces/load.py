"""A trace as every trace command takes it: read, its sessions started, its requests in order.

Wrong input is an InputError that says what is wrong and what is accepted. Needs numpy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.errors import InputError
from harness.record.folder import PLAN_FILE, RunFolder
from sim.curves import compiled, turns
from sim.curves.capacity import Ruler
from sim.curves.formats import JOURNAL
from sim.curves.readers import read_trace
from sim.curves.sources import expected_bytes, files_of, left_out
from sim.curves.trace import Ints, Requests, Trace
from sim.curves.tree import PrefixTree, build_tree
from sim.errors import SpecError
from sim.geometry import KvGeometry

SCHEMA = 1
SPREAD_HOURS = 24.0
"""Over what sessions without start times are spread when nothing else is asked for."""

Progress = Callable[[int, int | None, str], None]
"""Told (bytes read, bytes in all or None, file name)."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace is taken; defaults are what is said in the assumptions.

    ``block_tokens``: for formats that do not carry one. ``deltas``: whether rows of a session are
    turns of it, None where nobody said. ``spread_hours``: start the sessions of a trace
    without start times over this time, at random moments drawn from ``seed``. ``time_scale``:
    stretch the sessions' starts.
    """

    block_tokens: int | None = None
    deltas: bool | None = None
    spread_hours: float | None = None
    seed: int | None = None
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trace ready to be replayed, its requests in ``order``; what was assumed, and is odd."""

    tree: PrefixTree
    order: Ints
    ruler: Ruler
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    starts_known: bool

    def capacity(self, text: str) -> int:
        """One capacity of at least a block, e.g. "40 GiB", in blocks (``capacity.FORMS``)."""
        with input_errors():
            blocks = self.ruler.blocks(text)
        if blocks < 1:
            raise InputError(f"capacity {text!r} is less than one block")
        return blocks

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest request: a smaller GPU tier could not run it."""
        return int(self.tree.blocks_of_requests().max(initial=0))


def load(
    path: str,
    options: TraceOptions,
    *,
    model: Path | None = None,
    kv_dtype: str = "auto",
    progress: Progress | None = None,
) -> Loaded:
    """Read or load the trace ``path``; ``model`` (config.json or its folder) gives GiB."""
    with input_errors():
        _check(options)
        per_token = _bytes_per_token(model, kv_dtype)
        tree, odd = read_tree(path, options, progress)
        starts_known = tree.requests.starts_known
        requests, spread = _started(tree.requests, options)
        tree = replace(tree, requests=requests)
        order = requests.order(options.time_scale)
        ruler = Ruler(requests.block_tokens, per_token or requests.kv_bytes_per_token)
    assumptions = (
        f"{requests.source}, {requests.block_tokens} tokens a block; blocks are equal when they "
        "and all before them are",
        "requests are served one after the other by arrival, those of one nanosecond in the "
        f"trace's order{spread}",
        *_of_turns(requests),
        *_of_journal(requests, Path(path)),
        *_of_folder(Path(path)),
    )
    warnings = (*odd, *_not_read(Path(path)))
    return Loaded(tree, order, ruler, assumptions, warnings, starts_known)


def _of_turns(requests: Requests) -> Iterator[str]:
    if requests.source == turns.SOURCE:
        yield (
            "a turn's prompt is all that its session held before, answers included; an answer takes "
            "no time, and no blocks until a prompt repeats it: a GPU tier that still has its blocks "
            f"finds up to {turns.found_again(requests):,} more"
        )


def _of_journal(requests: Requests, file: Path) -> Iterator[str]:
    if requests.source != JOURNAL:
        return
    if _asked_again(file):
        yield "each document is asked the same question in every pass, as the plan beside it says"
    else:
        yield (
            "a question is new unless a later document includes it: of prompts repeated whole, only "
            "the plan in the journal's own folder knows"
        )


def _of_folder(place: Path) -> Iterator[str]:
    if place.is_dir():
        yield f"the folder's {len(files_of(place))} files are one trace, in order of name"


def _not_read(place: Path) -> Iterator[str]:
    if names := left_out(place):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        yield f"not read of the folder: {', '.join(names[:5])}{more}"


def _check(options: TraceOptions) -> None:
    """Before a long trace is read in vain."""
    if not 0 < options.time_scale < float("inf"):
        raise InputError(f"a time scale of {options.time_scale}; it must be above 0")
    hours = options.spread_hours
    if hours is not None and not 0 <= hours < float("inf"):
        raise InputError(f"a spread of {hours} hours; it must be a number of at least 0")


def read_tree(
    path: str, options: TraceOptions, progress: Progress | None
) -> tuple[PrefixTree, list[str]]:
    """The trace's whole blocks, compiled or not, and what is odd about it.

    A block that a prompt does not fill is left out, as vLLM never caches one. Sessions without
    start times have none yet.
    """
    file = Path(path)
    if path != "-" and compiled.is_compiled(file):
        if (options.block_tokens, options.deltas) != (None, None):
            raise InputError(
                f"{path} is compiled: its blocks and prompts are fixed; compile the trace again "
                "instead"
            )
        tree = compiled.load(file)
        if (tree.blocks_of_requests() > _whole_blocks(tree.requests)).any():
            raise InputError(
                f"{path} has blocks that its prompts do not fill, which an earlier kvcliff counted: "
                "compile the trace again"
            )
        return tree, []
    total = expected_bytes(path)
    told = (lambda done, name: progress(done, total, name)) if progress else None
    trace = read_trace(
        path,
        block_tokens=options.block_tokens,
        deltas=options.deltas,
        asked_again=_asked_again(file),
        progress=told,
    )
    return build_tree(trace.without_partial_blocks()), _too_long(trace)


def _whole_blocks(requests: Requests) -> Ints:
    return requests.input_tokens // requests.block_tokens


def _asked_again(file: Path) -> bool:
    """Whether ``file`` is a journal in its run folder, whose plan asks the same questions again."""
    folder = RunFolder(file.parent)
    is_run = all((folder.path / name).is_file() for name in (PLAN_FILE, "manifest.json"))
    return is_run and folder.read_plan().workload.questions == "repeated"


def _started(requests: Requests, options: TraceOptions) -> tuple[Requests, str]:
    """The requests with their sessions' starts, and how to say it."""
    hours, n_sessions = options.spread_hours, len(requests.session_start_ns)
    is_given = hours is None and requests.starts_known
    if options.time_scale != 1 and is_given and n_sessions in (1, len(requests)):
        raise InputError(
            f"a time scale of {options.time_scale:g} stretches the starts of sessions, and this trace "
            f"has {'one session' if n_sessions == 1 else 'no session of several requests'}: it would "
            "change nothing"
        )
    if hours is None and (requests.starts_known or len(requests.session_start_ns) == 1):
        if options.seed is not None:
            raise InputError(
                "a seed goes with a spread in hours here: this trace's sessions have start times"
            )
        scaled = f"; session starts stretched {options.time_scale:g} times"
        return requests, scaled if options.time_scale != 1 else ""
    hours = SPREAD_HOURS if hours is None else hours
    spread = hours * options.time_scale
    seed = 0 if options.seed is None else options.seed
    return requests.started_over(hours * 3600, seed), (
        f"; {len(requests.session_start_ns)} sessions start at random moments of {spread:g} h "
        f"(seed {seed})"
    )


def _too_long(trace: Trace) -> list[str]:
    requests = trace.requests
    most = -(-requests.input_tokens // requests.block_tokens)
    too_long = int((np.diff(trace.offsets) > most).sum())
    if not too_long:
        return []
    return [
        f"{too_long} of {len(requests)} requests list more blocks than their prompt fills at "
        f"{requests.block_tokens} tokens a block: is the block size right (--block-tokens)?"
    ]


def _bytes_per_token(model: Path | None, kv_dtype: str) -> float | None:
    if model is None:
        if kv_dtype != "auto":
            raise InputError(
                f"a KV cache of {kv_dtype} means nothing without a model: give --model"
            )
        return None
    try:
        return KvGeometry.from_config(model, kv_dtype).bytes_per_token
    except OSError as error:
        raise InputError(f"model {model}: cannot be read: {error.strerror}") from None


@contextmanager
def input_errors() -> Iterator[None]:
    """A SpecError is about what the user gave; so is a trace beyond the memory."""
    try:
        yield
    except SpecError as error:
        raise InputError(str(error)) from None
    except MemoryError as error:
        raise InputError(f"more than this machine's memory holds: {error}") from None


def head(tree: PrefixTree) -> dict[str, int]:
    """The fields every result begins with."""
    return {
        "schema": SCHEMA,
        "requests": len(tree.requests),
        "accesses": tree.n_accesses,
        "distinct_blocks": tree.n_blocks,
        "block_size": tree.requests.block_tokens,
    }


def share_of(part: int, whole: int) -> float | None:
    """``part`` / ``whole``; None where there is nothing."""
    return part / whole if whole else None
