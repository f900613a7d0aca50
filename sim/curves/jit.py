"""Runs the loops of ``sim.curves.kernels``, compiled by numba where that pays, else as they are.

Both ways execute the same source on the same integers, so the results are identical. numba is
imported only when a call is large enough to pay for it (0.5 s to import, more to load a kernel).
"""

import hashlib
import importlib.util
import os
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORTH_COMPILING = 3_000_000
"""Elementary steps above which loading numba costs less than plain Python (≈ 0.2 µs a step)."""

_KERNELS = "sim.curves.kernels."


def runs_compiled(work: int, compiled: bool | None) -> bool:
    """Whether a job of ``work`` elementary steps runs compiled: as said, or if that is faster."""
    return (work >= WORTH_COMPILING and _has_numba()) if compiled is None else compiled


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def run(kernel: Callable[..., Any], *args: Any, compiled: bool) -> Any:
    """Call ``kernel``; writable arrays among ``args`` are its outputs, in both ways.

    The plain way works on lists, which Python indexes four times faster than arrays.
    """
    if compiled:
        return compile_kernel(kernel)(*args)
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in args]
    result = kernel(*lists)
    for arg, values in zip(args, lists, strict=True):
        if isinstance(arg, np.ndarray) and arg.flags.writeable:
            arg[:] = values
    return result


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view a kernel must not write to, so that ``run`` need not copy it back."""
    view = array.view()
    view.flags.writeable = False
    return view


@cache
def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` and the helpers of its package that it calls, compiled and cached on disk."""
    import numba  # type: ignore[import-untyped,unused-ignore]

    names: dict[str, Any] = dict(kernel.__globals__)
    for name in kernel.__code__.co_names:
        helper = names.get(name)
        if isinstance(helper, types.FunctionType) and helper.__module__.startswith(_KERNELS):
            names[name] = compile_kernel(helper)
    twin = types.FunctionType(kernel.__code__, names, kernel.__name__)
    twin.__module__, twin.__qualname__ = kernel.__module__, kernel.__qualname__
    # numba looks at the folder when it wraps a function; others in this process keep theirs.
    theirs = numba.config.CACHE_DIR
    folder = _cache_folder(theirs)
    try:
        numba.config.CACHE_DIR = folder or theirs
        compiled: Callable[..., Any] = numba.njit(cache=folder is not None, nogil=True)(twin)
        return compiled
    finally:
        numba.config.CACHE_DIR = theirs


@cache
def _cache_folder(asked_for: str) -> str | None:
    """Where compiled kernels are kept (NUMBA_CACHE_DIR or the user's cache); None if nowhere.

    The folder is named after the kernels' source: numba itself only notices a change in the file
    of the kernel called, not in its helpers'.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcliff" / "numba"
    source = hashlib.blake2b(digest_size=6)
    for file in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        source.update(file.read_bytes())
    folder = (Path(asked_for) if asked_for else base) / source.hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None
