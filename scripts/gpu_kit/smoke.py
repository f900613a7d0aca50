"""Do the carried kernels run on this GPU? One JSON line a check; about 10 s on an H200.

Run by the box's Python with the kit's site on PYTHONPATH. Every kernel is compared with the same
sum in float32 by torch alone, whose kernels the box brought itself.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

# bfloat16 keeps 8 bits: single results differ by up to 2^-8, their norms by less than this.
_MOST_RELATIVE_ERROR: Final = 1e-2
_CONNECTORS: Final = ("LMCacheMPConnector", "LMCacheConnectorV1", "OffloadingConnector")


def main() -> int:
    """Print the checks; exit code 1 when one failed."""
    failed = 0
    for name, check in CHECKS.items():
        began = time.monotonic()
        ok, detail = _outcome(check)
        failed += not ok
        line = {"check": name, "ok": ok, "detail": detail}
        print(json.dumps({**line, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    return 1 if failed else 0


def _outcome(check: Callable[[], str | float]) -> tuple[bool, str]:
    """Whether ``check`` passed: a number is an error to be small, a text is what was found."""
    try:
        found = check()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any failure is this check's result
        return False, f"{type(error).__name__}: {error}"[:500]
    if isinstance(found, str):
        return True, found
    return found < _MOST_RELATIVE_ERROR, f"relative error {found:.1e}"


def _gpu() -> str:
    torch = _torch()
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.get_device_name()}, compute {major}.{minor}, torch {torch.__version__}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )


def _platform() -> str:
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        raise RuntimeError(f"vLLM sees no CUDA: its platform is {type(platform).__name__}")
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise RuntimeError("vLLM sees no Triton")
    return "CUDA and Triton"


def _rms_norm() -> float:
    torch = _torch()
    ops = importlib.import_module("vllm._custom_ops")
    rows, weight, out = _randn(777, 4096), _randn(4096), _randn(777, 4096)
    ops.rms_norm(out, rows, weight, 1e-6)
    scale = torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return _relative_error(out, rows.float() * scale * weight.float())


def _silu_and_mul() -> float:
    torch = _torch()
    importlib.import_module("vllm._custom_ops")
    rows, out = _randn(777, 24_576), _randn(777, 12_288)
    torch.ops._C.silu_and_mul(out, rows)
    gate, up = rows.float().chunk(2, dim=-1)
    return _relative_error(out, torch.nn.functional.silu(gate) * up)


def _flash_attention() -> float:
    """FlashAttention 3, causal, grouped heads, over a paged cache in vLLM's packed layout."""
    torch = _torch()
    attention = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    new, cached, heads, kv_heads, dim, page = 300, 1000, 32, 8, 128, 16
    total = new + cached
    n_pages = -(-total // page)
    query, key, value = (_randn(n, h, dim) for n, h in ((new, heads), *[(total, kv_heads)] * 2))
    pool = torch.zeros(n_pages, page, kv_heads, 2 * dim, device="cuda", dtype=torch.bfloat16)
    pool.view(n_pages * page, kv_heads, 2 * dim)[:total] = torch.cat([key, value], -1)

    def ints(*values: int) -> Any:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    out = attention(
        q=query,
        k=pool[..., :dim],
        v=pool[..., dim:],
        max_seqlen_q=new,
        cu_seqlens_q=ints(0, new),
        max_seqlen_k=total,
        seqused_k=ints(total),
        causal=True,
        softmax_scale=dim**-0.5,
        block_table=ints(*range(n_pages))[None],
        fa_version=3,
    )
    visible = torch.ones(new, total, dtype=torch.bool, device="cuda").tril(cached)
    spread = [
        part.repeat_interleave(heads // kv_heads, 1).transpose(0, 1).float()
        for part in (key, value)
    ]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).float(), *spread, attn_mask=visible
    )
    return _relative_error(out, expected.transpose(0, 1))


def _lmcache() -> str:
    return f"{len(dir(importlib.import_module('lmcache.c_ops')))} names"


def _connectors() -> str:
    """The class behind each host tier loads, and LMCache's own: not vLLM's copy of it."""
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    named = factory.KVConnectorFactory.get_connector_class_by_name
    importlib.import_module("lmcache.integration.vllm.vllm_v1_adapter")
    modules = {name: named(name).__module__ for name in _CONNECTORS}
    if not modules["LMCacheMPConnector"].startswith("lmcache."):
        raise RuntimeError(f"vLLM takes its own copy: {modules['LMCacheMPConnector']}")
    return ", ".join(modules)


def _torch() -> Any:
    return importlib.import_module("torch")


def _randn(*sizes: int) -> Any:
    torch = _torch()
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def _relative_error(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


CHECKS: Final[dict[str, Callable[[], str | float]]] = {
    "gpu": _gpu,
    "vllm platform": _platform,
    "rms_norm": _rms_norm,
    "silu_and_mul": _silu_and_mul,
    "flash attention 3": _flash_attention,
    "lmcache extension": _lmcache,
    "connectors": _connectors,
}

if __name__ == "__main__":
    sys.exit(main())
