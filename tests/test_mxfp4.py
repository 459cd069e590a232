"""MXFP4 against its definition, and what is wrong in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyvllm import LLM
from pyvllm.checkpoint import WeightError, open_safetensors
from pyvllm.mxfp4 import expand_mxfp4
from tests.models.test_experts import SIZES
from tests.test_equals_transformers import assert_greedy_equal
from tests.tiny_models import random_model, saved_state


def e2m1(code: int) -> float:
    """A sign, two bits of exponent, one of mantissa; exponent 0 has no hidden one."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -value if code & 8 else value


def test_every_code_and_many_scales(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8)
    blocks[0, 0] = torch.arange(64, dtype=torch.uint8).view(4, 16) * 4
    scales = torch.randint(100, 140, (2, 3, 4), dtype=torch.uint8)
    other = torch.randn(3)
    save_file({"w_blocks": blocks, "w_scales": scales, "other": other}, tmp_path / "model.safetensors")
    tensors = expand_mxfp4(open_safetensors(tmp_path))
    assert set(tensors) == {"w", "other"}
    assert tensors["w"].shape == (2, 128, 3)
    found = tensors["w"].read()
    assert torch.equal(tensors["other"].read(), other)
    assert found.dtype == torch.bfloat16
    for outer in range(2):
        for row in range(3):
            for i in range(128):
                byte = int(blocks[outer, row, i // 32, i % 32 // 2])
                code = byte >> 4 if i % 2 else byte & 15
                expected = e2m1(code) * 2.0 ** (int(scales[outer, row, i // 32]) - 127)
                assert found[outer, i, row].item() == expected


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(3, 4, 16, dtype=torch.uint8), torch.zeros(3, 5, dtype=torch.uint8)
    for tensors, message in (
        ({"w_blocks": blocks, "w_scales": scales}, r"'w_blocks' is \[3, 4, 16\], but its scales are \[3, 5\]"),
        ({"w_blocks": blocks}, r"'w_blocks' is \[3, 4, 16\], but its scales are None"),
        ({"w_scales": scales}, "'w_scales' are scales without blocks"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(WeightError, match=message):
            expand_mxfp4(open_safetensors(tmp_path))


def test_a_model_in_mxfp4(tmp_path: Path) -> None:
    """As the authors of GPT-OSS store it: the experts' matrices in blocks, all else in bfloat16."""
    fields: dict[str, Any] = SIZES | {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    }
    model = random_model("gpt_oss", **fields)
    config, state = saved_state(model, tmp_path)
    for layer in range(3):
        for name, shape in (("gate_up_proj", (4, 64, 2)), ("down_proj", (4, 64, 1))):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            del state[stem]
            state[f"{stem}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            state[f"{stem}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, tensor in expand_mxfp4(open_safetensors(tmp_path)).items():
        model.state_dict()[name].copy_(tensor.read())
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 64,
        "max_model_len": 64,
        "block_size": 4,
        "skip_tokenizer_init": True,
    }
    with torch.inference_mode(), LLM(str(tmp_path), dtype="float32", **options) as llm:
        assert_greedy_equal(model, llm, [[5, 6, 7], [(3 * i) % 97 for i in range(20)]], 12)
