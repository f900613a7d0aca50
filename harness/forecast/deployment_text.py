"""What ``kvcliff plan --deployment`` says: one paragraph, from a deployment's numbers."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sim.tiers.registry import model_of

if TYPE_CHECKING:
    from harness.forecast.deployment_file import Deployment


def sentences(deployment: "Deployment", content: dict[str, Any]) -> Iterator[str]:
    """The paragraph, sentence by sentence: sizes, outcome, cause, and what would have worked."""
    d, host = deployment, content["host"]
    on_each = f" on each of {d.tensor_parallel} workers" if d.tensor_parallel > 1 else ""
    beside = "."
    if d.host != "none":
        beside = f" and the host tier {host['tokens']:,} ({d.host_gib:g} GiB {host['gib_is']})."
    documents, are = (
        ("1 document", "is") if d.documents == 1 else (f"{d.documents:,} documents", "are")
    )
    yield (
        f"{documents} of {d.document_tokens:,} tokens {are} "
        f"{d.documents * d.document_tokens:,} tokens of KV; the GPU tier holds {d.gpu_kv_tokens:,} "
        f"({content['gpu']['gib_per_worker']:.1f} GiB{on_each}){beside}"
    )
    if len(d.passes) == 1:
        yield "Every document is asked once, so no cache has anything to serve: ask them again."
        return
    served = _replays(content["predicted"])
    yield (
        f"Of the replays' {sum(served.values()):,} prompt tokens {served['computed']:,} are "
        f"computed, {served['gpu_hit']:,} found on the GPU and {served['host_loaded']:,} loaded "
        "from the host."
    )
    yield _verdict(deployment, content, served)
    if content["inexact_because"]:
        bounds = list(content["computed_bounds"].values())[1:]
        least, most = (sum(ends) for ends in zip(*bounds, strict=True))
        yield (
            f"Not exact to the token: {'; '.join(content['inexact_because'])}. At least {least:,} and "
            f"at most {most:,} tokens of the replays are computed."
        )


def _verdict(deployment: "Deployment", content: dict[str, Any], served: dict[str, int]) -> str:
    d, enough = deployment, content["enough"]
    by_gpu = f"a GPU tier of {enough['gpu_tokens']:,} tokens would find every document"
    whole = d.document_blocks * d.block_size
    if whole == 0:
        return (
            f"No gain: a document has fewer tokens than a KV block ({d.block_size}), so nothing of "
            "it can be reused; use smaller blocks."
        )
    if served["gpu_hit"] == whole * d.documents * (len(d.passes) - 1):
        return "No gain from a host tier: the GPU tier finds every document by itself."
    if d.host == "none":
        return f"There is no host tier; {by_gpu}."
    if enough["host_chunks"] is None:
        return (
            f"No gain, 0 host hits: a document has fewer tokens than a host chunk "
            f"({d.chunk_tokens}), so the host can never serve one; use smaller chunks, or {by_gpu}."
        )
    best = _replays(content["predicted_with_enough_host"])
    if served == best:
        return "The host tier keeps every document."
    return (
        f"{_why_host_fails(deployment, content, served)} What works: with "
        f"{enough['advised_gib']:.10g} GiB ({content['host']['gib_is']}) "
        f"{best['host_loaded']:,} tokens are loaded and {best['computed']:,} computed; {by_gpu}, too. "
        + _about_less(enough)
    )


def _about_less(enough: dict[str, Any]) -> str:
    """What less than the sizes advised would do."""
    if enough["advised_gib"] - enough["host_gib"] >= 0.1 or not enough["host_is_steady"]:
        return (
            f"About {enough['host_gib']:.3g} GiB would do, but some sizes between serve less, "
            "since they evict at other moments."
        )
    if enough["host_is_least"]:
        return "Neither does with a chunk or a block less."
    return "Less host memory may do: the least was too much to look for."


def _why_host_fails(
    deployment: "Deployment", content: dict[str, Any], served: dict[str, int]
) -> str:
    d, host = deployment, content["host"]
    lead = "Less than it could be" if served["host_loaded"] else "No gain, 0 host hits"
    if d.prompt_tokens // d.chunk_tokens > host["chunks"]:
        return f"{lead}: not even one prompt fits the host tier."
    if host["tokens"] <= d.gpu_kv_tokens:
        return (
            f"{lead}: the host tier is no larger than the GPU tier and is written through, so it "
            "holds little that the GPU does not."
        )
    rule = (
        f" and evicts from {d.watermark:.0%} on"
        if (model := model_of(d.host)) and model.has_watermark
        else ""
    )
    if d.policy == "noop":
        rule = " and evicts nothing, so what comes late is never stored"
    walk = ""
    if d.policy != "noop" and any(a == b for a, b in pairwise(d.passes)):
        walk = "; a walk in the same order asks for each one just after it has gone"
    kept = int(host["tokens"] * (d.watermark if d.evicts_early else 1))
    return (
        f"{lead}: the host tier keeps at most {kept:,} tokens{rule}, fewer than the documents and "
        f"their questions need{walk}."
    )


def _replays(predicted: dict[str, dict[str, int]]) -> dict[str, int]:
    """Prompt tokens by source, all passes but the first together."""
    replays = list(predicted.values())[1:]
    return {
        source: sum(tokens[source] for tokens in replays)
        for source in ("computed", "gpu_hit", "host_loaded")
    }
