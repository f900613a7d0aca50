"""Whether this box has room for a plan, asked before the first server starts or downloads.

Only what is certain stops a run: a tier, pool or weights larger than what is there. Whether the rest
fits as well, ``kvcliff doctor`` says.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.errors import InputError, MachineError
from harness.machine.memory import needs_of
from harness.plan.experiment import Experiment
from harness.plan.lookup import hub_cache
from servers.gpu.devices import Device, devices_of
from servers.memory import check_host_memory
from sim.units import GIB


def check_room(experiment: Experiment) -> None:
    """InputError for a model that is not whole, MachineError or LaunchError for lack of room."""
    build = experiment.plan.server.build
    model = experiment.model
    if build == "fake":
        return
    if model.missing is not None:
        raise InputError(
            f"model.path {model.name!r} has no {model.missing}",
            hint="complete the folder, or give --dummy-weights: then config.json is enough",
        )
    for session in experiment.sessions:
        check_host_memory(session.arm)
    needs = needs_of(experiment)
    if build == "gpu":
        devices = devices_of(experiment.treatment, os.environ)
        check_gpu(devices, (needs.weights_bytes or 0) + needs.pool_bytes)
    if model.is_download and needs.weights_bytes is not None:
        check_disk(hub_cache(os.environ), needs.weights_bytes)


def check_gpu(devices: Sequence[Device], needed_bytes: int) -> None:
    """MachineError where weights and KV pool are larger than all memory of ``devices``."""
    sizes = [(d.instance or d.gpu.state).memory.total_bytes for d in devices]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes) or needed_bytes <= sum(known):
        return
    raise MachineError(
        f"weights and KV pool of the plan take {needed_bytes / GIB:.1f} GiB; "
        f"{', '.join(device.label for device in devices)} has {sum(known) / GIB:.1f} GiB",
        hint="take a smaller model, or lower num_gpu_blocks of [server] and [control]",
    )


def check_disk(cache: Path, needed_bytes: int) -> None:
    """MachineError where a download of ``needed_bytes`` does not fit where the hub cache lies."""
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise MachineError(
            f"the model's weights are {needed_bytes / GIB:.1f} GiB to download, {place} has "
            f"{free / GIB:.1f} GiB free",
            hint="set HF_HOME to a larger disk, or give --dummy-weights",
        )
