"""What memory a launch would take, checked before anything starts."""

import shutil
from pathlib import Path
from typing import Final

import psutil

from servers.arms import Arm
from servers.command import is_local
from servers.errors import LaunchError
from servers.tiers.base import Transfer
from sim.units import GIB, MIB

# The segment is page aligned and a little larger than the pool.
SEGMENT_HEADROOM: Final = 1.1


def check_host_memory(arm: Arm) -> None:
    """LaunchError when the arm's host tier is larger than the memory a new process can get."""
    if arm.host is None:
        return
    free = free_memory_bytes()
    if arm.host.gib * GIB > free:
        raise LaunchError(
            f"arm {arm.name} asks for a host tier of {arm.host.gib:g} GiB, but "
            f"{free / GIB:.1f} GiB of memory are free",
            hint="lower host gib, or end other programs; LMCache would come up and drop stores",
        )


def free_memory_bytes() -> int:
    """Memory a new process can get: the machine's, or the control group's where that is less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def choose_transfer(arm: Arm) -> Transfer:
    """``transfer_for`` this machine and arm; matters on the CPU build alone."""
    server = arm.server
    if arm.host is None or server.build != "cpu" or not is_local(server.model):
        return "lmcache_driven"
    geometry = server.geometry()
    shm = shutil.disk_usage("/dev/shm")
    pool_bytes = server.num_gpu_blocks * server.block_size * geometry.bytes_per_token
    return transfer_for(pool_bytes, shm_bytes=shm.total, shm_free_bytes=shm.free)


def transfer_for(pool_bytes: int, *, shm_bytes: int, shm_free_bytes: int) -> Transfer:
    """How KV moves on a CPU: by LMCache, unless /dev/shm is too small for the KV pool.

    Decided by the size of /dev/shm, not by what is free in it, so that all sessions of a run on
    one machine decide alike (containers often have 64 MiB; writing past it is a bus error).
    LaunchError when the pool would fit but for what others keep there.
    """
    needed = int(pool_bytes * SEGMENT_HEADROOM)
    if shm_bytes < needed:
        return "engine_driven"
    if shm_free_bytes < needed:
        raise LaunchError(
            f"the KV pool needs {needed / MIB:.0f} MiB of /dev/shm, "
            f"{shm_free_bytes / MIB:.0f} MiB are free",
            hint="remove lmcache_kv_* of ended processes there, or lower num_gpu_blocks",
        )
    return "lmcache_driven"
