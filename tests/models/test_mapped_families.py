"""Families that transformers lacks: a checkpoint under their names, made from an equivalent model of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyvllm import LLM
from pyvllm.models import build_spec
from tests.tiny_models import check_every_position, hf_logits, load, random_model

State = dict[str, Tensor]
Checkpoint = tuple[Any, dict[str, Any], State]
"""An equivalent model of transformers, the family's config, and its tensors under the family's names."""
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def check(architecture: str, config: dict[str, Any], state: State, expected: Callable[[list[int]], Tensor]) -> None:
    spec = build_spec(config | {"architectures": [architecture]})
    check_every_position(load(spec, state, max_model_len=64), expected, block_size=4)


def check_checkpoint(checkpoint: Checkpoint) -> None:
    model, config, state = checkpoint
    check(config["architectures"][0], config, state, lambda text: hf_logits(model, text))


def renamed(state: State, names: dict[str, str]) -> State:
    """Every key, with parts of it replaced."""
    result = {}
    for key, tensor in state.items():
        for old, new in names.items():
            key = key.replace(old, new)
        result[key] = tensor
    return result


def fused(state: State, names: tuple[str, ...], into: str, *, groups: int = 1) -> State:
    """The tensors whose names have one of `names`, of each layer in one, by `groups` of rows."""
    result, parts = {}, dict[str, list[Tensor]]()
    for key, tensor in state.items():
        found = next((name for name in names if name in key), None)
        if found is None:
            result[key] = tensor
        else:
            rows = tensor.unflatten(0, (groups, -1))
            parts.setdefault(key.replace(found, into), []).append(rows)
    return result | {key: torch.cat(rows, 1).flatten(0, 1) for key, rows in parts.items()}


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


# --- what is LLaMA or Qwen 2 under other names ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_internlm(bias: bool) -> None:
    model = random_model("llama", **SIZES, attention_bias=bias)
    config = SIZES | {"rotary": {"base": 10000, "type": "dynamic"}} | ({} if bias else {"bias": False})
    check("InternLMForCausalLM", config, model.state_dict(), lambda text: hf_logits(model, text))


def internlm2(*, kv_heads: int = 2, bias: bool = False, **fields: Any) -> Checkpoint:
    fields = SIZES | {"num_key_value_heads": kv_heads, "rope_theta": 100.0} | fields
    model = random_model("llama", **fields, attention_bias=bias)
    names = {
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    state = renamed(fused(model.state_dict(), QKV, "attention.wqkv", groups=kv_heads), names)
    return model, fields | {"architectures": ["InternLM2ForCausalLM"], "bias": bias}, state


@pytest.mark.parametrize(("kv_heads", "bias"), [(2, False), (1, False), (4, True)])
def test_internlm2(kv_heads: int, bias: bool) -> None:
    check_checkpoint(internlm2(kv_heads=kv_heads, bias=bias))


@pytest.mark.parametrize("bias", [True, False])
def test_internlm3(bias: bool) -> None:
    fields = SIZES | {"head_dim": 16}
    model = random_model("llama", **fields, num_key_value_heads=2, attention_bias=bias, mlp_bias=bias)
    config = fields | {"qkv_bias": bias, "bias": bias}
    check("InternLM3ForCausalLM", config, model.state_dict(), lambda text: hf_logits(model, text))


def test_internlm3_with_biases_of_queries_keys_and_values_alone() -> None:
    model = random_model("qwen2", **SIZES, num_key_value_heads=2)
    check("InternLM3ForCausalLM", SIZES | {"qkv_bias": True}, model.state_dict(), lambda text: hf_logits(model, text))


@pytest.mark.parametrize("architecture", ["AquilaModel", "AquilaForCausalLM"])
def test_aquila(architecture: str) -> None:
    fields = SIZES | {"num_key_value_heads": 2}
    model = random_model("llama", **fields)
    check(architecture, fields, model.state_dict(), lambda text: hf_logits(model, text))
    assert build_spec(fields | {"architectures": [architecture]}).norm.weight_in_float32


def qwen1(vocab_size: int = 97) -> Checkpoint:
    model = random_model("qwen2", **(SIZES | {"vocab_size": vocab_size}), num_key_value_heads=4, rope_theta=300.0)
    names = {
        "embed_tokens": "wte",
        "model.layers": "transformer.h",
        "model.": "transformer.",
        "input_layernorm": "ln_1",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
        "transformer.norm": "transformer.ln_f",
    }
    state = renamed(fused(model.state_dict(), QKV, "attn.c_attn"), names)
    config = {
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": 48,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 12,
        "vocab_size": vocab_size,
        "max_position_embeddings": 8192,
        "seq_length": 64,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 300.0,
        "rotary_pct": 1.0,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "no_bias": True,
        "tie_word_embeddings": False,
    }
    return model, config, state


def test_qwen1() -> None:
    model, config, state = qwen1()
    check_checkpoint((model, config, state))
    assert build_spec(config).max_position_embeddings == 64


# --- Baichuan ---------------------------------------------------------------------------------------------------------


def baichuan_7b(vocab_size: int = 97) -> Checkpoint:
    fields = SIZES | {"vocab_size": vocab_size}
    model = random_model("llama", **fields)
    state = fused(model.state_dict(), QKV, "self_attn.W_pack")
    return model, fields | {"architectures": ["BaiChuanForCausalLM"]}, state


def test_baichuan_7b() -> None:
    check_checkpoint(baichuan_7b())


@pytest.mark.parametrize("heads", [4, 6])
def test_baichuan_13b(heads: int) -> None:
    """ALiBi in LLaMA: all positions 0, and a mask with the biases."""
    fields = SIZES | {"num_attention_heads": heads}
    model = random_model("llama", **fields, attn_implementation="eager")
    state = fused(model.state_dict(), QKV, "self_attn.W_pack")

    def expected(text: list[int]) -> Tensor:
        return with_alibi(model, text, heads)

    del fields["max_position_embeddings"]
    check("BaichuanForCausalLM", fields | {"model_max_length": 64}, state, expected)


def with_alibi(model: Any, text: list[int], heads: int) -> Tensor:
    """The slopes as Baichuan's authors compute them: of the power of two below, then every second of that above."""
    below = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-8 * (i + 1) / (2 * below)) for i in range(0, 2 * below, 2)][: heads - below]
    position = torch.arange(len(text))
    bias = torch.tensor(slopes)[:, None, None] * (position - position[:, None])
    mask = bias.masked_fill(position > position[:, None], float("-inf"))[None]
    with torch.no_grad():
        zeros = torch.zeros(1, len(text), dtype=torch.long)
        logits: Tensor = model(torch.tensor([text]), attention_mask=mask, position_ids=zeros).logits[0]
    return logits


def test_baichuan_2_has_a_head_of_unit_rows_and_tells_its_positions_by_its_size() -> None:
    config = SIZES | {"architectures": ["BaichuanForCausalLM"], "vocab_size": 125696, "hidden_size": 4096}
    spec = build_spec(config | {"num_attention_heads": 32})
    assert spec.ropes[0] is not None
    assert spec.alibi_slopes is None
    stored = torch.randn(6, 5)
    parts = spec.unpack("lm_head.weight", stored)
    assert parts is not None
    assert parts[0][0] == "head"
    torch.testing.assert_close(parts[0][1], stored / stored.norm(dim=1, keepdim=True))
    more = build_spec(config | {"num_attention_heads": 32, "vocab_size": 125699})  # somebody added tokens
    assert more.names == spec.names
    large = build_spec(config | {"hidden_size": 5120, "num_attention_heads": 40})
    assert (large.ropes[0], len(large.alibi_slopes or ())) == (None, 40)
    first = build_spec(config | {"vocab_size": 64000, "hidden_size": 5120, "num_attention_heads": 40})
    assert first.unpack("lm_head.weight", stored) == [("head", stored)]


# --- ChatGLM ----------------------------------------------------------------------------------------------------------


def chatglm(*, groups: int | None = 2, bias: bool = True, vocab_size: int = 97, second: bool = False) -> Checkpoint:
    """`groups` None: no heads share keys, and the fused tensor goes by heads. `second`: ChatGLM 2."""
    kv_heads = groups or 4
    theta = {"rope_type": "default", "rope_theta": 20000.0}
    if second:
        theta = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = random_model(
        "glm",
        **(SIZES | {"rms_norm_eps": 1e-5, "vocab_size": vocab_size}),
        num_key_value_heads=kv_heads,
        head_dim=16,
        attention_bias=bias,
        pad_token_id=None,
        rope_parameters=theta | {"partial_rotary_factor": 0.5},
    )
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers": "transformer.encoder.layers",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    }
    by_head = 4 if groups is None else 1
    state = renamed(fused(model.state_dict(), QKV, "self_attention.query_key_value", groups=by_head), names)
    state["transformer.rotary_pos_emb.inv_freq"] = torch.zeros(4)
    config = {
        "architectures": ["ChatGLMModel"],
        "_name_or_path": f"THUDM/chatglm{2 if second else 3}-6b-32k",
        "num_layers": 2,
        "padded_vocab_size": vocab_size,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "kv_channels": 16,
        "num_attention_heads": 4,
        "multi_query_attention": groups is not None,
        "multi_query_group_num": groups,
        "add_qkv_bias": bias,
        "add_bias_linear": False,
        "seq_length": 64,
        "layernorm_epsilon": 1e-5,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "rope_ratio": 2,
        "tie_word_embeddings": False,
    }
    return model, config, state


@pytest.mark.parametrize(("groups", "bias", "second"), [(2, True, False), (None, True, False), (1, False, True)])
def test_chatglm(groups: int | None, bias: bool, second: bool) -> None:
    check_checkpoint(chatglm(groups=groups, bias=bias, second=second))


# --- other spellings --------------------------------------------------------------------------------------------------


FALCON_FIELDS = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "multi_query": "multi_query",
    "alibi": "alibi",
    "bias": "bias",
}


@pytest.mark.parametrize("kind", ["40b", "7b", "rw"])
def test_falcon_in_its_first_spelling(kind: str) -> None:
    fields: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "multi_query": kind != "rw",
        "alibi": kind == "rw",
        "bias": kind == "rw",
        "parallel_attn": kind != "rw",
        "new_decoder_architecture": kind == "40b",
        "num_kv_heads": 2 if kind == "40b" else None,
    }
    model = random_model("falcon", **fields)
    config = {new: fields[old] for old, new in FALCON_FIELDS.items()}
    config["model_type"] = "RefinedWeb" if kind == "40b" else "RefinedWebModel"
    rest: dict[str, dict[str, Any]] = {"40b": {"n_head_kv": 2}, "7b": {"parallel_attn": True}, "rw": {}}
    config |= rest[kind]
    check("RWForCausalLM", config, model.state_dict(), lambda text: hf_logits(model, text))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_images_is_its_text_part(prefix: str) -> None:
    fields = SIZES | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7}
    model = random_model("gemma3_text", **fields, pad_token_id=None)
    state = {key.replace("model.", prefix): value for key, value in model.state_dict().items() if "lm_head" not in key}
    state["vision_tower.encoder.weight"] = state["model.multi_modal_projector.norm.weight"] = torch.zeros(3)
    text_config = fields | {"tie_word_embeddings": True}
    config = {"text_config": text_config}
    check("Gemma3ForConditionalGeneration", config, state, lambda text: hf_logits(model, text))


def test_no_matrix_of_the_eyes_is_taken_for_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = SIZES | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 7}
    model = random_model("gemma3_text", **fields, pad_token_id=None)
    state = {key.replace("model.", "language_model.model."): value for key, value in model.state_dict().items()}
    del state["lm_head.weight"]
    state["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(5, 48)
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), dtype="float32", **options):
        assert not [record for record in caplog.records if "ties" in record.getMessage()]
    del state["language_model.model.embed_tokens.weight"]
    state["language_model.lm_head.weight"] = torch.zeros(97, 48)  # the one that is stored stands for both
    torch.save(state, tmp_path / "pytorch_model.bin")
    with LLM(str(tmp_path), dtype="float32", **options):
        pass
    del state["language_model.model.norm.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"1 missing: norm\.weight \(final_norm\)"):
        LLM(str(tmp_path), dtype="float32", **options)
