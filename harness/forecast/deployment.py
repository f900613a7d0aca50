"""A deployment that is only described: what its caches would serve, and from which size on.

For set-ups met in the wild, "no gain, 0 hits": the model, vLLM's own log line and the workload's
shape are enough. Nothing is started and no plan is needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

from harness.errors import InputError
from harness.forecast.deployment_bounds import Bounds, whatever_is_kept, whenever_it_ticks
from harness.forecast.deployment_file import REQUEST_IN_BLOCKS, Deployment
from harness.forecast.deployment_text import sentences
from harness.forecast.edges import host_edge_of, is_affordable, least_from
from harness.plan.lookup import config_of
from servers.tiers.registry import served_tier
from sim.errors import SpecError
from sim.layout import KvGroup, KvLayout
from sim.predict import NotPredictable, Predictor, TierSpec
from sim.split import TokenSplit
from sim.tiers.host import HostRequest, TicksMatter, align_up
from sim.tiers.lmcache_mp import HostChunks
from sim.tiers.registry import open_host, with_host
from sim.tiers.spec import engine_note
from sim.units import GIB
from sim.workload import pass_name

Passes = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class _Enough:
    """The host tier that is enough, and whether it is the least, and larger ones are enough too."""

    chunks: int | None
    is_least: bool
    is_steady: bool


def describe(deployment: Deployment) -> dict[str, Any]:
    """What the deployment would serve, as JSON-ready values, and a paragraph that says it.

    ``enough`` are sizes at which replays find every document, each tier alone (``gpu_tokens``,
    ``host_chunks``, ``host_gib``; null for a host that can serve none). They are the least: one
    block or chunk less, predicted too, falls short; unless ``host_is_least`` is false, for a
    description too large to look for it. ``host_is_steady`` is false where a larger host was seen
    to serve less, as a watermark's may; ``advised_gib``, in tenths, serves as well as the least.
    ``predicted`` has prompt tokens by pass and source, ``predicted_with_enough_host`` those beside
    a host tier of ``host_chunks``.
    ``inexact_because`` is empty where the prediction is exact to the token for one request at a
    time; otherwise ``computed_bounds`` has the least and the most tokens computed, by pass.
    Raises InputError for a model or sizes no server could have.
    """
    try:
        content = _predicted(deployment)
    except NotPredictable as error:
        raise InputError(f"this deployment cannot be predicted: {error}") from None
    except SpecError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"model {deployment.model!r}: {error}") from None
    return content | {"paragraph": " ".join(sentences(deployment, content))}


def _predicted(deployment: Deployment) -> dict[str, Any]:
    group, inexact = _only_group(deployment)
    sizes = _configured_sizes(deployment, group)
    host = sizes["host"]
    enough = _enough_host(deployment)
    chunks = enough.chunks
    tiers = _tiers(deployment, host["chunks"], chunk_bytes=host["chunk_bytes"])
    predicted, inexact, bounds = _as_configured(deployment, tiers, inexact)
    better = advised = None
    if chunks is not None:
        better = _tokens_by_pass(deployment, _tiers(deployment, chunks))
        advised = _advised_gib(deployment, enough, better, host["chunk_bytes"])
    return {
        "schema": 1,
        "bytes_per_token": group.bytes_per_token,
        "gpu": sizes["gpu"],
        "host": host,
        "enough": {
            "gpu_tokens": _enough_gpu_blocks(deployment) * deployment.block_size,
            "host_chunks": chunks,
            "host_gib": None if chunks is None else chunks * host["chunk_bytes"] / GIB,
            "host_is_least": enough.is_least,
            "host_is_steady": enough.is_steady,
            "advised_gib": advised,
        },
        "predicted": predicted,
        "predicted_with_enough_host": better,
        "inexact_because": inexact,
        "computed_bounds": bounds,
    }


def _as_configured(
    deployment: Deployment, tiers: TierSpec, inexact: list[str]
) -> tuple[Passes, list[str], Bounds | None]:
    """Tokens beside the host configured, why they are not exact, and then their bounds."""
    d = deployment
    try:
        predicted = _tokens_by_pass(d, tiers)
        if not inexact:
            return predicted, [], None
    except TicksMatter:
        predicted = _tokens_by_pass(d, tiers, ticks=(0,))
    asked = list(zip((name for name, _ in _requests(d)), _host_requests(d), strict=True))
    in_chunks = 0 if d.host == "none" else d.document_tokens // d.chunk_tokens * d.chunk_tokens
    if inexact:
        most = max(in_chunks, d.document_blocks * d.block_size)
        return predicted, inexact, whatever_is_kept(asked, most, is_gpu_known=False)
    host = open_host(tiers)
    assert isinstance(host, HostChunks), "no other tier has a timer"
    bounds = whenever_it_ticks(asked, host)
    if bounds is None:
        bounds = whatever_is_kept(asked, in_chunks, is_gpu_known=True)
    if all(least == most for least, most in bounds.values()):
        return predicted, [], None
    why = (
        f"prompts of {d.prompt_tokens:,} tokens take several prefill steps of "
        f"{d.max_num_batched_tokens:,}, and the host tier's eviction timer, which may tick between "
        "two of them, is taken not to"
    )
    return predicted, [why], bounds


def _only_group(deployment: Deployment) -> tuple[KvGroup, list[str]]:
    """The model's one group of layers, and why a prediction for it is not exact."""
    layout = KvLayout.from_config(
        config_of(deployment.model),
        deployment.kv_dtype,
        max_model_len=deployment.prompt_tokens + deployment.output_tokens,
    )
    layout.check_workers(deployment.tensor_parallel)
    if len(layout.groups) > 1 or layout.groups[0].kind not in ("full_attention", "mla"):
        held = "; ".join(
            f"{g.layers} layers of {g.kind}: "
            + (
                f"{g.bytes_per_token:,} bytes a token"
                if g.bytes_per_token is not None
                else f"{g.state_bytes or 'unknown'} bytes a sequence"
            )
            for g in layout.groups
        )
        raise SpecError(f"{deployment.model}: {layout.why_not_predictable} ({held})")
    inexact = [layout.why_not_predictable] if layout.why_not_predictable else []
    if (note := engine_note(deployment.engine)) is not None:
        inexact.append(note)
    if layout.groups[0].window_tokens is not None and deployment.host != "none":
        inexact.append(
            "a sliding window that no request outgrows was compared with vLLM's own cache alone"
        )
    if deployment.tensor_parallel > 1:
        inexact.append("more than one tensor-parallel worker was never compared with the engines")
    return layout.groups[0], inexact


def _configured_sizes(deployment: Deployment, group: KvGroup) -> dict[str, Any]:
    """Both tiers as configured; ``chunk_bytes`` is what one chunk takes of the configured size."""
    worker = group.worker_bytes_per_token(deployment.tensor_parallel)
    # A latent is stored by one rank for all; otherwise every rank stores its own heads, and
    # in-process each into a store of its own.
    shares = 1
    served = served_tier(deployment.host)
    if group.kv_heads is not None and not (served and served.is_per_worker):
        shares = deployment.tensor_parallel
    chunk_bytes = shares * align_up(worker * deployment.chunk_tokens)
    chunks = 0 if deployment.host == "none" else int(deployment.host_gib * GIB) // chunk_bytes
    return {
        "gpu": {
            "tokens": deployment.gpu_kv_tokens,
            "gib_per_worker": deployment.gpu_kv_tokens * worker / GIB,
        },
        "host": {
            "kind": deployment.host,
            "gib": deployment.host_gib,
            "gib_is": served.size_is if served else None,
            "chunk_bytes": chunk_bytes,
            "chunks": chunks,
            "tokens": chunks * deployment.chunk_tokens,
        },
    }


def _enough_gpu_blocks(deployment: Deployment) -> int:
    """The fewest blocks, null block included, that find every document in every replay alone."""
    d = deployment
    alone = _tiers(d.model_copy(update={"host": "none"}), 0)

    def finds_all(blocks: int) -> bool:
        predictor = Predictor(replace(alone, num_gpu_blocks=blocks))
        asked: set[int] = set()
        for _, document in _requests(d):
            hit = _split_of(predictor, d, document).gpu_hit
            if document in asked and hit < d.document_blocks * d.block_size:
                return False
            asked.add(document)
        return True

    return least_from(finds_all, guess=_lru_blocks(d), lowest=1 + d.request_blocks)


def _lru_blocks(deployment: Deployment) -> int:
    """The fewest blocks by counting: at its replay a document is as old as all asked since.

    Those leave their whole blocks, and each request the full blocks of its question; a block
    without a hash is used again by the next request (since vLLM 0.24; before, it ages, too).
    """
    d = deployment
    if len(d.passes) == 1 or not d.document_blocks:
        return 1 + d.request_blocks
    is_back_and_forth = any(a != b for a, b in pairwise(d.passes))
    n_between = (d.documents - 1) * (2 if is_back_and_forth else 1)
    full = (d.prompt_tokens + d.output_tokens - 1) // d.block_size
    aging = n_between * (full - d.document_blocks)
    counted = 1 + d.documents * d.document_blocks + aging + d.request_blocks - full
    return max(counted, 1 + d.request_blocks)


def _enough_host(deployment: Deployment) -> _Enough:
    """Chunks that serve every replay as an endless host would; None where there are none."""
    d = deployment
    if d.host == "none" or d.document_tokens < d.chunk_tokens:
        return _Enough(None, is_least=True, is_steady=True)
    n_touched = (
        d.documents * len(d.passes) * (d.prompt_tokens // d.chunk_tokens + REQUEST_IN_BLOCKS)
    )
    if is_affordable(n_touched):
        edge = host_edge_of(list(_host_requests(d)), _tiers(d, 0))
        return _Enough(edge.smallest, is_least=True, is_steady=edge.is_steady)
    return _Enough(_endless_chunks(d), is_least=False, is_steady=True)


def _endless_chunks(deployment: Deployment) -> int:
    """A host tier that evicts nothing: neither documents nor chunks that questions complete."""
    d = deployment
    shared, per_prompt = d.document_tokens // d.chunk_tokens, d.prompt_tokens // d.chunk_tokens
    n_prompts = d.documents * len(d.passes)
    distinct = d.documents * shared + n_prompts * (per_prompt - shared)
    return int(distinct / d.watermark) + 1 if d.evicts_early else distinct


def _host_requests(deployment: Deployment) -> Iterator[HostRequest]:
    """Every prompt as the host tier sees it beside the GPU tier described."""
    d = deployment
    predictor = Predictor(_tiers(d.model_copy(update={"host": "none"}), 0))
    shared, per_prompt = d.document_tokens // d.chunk_tokens, d.prompt_tokens // d.chunk_tokens
    n_questions = 0
    for _, document in _requests(d):
        hit = _split_of(predictor, d, document).gpu_hit
        own = range(n_questions, n_questions + per_prompt - shared)
        n_questions += len(own)
        chunks = [*_keys_of(document, shared), *own]
        yield HostRequest(d.prompt_tokens, chunks, hit, predictor.tiers.max_num_batched_tokens)


def _tiers(deployment: Deployment, host_chunks: int, *, chunk_bytes: int | None = None) -> TierSpec:
    """The tiers described, with ``host_chunks``; ``chunk_bytes`` makes the watermark exact."""
    gpu_only = TierSpec(
        engine=deployment.engine,
        block_size=deployment.block_size,
        num_gpu_blocks=deployment.gpu_kv_tokens // deployment.block_size,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
    )
    return with_host(
        gpu_only,
        deployment.host,
        deployment.settings(deployment.chunk_tokens),
        chunks=host_chunks,
        host_bytes=None if chunk_bytes is None else int(deployment.host_gib * GIB),
        chunk_bytes=chunk_bytes,
    )


def _tokens_by_pass(
    deployment: Deployment, tiers: TierSpec, ticks: Sequence[int] | None = None
) -> Passes:
    """Prompt tokens by pass and source; ``ticks``: of the host's timer (``HostRequest``)."""
    predictor = Predictor(tiers)
    passes: Passes = {}
    for name, document in _requests(deployment):
        split = _split_of(predictor, deployment, document, ticks)
        sums = passes.setdefault(name, {"computed": 0, "gpu_hit": 0, "host_loaded": 0})
        for source in sums:
            sums[source] += getattr(split, source)
    return passes


def _split_of(
    predictor: Predictor,
    deployment: Deployment,
    document: int,
    ticks: Sequence[int] | None = None,
) -> TokenSplit:
    """One request: the document's whole blocks have names, all others never come again."""
    d = deployment
    names = _keys_of(document, d.document_blocks)
    chunks = _keys_of(document, d.document_tokens // d.chunk_tokens)
    served = predictor.request_named(
        names, d.prompt_tokens, d.output_tokens, chunks=chunks, ticks=ticks
    )
    return served.split


def _keys_of(document: int, n: int) -> range:
    """Keys, below 0, of the ``n`` whole blocks or chunks of ``document``."""
    return range(-(document + 1) * n, -document * n)


def _requests(deployment: Deployment) -> Iterator[tuple[str, int]]:
    """(pass, document) of every request, in order."""
    for index, order in enumerate(deployment.passes):
        walk = range(deployment.documents)
        name = pass_name(index, order)
        for document in walk if order == "fwd" else reversed(walk):
            yield name, document


def _advised_gib(deployment: Deployment, enough: _Enough, best: Passes, chunk_bytes: int) -> float:
    """A host size to set, in tenths of a GiB, that is predicted to serve like ``best``.

    Under a watermark a larger store may serve less than a smaller one; where that is seen, the
    size that never evicts is advised, for no larger one can fail.
    """
    assert enough.chunks is not None, "nobody is advised a host that can serve nothing"
    gib = _gib_in_tenths(enough.chunks * chunk_bytes)
    d = deployment.model_copy(update={"host_gib": gib})
    tiers = _tiers(d, int(gib * GIB) // chunk_bytes, chunk_bytes=chunk_bytes)
    with suppress(TicksMatter):
        if enough.is_steady and _tokens_by_pass(d, tiers) == best:
            return gib
    return max(gib, _gib_in_tenths(_endless_chunks(d) * chunk_bytes))


def _gib_in_tenths(n_bytes: int) -> float:
    return ceil(n_bytes / GIB * 10) / 10
