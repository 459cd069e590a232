"""MPT as its authors wrote it, with parts that transformers' model lacks: against its formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.models.test_mapped_families import State, check

MPT: dict[str, dict[str, Any]] = {
    "learned-positions-and-biases": {"expansion_ratio": 2, "logit_scale": 0.5},
    "alibi-qk-norm": {
        "no_bias": True,
        "logit_scale": "inv_sqrt_d_model",
        "attn_config": {"alibi": True, "alibi_bias_max": 16, "qk_ln": True, "clip_qkv": 1.0},
    },
    "grouped": {
        "no_bias": True,
        "attn_config": {"alibi": True, "kv_n_heads": 2, "attn_type": "grouped_query_attention"},
    },
    "multiquery": {"attn_config": {"qk_ln": True, "attn_type": "multiquery_attention", "softmax_scale": 0.3}},
}


@pytest.mark.parametrize("name", MPT)
def test_mpt_as_its_authors_wrote_it(name: str) -> None:
    config = {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64, "vocab_size": 97} | MPT[name]
    state = mpt_state(config)
    check("MPTForCausalLM", config, state, lambda text: mpt_logits(config, state, text).float())


def mpt_sizes(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """`attn_config`, and the number of KV heads."""
    attention = config.get("attn_config", {})
    kinds = {"grouped_query_attention": attention.get("kv_n_heads"), "multiquery_attention": 1}
    return attention, kinds.get(attention.get("attn_type"), config["n_heads"])


def mpt_state(config: dict[str, Any]) -> State:
    attention, kv_heads = mpt_sizes(config)
    size, kv_size = config["d_model"], config["d_model"] // config["n_heads"] * kv_heads
    inner = size * config.get("expansion_ratio", 4)
    shapes: dict[str, tuple[int, ...]] = {"wte": (97, size), "norm_f": (size,)}
    if not attention.get("alibi"):
        shapes["wpe"] = (64, size)
    for layer in range(config["n_layers"]):
        parts = {
            "norm_1": (size,),
            "attn.Wqkv": (size + 2 * kv_size, size),
            "attn.out_proj": (size, size),
            "norm_2": (size,),
            "ffn.up_proj": (inner, size),
            "ffn.down_proj": (size, inner),
        }
        if attention.get("qk_ln"):
            parts |= {"attn.q_ln": (size,), "attn.k_ln": (kv_size,)}
        shapes |= {f"blocks.{layer}.{part}": shape for part, shape in parts.items()}
    torch.manual_seed(0)
    state = {
        f"transformer.{name}.weight": torch.randn(shape) * 0.25 + (len(shape) == 1) for name, shape in shapes.items()
    }
    if not config.get("no_bias"):
        biased = {name: shape for name, shape in shapes.items() if name not in ("wte", "wpe")}
        state |= {f"transformer.{name}.bias": torch.randn(shape[0]) * 0.3 for name, shape in biased.items()}
    return state


def mpt_logits(config: dict[str, Any], state: State, text: list[int]) -> Tensor:
    """MPT's formulas, all in float64: [tokens, V]."""
    attention, kv_heads = mpt_sizes(config)
    heads, size = config["n_heads"], config["d_model"]
    head_dim = size // heads

    def weights(name: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = state[f"transformer.{name}.weight"], state.get(f"transformer.{name}.bias")
        return weight.double(), None if bias is None else bias.double()

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, *weights(name))

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights(name)
        return functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

    position = torch.arange(len(text))
    scores_bias = torch.zeros(len(text), len(text)).double().masked_fill(position > position[:, None], -torch.inf)
    scores_bias = scores_bias.expand(heads, -1, -1)
    x = weights("wte")[0][text]
    if attention.get("alibi"):
        power = 8 if heads > 4 else 4
        exponents = [attention.get("alibi_bias_max", 8) * i / power for i in range(1, power + 1)]
        exponents = exponents if power == heads else (exponents[1::2] + exponents[::2])[:heads]
        slopes = torch.tensor([0.5**exponent for exponent in exponents]).double()
        scores_bias = scores_bias - slopes[:, None, None] * (position[:, None] - position)
    else:
        x = x + weights("wpe")[0][: len(text)]
    for layer in range(config["n_layers"]):
        name = f"blocks.{layer}"
        qkv = linear(norm(x, f"{name}.norm_1"), f"{name}.attn.Wqkv")
        if clip := attention.get("clip_qkv"):
            qkv = qkv.clamp(-clip, clip)
        q, k, v = qkv.split([size, kv_heads * head_dim, kv_heads * head_dim], -1)
        if attention.get("qk_ln"):
            q, k = norm(q, f"{name}.attn.q_ln"), norm(k, f"{name}.attn.k_ln")
        q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * attention.get("softmax_scale", head_dim**-0.5) + scores_bias
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, f"{name}.attn.out_proj")
        inner = functional.gelu(linear(norm(x, f"{name}.norm_2"), f"{name}.ffn.up_proj"))
        x = x + linear(inner, f"{name}.ffn.down_proj")
    scale = config.get("logit_scale", 1.0)
    scale = size**-0.5 if scale == "inv_sqrt_d_model" else scale
    return norm(x, "norm_f") @ weights("wte")[0].T * scale
