"""The plan: what is compared, on which workload, in which order, as its file says it."""

from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from harness.errors import InputError
from harness.plan.labels import BASELINE, CONTROL, treatments
from harness.plan.rule import DecisionSection
from servers.arms import connector_class
from sim.tiers.settings import DEFAULT_KIND, TIER_KINDS, TierKind
from sim.workload import (
    Questions,
    Workload,
    WorkloadSpec,
    build_workload,
)

PLAN_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)


Count = Annotated[int, Field(ge=1, le=100_000_000)]


GpuBlocks = Annotated[int, Field(ge=2, le=10_000_000)]


Share = Annotated[float, Field(gt=0, le=1)]


Seconds = Annotated[float, Field(gt=0, le=86_400)]


Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]


Weights = Literal["auto", "dummy"]
"""``auto``: the model's own. ``dummy``: made up by vLLM (``--load-format dummy``); nothing is
downloaded, timing and token sources are the model's, outputs mean nothing."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(_Section):
    """``path``: ``tiny`` (written by kvcliff), a folder or a hub id; see ``harness.plan.models``."""

    path: str = "tiny"
    weights: Weights = "auto"


class WorkloadSection(_Section):
    """Sizes in tokens; ``vocab`` is a half-open range of token ids, by default from the model.

    ``questions`` and ``document_step_tokens`` as in ``sim.workload``; for those two the sizes are
    the smallest, ``spec().longest_prompt_tokens`` is the largest.
    """

    documents: Count
    document_tokens: Count
    question_tokens: Count
    output_tokens: Annotated[int, Field(ge=2)]  # 1 may reorder store and session end on a GPU
    passes: Annotated[tuple[Literal["fwd", "rev"], ...], Field(min_length=1, strict=False)]
    warmup_documents: Count = 2
    seed: int = 1
    vocab: Annotated[tuple[int, int], Field(strict=False)] | None = None
    document_step_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    questions: Questions = "new"

    def spec(self) -> WorkloadSpec:
        """The workload as ``sim`` takes it; before ``vocab`` is known its sizes alone hold."""
        return WorkloadSpec(**{**self.model_dump(), "vocab": self.vocab or (0, 0)})


class ServerSection(_Section):
    """What every arm's vLLM server has in common; ``num_gpu_blocks`` includes the null block.

    ``engine``: the vLLM version whose rules predictions follow, by default the installed one's.
    """

    engine: Annotated[str, Field(pattern=r"^(auto|[0-9]+\.[0-9]+.*)$")] = "auto"
    build: Literal["auto", "cpu", "gpu", "fake"] = "auto"
    block_size: Count
    num_gpu_blocks: GpuBlocks
    max_num_batched_tokens: Count
    max_model_len: Count
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    eager: bool = False


class HostSection(_Section):
    """The host tier of the treatment and of ``control``; the last three: of ``lmcache-mp`` alone.

    For vLLM's own tiers a chunk is a block.
    """

    gib: Annotated[float, Field(gt=0, le=65_536)]
    chunk_tokens: Count = 256
    watermark: Share = 0.8
    evict_ratio: Share = 0.2
    policy: Literal["LRU", "noop"] = "LRU"


class ArmSection(_Section):
    """What a label of ``order`` stands for, next to ``baseline``.

    ``tier`` None: no host tier. ``env``, ``flags`` (words of vLLM's command line) and
    ``connector`` (a ``--kv-transfer-config``, in place of ``tier``) are passed on as they are;
    an arm with one of them has no exact prediction.
    """

    tier: TierKind | None = None
    prefix_caching: bool = True
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    flags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    connector: dict[str, Any] | None = None

    @property
    def connector_class(self) -> str | None:
        """The KV connector that must be seen to run; None for none."""
        return connector_class(self.tier, self.connector)


BUILT_IN_ARMS: dict[str, ArmSection] = {
    **{kind: ArmSection(tier=kind) for kind in TIER_KINDS},
    "none": ArmSection(prefix_caching=False),
}
"""The labels every plan knows; ``[arms.LABEL]`` adds to them or replaces one."""


class ControlSection(_Section):
    """The fits-in-GPU control: the treatment arm with this many GPU blocks instead.

    ``documents``: it asks for the first so many alone, in every pass; None: for all.
    """

    num_gpu_blocks: GpuBlocks
    documents: Count | None = None


class DeadlineSection(_Section):
    """The longest each wait may take, in seconds."""

    start_s: Seconds = 240
    request_s: Seconds = 120
    settle_s: Seconds = 20


class Plan(_Section):
    """A plan file as written; ``resolve`` turns it into an ``Experiment``."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]
    order: Annotated[tuple[Label, ...], Field(min_length=1, strict=False)]
    model: ModelSection = ModelSection()
    workload: WorkloadSection
    server: ServerSection
    host: HostSection
    control: ControlSection | None = None
    arms: dict[Label, ArmSection] = {}
    deadlines: DeadlineSection = DeadlineSection()
    decision: DecisionSection = DecisionSection()

    @property
    def treatment(self) -> str:
        """The label compared with ``baseline``; where none is measured, the tier it would be."""
        others = treatments(self.order)
        return others[0] if others else DEFAULT_KIND

    def arm(self, label: str) -> ArmSection:
        """What ``label`` stands for: ``control`` the treatment. KeyError: not a label."""
        if label == BASELINE:
            return ArmSection()
        label = self.treatment if label == CONTROL else label
        return self.arms[label] if label in self.arms else BUILT_IN_ARMS[label]

    def to_toml(self) -> str:
        """The plan as TOML, defaults written out."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True, mode="json"))


def documents_of(plan: Plan, label: str) -> int:
    """How many documents, the first ones, a session of an arm asks for in every pass."""
    limit = plan.control.documents if label == CONTROL and plan.control else None
    return plan.workload.documents if limit is None else limit


def session_name(order: int, arm: str) -> str:
    """Name of the session at position ``order`` (1 first): unique in a run, sorts in order."""
    return f"{order:02d}-{arm}"


def whole_workload(plan: Plan) -> Workload:
    """Every request of a session of the resolved ``plan``, warm-up included."""
    work = plan.workload
    assert work.vocab is not None, "resolve fills vocab"
    try:
        return build_workload(work.spec())
    except ValueError as error:
        raise InputError(f"workload: {error}") from None
