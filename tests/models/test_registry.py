"""Families from outside."""

from __future__ import annotations

import asyncio
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import pyvllm
from pyvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from pyvllm.chat import load_template, render_chat
from pyvllm.models import FAMILIES, build_spec
from pyvllm.models.families.llama import llama
from pyvllm.models.registry import VARIABLE, Registry
from pyvllm.models.table import support_table
from tests.test_equals_transformers import assert_greedy_equal
from tests.tiny_models import plain_config, random_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_family.py"


def gpt_neo_model() -> Any:
    return random_model(
        "gpt_neo",
        hidden_size=48,
        num_layers=3,
        num_heads=4,
        attention_types=[[["global", "local"], 1], [["local"], 1]],
        window_size=5,
        vocab_size=97,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    )


def test_the_example_adds_a_family_in_under_60_lines(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    runpy.run_path(str(EXAMPLE))
    assert "GPTNeoForCausalLM" in pyvllm.ModelRegistry.get_supported_archs()
    model = gpt_neo_model()
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "skip_tokenizer_init": True}
    with torch.inference_mode(), LLM(str(tmp_path), dtype="float32", **options) as llm:
        assert_greedy_equal(model, llm, [[5, 6, 7], [(3 * i) % 97 for i in range(20)]], 12)


def test_a_family_is_a_function_or_the_name_of_one() -> None:
    registry = Registry(FAMILIES)
    registry.register_model("Mine", llama)
    registry.register_model("Yours", "pyvllm.models.families.llama:llama")
    for name in ("Mine", "Yours"):
        assert registry.build_spec(plain_config(architectures=[name])) == llama(plain_config(architectures=[name]))
    assert registry.get_supported_archs()[-2:] == ["Mine", "Yours"]
    with pytest.raises(ValueError, match=r"architectures is .*Mine.*, supported: "):
        build_spec(plain_config(architectures=["Mine"]))


def test_what_makes_no_specification_is_named() -> None:
    registry = Registry(FAMILIES)
    a_class: Any = dict  # as is registered elsewhere
    registry.register_model("Mine", a_class)
    with pytest.raises(ValueError, match=r"what is registered for Mine made {.*must make a ModelSpec"):
        registry.build_spec(plain_config(architectures=["Mine"]))


def test_a_package_adds_a_family_with_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added-1.0.dist-info").mkdir()
    (tmp_path / "added-1.0.dist-info" / "METADATA").write_text("Name: added\nVersion: 1.0\n", encoding="utf-8")
    points = "[pyvllm.models]\nAddedModel = added_family:make\nLlamaForCausalLM = added_family:missing\n"
    (tmp_path / "added-1.0.dist-info" / "entry_points.txt").write_text(points, encoding="utf-8")
    (tmp_path / "added_family.py").write_text(
        "from pyvllm.models import base_spec\ndef make(config): return base_spec(config)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = plain_config(architectures=["AddedModel"])
    assert build_spec(config).architecture == "AddedModel"
    assert pyvllm.ModelRegistry.get_supported_archs()[-1] == "AddedModel"
    assert build_spec(plain_config()) == llama(plain_config())  # what comes with pyvllm is not replaced


def test_the_engines_own_process_knows_what_was_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    __import__(EXAMPLE.stem)
    assert os.environ[VARIABLE] == "GPTNeoForCausalLM=custom_family:gpt_neo"
    gpt_neo_model().save_pretrained(tmp_path)
    args = AsyncEngineArgs(
        model=str(tmp_path), dtype="float32", num_gpu_blocks_override=64, block_size=4, skip_tokenizer_init=True
    )

    async def tokens() -> list[int]:
        llm = AsyncLLM.from_engine_args(args)
        try:
            params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
            async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, "one"):
                last = output
        finally:
            llm.shutdown()
        return last.outputs[0].token_ids

    assert len(asyncio.run(tokens())) == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Mine", "PYVLLM_MODELS is 'Mine', must be Architecture=module:function"),
        ("Mine=a.b", "must be Architecture=module:function"),
        ("Mine=__main__:make", "Mine is registered as __main__:make, not to be found here: it belongs to the program"),
        ("Mine=no_such_module:make", "not to be found here: No module named 'no_such_module'"),
        ("Mine=os:make", "not to be found here: module 'os' has no attribute 'make'"),
    ],
)
def test_a_family_that_cannot_be_found_is_named(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        build_spec(plain_config(architectures=["Mine"]))


def test_a_family_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        VARIABLE, "LlamaForCausalLM=pyvllm.models.families.llama:qwen3, Mine=pyvllm.models.families.llama:llama"
    )
    assert build_spec(plain_config()).qk_norm is not None
    assert "Mine" in pyvllm.ModelRegistry.get_supported_archs()


@pytest.mark.parametrize(
    ("architecture", "make_spec", "message"),
    [
        ("a=b", llama, "architecture must be a name as in config.json, got 'a=b'"),
        ("", llama, "architecture must be a name as in config.json, got ''"),
        (3, llama, "got 3"),
        ("Mine", 3, "make_spec must be a function or 'module:name' of one, got 3"),
        ("Mine", "a.b.c", "got 'a.b.c'"),
    ],
)
def test_what_cannot_be_a_family_is_refused(architecture: Any, make_spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Registry(()).register_model(architecture, make_spec)


def test_no_architecture_has_two_families() -> None:
    names = [architecture for family in FAMILIES for architecture in family.architectures]
    assert len(names) == len(set(names))


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    docs = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert support_table() in docs, f"docs/models.md must have:\n{support_table()}"


CHATS = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "vicuna": "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: Hi ASSISTANT: Yes?</s>USER: Bye ASSISTANT:",
    "alpaca": "<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nHi\n\n### Response:\nYes?\n\n### Instruction:\nBye\n\n### Response:\n",
    "falcon": "User: Hi\nFalcon: Yes?\nUser: Bye\nFalcon:",
    "chatglm2": "[gMASK]<sop>[Round 1]\n\n问\uff1aHi\n\n答\uff1aYes?\n\n[Round 2]\n\n问\uff1aBye\n\n答\uff1a",
    "aquila": "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the human's questions.###Human: Hi###Assistant: Yes?###Human: Bye###Assistant:",
    "stablelm_tuned": "<|USER|>Hi<|ASSISTANT|>Yes?<|USER|>Bye<|ASSISTANT|>",
    "phi2": "Instruct: Hi\nOutput: Yes?\nInstruct: Bye\nOutput:",
    "redpajama": "<human>: Hi\n<bot>: Yes?\n<human>: Bye\n<bot>:",
}


def test_every_chat_template_of_the_examples_is_tried() -> None:
    assert {path.stem for path in (ROOT / "examples" / "chat_templates").glob("*.jinja")} == set(CHATS)


@pytest.mark.parametrize("name", CHATS)
def test_chat_templates_of_the_examples(name: str) -> None:
    messages = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye")]
    text = render_chat(
        load_template(str(ROOT / "examples" / "chat_templates" / f"{name}.jinja")),
        [{"role": role, "content": content} for role, content in messages],
        special_tokens={"bos_token": "<s>"},  # a chat's text is encoded without adding any
    )
    assert text == CHATS[name]
