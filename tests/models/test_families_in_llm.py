"""A checkpoint of each family through `LLM`: files in every form, chunks, prefix cache, greedy and beam search."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pyvllm import LLM, SamplingParams
from tests.models.test_experts import MODELS as EXPERTS
from tests.models.test_experts import SIZES
from tests.models.test_first_families import MODELS as FIRST
from tests.models.test_modern_families import MODELS as MODERN
from tests.test_equals_transformers import assert_beams_equal, assert_greedy_equal
from tests.tiny_models import random_model

MODELS = FIRST | {name: (kind, SIZES | fields) for name, (kind, fields) in (MODERN | EXPERTS).items()}


def one_file(folder: Path) -> None:
    """As `save_pretrained` writes it."""


def sharded(folder: Path) -> None:
    """Three safetensors files with an index."""
    _shard(folder, "model-{:05}-of-00003.safetensors", save_file)


def sharded_bin(folder: Path) -> None:
    """Three `.bin` files with an index."""
    _shard(folder, "pytorch_model-{:05}-of-00003.bin", torch.save)


def bin_of_old(folder: Path) -> None:
    """One `.bin` file, names without a prefix, a mask stored in each layer, the tied head stored too."""
    state = load_file(folder / "model.safetensors")
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    state |= {"lm_head.weight": state["wte.weight"], "h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _shard(folder: Path, name: str, save: Callable[[dict[str, Tensor], Path], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    placed: dict[str, str] = {}
    for i in range(3):
        shard = {key: state[key] for key in names[i::3]}
        placed |= dict.fromkeys(shard, name.format(i + 1))
        save(shard, folder / name.format(i + 1))
    stem = "model.safetensors" if name.endswith(".safetensors") else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": placed}), encoding="utf-8")


FORMS = {
    "gpt2": bin_of_old,
    "gpt2-unscaled": one_file,
    "bigcode-mqa": sharded,
    "gptj": sharded_bin,
    "neox": one_file,
    "opt": sharded,
    "opt-350m": sharded_bin,
    "bloom": one_file,
    "falcon-7b": sharded_bin,
    "falcon-rw": one_file,
    "falcon-40b": sharded,
    "mpt": sharded_bin,
    "gemma": sharded,
    "gemma2": one_file,
    "gemma3": sharded_bin,
    "phi": sharded,
    "phi3": sharded_bin,
    "stablelm-12b": one_file,
    "olmo": sharded_bin,
    "olmo2": one_file,
    "olmo3": sharded,
    "granite": sharded_bin,
    "smollm3": one_file,
    "glm": sharded,
    "glm4": sharded_bin,
    "starcoder2": one_file,
    "cohere-plus": sharded,
    "ministral": sharded_bin,
    "mixtral": sharded,
    "qwen2-moe": sharded_bin,
    "qwen3-moe": one_file,
    "olmoe": one_file,
    "gpt-oss": sharded,
    "granite-moe-shared": sharded_bin,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_gpu_blocks_override": 128,
    "skip_tokenizer_init": True,
}


@pytest.mark.parametrize("name", FORMS)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, fields = MODELS[name]
    model = random_model(model_type, **fields)
    model.generation_config.eos_token_id = model.config.eos_token_id = [3]
    model.save_pretrained(tmp_path)
    FORMS[name](tmp_path)
    shared = [(5 * i + 2) % 96 for i in range(13)]
    prompts = [shared + [(11 * i + 7 * j) % 96 for j in range(1 + 6 * i)] for i in range(4)]
    with torch.inference_mode(), LLM(str(tmp_path), **OPTIONS) as llm:
        assert_greedy_equal(model, llm, prompts, 12)
        again = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        outputs = llm.generate([prompts[3]], again, use_tqdm=False)
        assert outputs[0].num_cached_tokens
        ids = torch.tensor([prompts[3] + outputs[0].outputs[0].token_ids])
        assert model(ids).logits[0, len(prompts[3]) - 1 : -1].argmax(-1).tolist() == outputs[0].outputs[0].token_ids
        assert_beams_equal(model, llm, prompts[:1], 6, 3)
