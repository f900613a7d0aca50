"""``kvcliff convert``: a trace written for another tool."""

from pathlib import Path
from typing import Any

from harness.files import replacing
from harness.traces.load import SCHEMA, Loaded, input_errors
from sim.curves.convert import convert
from sim.curves.formats import MOONCAKE_BLOCK_TOKENS


def convert_trace(
    loaded: Loaded, output: Path, target: str, *, chunk_tokens: int | None = None
) -> dict[str, Any]:
    """Write a trace for another tool ("lmcache" or "mooncake"); returns what was written."""
    per_token = loaded.ruler.bytes_per_token
    warnings = list(loaded.warnings)
    if target == "mooncake" and loaded.ruler.block_tokens != MOONCAKE_BLOCK_TOKENS:
        warnings.append(
            f"Mooncake rows name no block size and readers take {MOONCAKE_BLOCK_TOKENS} tokens; these "
            f"have {loaded.ruler.block_tokens}: read them with --block-tokens"
        )
    with input_errors(), replacing(output) as temporary:
        written = convert(
            loaded.tree,
            target,
            temporary,
            order=loaded.order,
            chunk_tokens=chunk_tokens,
            kv_bytes_per_token=2 if per_token is None else max(1, round(per_token)),
            compress=output.suffix == ".gz",
        )
    return {
        "schema": SCHEMA,
        "output": str(output),
        "target": target,
        "requests": written,
        "kv_bytes_per_token": per_token,
        "assumptions": list(loaded.assumptions),
        "warnings": warnings,
    }
