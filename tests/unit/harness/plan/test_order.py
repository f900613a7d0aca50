import pytest

from harness.errors import InputError
from harness.plan.files import parse_plan
from harness.plan.order import drawn, weaknesses
from tests.factory import PLAN_TOML, make_plan

A, B = "baseline", "lmcache"
LINE = 'order = ["baseline", "lmcache", "lmcache", "baseline"]'


def test_two_pairs_are_a_b_b_a_and_one_is_a_b() -> None:
    assert drawn(2, B, seed=1, has_control=True) == [A, B, B, A, "control"]
    assert drawn(1, B, seed=1, has_control=False) == [A, B]


def test_more_are_blocks_of_which_either_arm_begins_by_the_seed() -> None:
    orders = [drawn(5, B, seed=seed, has_control=False) for seed in range(64)]
    assert orders[3] == drawn(5, B, seed=3, has_control=False)
    blocks = [order[i : i + 4] for order in orders for i in (0, 4)]
    assert all(block in ([A, B, B, A], [B, A, A, B]) for block in blocks)
    assert 40 <= blocks.count([A, B, B, A]) <= 88  # of 128, four standard errors
    assert all(sorted(order[8:]) == [A, B] for order in orders)


def test_a_plan_of_pairs_has_the_order_that_is_drawn_and_keeps_it() -> None:
    plan = parse_plan(PLAN_TOML.replace(LINE, "pairs = 6").encode(), where="plan.toml")
    assert list(plan.order) == drawn(6, B, seed=1, has_control=False)
    assert "pairs" not in plan.to_toml()
    assert parse_plan(plan.to_toml().encode(), where="again").order == plan.order


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (LINE + "\npairs = 2", "order or pairs, not both"),
        ("pairs = 0", "pairs"),
        ('pairs = "2"', "pairs"),
    ],
)
def test_pairs_that_are_none_are_refused_by_name(lines: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_plan(PLAN_TOML.replace(LINE, lines).encode(), where="plan.toml")


def test_the_treatment_of_pairs_must_be_one() -> None:
    more = PLAN_TOML.replace(LINE, "pairs = 2") + '[arms.other]\ntier = "native"\n'
    with pytest.raises(InputError, match="pairs needs to know its treatment"):
        parse_plan(more.encode(), where="plan.toml")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([A, B, B, A, "control"], None),
        ([B, B], None),
        ([A, B, B, A, B, A, A, B], None),
        ([A, B, B, A, A, B], None),
        ([A, B, "control"], "has 1 pair of sessions, and the decision needs 2"),
        ([A, B, A, B], "in every pair of the order baseline comes first"),
        ([A, B, B, A, A, B, B, A], "one block again and again"),
    ],
)
def test_an_order_that_cannot_decide_well_is_told_so(order: list[str], said: str | None) -> None:
    found = list(weaknesses(order, make_plan().decision.min_blocks))
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])
