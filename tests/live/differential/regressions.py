"""Small workloads on which a rule was once wrong, or on which two rules differ: kept, and cheap.

A failing comparison prints its workload minimised and in this form; it belongs here once mended.
"""

from sim.tiers.spec import TierSpec
from tests.live.differential.workloads import Case, Step


def _ids(bits: str) -> tuple[int, ...]:
    return tuple(map(int, bits))


REGRESSIONS: dict[str, list[Case]] = {
    # vLLM 0.23 evicts the first prompt's only full block, 0.24 does not (PR #42656).
    "gpu": [
        Case(
            seed=-1,
            tiers=TierSpec(
                block_size=4,
                num_gpu_blocks=4,
                max_num_batched_tokens=1000,
                async_scheduling=False,
            ),
            steps=(
                Step(_ids("000011"), (0,)),
                Step(_ids("111"), (0,)),
                Step(_ids("101011"), (0,)),
                Step(_ids("000011"), (0,)),
            ),
        )
    ],
    # The two recency rules of 0.32 and 0.33 part in the third request: found by running the rule
    # of the one against the classes of the other.
    "native": [
        Case(
            seed=-2,
            tiers=TierSpec(
                block_size=1,
                num_gpu_blocks=40,
                max_num_batched_tokens=7,
                async_scheduling=False,
                host="native",
                host_chunks=19,
                chunk_tokens=2,
            ),
            steps=(
                Step(_ids("011011110"), _ids("010")),
                Step(_ids("1110001011010110001101001101111100111"), _ids("000")),
                Step(_ids("011011110111110110100011100000011010110"), (2,), stopped=True),
            ),
        )
    ],
}
