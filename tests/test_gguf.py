"""GGUF files: the Hugging Face layout and config against transformers, and damage, which is named and found at once."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pyvllm import gguf
from pyvllm.checkpoint import open_gguf
from pyvllm.gguf import read_gguf
from pyvllm.hub import resolve_model

TinyCheckpoint = Callable[..., Path]

PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in PARTS:
        return f"{PARTS[stem]}.{suffix}"
    block, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{block}.{PARTS[part]}.{suffix}"


def permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k of architecture "llama"."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_header(path: Path, config: Any, architecture: str) -> library.GGUFWriter:
    writer = library.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(259)
    writer.add_add_bos_token(False)
    writer.add_token_list([f"token {i} ▁é" for i in range(config.vocab_size)])
    writer.add_token_scores([float(i) for i in range(config.vocab_size)])
    return writer


def finish(writer: library.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(folder: Path, path: Path, architecture: str, *, quantise: Any = None, extra: Any = None) -> None:
    """Write the checkpoint of `folder` as llama.cpp's converter would."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    writer = write_header(path, config, architecture)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = permute(tensor, heads)
        data = tensor.numpy()
        if quantise is not None and data.ndim == 2:
            writer.add_tensor(gguf_name(name), library.quantize(data, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), data)
    if extra is not None:
        extra(writer)
    finish(writer)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    convert(tiny_checkpoint("llama", {"attention_bias": True}), path, "llama")
    return path


@pytest.mark.parametrize(
    ("family", "architecture", "overrides"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "llama", {"head_dim": 8, "tie_word_embeddings": True}),
        ("mistral", "llama", {"sliding_window": None}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_tensors_and_config_equal_the_checkpoint_it_was_made_of(
    family: str, architecture: str, overrides: dict[str, Any], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    import transformers

    folder, path = tiny_checkpoint(family, overrides), tmp_path / "m.gguf"
    convert(folder, path, architecture)
    stored = load_file(folder / "model.safetensors")
    read = open_gguf(read_gguf(path))
    assert set(read) == set(stored)
    for name, tensor in read.items():
        assert tensor.shape == tuple(stored[name].shape)
        assert torch.equal(tensor.read(), stored[name]), name

    config = resolve_model(str(path)).config
    ours = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "eos_token_id",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "bos_token_id",
    ):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config["head_dim"] == getattr(theirs, "head_dim", None) or 16
    assert config["torch_dtype"] == "float32"
    for key in ("attention_bias", "mlp_bias"):
        if family == "llama":
            assert config[key] == getattr(theirs, key), key


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_types(name: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    kind = library.GGMLQuantizationType[name]
    folder, path = tiny_checkpoint("qwen2"), tmp_path / "m.gguf"
    convert(folder, path, "qwen2", quantise=kind)
    stored = load_file(folder / "model.safetensors")
    tolerance = {"Q4_0": 0.13, "Q4_1": 0.13, "Q5_0": 0.07, "Q5_1": 0.07, "Q8_0": 0.01, "F16": 1e-3, "BF16": 1e-2}[name]
    for key, tensor in open_gguf(read_gguf(path)).items():
        data = tensor.read()
        expected_dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
        assert data.dtype == (expected_dtype if data.ndim == 2 else torch.float32)
        assert str(data.dtype) == f"torch.{tensor.dtype}"
        bound = tolerance * stored[key].abs().max() if data.ndim == 2 else 0.0
        assert (data.float() - stored[key]).abs().max() <= bound, key
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(name)
    assert resolve_model(str(path)).config.get("torch_dtype") == dtype


def test_llama3_rope_is_recovered_from_its_frequencies(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    folder = tiny_checkpoint("llama", {"rope_parameters": scaling, "max_position_embeddings": 131072, "head_dim": 64})
    config = transformers.AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    divisors = (plain / scaled).numpy()

    def add(values: np.ndarray[Any, Any]) -> Callable[[library.GGUFWriter], None]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    convert(folder, tmp_path / "m.gguf", "llama", extra=add(divisors))
    ours = resolve_model(str(tmp_path / "m.gguf")).config
    assert ours["rope_scaling"] == {key: value for key, value in scaling.items() if key != "rope_theta"}
    assert "rope_freqs.weight" not in open_gguf(read_gguf(tmp_path / "m.gguf"))

    convert(folder, tmp_path / "other.gguf", "llama", extra=add(divisors * np.linspace(1, 2, 32, dtype=np.float32)))
    with pytest.raises(ValueError, match=r"other\.gguf: rope_freqs\.weight does not follow"):
        resolve_model(str(tmp_path / "other.gguf"))


def test_rope_scaling_window_and_sampling_keys(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    def yarn(writer: library.GGUFWriter) -> None:
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_rope_dimension_count(8)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    def windowed(writer: library.GGUFWriter) -> None:
        writer.add_sliding_window(16)
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def longrope(writer: library.GGUFWriter) -> None:
        writer.add_rope_scaling_type(library.RopeScalingType.LONGROPE)

    convert(tiny_checkpoint("qwen2"), tmp_path / "yarn.gguf", "qwen2", extra=yarn)
    model = resolve_model(str(tmp_path / "yarn.gguf"))
    assert model.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert model.config["partial_rotary_factor"] == 0.5
    assert model.generation_config == {"temperature": 0.5, "top_k": 20, "eos_token_id": [257, 259]}

    convert(tiny_checkpoint("llama"), tmp_path / "window.gguf", "llama", extra=windowed)
    config = resolve_model(str(tmp_path / "window.gguf")).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)

    convert(tiny_checkpoint("llama"), tmp_path / "long.gguf", "llama", extra=longrope)
    with pytest.raises(ValueError, match=r"long\.gguf: rope\.scaling\.type 'longrope'"):
        resolve_model(str(tmp_path / "long.gguf"))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*pairs: bytes, version: int = 3, magic: bytes = b"GGUF", tensors: tuple[bytes, ...] = ()) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(pairs))
    return magic + counts + b"".join(pairs) + b"".join(tensors) + bytes(64)


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


UINT32, STRING, ARRAY = struct.pack("<I", 4), struct.pack("<I", 8), struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"GGUF", "truncated"),
        (header(magic=b"GGML"), "magic"),
        (header(version=1), "version 1 "),
        (header(version=99), "version 99 "),
        (header(version=3 << 24), "big-endian"),
        (header(string(b"k") + ARRAY + struct.pack("<IQ", 0, 1 << 60)), "truncated"),
        (header(string(b"k") + ARRAY + STRING + struct.pack("<Q", 1 << 60)), "truncated"),
        (header(string(b"k") + ARRAY + (ARRAY + struct.pack("<Q", 1)) * 5000), "recursion"),
        (header(string(b"k") + struct.pack("<IQ", 8, 1 << 63)), "truncated"),
        (header(string(b"k") + struct.pack("<I", 77)), "77"),
        (header(*[string(b"k") + UINT32 + UINT32] * 2), "Duplicate k"),
        (header(string(b"k") + STRING + string(b"\xff\xfe")), "k is not UTF-8"),
        (header(string(b"split.count") + UINT32 + struct.pack("<I", 3)), "split into 3 files"),
        (header(string(b"general.alignment") + UINT32 + struct.pack("<I", 3)), "alignment"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 61, 0) + bytes(64), "truncated"),
        (header(tensors=(tensor(dims=(8,)), tensor(dims=(8,)))), "duplicated tensor with name t"),
        (header(tensors=(tensor(dims=(1 << 62, 1 << 62)),)), "(4611686018427387904,4611686018427387904)"),
        (header(tensors=(tensor(offset=1 << 40),)), "truncated"),
        (header(tensors=(tensor(offset=(1 << 64) - 32),)), "overflow"),
        (header(tensors=(tensor(dims=(4,), offset=1),)), "tensor 't' is at byte 65, not aligned to 32"),
        (header(tensors=(tensor(dims=(33,), kind=8),)), "row size (33) is not a multiple of Q8_0 block size"),
        (header(tensors=(tensor(dims=(0,)),)), "tensor 't' has shape [0]"),
        (header(tensors=(tensor(kind=1000),)), "1000"),
        (header(tensors=(tensor(dims=(256,), kind=15),)) + bytes(300), "Q8_K"),
    ],
)
def test_corrupt_file_is_named_with_the_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.gguf") as caught:
        gguf.read_gguf(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("kind", "length"), [(8, 1 << 60), (9, 1 << 60), (0, 1 << 60), (0, 1 << 25)])
def test_wrong_array_length_is_noticed_at_once(kind: int, length: int, tmp_path: Path) -> None:
    path, start = tmp_path / "long.gguf", time.process_time()
    path.write_bytes(header(string(b"k") + ARRAY + struct.pack("<IQ", kind, length), UINT32) + b"\xff" * (1 << 25))
    with pytest.raises(ValueError, match=r"long\.gguf: .* truncated: \d+ bytes wanted at byte \d+ of \d+"):
        gguf.read_gguf(path)
    assert time.process_time() - start < 1


def test_every_truncation_is_noticed(tiny_gguf: Path, tmp_path: Path) -> None:
    whole, path = tiny_gguf.read_bytes(), tmp_path / "cut.gguf"
    end = max(t.stored.data_offset + t.stored.n_bytes for t in gguf.read_gguf(tiny_gguf).tensors.values())
    for length in [*range(0, 2000, 37), *range(2000, end, end // 40), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            gguf.read_gguf(path)


def test_random_damage_to_the_header_never_raises_anything_else(tiny_gguf: Path, tmp_path: Path) -> None:
    whole, path, rng = tiny_gguf.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    header_bytes = min(t.stored.data_offset for t in gguf.read_gguf(tiny_gguf).tensors.values())
    messages: list[str] = []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            resolve_model(str(path))
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all("damaged.gguf" in message for message in messages)


def test_unsupported_architecture_and_missing_keys_are_named(tmp_path: Path) -> None:
    def resolve(name: str, architecture: str) -> None:
        writer = library.GGUFWriter(tmp_path / name, architecture)
        writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
        finish(writer)
        resolve_model(str(tmp_path / name))

    with pytest.raises(ValueError, match=r"a\.gguf: general\.architecture is mamba, supported: llama"):
        resolve("a.gguf", "mamba")
    with pytest.raises(ValueError, match=r"b\.gguf: llama\.attention\.head_count is None, must be one int"):
        resolve("b.gguf", "llama")


def test_transformers_reads_the_same_tensors(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    import transformers

    def add_sizes(writer: library.GGUFWriter) -> None:
        writer.add_vocab_size(320)
        writer.add_rope_dimension_count(16)

    kind = library.GGMLQuantizationType.Q8_0
    convert(tiny_checkpoint("llama"), tmp_path / "m.gguf", "llama", quantise=kind, extra=add_sizes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    tensors = open_gguf(read_gguf(tmp_path / "m.gguf"))
    assert set(tensors) == set(theirs.state_dict())
    for name, expected in theirs.state_dict().items():
        assert torch.equal(tensors[name].read(), expected), name


def test_smollm2_equals_the_librarys_blocks_in_transformers_layout(smollm2: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    model = resolve_model(str(smollm2))
    tensors = open_gguf(read_gguf(model.path))
    processor = LlamaTensorProcessor(config=model.config)
    assert len(tensors) == 272
    assert "lm_head.weight" not in tensors
    assert model.config["tie_word_embeddings"] is True
    for stored in library.GGUFReader(model.path).tensors:
        values = library.dequantize(stored.data, stored.tensor_type)
        expected = torch.from_numpy(processor.process(values.copy(), stored.name).weights.copy())
        assert torch.equal(tensors[gguf.hf_name(stored.name)].read(), expected), stored.name
    assert (model.config["hidden_size"], model.config["num_hidden_layers"], model.config["vocab_size"]) == (
        576, 30, 49152,
    )  # fmt: skip
