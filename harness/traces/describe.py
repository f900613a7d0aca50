"""``kvcliff describe``: size, reuse and shape of a trace."""

from typing import Any

import numpy as np

from harness.traces.load import Loaded, head, share_of


def description(loaded: Loaded) -> dict[str, Any]:
    """What a trace holds, as JSON says it."""
    tree, requests = loaded.tree, loaded.tree.requests
    blocks = tree.blocks_of_requests()
    arrivals = requests.arrivals_ns()
    return {
        **head(tree),
        "format": requests.source,
        "sessions": len(requests.session_start_ns),
        "session_starts_known": loaded.starts_known,
        "prompt_tokens": int(requests.input_tokens.sum()),
        "output_tokens": int(requests.output_tokens.sum()),
        "duration_s": int(np.ptp(arrivals)) / 1e9 if len(arrivals) else 0.0,
        "longest_request_blocks": loaded.longest_blocks,
        "median_request_blocks": float(np.median(blocks)) if len(blocks) else 0.0,
        "ideal_hit_share": share_of(
            (tree.n_accesses - tree.n_blocks) * requests.block_tokens,
            int(requests.input_tokens.sum()),
        ),
        "edges": len(tree.parent),
        "kv_bytes_per_token": loaded.ruler.bytes_per_token,
        "assumptions": list(loaded.assumptions),
        "warnings": list(loaded.warnings),
    }
