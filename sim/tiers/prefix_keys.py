"""One int per whole prefix: what both tiers look their blocks and chunks up by.

vLLM and LMCache chain a hash over the prefix (``vllm/v1/core/kv_cache_utils.hash_block_tokens``,
``lmcache/v1/token_database.py``); the digest itself never decides anything, so a table does.
"""

from collections.abc import Sequence

from sim.errors import SpecError


class PrefixKeys:
    """Names whole prefixes by one int each: two equal keys mean two equal prefixes, always.

    Exact (a table, not a digest) and one pass over the tokens. The table holds every distinct
    block of tokens seen, so its memory grows with the workload's distinct tokens, not its requests.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise SpecError(f"a block of {block_tokens} tokens; it must hold at least 1")
        self._block_tokens = block_tokens
        self._table: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next = 1  # 0 names the empty prefix

    def of(self, tokens: Sequence[int]) -> list[int]:
        """One key per full block of ``tokens``, in order; a partial last block has none."""
        step, table = self._block_tokens, self._table
        tokens = tuple(tokens)
        keys: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - step + 1, step):
            entry = (parent, tokens[start : start + step])
            key = table.get(entry)
            if key is None:
                key = table[entry] = self.fresh()
            keys.append(key)
            parent = key
        return keys

    def fresh(self) -> int:
        """A key equal to no other: for a block that ends in tokens nobody will ask for again."""
        self._next += 1
        return self._next - 1
