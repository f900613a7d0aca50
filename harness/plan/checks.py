"""Why a plan cannot work: what the engines would refuse, or nobody could attribute."""

import json
from collections.abc import Iterator
from typing import Any

from harness.plan.arms import BASELINE, CONTROL, treatments
from harness.plan.plan import BUILT_IN_ARMS, ArmSection, Plan
from harness.plan.rule import unknown_pass
from servers.flags import may_mean
from servers.tiers.registry import SERVED
from sim.tiers.gpu_pool import usable_tokens
from sim.tiers.registry import MODELS
from sim.tiers.settings import TierKind
from sim.workload import pass_name

# Prompts are Python integers in memory: 8 bytes a reference, so 200 million are about 1.6 GB.
_MOST_TOKENS_IN_MEMORY = 200_000_000


def problems_of(plan: Plan) -> list[str]:
    """Why the engines could not run this plan, or its outcome could not be attributed."""
    problems = list(_unknown_arms(plan)) or [*_arms_problems(plan), *_order_problems(plan)]
    if problems:  # the rest asks what the arms are
        return problems
    problems = [
        *_workload_problems(plan), *_load_problems(plan),
        *_gpu_tier_problems(plan), *_host_tier_problems(plan),
    ]  # fmt: skip
    passes = [pass_name(index, order) for index, order in enumerate(plan.workload.passes)]
    wrong = unknown_pass(plan.decision, passes)
    return [*problems, wrong] if wrong else problems


def _workload_problems(plan: Plan) -> Iterator[str]:
    work, server = plan.workload, plan.server
    prompt = work.spec().longest_prompt_tokens
    total = prompt + work.output_tokens
    session_tokens = total * (work.documents * len(work.passes) + work.warmup_documents)
    if session_tokens > _MOST_TOKENS_IN_MEMORY:
        yield (
            f"workload asks for {session_tokens:,} tokens a session, prompts and outputs; at most "
            f"{_MOST_TOKENS_IN_MEMORY:,} are held in memory"
        )
    if plan.control and (plan.control.documents or 0) > work.documents:
        yield f"control.documents is {plan.control.documents}; the workload has {work.documents}"
    if total > server.max_model_len:
        yield (
            f"server.max_model_len is {server.max_model_len}, but prompt and output are {total} "
            "tokens; vLLM would cut the output silently"
        )
    if prompt > server.max_num_batched_tokens:
        yield (
            f"server.max_num_batched_tokens is {server.max_num_batched_tokens}, but a prompt has "
            f"{prompt} tokens; a prefill in several steps is not predictable to the token"
        )


def _load_problems(plan: Plan) -> Iterator[str]:
    """Why requests in flight together could not be told apart."""
    if plan.load is None:
        return
    if problem := plan.load.problem():
        yield problem
    for name, arm in plan.arms.items():
        for flag in arm.flags:
            if flag == "-dp" or may_mean(flag, "--data-parallel-size"):
                yield f"arms.{name}.flags has {flag}: under [load] one rank's KV events are read"


def _unknown_arms(plan: Plan) -> Iterator[str]:
    known = {BASELINE, CONTROL, *BUILT_IN_ARMS, *plan.arms}
    for name in plan.order:
        if name not in known:
            yield (
                f"order names {name!r}, which is no arm: known are {', '.join(sorted(known))}; "
                f"[arms.{name}] would define it"
            )


def _order_problems(plan: Plan) -> Iterator[str]:
    """What makes sessions in this order no pairs of baseline and treatment, and perhaps a control."""
    compared = [name for name in plan.order if name != CONTROL]
    others = treatments(plan.order)
    if len(others) > 1:
        yield (
            f"order has the arms {', '.join(sorted(others))} next to baseline; a plan compares "
            "one: make a plan for each"
        )
    n_base = compared.count(BASELINE)
    n_tier = len(compared) - n_base
    if n_base and n_tier and n_base != n_tier:
        yield (
            f"order has {n_base} baseline and {n_tier} {plan.treatment} sessions; they are "
            "compared in pairs, so there must be as many of each"
        )
    pairs = zip(compared[::2], compared[1::2], strict=False)
    if n_base and n_tier and any(first == second for first, second in pairs):
        yield (
            f"order compares {' '.join(compared)}: each pair of sessions must be one of each arm, "
            "as in A B B A, or a change of the machine looks like an effect"
        )
    if CONTROL in plan.order and plan.control is None:
        yield "order names control, but there is no [control] section"
    if CONTROL in plan.order and plan.arm(CONTROL).tier is None:
        yield (
            f"order names control, the treatment on a GPU tier that holds everything; "
            f"{plan.treatment} has no host tier to show idle there"
        )


# Options the launcher sets itself: a second one would undo what every arm has in common.
_OURS = (
    "--model", "--served-model-name", "--host", "--port", "--dtype", "--load-format",
    "--max-model-len", "--block-size", "--num-gpu-blocks-override", "--max-num-seqs",
    "--max-num-batched-tokens", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend",
    "--api-server-count", "--disable-log-stats", "--config", "--kv-events-config",
)  # fmt: skip


# Which GPU an arm runs on is no factor: CUDA's order of them counts, too.
_OUR_ENV = (
    "PYTHONHASHSEED", "TMPDIR", "VLLM_CACHE_ROOT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
)  # fmt: skip

# KVTransferConfig of vLLM 0.32 asks for one of them wherever there is a connector.
_ROLES = ("kv_both", "kv_consumer", "kv_producer")


def _arms_problems(plan: Plan) -> Iterator[str]:
    for name, arm in plan.arms.items():
        where = f"arms.{name}"
        if name in (BASELINE, CONTROL):
            yield f"{where}: {name} is fixed; give the arm another name"
        elif arm == ArmSection():
            yield f"{where} differs in nothing from baseline; give it a tier, or a factor of its own"
        if arm.connector is not None and arm.tier is not None:
            yield f"{where} has a tier and a connector; one of them"
        if arm.connector is not None:
            yield from _connector_problems(f"{where}.connector", arm.connector)
        yield from _words_problems(where, arm)


def _words_problems(where: str, arm: ArmSection) -> Iterator[str]:
    """What a process cannot be given, or kvcliff gives itself."""
    for flag in arm.flags:
        ours = next((option for option in _OURS if may_mean(flag, option)), None)
        if ours is not None:
            meant = "" if flag.split("=")[0] == ours else f" (vLLM reads it as {ours})"
            yield f"{where}.flags has {flag}, which kvcliff sets itself for every arm{meant}"
        if "\0" in flag:
            yield f"{where}.flags has {flag!r}: a command line has no NUL characters"
    for name, value in arm.env.items():
        if name in _OUR_ENV:
            yield f"{where}.env has {name}, which kvcliff sets itself for every arm"
        if "\0" in value:
            yield f"{where}.env.{name} is {value!r}: an environment has no NUL characters"


def _connector_problems(where: str, connector: dict[str, Any]) -> Iterator[str]:
    """A connector is written as JSON, and has what vLLM insists on."""
    name, role = connector.get("kv_connector"), connector.get("kv_role")
    if not isinstance(name, str) or not name:
        yield f"{where} has no kv_connector, the name of the class to create"
    elif role not in _ROLES:
        given = "none" if role is None else repr(role)
        yield f"{where}.kv_role: vLLM needs one of {', '.join(_ROLES)}, got {given}"
    try:
        json.dumps(connector, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"{where} cannot be written as JSON, which vLLM takes: {error}"


def _gpu_tier_problems(plan: Plan) -> Iterator[str]:
    server = plan.server
    capacities = [("server", server.num_gpu_blocks)]
    if plan.control:
        capacities.append(("control", plan.control.num_gpu_blocks))
    for section, blocks in capacities:
        usable = usable_tokens(blocks, server.block_size)
        if usable < server.max_model_len:
            yield (
                f"{section}.num_gpu_blocks is {blocks}: {usable} usable tokens, fewer than "
                f"server.max_model_len {server.max_model_len}; vLLM refuses to start"
            )
    if server.build == "cpu" and server.block_size % 32:
        yield f"server.block_size is {server.block_size}; the CPU build takes multiples of 32"


def _host_tier_problems(plan: Plan) -> Iterator[str]:
    tier, block_size = plan.arm(plan.treatment).tier, plan.server.block_size
    chunk_tokens = plan.host.chunk_tokens
    served = None if tier is None else SERVED[tier]
    if served and not served.takes_policy and plan.host.policy != "LRU":
        yield f"host.policy is {plan.host.policy!r}; the tier {tier} knows LRU alone"
    if served and served.keeps_blocks and "chunk_tokens" in plan.host.model_fields_set:
        if chunk_tokens != block_size:
            yield (
                f"host.chunk_tokens is {chunk_tokens}; the tier {tier} keeps single blocks of "
                f"{block_size}: leave it out"
            )
    elif _needs_whole_blocks(tier) and chunk_tokens % block_size:
        yield (
            f"host.chunk_tokens is {chunk_tokens}; LMCache's server needs a multiple of "
            f"server.block_size {block_size}"
        )


def _needs_whole_blocks(tier: TierKind | None) -> bool:
    """Whether a chunk must be whole GPU blocks, and is not one anyway."""
    return tier is None or not (SERVED[tier].keeps_blocks or MODELS[tier].takes_any_chunk)
