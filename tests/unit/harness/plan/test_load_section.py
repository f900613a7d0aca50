"""The load section of a plan: what it refuses, when its requests are due, what it changes."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.measure.create import predicted_rows
from harness.plan.experiment import resolve
from harness.plan.files import parse_plan
from harness.plan.load import DEFAULT_SEQS, LoadSection
from tests.factory import make_plan


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("", "load needs concurrency, a closed loop, or rate"),
        ("concurrency = 4\nrate = 2", "load needs concurrency, a closed loop, or rate"),
        ("concurrency = 4\nburstiness = 2", "load.burstiness has no meaning in a closed loop"),
        ("rate = 2\nthink_s = 1", "load.think_s has no meaning in an open loop"),
        ("rate = 2\nburstiness = 2", "burstiness is of gamma arrivals; load.arrivals is 'poisson'"),
        ("concurrency = 0", "load.concurrency: .*greater than or equal to 1"),
        ("rate = inf", "load.rate: .*"),
        ('rate = 2\narrivals = "uniform"', "load.arrivals: .*'poisson', 'gamma' or 'constant'"),
        ("concurency = 4", "load.concurency: .*not permitted"),
    ],
)
def test_a_load_that_means_nothing_is_refused(section: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(more=f"[load]\n{section}")


def test_one_rank_publishes_the_events() -> None:
    own = '[load]\nconcurrency = 4\n[arms.own]\nflags = ["-dp", "2"]'
    with pytest.raises(InputError, match=r"arms\.own\.flags has -dp: under .* one rank's"):
        make_plan(order='order = ["baseline", "own"]', more=own)


def test_an_engine_whose_events_name_no_request_is_refused(tmp_path: Path) -> None:
    plan = make_plan(engine='engine = "0.29.1"', more="[load]\nconcurrency = 4")
    with pytest.raises(InputError, match=r"the vLLM of this plan is 0\.29\.1; .* since 0\.30"):
        resolve(plan, cache_dir=tmp_path)


def test_a_plan_with_a_load_survives_being_written_and_read_again() -> None:
    for section in ("concurrency = 4", 'rate = 2\narrivals = "gamma"\nburstiness = 0.5'):
        plan = make_plan(more=f"[load]\n{section}")
        assert parse_plan(plan.to_toml().encode(), where="again") == plan


def test_more_requests_run_at_once_under_load_and_none_is_predicted(tmp_path: Path) -> None:
    def spec(more: str, **changed: str) -> int:
        experiment = resolve(make_plan(more=more, **changed), cache_dir=tmp_path)
        return experiment.arms["baseline"].server.max_num_seqs

    assert spec("") == 4
    assert spec("[load]\nconcurrency = 4") == DEFAULT_SEQS
    assert spec("[load]\nconcurrency = 4", block_size="block_size = 32\nmax_num_seqs = 8") == 8
    experiment = resolve(make_plan(more="[load]\nconcurrency = 4"), cache_dir=tmp_path)
    rows = predicted_rows(experiment)
    assert rows != []
    assert all("several requests are in flight" in (row.why_not or "") for row in rows)


def test_a_load_is_part_of_what_a_plan_asks(tmp_path: Path) -> None:
    def plan_id(more: str) -> str:
        return resolve(make_plan(more=more), cache_dir=tmp_path).plan_id

    ids = {plan_id(more) for more in ("", "[load]\nconcurrency = 4", "[load]\nconcurrency = 5")}
    assert len(ids) == 3


def gaps(section: LoadSection, *, seed: int = 1, name: str = "pass1-cold") -> list[float]:
    due = section.due_s(20_001, seed=seed, pass_name=name)
    assert due[0] == 0
    return [after - before for before, after in pairwise(due)]


@pytest.mark.parametrize(
    ("section", "spread"),
    [
        (LoadSection(rate=4.0), 1.0),
        (LoadSection(rate=4.0, arrivals="constant"), 0.0),
        (LoadSection(rate=4.0, arrivals="gamma", burstiness=4.0), 0.5),
        (LoadSection(rate=4.0, arrivals="gamma", burstiness=0.25), 2.0),
    ],
)
def test_arrivals_have_their_rate_and_their_spread(section: LoadSection, spread: float) -> None:
    found = gaps(section)
    assert statistics.mean(found) == pytest.approx(1 / 4, rel=0.05)
    # Of gamma arrivals the standard deviation is the mean over the root of the shape.
    assert statistics.stdev(found) * 4 == pytest.approx(spread, rel=0.05, abs=1e-9)


def test_arrivals_are_drawn_by_seed_and_pass_alone() -> None:
    section = LoadSection(rate=4.0)
    assert gaps(section) == gaps(LoadSection(rate=4.0))
    assert gaps(section) != gaps(section, seed=2)
    assert gaps(section) != gaps(section, name="pass2-replay")
    assert section.due_s(1, seed=1, pass_name="p") == [0.0]
