"""What is attributed to the requests of a pass must add up to what its counters moved by."""

import pytest

from harness.counters.errors import CounterError, CounterReset, ForeignTraffic, MissingSeries
from harness.counters.passes import PassRequest, check_pass
from sim.split import TokenSplit

BEFORE = {
    "finished": 5, "preemptions": 0, "prompt_computed": 1000, "prompt_gpu_hit": 10,
    "prompt_host_loaded": 0, "host_loaded_chunks": 3,
}  # fmt: skip
KNOWN = [
    PassRequest(200, TokenSplit(200, 200, 0, 0), 0),
    PassRequest(200, TokenSplit(200, 8, 64, 128), 2),
    PassRequest(200, TokenSplit(200, 8, 0, 192), 3),
]
MOVED = {
    "finished": 3, "prompt_computed": 216, "prompt_gpu_hit": 64, "prompt_host_loaded": 320,
    "host_loaded_chunks": 5,
}  # fmt: skip


def after(**more: int) -> dict[str, int]:
    return {name: value + MOVED.get(name, 0) + more.get(name, 0) for name, value in BEFORE.items()}


@pytest.mark.parametrize("name", ["prompt_computed", "prompt_gpu_hit", "prompt_host_loaded"])
@pytest.mark.parametrize("off", [-1, 1])
def test_sums_by_source_are_the_counters_to_the_token(name: str, off: int) -> None:
    check_pass(BEFORE, after(), KNOWN)
    with pytest.raises(CounterError, match="by source the requests sum to 216 computed"):
        check_pass(BEFORE, after(**{name: off}), KNOWN)


def test_a_hit_taken_for_a_load_is_refused_though_the_tokens_sum_up() -> None:
    wrong = [KNOWN[0], PassRequest(200, TokenSplit(200, 8, 0, 192), 3), KNOWN[2]]
    with pytest.raises(CounterError, match="by source"):
        check_pass(BEFORE, after(), wrong)


def test_a_request_that_is_not_known_may_have_moved_the_counters_by_its_prompt() -> None:
    unknown = [*KNOWN, PassRequest(100, None)]
    check_pass(BEFORE, after(), unknown)  # never counted
    check_pass(BEFORE, after(prompt_computed=60, prompt_host_loaded=40), unknown)
    with pytest.raises(ForeignTraffic, match="101 prompt tokens more"):
        check_pass(BEFORE, after(prompt_computed=61, prompt_host_loaded=40), unknown)
    with pytest.raises(CounterError, match="by source"):
        check_pass(BEFORE, after(prompt_gpu_hit=-1, prompt_computed=101), unknown)


def test_chunks_that_were_not_loaded_are_noticed() -> None:
    with pytest.raises(CounterError, match="loaded 4 chunks in the pass, the requests need 5"):
        check_pass(BEFORE, after(host_loaded_chunks=-1), KNOWN)


def test_counters_of_another_process_or_version_say_nothing() -> None:
    with pytest.raises(CounterReset):
        check_pass(BEFORE, {**after(), "prompt_computed": 3}, KNOWN)
    old = {name: value for name, value in BEFORE.items() if name != "prompt_gpu_hit"}
    with pytest.raises(MissingSeries, match="prompt_gpu_hit"):
        check_pass(old, {n: v for n, v in after().items() if n in old}, KNOWN)
