"""What is compared with what: one entry per engine class or tier, for the tests and the long mode.

``KVCLIFF_DIFFERENTIAL_S`` is the time all parts together may take in the tests, in seconds.
"""

import importlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from sim.tiers.settings import HostKind
from tests.live.differential.compare import Driver, Tally, compare, difference
from tests.live.differential.engines import vllm_core
from tests.live.differential.workloads import Case, random_case

DEFAULT_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison: ``share`` of the time, and the requests it must reach however long it takes.

    ``module`` has the driver.
    """

    name: str
    module: str
    host: HostKind
    async_scheduling: bool
    share: float
    min_requests: int

    @property
    def driver(self) -> Driver:
        """The function that serves a case by the engine's classes."""
        module = importlib.import_module(f"tests.live.differential.{self.module}")
        return module.serve  # type: ignore[no-any-return]

    def cases(self, first_seed: int = 0) -> Iterator[Case]:
        """Workloads without end, under the rules of the vLLM that is installed."""
        for seed in itertools.count(first_seed):
            yield self.case(seed)

    def case(self, seed: int) -> Case:
        """The workload of ``seed``."""
        return random_case(
            seed,
            self.host,
            async_scheduling=self.async_scheduling,
            engine=vllm_core().version,
        )

    def run(self, *, seconds: float, first_seed: int = 0, min_requests: int = 0) -> Tally:
        """Compare for ``seconds``, after one workload that imports what the driver needs."""
        difference(self.case(first_seed), self.driver)
        return compare(
            self.cases(first_seed), self.driver, seconds=seconds, min_requests=min_requests
        )


PARTS = {
    part.name: part
    for part in (
        Part("gpu", "kv_manager", "none", False, 0.15, 12_000),
        Part("scheduler", "schedulers", "none", False, 0.1, 1_000),
        Part("async-scheduler", "schedulers", "none", True, 0.15, 1_000),
        Part("lmcache", "lmcache_inprocess", "lmcache", True, 0.2, 500),
        Part("lmcache-mp", "lmcache_server", "lmcache-mp", True, 0.25, 400),
        Part("native", "native_offload", "native", True, 0.15, 1_000),
    )
}


def seconds_in_tests(part: Part) -> float:
    """The time ``part`` may take in the tests."""
    return part.share * float(os.environ.get("KVCLIFF_DIFFERENTIAL_S", DEFAULT_SECONDS))
