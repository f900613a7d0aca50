"""A deployment as its file describes it."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from harness.errors import InputError
from harness.files import validated
from harness.plan.host import DEFAULT, EvictionFields
from servers.tiers.registry import keeps_blocks
from sim.tiers.registry import model_of
from sim.tiers.settings import DEFAULT_KIND, HostKind
from sim.workload import PassOrder

REQUEST_IN_BLOCKS = 30
"""A request by itself takes as long to predict as so many of its blocks."""

_MOST_BLOCKS = 5_000_000  # about 3 s a prediction, and up to ten are made

DescribedCount = Annotated[int, Field(ge=1, le=2**40)]


class Deployment(EvictionFields):
    """DEPLOYMENT.toml. ``model``: what ``lookup.config_of`` finds.

    ``gpu_kv_tokens`` is vLLM's log line "GPU KV cache size: N tokens". ``host_gib`` is the size as
    it is configured: of each worker for ``lmcache``, of the server for ``lmcache-mp``, in all for
    ``native``. The documents are asked in ``passes``, each time with a question of its own.
    ``chunk_tokens`` is LMCache's 256 unless said, and a block for ``native``, whose
    blocks_per_chunk is 1.
    """

    model: str
    gpu_kv_tokens: DescribedCount
    documents: Annotated[int, Field(ge=1, le=1_000_000)]
    document_tokens: DescribedCount
    passes: Annotated[tuple[PassOrder, ...], Field(min_length=1, strict=False)] = ("fwd", "fwd")
    question_tokens: DescribedCount = 20
    output_tokens: DescribedCount = 16
    host: HostKind = DEFAULT_KIND
    host_gib: Annotated[float, Field(ge=0, le=1_048_576)] = 0.0
    engine: str = "0.32.0"
    kv_dtype: str = "auto"
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    block_size: DescribedCount = 16
    chunk_tokens: DescribedCount = DEFAULT.chunk_tokens
    max_num_batched_tokens: DescribedCount = 8192

    @model_validator(mode="before")
    @classmethod
    def _chunks_of_native(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and keeps_blocks(fields.get("host")):
            return {"chunk_tokens": fields.get("block_size", 16)} | fields
        return fields

    @property
    def prompt_tokens(self) -> int:
        """Tokens of every prompt."""
        return self.document_tokens + self.question_tokens

    @property
    def document_blocks(self) -> int:
        """Whole blocks of a document: what a replay can find of it."""
        return self.document_tokens // self.block_size

    @property
    def evicts_early(self) -> bool:
        """Whether the host tier evicts before it is full."""
        model = model_of(self.host)
        return model is not None and model.evicts_early(self.policy)

    @property
    def request_blocks(self) -> int:
        """Blocks a request holds at its end; its last generated token never gets a slot."""
        return -(-(self.prompt_tokens + self.output_tokens - 1) // self.block_size)


def read_deployment(path: Path) -> Deployment:
    """DEPLOYMENT.toml; InputError names file, field and value."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    fields = f"fields: {', '.join(Deployment.model_fields)}"
    deployment = validated(Deployment, content, where=str(path), hint=fields)
    requests = deployment.documents * len(deployment.passes)
    if requests * (deployment.request_blocks + REQUEST_IN_BLOCKS) > _MOST_BLOCKS:
        raise InputError(
            f"{path}: {requests:,} prompts of {deployment.request_blocks:,} KV blocks; about "
            f"{_MOST_BLOCKS:,} blocks in all are predicted here",
            hint="describe fewer documents and a proportionally smaller GPU and host tier",
        )
    return deployment
