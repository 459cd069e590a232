"""Whole folders of families that come with code of their own: chats through `LLM`, and the code is never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyvllm import LLM, SamplingParams
from tests.models.test_mapped_families import Checkpoint, baichuan_7b, chatglm, internlm2, qwen1
from tests.test_equals_transformers import assert_beams_equal
from tests.test_own_tokenizers import byte_pairs, train, write_tiktoken

CODE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"


def qwen1_folder(path: Path) -> Checkpoint:
    ranks = byte_pairs()
    write_tiktoken(path, ranks)
    write(path, generation_config={"chat_format": "chatml", "eos_token_id": len(ranks)})
    write(path, tokenizer_config={"tokenizer_class": "QWenTokenizer"})
    return qwen1(len(ranks) + 208)


def chatglm_folder(path: Path) -> Checkpoint:
    size = train(path / "tokenizer.model").vocab_size()
    write(path, tokenizer_config={"tokenizer_class": "ChatGLMTokenizer"})
    return chatglm(vocab_size=size + 13)


def baichuan_folder(path: Path) -> Checkpoint:
    reference = train(path / "tokenizer.model", user_defined_symbols=["<reserved_106>", "<reserved_107>"])
    user, assistant = (reference.piece_to_id(f"<reserved_10{i}>") for i in (6, 7))
    write(path, generation_config={"user_token_id": user, "assistant_token_id": assistant})
    write(path, tokenizer_config={"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False})
    return baichuan_7b(reference.vocab_size())


def internlm2_folder(path: Path) -> Checkpoint:
    size = train(path / "tokenizer.model").vocab_size()
    template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    write(path, tokenizer_config={"tokenizer_class": "InternLM2Tokenizer", "chat_template": template})
    return internlm2(vocab_size=size)


def write(path: Path, **files: dict[str, Any]) -> None:
    for name, content in files.items():
        auto_map = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None], "AutoConfig": "code.Config"}}
        (path / f"{name}.json").write_text(json.dumps(content | auto_map), encoding="utf-8")


@pytest.mark.parametrize("make", [qwen1_folder, chatglm_folder, baichuan_folder, internlm2_folder])
def test_chat(make: Callable[[Path], Checkpoint], tmp_path: Path) -> None:
    model, config, state = make(tmp_path)
    write(tmp_path, config=config)
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    torch.save(state, tmp_path / "pytorch_model.bin")
    messages = [{"role": "user", "content": "the family"}]
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "block_size": 4}
    with torch.inference_mode(), LLM(str(tmp_path), trust_remote_code=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        output = llm.chat(messages, params, use_tqdm=False)[0]
        tokenizer = llm.get_tokenizer()
        assert_beams_equal(model, llm, [output.prompt_token_ids], 6, 3)
    prompt = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert output.prompt_token_ids == prompt
    token_ids = output.outputs[0].token_ids
    logits = model(torch.tensor([prompt + token_ids])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids
    assert not (tmp_path / "code.ran").exists()
