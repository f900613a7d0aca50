"""The kinds of host tier that are simulated, a file of this folder each, and the tiers of a spec."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from sim.errors import SpecError
from sim.tiers import lmcache, lmcache_mp, native, simple
from sim.tiers.gpu_pool import GpuPool
from sim.tiers.host import HostCache
from sim.tiers.settings import HOST_KINDS, TIER_KINDS, HostKind, HostSettings, TierKind
from sim.tiers.spec import TierModel, TierSpec, engine_rules


def _simulated(kind: TierKind) -> TierModel:
    """One line a kind; mypy names a kind that has none."""
    match kind:
        case "lmcache-mp":
            return lmcache_mp.MODEL
        case "lmcache":
            return lmcache.MODEL
        case "native":
            return native.MODEL
        case "simple":
            return simple.MODEL
        case _:
            assert_never(kind)


MODELS: Final[Mapping[TierKind, TierModel]] = {kind: _simulated(kind) for kind in TIER_KINDS}


def model_of(kind: HostKind | None) -> TierModel | None:
    """How ``kind`` is simulated; None where there is no host tier."""
    return None if kind is None or kind == "none" else MODELS[kind]


def with_host(
    gpu_only: TierSpec,
    kind: HostKind,
    settings: HostSettings,
    *,
    chunks: int | None,
    host_bytes: int | None,
    chunk_bytes: int | None,
) -> TierSpec:
    """``gpu_only`` beside a host tier of ``chunks``, or of none where ``kind`` says so.

    Both sizes in bytes, where they are known, make a watermark exact; no other tier minds them.
    """
    model = model_of(kind)
    is_exact = model is not None and model.has_watermark and host_bytes is not None
    return replace(
        gpu_only,
        host=kind,
        host_chunks=None if model is None else chunks,
        host_bytes=host_bytes if is_exact else None,
        chunk_bytes=chunk_bytes if is_exact else None,
        **settings.settings(),
    )


def open_gpu(spec: TierSpec) -> GpuPool:
    """The empty GPU tier of ``spec``. Raises SpecError for one no server could have."""
    rule = spec.hashless_first
    if rule is None:
        rule = engine_rules(spec.engine).hashless_first
    return GpuPool(spec.num_gpu_blocks, hashless_first=rule)


def open_host(spec: TierSpec) -> HostCache | None:
    """The empty host tier of ``spec``, or None for none.

    Raises SpecError for a spec no server could have, NotPredictable for one that is not modelled.
    """
    kind = spec.host_kind
    if kind not in HOST_KINDS:
        raise SpecError(f"host is {kind!r}; known: {', '.join(HOST_KINDS)}")
    if (kind == "none") != (spec.host_chunks is None):
        raise SpecError(f"host {kind!r} with host_chunks {spec.host_chunks}: one contradicts")
    model = model_of(kind)
    if model is None:
        return None
    if spec.chunk_tokens < 1 or (spec.chunk_tokens % spec.block_size and not model.takes_any_chunk):
        raise SpecError(
            f"chunks of {spec.chunk_tokens} tokens are not whole blocks of {spec.block_size}; "
            f"host {kind!r} refuses such a pair"
        )
    return model.open_tier(spec)
