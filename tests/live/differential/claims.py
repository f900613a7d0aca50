"""What every comparison's test asserts, and the faults planted in ``sim`` to see it fail."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from sim.tiers.gpu_pool import GpuPool
from sim.tiers.native import NativeChunks
from tests.live.differential.compare import Tally, caught, difference
from tests.live.differential.engines import vllm_core, vllm_scheduling
from tests.live.differential.parts import PARTS, seconds_in_tests
from tests.live.differential.workloads import Case


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """Marks of a module of comparisons: live, and skipped where one of ``packages`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return [
        pytest.mark.live,
        pytest.mark.skipif(
            bool(missing),
            reason=f"no {' and no '.join(missing)} here: `make setup` installs an engine build",
        ),
        # The engines' own warnings, raised whenever they import something, are theirs.
        pytest.mark.filterwarnings("ignore"),
    ]


def assert_part_agrees(name: str, *, with_host: bool) -> Tally:
    """Compare part ``name`` within its time; nothing may differ and enough must have been seen."""
    vllm_scheduling()  # importing it takes as long as a thousand requests
    part = PARTS[name]
    tally = part.run(seconds=seconds_in_tests(part), min_requests=part.min_requests)
    assert tally.first_difference is None, tally.first_difference
    assert tally.requests >= part.min_requests
    assert tally.with_gpu_hit >= part.min_requests // 4
    if with_host:
        assert tally.with_host_load >= part.min_requests // 30
        assert tally.mixed >= part.min_requests // 150
        assert tally.evictions >= part.min_requests // 10
    return tally


def share_caught(name: str, n_workloads: int, **believed: Any) -> float:
    """Share of workloads on which ``sim`` differs when it believes ``believed`` of the tiers."""
    return share_caught_by(name, n_workloads, lambda case: with_tiers(case, **believed))


def share_caught_by(name: str, n_workloads: int, spoil: Any = lambda case: case) -> float:
    """Share of workloads on which ``sim``, spoilt, differs from the engine."""
    part = PARTS[name]
    seeds = caught(islice(part.cases(), n_workloads), part.driver, spoil)
    return len(seeds) / n_workloads


def is_caught(name: str, *, within: int) -> bool:
    """Whether ``sim``, as it stands now, differs from the engine on one of the first workloads."""
    part = PARTS[name]
    return any(difference(case, part.driver) for case in islice(part.cases(), within))


def with_tiers(case: Case, **changes: Any) -> Case:
    """``case`` on other tiers."""
    return replace(case, tiers=replace(case.tiers, **changes))


def with_engine(case: Case) -> Case:
    """``case`` under the rules of the installed vLLM."""
    return with_tiers(case, engine=vllm_core().version)


# --- wrong rules, one each


class NoNullBlock(GpuPool):
    """Takes vLLM's null block for one a request can have."""

    def __init__(self, num_gpu_blocks: int, *, hashless_first: bool = True) -> None:
        super().__init__(num_gpu_blocks + 1, hashless_first=hashless_first)


class PrefixFirstNative(NativeChunks):
    """Evicts a prompt's head before its tail."""

    def touch(self, keys: Sequence[int]) -> None:
        super().touch(tuple(reversed(keys)))
