"""Add a family of models from outside: GPT-Neo, which pyvllm does not know.

`python examples/custom_family.py MODEL`, for example with roneneldan/TinyStories-1M. A family is data: which parts its
decoder has, and what its checkpoint calls the parameters.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyvllm import LLM, ModelRegistry, SamplingParams
from pyvllm.models import ModelSpec, base_spec, layer_norm, renamed, with_mlp_size

NAMES = (
    ("wte", "embed"),
    ("wpe", "positions"),
    ("h.N.ln_1", "layers.N.norm1"),
    ("h.N.attn.attention.q_proj", "layers.N.q"),
    ("h.N.attn.attention.k_proj", "layers.N.k"),
    ("h.N.attn.attention.v_proj", "layers.N.v"),
    ("h.N.attn.attention.out_proj", "layers.N.o"),
    ("h.N.ln_2", "layers.N.norm2"),
    ("h.N.mlp.c_fc", "layers.N.up"),
    ("h.N.mlp.c_proj", "layers.N.down"),
    ("ln_f", "final_norm"),
    ("lm_head", "head"),
)


def gpt_neo(config: Mapping[str, Any]) -> ModelSpec:
    """Learned positions, unscaled scores, a window in the layers that `attention_types` calls local."""
    fields = renamed(config, {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"})
    fields = with_mlp_size(fields | {"hidden_act": config.get("activation_function", "gelu_new")})
    norm = layer_norm(config, "layer_norm_epsilon")
    spec = base_spec(fields, names=NAMES, norm=norm, rotary=False, tied=True)
    kinds = [kind for pattern, times in config["attention_types"] for _ in range(times) for kind in pattern]
    return replace(
        spec,
        position_offset=0,
        windows=tuple(config["window_size"] if kind == "local" else None for kind in kinds),
        scale=1.0,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        prefixes=("transformer.",),
    )


ModelRegistry.register_model("GPTNeoForCausalLM", gpt_neo)

if __name__ == "__main__":
    with LLM(sys.argv[1]) as llm:
        output = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=64))[0]
        print(output.prompt, output.outputs[0].text)
