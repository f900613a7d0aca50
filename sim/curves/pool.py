"""vLLM's own GPU pool at one capacity, block by block: what the curve of all capacities leaves out.

A partial last block takes room while its request runs, and a prompt found whole computes its last
block a second time, which then lies in the pool twice. Both cost hits, a few blocks' worth.
"""

import numpy as np

from sim.curves.stack import order_of
from sim.curves.trace import Ints
from sim.curves.tree import PrefixTree
from sim.errors import SpecError
from sim.predict import Predictor, TierSpec


def pool_hits(
    tree: PrefixTree, usable_blocks: int, *, order: Ints | None = None, decode: bool = False
) -> Ints:
    """Blocks each request of ``order`` (default: all, by arrival) finds in the pool, in that order.

    ``usable_blocks`` is ``num_gpu_blocks`` − 1, at least 1. As ``sim.predict``: one request after
    the other, the last token always computed; without ``decode``, of an answer only its first
    token is generated. A request that does not fit the pool is not served and changes nothing.
    """
    requests = tree.requests
    block = requests.block_tokens
    pool = Predictor(
        TierSpec(block_size=block, num_gpu_blocks=usable_blocks + 1, max_num_batched_tokens=2**61)
    )
    order = order_of(tree, order)
    hits = np.zeros(len(order), dtype=np.int64)
    for place, r in enumerate(order.tolist()):
        n_prompt = int(requests.input_tokens[r])
        # Names below 0 are of the trace's blocks; what it does not list, nobody asks for again.
        keys = (-1 - tree.ids_of(r)[: n_prompt // block]).tolist()
        answer = max(int(requests.output_tokens[r]), 1) if decode else 1
        try:
            found = pool.request_named(keys, n_prompt, answer)
        except SpecError:
            continue
        hits[place] = found.split.gpu_hit // block
    return hits
