"""The plan: what is compared, on which workload, in which order, as its file says it."""

import hashlib
import json
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.errors import InputError
from harness.plan.arms import BASELINE, CONTROL, treatments
from harness.plan.host import DEFAULT, EvictionFields
from harness.plan.load import DEFAULT_SEQS, LoadSection
from harness.plan.order import drawn
from harness.plan.rule import DecisionSection
from servers.arms import connector_class
from sim.errors import SpecError
from sim.split import Units
from sim.tiers.settings import DEFAULT_KIND, TIER_KINDS, TierKind
from sim.workload import Questions, Workload, WorkloadSpec, build_workload

PlanCount = Annotated[int, Field(ge=1, le=100_000_000)]
GpuBlocks = Annotated[int, Field(ge=2, le=10_000_000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
ArmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]

Weights = Literal["auto", "dummy"]
"""``auto``: the model's own. ``dummy``: made up by vLLM (``--load-format dummy``); nothing is
downloaded, timing and token sources are the model's, outputs mean nothing."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(_Section):
    """What every server serves; see ``harness.plan.models``."""

    path: str = Field(
        default="tiny",
        description="`tiny`, a small model that kvcliff writes itself; a folder with config.json and "
        "weights; or a name on Hugging Face, which vLLM downloads",
    )
    weights: Weights = Field(
        default="auto",
        description="`auto`: the model's own; `dummy`: made up by vLLM, so nothing is downloaded and "
        "outputs mean nothing",
    )


class WorkloadSection(_Section):
    """Sizes in tokens; ``spec().longest_prompt_tokens`` is the largest prompt."""

    documents: PlanCount = Field(
        description="number of documents; every request is a document and a question"
    )
    document_tokens: PlanCount = Field(
        description="length of the first document, and of all by default"
    )
    question_tokens: PlanCount = Field(description="length of a question")
    output_tokens: Annotated[int, Field(ge=2)] = Field(  # 1 may reorder store and end on a GPU
        description="tokens generated for a request, at least 2"
    )
    passes: Annotated[tuple[Literal["fwd", "rev"], ...], Field(min_length=1, strict=False)] = Field(
        description="walks over the documents: `fwd` in their order, `rev` in reverse"
    )
    warmup_documents: PlanCount = Field(
        default=2, description="throw-away documents that each session asks for first"
    )
    seed: int = Field(default=1, description="seed of the token ids")
    vocab: Annotated[tuple[int, int], Field(strict=False)] | None = Field(
        default=None,
        description="first token id to draw from, and the one after the last; by default the model's",
    )
    document_step_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = Field(
        default=0, description="each document is that much longer than the one before it"
    )
    questions: Questions = Field(
        default="new",
        description="in each pass a document gets a `new` question, one more `appended` to those "
        "before, or its first one `repeated`",
    )

    def spec(self) -> WorkloadSpec:
        """The workload as ``sim`` takes it; before ``vocab`` is known its sizes alone hold."""
        return WorkloadSpec(**{**self.model_dump(), "vocab": self.vocab or (0, 0)})


class ServerSection(_Section):
    """What every arm's vLLM server has in common."""

    engine: Annotated[str, Field(pattern=r"^(auto|[0-9]+\.[0-9]+.*)$")] = Field(
        default="auto",
        description="the vLLM version whose rules the prediction follows; `auto`: the installed one",
    )
    build: Literal["auto", "cpu", "gpu", "fake"] = Field(
        default="auto", description="vLLM's build, `cpu` or `gpu`; `auto`: the installed one"
    )
    block_size: PlanCount = Field(description="tokens of a KV block")
    num_gpu_blocks: GpuBlocks = Field(
        description="size of the GPU tier in blocks, one of which vLLM never uses"
    )
    max_num_batched_tokens: PlanCount = Field(description="at least as many as a prompt has")
    max_model_len: PlanCount = Field(description="at least as many as a prompt and its output have")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="`float32`, `float16` or `bfloat16`; `auto`: what suits the build",
    )
    eager: bool = Field(
        default=False,
        description="true: no compilation and no CUDA graphs, so a GPU server starts sooner and "
        "generates more slowly",
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None,
        description="requests that run at once, the others wait; by default 4, with a `[load]` "
        f"{DEFAULT_SEQS}",
    )


class _HostSize(_Section):
    gib: Annotated[float, Field(gt=0, le=65_536)] = Field(
        description="size of the host tier in GiB"
    )
    chunk_tokens: PlanCount = Field(
        default=DEFAULT.chunk_tokens,
        description="LMCache's chunk; vLLM's own tiers keep single blocks",
    )


class HostSection(EvictionFields, _HostSize):  # a plan says the size first
    """The host tier of the treatment and of ``control``."""


class ArmSection(_Section):
    """An arm of ``order``, by what it differs in from ``baseline``.

    An arm with ``env``, ``flags`` or ``connector`` has no exact prediction.
    """

    tier: TierKind | None = Field(default=None, description="a kind of host tier; none by default")
    prefix_caching: bool = Field(default=True, description="vLLM's prefix cache, the GPU tier")
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default={}, description="added to vLLM's environment"
    )
    flags: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="words appended to vLLM's command line"
    )
    connector: dict[str, Any] | None = Field(
        default=None, description="a `--kv-transfer-config` in place of `tier`"
    )

    @property
    def connector_class(self) -> str | None:
        """The KV connector that must be seen to run; None for none."""
        return connector_class(self.tier, self.connector)


BUILT_IN_ARMS: dict[str, ArmSection] = {
    **{kind: ArmSection(tier=kind) for kind in TIER_KINDS},
    "none": ArmSection(prefix_caching=False),
}
"""The arms every plan knows; ``[arms.NAME]`` adds to them or replaces one."""


class ControlSection(_Section):
    """The fits-in-GPU control: the treatment arm on another GPU tier."""

    num_gpu_blocks: GpuBlocks = Field(
        description="size of the control's GPU tier in blocks, enough for every document it asks for"
    )
    documents: PlanCount | None = Field(
        default=None, description="the control asks for the first so many only; by default for all"
    )


class DeadlineSection(_Section):
    """The longest each wait may take, in seconds."""

    start_s: Seconds = Field(default=240, description="longest start of a session's servers")
    request_s: Seconds = Field(default=120, description="longest answer to a request")
    settle_s: Seconds = Field(
        default=20, description="longest wait after an answer for counters that are final"
    )


class Plan(_Section):
    """A plan file as written; ``resolve`` turns it into an ``Experiment``."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)] = Field(
        description="version of this format: 1"
    )
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")] = Field(
        description="a name for the run folder"
    )
    order: Annotated[tuple[ArmName, ...], Field(min_length=1, strict=False)] = Field(
        description="the sessions, each an arm: `baseline`, one treatment and perhaps `control`; "
        "needed where there is no `pairs`"
    )
    pairs: Annotated[int, Field(ge=1, le=1_000)] | None = Field(
        default=None,
        exclude=True,  # a run's plan has the order that was drawn
        description="in place of `order`: so many pairs of sessions, in an order drawn by "
        "`workload.seed`, and the control where there is a `[control]`; the treatment is the arm of "
        f"`[arms]`, or `{DEFAULT_KIND}`",
    )
    model: ModelSection = ModelSection()
    workload: WorkloadSection
    server: ServerSection
    host: HostSection
    control: ControlSection | None = None
    load: LoadSection | None = None
    arms: dict[ArmName, ArmSection] = {}
    deadlines: DeadlineSection = DeadlineSection()
    decision: DecisionSection = DecisionSection()

    @model_validator(mode="before")
    @classmethod
    def _with_order(cls, content: Any) -> Any:
        """The order drawn for ``pairs``; what is wrong with either is said by its own field."""
        if not isinstance(content, dict) or "pairs" not in content:
            return content
        if "order" in content:
            raise ValueError("a plan has order or pairs, not both")
        arms, workload = content.get("arms") or {}, content.get("workload")
        seed = workload.get("seed", 1) if isinstance(workload, dict) else 1
        n_pairs = content["pairs"]
        if not isinstance(arms, dict) or type(n_pairs) is not int or not 1 <= n_pairs <= 1_000:
            return {**content, "order": [BASELINE]}
        if len(arms) > 1:
            raise ValueError("pairs needs to know its treatment: one arm in [arms], or order")
        treatment = next(iter(arms), DEFAULT_KIND)
        has_control = "control" in content
        order = drawn(n_pairs, treatment, seed=seed, has_control=has_control)
        return {**content, "order": order}

    @property
    def treatment(self) -> str:
        """The arm compared with ``baseline``; where none is measured, the tier it would be."""
        others = treatments(self.order)
        return others[0] if others else DEFAULT_KIND

    @property
    def units(self) -> Units:
        """What the tiers of a resolved plan keep as one."""
        return Units(block=self.server.block_size, chunk=self.host.chunk_tokens)

    def arm(self, name: str) -> ArmSection:
        """The arm ``name``; ``control`` is the treatment. KeyError: there is none."""
        if name == BASELINE:
            return ArmSection()
        name = self.treatment if name == CONTROL else name
        return self.arms[name] if name in self.arms else BUILT_IN_ARMS[name]

    def to_toml(self) -> str:
        """The plan as TOML, defaults written out."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True, mode="json"))


def documents_of(plan: Plan, arm: str) -> int:
    """How many documents, the first ones, a session of an arm asks for in every pass."""
    limit = plan.control.documents if arm == CONTROL and plan.control else None
    return plan.workload.documents if limit is None else limit


def plan_id_of(plan: Plan, shape: bytes) -> str:
    """Name and content hash: runs with equal ids asked the same of the same build and model shape.

    ``shape``: the model's config.json. The model counts by it and by whose weights it has, not by
    where it lies; what only waits or judges does not.
    """
    content = plan.model_dump(
        mode="json",
        by_alias=True,
        exclude={"name": True, "deadlines": True, "model": {"path"}},
        exclude_defaults=True,
    )
    if not content.get("model"):
        content.pop("model", None)  # as in plans from before there was a choice of weights
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode() + shape)
    return f"{plan.name}-{digest.hexdigest()[:8]}"


def session_name(order: int, arm: str) -> str:
    """Name of the session at position ``order`` (1 first): unique in a run, sorts in order."""
    return f"{order:02d}-{arm}"


def whole_workload(plan: Plan) -> Workload:
    """Every request of a session of the resolved ``plan``, warm-up included."""
    work = plan.workload
    assert work.vocab is not None, "resolve fills vocab"
    try:
        return build_workload(work.spec())
    except SpecError as error:
        raise InputError(f"workload: {error}") from None
