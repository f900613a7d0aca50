"""The weights of the tiny model: seeded random numbers, in safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file


def save_weights(path: Path, config: Mapping[str, Any], *, seed: int, std: float) -> None:
    """Write the weights of the Qwen3 that ``config`` describes, drawn with deviation ``std``."""
    save_file(_weights(config, seed=seed, std=std), path, metadata={"format": "pt"})


def _weights(
    config: Mapping[str, Any], *, seed: int, std: float
) -> dict[str, npt.NDArray[np.float32]]:
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    q_dim = config["num_attention_heads"] * config["head_dim"]
    kv_dim = config["num_key_value_heads"] * config["head_dim"]
    rng = np.random.Generator(np.random.PCG64(seed))

    def drawn(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    weights = {"model.embed_tokens.weight": drawn(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones(hidden),
            f"{at}.self_attn.q_proj.weight": drawn(q_dim, hidden),
            f"{at}.self_attn.k_proj.weight": drawn(kv_dim, hidden),
            f"{at}.self_attn.v_proj.weight": drawn(kv_dim, hidden),
            f"{at}.self_attn.o_proj.weight": drawn(hidden, q_dim),
            f"{at}.self_attn.q_norm.weight": ones(config["head_dim"]),
            f"{at}.self_attn.k_norm.weight": ones(config["head_dim"]),
            f"{at}.post_attention_layernorm.weight": ones(hidden),
            f"{at}.mlp.gate_proj.weight": drawn(inter, hidden),
            f"{at}.mlp.up_proj.weight": drawn(inter, hidden),
            f"{at}.mlp.down_proj.weight": drawn(hidden, inter),
        }
    weights["model.norm.weight"] = ones(hidden)
    weights["lm_head.weight"] = drawn(config["vocab_size"], hidden)
    return weights
