"""The load section of a plan: how many requests are in flight, or when each is due."""

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Arrivals = Literal["poisson", "gamma", "constant"]

WHY_NOT_PREDICTED = (
    "several requests are in flight: which of them the tiers serve first is a matter of timing"
)

DEFAULT_SEQS = 256
"""``server.max_num_seqs`` of a plan with a load; vLLM's own default on most GPUs."""


class LoadSection(BaseModel):
    """``[load]`` of a plan: each pass is sent with several requests in flight.

    A closed loop has ``concurrency``; an open one has ``rate``, and its requests are sent when they
    are due, the same in every session.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    concurrency: Annotated[int, Field(ge=1, le=1_000)] | None = Field(
        default=None, description="closed loop: so many requests in flight, always"
    )
    think_s: Annotated[float, Field(ge=0, le=3_600)] = Field(
        default=0.0, description="closed loop: pause between an answer and the next request"
    )
    rate: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        default=None, description="open loop: requests a second, on average"
    )
    arrivals: Arrivals = Field(
        default="poisson",
        description="open loop: `poisson`; `gamma`, of `burstiness`; or `constant`, evenly spaced",
    )
    burstiness: Annotated[float, Field(gt=0, le=1_000)] = Field(
        default=1.0,
        description="shape of `gamma` arrivals: below 1 in bursts, 1 as `poisson`, above 1 more even",
    )
    most_in_flight: Annotated[int, Field(ge=1, le=4_096)] = Field(
        default=256,
        description="open loop: with so many in flight the next request is late, which the run says",
    )

    slo_ttft_ms: Annotated[float, Field(gt=0, le=1e7)] | None = Field(
        default=None, description="longest TTFT of a good answer, from when it was due, in ms"
    )
    slo_tpot_ms: Annotated[float, Field(gt=0, le=1e7)] | None = Field(
        default=None, description="longest time per output token of a good answer, in ms"
    )

    def problem(self) -> str | None:
        """What is wrong with the section; None when nothing is."""
        if (self.concurrency is None) == (self.rate is None):
            return "load needs concurrency, a closed loop, or rate, an open one, and not both"
        defaults = type(self).model_fields
        unused = ("arrivals", "burstiness", "most_in_flight") if self.concurrency else ("think_s",)
        given = [name for name in unused if getattr(self, name) != defaults[name].default]
        if given:
            loop = "a closed loop" if self.concurrency else "an open loop"
            return f"load.{given[0]} has no meaning in {loop}; leave it out"
        if self.burstiness != defaults["burstiness"].default and self.arrivals != "gamma":
            return f"load.burstiness is of gamma arrivals; load.arrivals is {self.arrivals!r}"
        return None

    def due_s(self, n: int, *, seed: int, pass_name: str) -> list[float]:
        """Seconds after the pass began at which each of ``n`` requests is due, the first at 0.

        Drawn from ``seed`` and the pass alone, so that every session is asked the same way.
        ValueError in a closed loop, in which nothing is due.
        """
        if self.rate is None:
            raise ValueError("a closed loop has no arrivals")
        rng = random.Random(f"{seed}/arrivals/{pass_name}")
        due = [0.0]
        for _ in range(n - 1):
            due.append(due[-1] + self._gap_s(rng, self.rate))
        return due[:n]

    def _gap_s(self, rng: random.Random, rate: float) -> float:
        if self.arrivals == "constant":
            return 1 / rate
        shape = self.burstiness if self.arrivals == "gamma" else 1.0
        return rng.gammavariate(shape, 1 / (rate * shape))
