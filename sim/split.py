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


SOURCE_CLASSES = ("recomputed", "gpu+recomputed", "gpu+host", "host", "gpu")


def class_of(computed: int, gpu_hit: int, host_loaded: int, *, question: int, block: int) -> str:
    """Where a document's KV came from; one of ``SOURCE_CLASSES``. All in tokens.

    A GPU hit ends at a block boundary, so a whole document found in the GPU tier leaves at most
    the question and one block to compute; a partial hit leaves or loads more.
    """
    if gpu_hit == 0:
        return "host" if host_loaded else "recomputed"
    if host_loaded:
        return "gpu+host"
    return "gpu" if computed <= question + block else "gpu+recomputed"
