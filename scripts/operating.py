#!/usr/bin/env python3
"""How often the decision procedure errs, and how often it decides: ``python scripts/operating.py``.

Synthetic runs on hosts of many kinds, by number of pairs of sessions, judged by the procedure that
judges real runs (``harness.verdict.procedure``). Writes results/operating.json; takes some
minutes on two cores.

A run has its sessions in the order that a plan's ``pairs`` draws. A session's times in the first
pass and in the pass decided on are the host's slowness at the time, times what the session has by
itself, times what each pass has by itself.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import log, pi, sin, sqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.plan.order import drawn
from harness.report.compare import Samples, changes
from harness.verdict.procedure import Level, SessionPair, conclude

RESULTS = Path(__file__).resolve().parents[1] / "results"
MIN_RATIO = 1.1
RUNS = 2_000
PAIRS = (2, 3, 4, 5, 6, 8, 12)
POWERS = (1.1, 1.2, 1.5, 3)

Slowness = list[tuple[float, float]]
"""Log of the host's slowness in a session's first pass and in the pass decided on, by session."""
Host = Callable[[random.Random, int], Slowness]
"""Of a number of sessions."""


@dataclass(frozen=True)
class Case:
    """A host, the standard deviation of what a session and a pass have by themselves (logs).

    ``tails``: degrees of freedom of Student's t that sessions are drawn from; None: normal.
    ``storing``: what the treatment adds to the first pass. ``dead``: one session is so much slower.
    """

    host: Host
    session: float = 0.05
    each_pass: float = 0.02
    tails: float | None = None
    storing: float = 0.0
    dead: float = 1.0


# --- hosts


def even(_draw: random.Random, n: int) -> Slowness:
    """The same speed all the time."""
    return [(0.0, 0.0)] * n


def at_times(shape: Callable[[float], float]) -> Host:
    """``shape`` of the time from 0 to 1; the two passes are at a quarter and 0.6 of a session."""
    return lambda _draw, n: [(shape((i + 0.25) / n), shape((i + 0.6) / n)) for i in range(n)]


def step(by: float) -> Host:
    """From a moment on, the host is ``by`` times slower."""

    def host(draw: random.Random, n: int) -> Slowness:
        moment = draw.uniform(0, n)
        return [tuple(log(by) * (i + at > moment) for at in (0.25, 0.6)) for i in range(n)]  # type: ignore[misc]

    return host


def walk(by: float, keeps: float = 1.0) -> Host:
    """A random walk in steps of half a session, or one that forgets (``keeps`` below 1)."""

    def host(draw: random.Random, n: int) -> Slowness:
        now = draw.gauss(0, by) if keeps < 1 else 0.0
        found = []
        for _ in range(2 * n):
            new = sqrt(1 - keeps**2) if keeps < 1 else sqrt(0.5)
            now = keeps * now + by * new * draw.gauss(0, 1)
            found.append(now)
        return list(zip(found[::2], found[1::2], strict=True))

    return host


def two_speeds(by: float, *, changes: str) -> Host:
    """``by`` times slower or not: by session, by pass, or changing with a quarter's chance."""

    def host(draw: random.Random, n: int) -> Slowness:
        if changes == "session":
            return [(slow, slow) for slow in (log(by) * draw.randrange(2) for _ in range(n))]
        if changes == "pass":
            return [(log(by) * draw.randrange(2), log(by) * draw.randrange(2)) for _ in range(n)]
        slow, found = draw.randrange(2), []
        for _ in range(2 * n):
            slow = 1 - slow if draw.random() < 0.25 else slow
            found.append(log(by) * slow)
        return list(zip(found[::2], found[1::2], strict=True))

    return host


def period(sessions: int, by: float) -> Host:
    """Slower in the first half of every so many sessions, from a session that is drawn."""

    def host(draw: random.Random, n: int) -> Slowness:
        start = draw.randrange(sessions)
        slow = [log(by) * ((i + start) % sessions < max(1, sessions // 2)) for i in range(n)]
        return [(each, each) for each in slow]

    return host


def hump(by: float) -> Host:
    """``by`` times faster in the middle half."""
    return at_times(lambda at: -log(by) * (0.25 < at < 0.75))


CASES: Mapping[str, Case] = {
    **{f"sessions differ by {s} %": Case(even, session=s / 100) for s in (2, 5, 10, 20)},
    "passes differ by 10 %": Case(even, session=0, each_pass=0.1),
    "passes differ by 20 %": Case(even, session=0, each_pass=0.2),
    "5 %, tails of t with 3 degrees": Case(even, tails=3),
    "5 %, tails of t with 1.5 degrees": Case(even, tails=1.5),
    "5 %, tails of Cauchy": Case(even, tails=1),
    "random walk of 5 %": Case(walk(0.05)),
    "random walk of 10 %": Case(walk(0.1)),
    "autoregressive 0.7, 10 %": Case(walk(0.1, keeps=0.7)),
    "autoregressive 0.9, 20 %": Case(walk(0.2, keeps=0.9)),
    "linear drift to 1.3": Case(at_times(lambda at: log(1.3) * at)),
    "linear drift to 2": Case(at_times(lambda at: log(2) * at)),
    "faster by 1.2 in the middle": Case(hump(1.2)),
    "faster by 1.3 in the middle": Case(hump(1.3)),
    "faster by 1.4 in the middle": Case(hump(1.4)),
    "a sine's half wave of 1.4": Case(at_times(lambda at: -log(1.4) * sin(pi * at) ** 2)),
    "a step of 1.4": Case(step(1.4)),
    "a step of 2": Case(step(2)),
    "two speeds 1.6 apart, by session": Case(two_speeds(1.6, changes="session")),
    "two speeds 1.6 apart, by pass": Case(two_speeds(1.6, changes="pass")),
    "two speeds 1.6 apart, for a while": Case(two_speeds(1.6, changes="at times")),
    "one session 3 times slower": Case(even, dead=3),
    "one session 3 times slower, quiet": Case(even, session=0.02, dead=3),
    "one session 3 times faster": Case(even, dead=1 / 3),
    **{f"a period of {k} sessions, 1.4": Case(period(k, 1.4)) for k in (2, 3, 4)},
    "a period of 4 sessions, 1.4, quiet": Case(period(4, 1.4), session=0.02, each_pass=0.01),
    "5 %, storing costs 5 %": Case(even, storing=0.05),
}


# --- runs


def run(case: Case, draw: random.Random, n_pairs: int, ratio: float) -> list[SessionPair]:
    """The pairs of one run in which the treatment is ``ratio`` times as fast in replays."""
    order = drawn(n_pairs, "treatment", seed=draw.getrandbits(32), has_control=False)
    arms = [arm == "treatment" for arm in order]
    slow = case.host(draw, len(arms))
    dead = draw.randrange(len(arms))
    levels = []
    for i, arm in enumerate(arms):
        own = case.session * (student_t(draw, case.tails) if case.tails else draw.gauss(0, 1))
        own += log(case.dead) * (i == dead)
        first, decided = (own + at + draw.gauss(0, case.each_pass) for at in slow[i])
        levels.append(
            Level(f"{i + 1:02d}", decided - log(ratio) * arm, first + log(1 + case.storing) * arm)
        )
    pairs = []
    for i in range(0, len(arms), 2):
        base, treated = levels[i : i + 2] if not arms[i] else levels[i : i + 2][::-1]
        assert base.decided is not None
        assert treated.decided is not None
        assert base.first is not None
        assert treated.first is not None
        pairs.append(
            SessionPair(base, treated, base.decided - treated.decided, base.first - treated.first)
        )
    return pairs


def student_t(draw: random.Random, degrees: float) -> float:
    """A draw of Student's t; no session is e^30 times slower than another."""
    found = draw.gauss(0, 1) / sqrt(draw.gammavariate(degrees / 2, 2) / degrees)
    return max(-600.0, min(600.0, found))


def shares(name: str, ratio: float) -> dict[str, dict[str, float]]:
    """By verdict and number of pairs, the share of runs that get it."""
    found: dict[str, dict[str, float]] = {"supported": {}, "not supported": {}}
    for n_pairs in PAIRS:
        draw = random.Random(f"{name} {ratio} {n_pairs}")
        verdicts = [
            conclude(run(CASES[name], draw, n_pairs, ratio), min_ratio=MIN_RATIO).verdict
            for _ in range(RUNS)
        ]
        for verdict, by_pairs in found.items():
            by_pairs[str(n_pairs)] = verdicts.count(verdict) / RUNS  # type: ignore[arg-type]
    return found


def changed(sessions: int, slower: float) -> float:
    """The share of comparisons of two runs, three passes and two arms, that call a cell changed."""
    draw, found = random.Random(f"compare {slower} {sessions}"), 0
    for _ in range(RUNS):
        cells = {}
        for arm in ("baseline", "treatment"):
            own = [[draw.gauss(0, 0.05) for _ in range(sessions)] for _ in range(2)]
            for name in ("first", "second", "third"):
                before, after = ([x + draw.gauss(0, 0.02) for x in logs] for logs in own)
                cells[name, arm] = [Samples("later", before, [x + log(slower) for x in after])]
        judged = changes(cells)
        found += any(change.says == "changed" for (change,) in judged.values())
    return found / RUNS


def main() -> None:
    """Judge all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "operating.json")
    out: Path = parser.parse_args().out
    with ProcessPoolExecutor() as pool:
        by_ratio = {
            ratio: dict(zip(CASES, pool.map(partial(shares, ratio=ratio), CASES), strict=True))
            for ratio in (1.0, *POWERS)
        }
    table = {
        "schema": 1,
        "min_ratio": MIN_RATIO,
        "runs": RUNS,
        "false_supported": _of(by_ratio[1.0], "supported"),
        "supported_at_the_threshold": _of(by_ratio[1.1], "supported"),
        "not_supported_at_the_threshold": _of(by_ratio[1.1], "not supported"),
        "false_not_supported": _of(by_ratio[1.2], "not supported"),
        "compare": {
            words: {str(n): changed(n, slower) for n in PAIRS}
            for words, slower in (("unchanged", 1.0), ("1.2 times slower", 1.2))
        },
        "power": {f"{ratio:g}": _of(by_ratio[ratio], "supported") for ratio in POWERS},
    }
    out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for name in ("false_supported", "supported_at_the_threshold", "not_supported_at_the_threshold"):
        worst = {n: max(by[n] for by in table[name].values()) for n in map(str, PAIRS)}  # type: ignore[attr-defined]
        print(f"{name}: worst of {len(CASES)} hosts by pairs {worst}")


def _of(
    found: Mapping[str, Mapping[str, dict[str, float]]], verdict: str
) -> dict[str, dict[str, float]]:
    return {name: by_verdict[verdict] for name, by_verdict in found.items()}


if __name__ == "__main__":
    main()
