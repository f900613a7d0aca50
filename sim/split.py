"""Where one request's prompt tokens got their KV from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """Prompt tokens of one request by source; they sum to ``prompt_tokens`` or it does not exist.

    ``computed``: prefilled by this request. ``gpu_hit``: found in the GPU's prefix cache.
    ``host_loaded``: counted by the scheduler as loaded from the host tier (block exact; the bytes
    moved are whole chunks and may exceed it). Raises ValueError for a negative part or a wrong sum.
    """

    prompt_tokens: int
    computed: int
    gpu_hit: int
    host_loaded: int

    def __post_init__(self) -> None:
        if min(self.computed, self.gpu_hit, self.host_loaded) < 0:
            raise ValueError(f"a token source is negative: {self}")
        total = self.computed + self.gpu_hit + self.host_loaded
        if total != self.prompt_tokens:
            raise ValueError(
                f"token sources sum to {total}, the prompt has {self.prompt_tokens} tokens: {self}"
            )


@dataclass(frozen=True, slots=True)
class Units:
    """Tokens that a tier keeps as one or not at all: a GPU ``block``, a host ``chunk``."""

    block: int
    chunk: int


USUAL_UNITS = Units(block=16, chunk=256)
"""vLLM's default on CUDA, and LMCache's."""


SOURCE_CLASSES = (
    "recomputed",
    "gpu+recomputed",
    "host+recomputed",
    "gpu+host+recomputed",
    "gpu+host",
    "host",
    "gpu",
)


def class_of(split: TokenSplit, *, doc_tokens: int, units: Units) -> str:
    """Where a document's KV came from; one of ``SOURCE_CLASSES``, which name every part of it.

    The document is the prompt's first ``doc_tokens`` tokens, the question the rest. A tier keeps
    whole units, so of a document it holds all of it serves floor(doc_tokens / unit) units: the
    unit is a chunk where anything came from the host, else a block. ``recomputed`` is part of the
    class when the tiers served fewer tokens than that. What is computed behind that unit, the
    document's last part of a unit and the question, no tier could have served; nor, of a prompt
    that ends with its document, the last block, which vLLM computes for the last token's logits.
    """
    served = split.gpu_hit + split.host_loaded
    unit = units.chunk if split.host_loaded else units.block
    before_last_token = (split.prompt_tokens - 1) // units.block * units.block
    servable = min(doc_tokens // unit * unit, before_last_token)
    parts = {
        "gpu": split.gpu_hit > 0,
        "host": split.host_loaded > 0,
        "recomputed": not served or served < servable,
    }
    return "+".join(part for part, is_there in parts.items() if is_there)
