"""Plant wrong rules in the predictor and see whether the matrix's stored journals catch them.

A matrix that a wrong predictor passes proves little about the right one. Each mutation replaces one
rule of ``sim`` in memory, predicts every committed run of the matrix again and counts the requests
whose journal contradicts it. Needs no engine.

    python scripts/mutations.py            # writes results/mutations.json; exit code 1: one escaped
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sim.predict
import sim.tiers.lmcache_mp
import sim.tiers.registry
from harness.files import write_json
from harness.measure.create import predicted_rows
from harness.plan.experiment import Experiment, resolve
from harness.record.folder import PLAN_FILE, RunFolder
from harness.verdict.reconcile import Reconciled, join
from sim.tiers.gpu_pool import GpuPool
from sim.tiers.host import HostRequest, HostShare, lmcache_load
from sim.tiers.lmcache_mp import HostChunks

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "results" / "matrix"
RECORD = ROOT / "results" / "mutations.json"


class AppendAllFreeing(GpuPool):
    """Frees as vLLM ≤ 0.23 does: un-hashed blocks go to the tail like the others."""

    def __init__(self, num_gpu_blocks: int, *, hashless_first: bool = True) -> None:
        """As ``GpuPool``; the rule asked for is ignored."""
        super().__init__(num_gpu_blocks, hashless_first=False)


class NoNullBlock(GpuPool):
    """Takes every block for usable."""

    def __init__(self, num_gpu_blocks: int, *, hashless_first: bool = True) -> None:
        """As ``GpuPool`` with one block more."""
        super().__init__(num_gpu_blocks + 1, hashless_first=hashless_first)


def every_full_block(n_prompt: int, block_size: int) -> int:
    """``reusable_blocks`` that lets a hit cover the last prompt token too."""
    return n_prompt // block_size


def load_with_last_token(request: HostRequest, hit: int, chunk_tokens: int) -> HostShare:
    """``lmcache_load`` without the token it leaves to compute when the whole prompt is there."""
    share = lmcache_load(request, hit, chunk_tokens)
    if hit * chunk_tokens == request.n_prompt and share.loaded_tokens:
        return replace(share, loaded_tokens=share.loaded_tokens + 1)
    return share


class TouchedByRetrieve(HostChunks):
    """Moves chunks up in recency only when they are loaded: not by lookup, store or session end."""

    def serve(self, request: HostRequest) -> HostShare:
        """As ``HostChunks.serve`` but for the touch."""
        hit = self.longest_hit(request.chunks)
        load = lmcache_load(request, hit, self._chunk_tokens)
        stored = self.store(request.chunks[hit:])
        self.touch(request.chunks[hit - load.loaded_chunks : hit])
        self.settle()
        return replace(load, stored_chunks=stored)


class OneTickTooFew(HostChunks):
    """Stops evicting one tick before the store is below its watermark."""

    def settle(self) -> int:
        """As ``HostChunks.settle``, the last tick undone."""
        before = list(self._chunks)
        gone = super().settle()
        dropped = last_tick = 0
        while dropped < gone:
            last_tick = max(1, int((len(before) - dropped) * self._evict_ratio))
            dropped += last_tick
        for key in reversed(before[gone - last_tick : gone]):
            self._chunks[key] = None
            self._chunks.move_to_end(key, last=False)
        self.evicted -= last_tick
        return gone - last_tick


@dataclass(frozen=True, slots=True)
class Mutation:
    """A wrong rule and the names in ``sim`` that are replaced to plant it."""

    name: str
    replaced: tuple[tuple[Any, str, object], ...]

    def planted(self) -> AbstractContextManager[None]:
        """The rule is wrong inside the ``with`` block and right again after it."""
        return _replaced(self.replaced)


@contextmanager
def _replaced(replaced: Iterable[tuple[Any, str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, wrong in replaced:
            stack.enter_context(patch.object(owner, attribute, wrong))
        yield


MUTATIONS = (
    Mutation("append-all freeing", ((sim.tiers.registry, "GpuPool", AppendAllFreeing),)),
    Mutation("no null block", ((sim.tiers.registry, "GpuPool", NoNullBlock),)),
    Mutation(
        "no last-token rule",
        (
            (sim.predict, "reusable_blocks", every_full_block),
            (sim.tiers.lmcache_mp, "lmcache_load", load_with_last_token),
        ),
    ),
    Mutation(
        "host touched by retrieve only", ((sim.tiers.lmcache_mp, "HostChunks", TouchedByRetrieve),)
    ),
    Mutation("one watermark tick too few", ((sim.tiers.lmcache_mp, "HostChunks", OneTickTooFew),)),
)


def matrix_runs(folder: Path = MATRIX) -> list[RunFolder]:
    """The committed runs of the matrix, by name."""
    return [RunFolder(path.parent) for path in sorted(folder.glob(f"*/{PLAN_FILE}"))]


def experiment_of(run: RunFolder, cache_dir: Path) -> Experiment:
    """The experiment ``run`` measured; the model's shape is read from ``cache_dir``."""
    return resolve(run.read_plan(), cache_dir=cache_dir)


def compared(run: RunFolder, experiment: Experiment) -> tuple[Reconciled, ...]:
    """The run's journal beside what the simulator, as it is now, predicts."""
    predictions = predicted_rows(experiment)
    return tuple(join({row.key: None for row in predictions}, run.rows(), predictions))


def caught(mutation: Mutation, runs: Sequence[tuple[RunFolder, Experiment]]) -> dict[str, int]:
    """Requests that contradict ``mutation``, by plan; plans that let it pass are left out."""
    with mutation.planted():
        counts = {
            experiment.plan.name: sum(not r.is_reconciled for r in compared(run, experiment))
            for run, experiment in runs
        }
    return {name: count for name, count in sorted(counts.items()) if count}


def record(runs: Sequence[tuple[RunFolder, Experiment]]) -> dict[str, Any]:
    """Content of ``results/mutations.json``."""
    return {
        "schema": 1,
        "requests": sum(len(compared(run, experiment)) for run, experiment in runs),
        "contradicting_requests": {
            "none planted": _unmutated(runs),
            **{mutation.name: caught(mutation, runs) for mutation in MUTATIONS},
        },
    }


def _unmutated(runs: Sequence[tuple[RunFolder, Experiment]]) -> dict[str, int]:
    return caught(Mutation("none planted", ()), runs)


def main(say: Callable[[str], None] = print) -> int:
    """Write the record and say it; 1 when a mutation escaped or the right rules are contradicted."""
    with tempfile.TemporaryDirectory() as cache:
        runs = [(run, experiment_of(run, Path(cache))) for run in matrix_runs()]
        content = record(runs)
    write_json(RECORD, content)
    say(f"{content['requests']} requests of {len(runs)} runs; requests that contradict:")
    for name, plans in content["contradicting_requests"].items():
        listed = ", ".join(f"{plan} {count}" for plan, count in plans.items())
        say(f"  {name}: {listed or 'none'}")
    found = content["contradicting_requests"]
    return 0 if not found.pop("none planted") and all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
