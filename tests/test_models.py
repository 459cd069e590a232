"""Specifications and decoder against transformers, on tiny random models in float32."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pyvllm.kernels import Norm, select
from pyvllm.kernels.plain import norm, rotate_
from pyvllm.kv_cache import KVCache
from pyvllm.layers.rope import RopeSpec, inverse_frequencies, rope_tables
from pyvllm.models import FAMILIES, Decoder, build_spec
from pyvllm.models.stored import numbered
from tests.plans import Entry, plan_buffer, view
from tests.tiny_models import (
    CPU,
    LLAMA3,
    LONGROPE,
    MODELS,
    Paged,
    check_every_position,
    config_of,
    hf_logits,
    hf_model,
    load,
    plain_config,
    random_ids,
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return hf_model(request.param)


# --- the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_equal_transformers_at_every_position(model: Any, block_size: int) -> None:
    decoder = load(build_spec(config_of(model)), model.state_dict())
    check_every_position(decoder, lambda text: hf_logits(model, text), block_size=block_size)


def test_reference_kernels_run_the_model_too() -> None:
    model = hf_model("mistral-window")
    decoder = load(build_spec(config_of(model)), model.state_dict())
    paged = Paged(decoder, block_size=4, kernels=select(torch.device("meta"), torch.float32))
    assert paged.kernels.name == "reference"
    text = random_ids(20)
    logits = [paged.step({0: text[:9]})[0], paged.step({0: text[9:19]})[0], paged.step({0: text[19:]})[0]]
    torch.testing.assert_close(torch.cat(logits), hf_logits(model, text), atol=1e-4, rtol=1e-5)


def test_packed_weights_give_the_same_logits(model: Any) -> None:
    decoder = load(build_spec(config_of(model)), model.state_dict())
    decoder.pack(select(CPU, torch.float32))
    text = random_ids(12)
    logits = Paged(decoder, block_size=4).step({0: text})[0]
    torch.testing.assert_close(logits, hf_logits(model, text), atol=1e-4, rtol=1e-5)
    with pytest.raises(RuntimeError, match="packed"):
        decoder.slots()


def test_bfloat16_errs_no_more_than_transformers_does() -> None:
    model = hf_model("llama-gqa")
    text = random_ids(40)
    exact = hf_logits(model, text)
    decoder = Decoder(build_spec(config_of(model)), max_model_len=64, dtype=torch.bfloat16, device=CPU)
    slots = decoder.slots()
    for name, tensor in model.state_dict().items():
        for slot, part in decoder.spec.unpack(name, tensor) or []:
            slots[slot].copy_(part)
    kernels = select(CPU, torch.bfloat16)
    decoder.pack(kernels)
    kv = KVCache(decoder.spec, num_blocks=10, num_host_blocks=0, block_size=4, dtype=torch.bfloat16, device=CPU)
    step = view(plan_buffer([Entry(token_ids=text, blocks=range(10))], block_size=4))
    with torch.inference_mode():
        hidden = decoder.forward(step, torch.zeros(1, dtype=torch.int32), kv.layers, kernels)
        logits = decoder.logits(hidden, kernels).float()
    theirs = hf_logits(model.to(torch.bfloat16), text).float()
    assert (logits - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


def test_dynamic_rope_goes_on_past_training_as_transformers_generates() -> None:
    model = hf_model("llama-dynamic")
    text = random_ids(75)
    paged = Paged(load(build_spec(config_of(model)), model.state_dict()), block_size=4)
    found = [paged.step({0: text[:60]})[0], *(paged.step({0: [token]})[0] for token in text[60:])]
    with torch.no_grad():
        output = model(torch.tensor([text[:60]]), use_cache=True)
        expected = [output.logits[0]]
        for token in text[60:]:
            output = model(torch.tensor([[token]]), cache=output.past_key_values, use_cache=True)
            expected.append(output.logits[0])
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-4, rtol=1e-5)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "num_positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 1.3}, 5000),
        (LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}, 1),
        ({"rope_type": "yarn", "factor": 32.0}, 1),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}, 1),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0}, 1),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1, "rope_theta": 1e6}, 1),
        (LONGROPE, 1),
        (LONGROPE, 1025),
        (LONGROPE | {"factor": 2.0}, 4096),
        (LONGROPE | {"attention_factor": 1.3}, 1024),
    ],
)
def test_rope_frequencies_equal_transformers(fields: dict[str, Any], num_positions: int) -> None:
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(fields))
    spec = build_spec(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).ropes[0]
    assert spec is not None
    length = torch.tensor(num_positions) if num_positions > 1 else None
    expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(spec, num_positions)[-1], expected, atol=0, rtol=1e-6)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 6])
def test_rope_turns_pairs_in_the_plane(interleaved: bool, dim: int) -> None:
    """As multiplication of complex numbers; what is beyond `dim` stays."""
    torch.manual_seed(0)
    spec = RopeSpec(theta=100.0, dim=dim, interleaved=interleaved)
    tables = rope_tables(spec, num_positions=16, dtype=torch.float32, device=CPU)
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 15], dtype=torch.int32)
    turned = x.clone()
    rotate_(turned, tables.cos[positions][:, None], tables.sin[positions][:, None], interleaved=interleaved)
    half = dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = x.clone()
    for i, (first, second) in enumerate(pairs):
        angle = positions.double() * 100.0 ** (-2 * i / dim)
        product = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones(3), angle.float())[:, None]
        expected[..., first], expected[..., second] = product.real, product.imag
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight_in_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_where_the_family_does(weight_in_float32: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64).mul_(0.5).add_(1).to(dtype)
    x = torch.randn(50, 64).to(dtype)
    quotient = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    at_once, rounded = (quotient * weight.float()).to(dtype), quotient.to(dtype) * weight
    expected, other = (at_once, rounded) if weight_in_float32 else (rounded, at_once)
    found = norm(x, Norm(weight=weight, eps=1e-5, weight_in_float32=weight_in_float32))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected)
    else:
        assert (found != expected).float().mean() < 0.01 < (other != expected).float().mean()


# --- specifications ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ({"rope_scaling": None}, {"rope_parameters": None}),
        (
            {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 7.0},
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0}},
        ),
    ],
)
def test_old_and_new_spelling_of_rope_are_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert build_spec(plain_config(**old)) == build_spec(plain_config(**new))


def test_absent_and_null_fields_take_their_meaning() -> None:
    spec = build_spec(plain_config(head_dim=None, num_key_value_heads=None, attention_bias=None))
    assert (spec.head_dim, spec.num_kv_heads, spec.qkv_bias, spec.norm.eps) == (12, 4, False, 1e-6)
    assert spec.attention(0).scale == pytest.approx(1 / math.sqrt(12))
    mistral = plain_config(architectures=["MistralForCausalLM"])
    assert build_spec(mistral).windows == (4096,) * 3
    assert build_spec(mistral | {"sliding_window": None}).windows == (None,) * 3
    assert build_spec(mistral | {"sliding_window": 7}).windows == (7,) * 3
    qwen = plain_config(architectures=["Qwen2ForCausalLM"], sliding_window=9, max_window_layers=2)
    assert build_spec(qwen).windows == (None,) * 3
    assert build_spec(qwen | {"use_sliding_window": True}).windows == (None, None, 9)
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    typed = qwen | {"use_sliding_window": True, "layer_types": layer_types}
    assert build_spec(typed).windows == (9, None, None)
    assert build_spec(plain_config(architectures=["Qwen3ForCausalLM"])).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, r"architectures is \['NoSuchModel'\], supported: LlamaForCausalLM, "),
        ({"architectures": None}, r"architectures is \[\], supported: "),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', must be a whole number >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 5}, "hidden_size is 48, must be a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must divide num_attention_heads 4"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh', supported: silu"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', must be true or false"),
        ({"head_dim": 15}, "head_dim and partial_rotary_factor rotate 15 of 15"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type is 'su', supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is .* must be one set"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window is -1"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types is .* must have 3 entries",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": 5}, "layer_types is 5, must have 3 entries"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers is 'x', must be a whole number",
        ),
        ({"architectures": 5}, "architectures is 5, must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is .* supported: LlamaForCausalLM"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], supported: silu"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, must be a whole number >= 1 and <= 10000"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648, must be a whole number >= 1 and <= 2147483647"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": "x"},
            "original_max_position_embeddings is 'x'",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 3}, "layer_types is 'linear_"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(plain_config(**fields))


@pytest.mark.parametrize("architecture", [name for family in FAMILIES for name in family.architectures])
def test_every_architecture_has_a_spec_that_names_all_parameters(architecture: str) -> None:
    config = plain_config(hidden_size=256)
    spec = build_spec(config | {"architectures": [architecture], "text_config": config})
    assert spec.architecture == architecture
    stored = {slot for _, of in spec.names for slot in ((of,) if isinstance(of, str) else of.slots)}
    decoder = Decoder(spec, max_model_len=8, dtype=torch.float32, device=torch.device("meta"))
    for slot in decoder.slots():
        pattern, _ = numbered(slot.removesuffix(".bias"))
        assert pattern in stored


def test_checkpoint_names() -> None:
    spec = build_spec(plain_config(architectures=["YiForCausalLM"], tie_word_embeddings=True, attention_bias=True))
    tensor = torch.empty(3, 2, device="meta")

    def slots(name: str) -> list[str] | None:
        parts = spec.unpack(name, tensor)
        assert parts is None or all(part is tensor for _, part in parts)
        return None if parts is None else [slot for slot, _ in parts]

    assert slots("model.embed_tokens.weight") == slots("embed_tokens.weight") == ["embed"]
    assert slots("model.layers.2.ln1.weight") == slots("layers.2.input_layernorm.weight") == ["layers.2.norm1"]
    assert slots("model.layers.0.self_attn.q_proj.bias") == ["layers.0.q.bias"]
    assert slots("model.layers.0.mlp.up_proj.bias") == ["layers.0.up.bias"]  # which the decoder lacks: loading says so
    assert slots("model.norm.weight") == ["final_norm"]
    assert slots("lm_head.weight") == []
    assert slots("model.layers.1.self_attn.rotary_emb.inv_freq") == []
    for unknown in (
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.N.mlp.up_proj.weight",
        "score.weight",
    ):
        assert slots(unknown) is None
    assert replace(spec, tied=False).unpack("lm_head.weight", tensor) == [("head", tensor)]
