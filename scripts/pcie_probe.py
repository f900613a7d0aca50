"""How fast this machine copies KV and computes prefill: ``pcie_probe.py OUT.json [--config FILE]``.

Needs torch and nothing else; copy this one file to the machine. About a minute on a data-centre GPU.
``kvcliff plan PLAN --probe OUT.json`` turns what it measured into expected times to first token.
``--device cpu`` is a dry run with small sizes: it shows that the script works, not how fast a GPU is.
Exit status: 0 written, 2 wrong usage, 3 this machine cannot be probed.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

SCHEMA = 1  # history: 1 = first published
KIND = "kvcliff-probe"
KIB, MIB = 2**10, 2**20
# From one layer's page of 16 tokens to a prefix of 2,048 tokens of an 8B model; 28 and 36 MiB are
# chunks of 256 tokens of Qwen3-0.6B and Qwen3-8B.
COPY_BYTES = (16 * KIB, 256 * KIB, *(n * MIB for n in (1, 4, 9, 28, 36, 72, 288)))
DRY_COPY_BYTES = (16 * KIB, 256 * KIB, MIB, 4 * MIB)
NEW_TOKENS, CACHED_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384), (0, 2048, 8192)
DRY_NEW_TOKENS, DRY_CACHED_TOKENS = (16, 64, 128, 256), (0, 128)
WARM_UPS, REPEATS = 2, 7
# Weights of the layers run in turn must not fit a cache: the largest L2 today has 126 MB.
COLD_BYTES = 256 * MIB
MAX_LAYER_SETS = 64


class ProbeError(Exception):
    """Why nothing was measured; ``code`` is the exit status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder's layers; by default those of Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Machine:
    """The device measured, and how: ``torch`` is the module."""

    torch: Any
    device: str
    dtype: Any

    @property
    def is_gpu(self) -> bool:
        """Whether the device has streams and pinned host memory."""
        return self.device == "cuda"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write OUT, print a summary; returns the exit status."""
    arguments = _arguments(words)
    try:
        shape = read_shape(arguments.config) if arguments.config else Shape()
        _check_out(arguments.out)
        found = probe(open_machine(arguments.device), shape, chunk_tokens=arguments.chunk_tokens)
    except ProbeError as error:
        print(f"pcie_probe: {error}", file=sys.stderr)
        return error.code
    draft = arguments.out.with_name(f".{arguments.out.name}.draft")
    draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draft.replace(arguments.out)
    _show(found)
    return 0


def probe(machine: Machine, shape: Shape, *, chunk_tokens: int) -> dict[str, Any]:
    """Everything measured, JSON-ready; times in seconds, sizes in bytes."""
    value_bytes = machine.torch.empty(0, dtype=machine.dtype).element_size()
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes
    began = time.perf_counter()
    copies = measure_copies(machine, chunk_bytes=per_token * chunk_tokens)
    prefill, skipped = measure_prefill(machine, shape)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": time.perf_counter() - began,
        "machine": _facts(machine),
        "shape": asdict(shape),
        "dtype": str(machine.dtype).removeprefix("torch."),
        "chunk": {"tokens": chunk_tokens, "bytes": per_token * chunk_tokens},
        "copies": copies,
        "copy_fits": fit_copies(copies),
        "prefill": prefill,
        "prefill_fit": fit_prefill(prefill),
        "skipped": skipped,
    }


def read_shape(path: Path) -> Shape:
    """The shape in a model's config.json."""
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size",
             "intermediate": "intermediate_size", "heads": "num_attention_heads"}  # fmt: skip
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        sizes = {ours: config[theirs] for ours, theirs in names.items()}
        sizes["kv_heads"] = config.get("num_key_value_heads") or sizes["heads"]
        sizes["head_dim"] = config.get("head_dim") or sizes["hidden"] // sizes["heads"]
    except OSError as error:
        raise ProbeError(f"cannot read {path}: {error.strerror}", 2) from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ProbeError(f"{path} is no config.json of a decoder: {error!r}", 2) from None
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < 1]
    if wrong or sizes["heads"] % sizes["kv_heads"]:
        raise ProbeError(f"{path} has sizes no decoder has: {sizes}", 2)
    return Shape(**sizes)


def open_machine(device: str) -> Machine:
    """The device, or ProbeError when torch or the device is not there."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ProbeError(f"torch cannot be imported: {error}", 3) from None
    if device == "cuda" and not torch.cuda.is_available():
        raise ProbeError(
            f"torch {torch.__version__} sees no CUDA device; --device cpu makes a dry run", 3
        )
    torch.manual_seed(1)
    return Machine(torch, device, torch.bfloat16 if device == "cuda" else torch.float32)


def measure_copies(machine: Machine, *, chunk_bytes: int) -> list[dict[str, Any]]:
    """Time of one copy for each size, direction and kind of host memory."""
    sizes = COPY_BYTES if machine.is_gpu else DRY_COPY_BYTES
    limit = COPY_BYTES[-1] if machine.is_gpu else DRY_COPY_BYTES[-1]
    rows = []
    for n_bytes in sorted({*sizes, min(chunk_bytes, limit)}):
        there = machine.torch.empty(n_bytes, dtype=machine.torch.uint8, device=machine.device)
        for pinned in (True, False) if machine.is_gpu else (False,):
            here = machine.torch.zeros(n_bytes, dtype=machine.torch.uint8, pin_memory=pinned)
            ways = {"h2d": (there, here), "d2h": (here, there)}
            for direction, (to, source) in ways.items():
                seconds = timed(machine, _copying(to, source))
                rows.append({"bytes": n_bytes, "pinned": pinned, "direction": direction,
                             **_spread(seconds)})  # fmt: skip
    return rows


def _copying(to: Any, source: Any) -> Callable[[], Any]:
    return lambda: to.copy_(source, non_blocking=True)


def measure_prefill(
    machine: Machine, shape: Shape
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time of all layers for new tokens after cached ones, and the sizes that did not fit.

    Some layers with weights of their own are run and their time is scaled to all.
    """
    new_tokens: Sequence[int] = NEW_TOKENS if machine.is_gpu else DRY_NEW_TOKENS
    cached_tokens: Sequence[int] = CACHED_TOKENS if machine.is_gpu else DRY_CACHED_TOKENS
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    layers = _layers(machine, shape)
    for cached in cached_tokens:
        for new in new_tokens:
            size = {"new": new, "cached": cached}
            try:
                run = _prefill(machine, shape, layers, **size)
                seconds = timed(machine, run)
            except machine.torch.OutOfMemoryError as error:
                skipped.append({**size, "because": str(error).splitlines()[0]})
                continue
            scale = shape.layers / len(layers)
            rows.append({**size, **_spread([s * scale for s in seconds])})
    return rows, skipped


def _layers(machine: Machine, shape: Shape) -> list[tuple[Any, ...]]:
    torch, head = machine.torch, shape.head_dim
    sizes = (
        (shape.hidden, (shape.heads + 2 * shape.kv_heads) * head),
        (shape.heads * head, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
    )
    layer_bytes = sum(rows * columns for rows, columns in sizes) * (2 if machine.is_gpu else 4)
    count = min(shape.layers, MAX_LAYER_SETS, 1 + COLD_BYTES // layer_bytes)
    if not machine.is_gpu:
        count = 1
    kwargs = {"device": machine.device, "dtype": machine.dtype}
    return [tuple(torch.randn(*size, **kwargs) * 0.02 for size in sizes) for _ in range(count)]


def _prefill(
    machine: Machine, shape: Shape, layers: Sequence[tuple[Any, ...]], *, new: int, cached: int
) -> Callable[[], Any]:
    """A run of ``layers``: norms, projections, causal attention over cached and new, gated MLP."""
    torch, bias = machine.torch, importlib.import_module("torch.nn.attention.bias")
    functional, head = torch.nn.functional, shape.head_dim
    kwargs = {"device": machine.device, "dtype": machine.dtype}
    start = torch.randn(new, shape.hidden, **kwargs)
    past = torch.randn(2, cached, shape.kv_heads, head, **kwargs)
    ones = torch.ones(shape.hidden, **kwargs)
    widths = [shape.heads * head, shape.kv_heads * head, shape.kv_heads * head]
    mask = bias.causal_lower_right(new, new + cached) if cached else None

    def attention(x: Any, weights: Any) -> Any:
        q, k, v = (functional.rms_norm(x, (shape.hidden,), ones) @ weights).split(widths, -1)
        q = q.view(new, shape.heads, head).transpose(0, 1)[None]
        k, v = (
            torch.cat([old, part.view(new, shape.kv_heads, head)])
            .transpose(0, 1)[None]
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
            for old, part in ((past[0], k), (past[1], v))
        )
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        return out[0].transpose(0, 1).reshape(new, widths[0])

    def run() -> Any:
        x = start
        with torch.no_grad():
            for qkv, output, gate_up, down in layers:
                x = x + attention(x, qkv) @ output
                gate, up = (functional.rms_norm(x, (shape.hidden,), ones) @ gate_up).chunk(2, -1)
                x = x + (functional.silu(gate) * up) @ down
        return x

    return run


def timed(machine: Machine, run: Callable[[], Any]) -> list[float]:
    """Seconds of each of REPEATS runs, by the device's own clock where it has one."""
    for _ in range(WARM_UPS):
        run()
    seconds = []
    for _ in range(REPEATS):
        if not machine.is_gpu:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            continue
        start, end = (machine.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def _spread(seconds: Sequence[float]) -> dict[str, Any]:
    return {"median_s": median(seconds), "min_s": min(seconds), "max_s": max(seconds),
            "n": len(seconds)}  # fmt: skip


def fit_copies(copies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``seconds = latency + bytes / rate`` for each direction and kind of host memory."""
    fits = []
    for pinned, direction in sorted({(row["pinned"], row["direction"]) for row in copies}):
        rows = [r for r in copies if (r["pinned"], r["direction"]) == (pinned, direction)]
        found = least_squares([(1.0, r["bytes"]) for r in rows], [r["median_s"] for r in rows])
        fits.append({"pinned": pinned, "direction": direction, "latency_s": found[0],
                     "bytes_per_s": 1 / found[1] if found[1] else None})  # fmt: skip
    return fits


def fit_prefill(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """``seconds = a + b·n + g·n·(c + n/2)`` for n new tokens after c; None with too few rows."""
    if len(rows) < 4:
        return None
    features = [(1.0, r["new"], r["new"] * (r["cached"] + r["new"] / 2)) for r in rows]
    found = least_squares(features, [r["median_s"] for r in rows])
    return dict(zip(("a_s", "b_s_per_token", "g_s_per_pair"), found, strict=True))


def least_squares(features: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients ≥ 0 with the least squared relative errors; the best set of non-zero ones."""
    size = len(features[0])
    scale = [max(row[i] for row in features) for i in range(size)]
    rows = [
        [x / unit / t for x, unit in zip(row, scale, strict=True)]
        for row, t in zip(features, times, strict=True)
    ]
    best, least = [0.0] * size, float(len(rows))
    for free in (set_ for k in range(size) for set_ in combinations(range(size), k + 1)):
        solved = _solve([[r[i] for i in free] for r in rows])
        if solved is None or min(solved) < 0:
            continue
        error = sum(
            (1 - sum(r[i] * b for i, b in zip(free, solved, strict=True))) ** 2 for r in rows
        )
        if error < least:
            least, best = error, [0.0] * size
            for i, value in zip(free, solved, strict=True):
                best[i] = value / scale[i]
    return best


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x with the least Σ(row·x − 1)², by its normal equations; None when they are singular."""
    size = len(rows[0])
    work = [
        [*(sum(r[i] * r[j] for r in rows) for j in range(size)), sum(r[i] for r in rows)]
        for i in range(size)
    ]
    for column in range(size):
        top = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[top][column]) < 1e-12 * len(rows):
            return None
        work[column], work[top] = work[top], work[column]
        for row in range(size):
            if row != column:
                factor = work[row][column] / work[column][column]
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [work[i][size] / work[i][i] for i in range(size)]


def _facts(machine: Machine) -> dict[str, Any]:
    """What the figures belong to; no name of the machine or its user."""
    torch = machine.torch
    facts: dict[str, Any] = {
        "device": machine.device,
        "gpu": None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if not machine.is_gpu:
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "gpus_visible": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        **_nvidia_smi(),
    }


def _nvidia_smi() -> dict[str, str | None]:
    """Driver, PCIe link and clocks in nvidia-smi's own words; None where it does not answer."""
    fields = {
        "driver": "driver_version",
        "pcie_generation": "pcie.link.gen.current",
        "pcie_width": "pcie.link.width.current",
        "sm_clock": "clocks.sm",
        "max_sm_clock": "clocks.max.sm",
        "power_limit": "power.limit",
    }
    asked = f"--query-gpu={','.join(fields.values())}"
    try:
        answer = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"],
            capture_output=True, text=True, errors="replace", timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(fields)
    values = [value.strip() for value in (answer.stdout.splitlines() or [""])[0].split(",")]
    if len(values) != len(fields):
        return dict.fromkeys(fields)
    return dict(zip(fields, values, strict=True))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("out", type=Path, help="JSON file to write; must not exist")
    parser.add_argument("--config", type=Path, help="a model's config.json (default: Qwen3-8B)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--chunk-tokens", type=_positive, default=256, help="LMCache's chunk")
    return parser.parse_args(words)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000")
    return int(text)


def _check_out(out: Path) -> None:
    if out.exists():
        raise ProbeError(f"{out} exists already; a measurement is not overwritten", 2)
    if not out.parent.is_dir():
        raise ProbeError(f"there is no folder {out.parent}", 2)


def _show(found: dict[str, Any]) -> None:
    machine = found["machine"]
    name = machine["gpu"] or "CPU, a dry run"
    print(f"{name}, torch {machine['torch']}, {found['took_s']:.0f} s")
    for fit in found["copy_fits"]:
        kind = "pinned" if fit["pinned"] else "pageable"
        rate = f"{fit['bytes_per_s'] / 1e9:.1f} GB/s" if fit["bytes_per_s"] else "no rate"
        print(f"{fit['direction']} {kind}: {rate}, {1e6 * fit['latency_s']:.0f} µs a copy")
    for row in found["prefill"]:
        print(
            f"prefill {row['new']:,} after {row['cached']:,}: {1e3 * row['median_s']:.2f} ms, "
            f"{row['new'] / row['median_s']:,.1f} tokens/s"
        )
    for row in found["skipped"]:
        print(f"skipped {row['new']:,} after {row['cached']:,}: {row['because']}")


if __name__ == "__main__":
    sys.exit(main())
