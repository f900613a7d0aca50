"""Prediction of request streams of any length: memory for the tiers' state and one request."""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from sim.predict import Predictor, TierSpec
from sim.tiers.prefix_keys import PrefixKeys

_KEY_BYTES = 16  # 128 bits: among 10**12 blocks two equal keys by chance are a 10**-15 event
_FIRST_SEGMENT_ID = 2**32  # beyond every id a model has


class DigestKeys(PrefixKeys):
    """As ``PrefixKeys``, by SHA-256 of the whole prefix, as vLLM itself names blocks.

    Memory does not grow with the tokens seen. Token ids must fit 64 bits signed (OverflowError).
    """

    def of(self, tokens: Sequence[int]) -> list[int]:
        """One key per full block of ``tokens``, in order; a partial last block has none."""
        ids = array("q", tokens)
        step = self._block_tokens * ids.itemsize
        content = ids.tobytes()
        prefix = sha256()
        keys = []
        for start in range(0, len(content) - step + 1, step):
            prefix.update(content[start : start + step])
            keys.append(int.from_bytes(prefix.digest()[:_KEY_BYTES], "little"))
        return keys


class StreamPredictor(Predictor):
    """A predictor whose memory does not grow with the tokens it has seen."""

    def __init__(self, tiers: TierSpec) -> None:
        super().__init__(tiers)
        self._keys = DigestKeys(tiers.block_size)


def segment_ids(name: str, n_tokens: int) -> range:
    """Token ids of a named piece of text: consecutive, from a start that the name's digest gives.

    Starts lie in [2**32, 2**62 + 2**32): two of 10**5 names meet with a chance of 10**-9, and a
    meeting matters only in prompts that agree up to it.
    """
    digest = sha256(name.encode("utf-8", "surrogatepass")).digest()
    start = _FIRST_SEGMENT_ID + (int.from_bytes(digest[:8], "little") >> 2)
    return range(start, start + n_tokens)
