"""The weights of the tiny model: seeded random numbers, in safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file


def save_weights(path: Path, config: Mapping[str, Any], *, seed: int, std: float) -> None:
    """Write the weights of the Qwen3 that ``config`` describes, drawn with deviation ``std``."""
    hidden, inter, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_dim, kv_dim = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_dim, hidden),
        "self_attn.k_proj": (kv_dim, hidden),
        "self_attn.v_proj": (kv_dim, hidden),
        "self_attn.o_proj": (hidden, q_dim),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes |= {"model.norm": (hidden,), "lm_head": (config["vocab_size"], hidden)}
    rng = np.random.Generator(np.random.PCG64(seed))

    def weight(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if len(shape) == 1:  # of a norm
            return np.ones(shape, dtype=np.float32)
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    weights = {f"{name}.weight": weight(shape) for name, shape in shapes.items()}
    save_file(weights, path, metadata={"format": "pt"})
