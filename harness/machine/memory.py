"""How much memory the servers of a plan take, on the host and on the GPU, before they start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.plan.experiment import Experiment
from servers.flags import values_of
from servers.gpu.devices import parallel_size
from sim.dense import DenseShape
from sim.units import GIB

# vLLM's CPU build and LMCache hold about 1.2 and 0.7 GiB with the tiny model; page cache and the
# client need room too.
_CPU_ENGINES_BYTES: Final = 4 * GIB
# vLLM's and LMCache's processes with CUDA, and loading weights (estimate).
_GPU_ENGINES_BYTES: Final = 6 * GIB
# CUDA context, activations of a prefill of some thousand tokens, CUDA graphs (estimate).
_GPU_WORK_BYTES: Final = 3 * GIB
# vLLM 0.32 takes no less of a card than this share at its start (v1/worker/utils.py,
# request_memory), however small the KV pool; its default (config/cache.py).
_UTILIZATION_FLAG: Final = "--gpu-memory-utilization"
_UTILIZATION: Final = 0.92
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes the largest session of a plan takes; None: not known.

    ``gpu_*`` are None on a CPU build, where weights and KV pool lie in host memory.
    ``gpu_bytes`` is of each GPU where a server takes several. ``gpu_share``: part of a whole GPU
    that vLLM must find free to start at all.
    ``weights_bytes`` and ``pool_bytes`` are in ``host_bytes`` or ``gpu_bytes`` already.
    """

    tier_bytes: int
    pool_bytes: int
    weights_bytes: int | None
    host_bytes: int
    gpu_bytes: int | None = None
    gpu_share: float | None = None


def needs_of(experiment: Experiment) -> Needs:
    """The most any session of the plan takes; sessions run one after another.

    Weights nobody knows the size of count as nothing, and are None.
    """
    arms = {session.arm.name: session.arm for session in experiment.sessions}.values()
    tier = max(int(arm.host.gib * GIB) if arm.host else 0 for arm in arms)
    blocks = max(arm.server.num_gpu_blocks * arm.server.block_size for arm in arms)
    pool = blocks * experiment.geometry.bytes_per_token
    server = next(iter(arms)).server
    weights = _weights_bytes(experiment, server.dtype)
    model = pool + (weights or 0)
    if server.build != "gpu":
        return Needs(tier, pool, weights, _CPU_ENGINES_BYTES + tier + model)
    share = max(_utilization(arm.flags) for arm in arms)
    each = model // min(parallel_size(arm.flags) for arm in arms)
    return Needs(tier, pool, weights, _GPU_ENGINES_BYTES + tier, _GPU_WORK_BYTES + each, share)


def _weights_bytes(experiment: Experiment, dtype: str) -> int | None:
    """By parameters where the shape tells, else the size of the files."""
    model = experiment.model
    shape = DenseShape.from_config(model.read_config())
    if shape is not None and dtype in _BYTES:
        return shape.parameters * _BYTES[dtype]
    folder = Path(model.serve)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) or None


def _utilization(flags: tuple[str, ...]) -> float:
    """The last ``--gpu-memory-utilization`` of these; vLLM's default without a usable one."""
    given = [*values_of(flags, _UTILIZATION_FLAG)]
    try:
        share = float(given[-1])
    except (IndexError, ValueError):  # not given, or vLLM will refuse it with its own words
        return _UTILIZATION
    return share if 0 < share <= 1 else _UTILIZATION
