"""GGUF files through the `gguf` library, in the Hugging Face names, layout and config that the rest of pyvllm reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, ReaderField, ReaderTensor, dequantize

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN_TYPES: Final = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
"""ggml types that hold one element of this dtype per value; all others are blocks that decode to float32."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor's header. `shape` is in torch order (outermost first), `dtype` torch's name of what reading gives."""

    shape: tuple[int, ...]
    dtype: str
    is_quantised: bool
    stored: ReaderTensor
    """The library's entry; its data are views of the mapped file."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The header of a GGUF file; `metadata` values are int, float, bool, str, or lists of one of these."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read(self, name: str) -> Tensor:
        """The tensor `name` in the file's own layout, in its `dtype`; quantised types are decoded to float32."""
        import torch  # here: those who read headers alone do without

        tensor, stored = self.tensors[name], self.tensors[name].stored
        if tensor.is_quantised:
            return torch.from_numpy(dequantize(stored.data, stored.tensor_type))
        # Mode "c" keeps the mapping private and writable, as torch wants; nothing writes to it.
        data = np.memmap(self.path, np.uint8, mode="c", offset=stored.data_offset, shape=(stored.n_bytes,))
        return torch.from_numpy(data).view(getattr(torch, tensor.dtype)).view(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """The header of the GGUF file at `path`.

    Raises ValueError naming the file and the reason when it is not GGUF, is truncated or corrupt, or uses a version
    or tensor type that cannot be read; FileNotFoundError when it does not exist.
    """
    try:
        with np.errstate(over="raise"):
            reader = _Reader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
        if metadata.get("split.count", 0) not in (0, 1):
            raise ValueError(f"part of a model split into {metadata['split.count']} files; merge them into one first")
        tensors = {stored.name: _tensor(stored, reader) for stored in reader.tensors}
    except OSError:
        raise
    except Exception as error:  # the library trusts what it reads: whatever that leads to, the file is refused
        raise ValueError(f"{path}: corrupt or unsupported GGUF file: {error}") from error
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


class _Reader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """The library's reader, with a check against the end of the file: without, a wrong length makes it loop for ever.

    Each number and string becomes a numpy view. Views of plain arrays instead of `memmap`s, and one view for a whole
    array of numbers, make it three times as fast.
    """

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: str | None = None) -> Any:
        if self.byte_order != "I":
            raise ValueError("big-endian files are not supported")
        num_bytes = np.dtype(dtype).itemsize * int(count)
        if num_bytes > self.data.size - offset:
            raise ValueError(f"truncated: {num_bytes} bytes wanted at byte {offset} of {self.data.size}")
        return np.frombuffer(self.data, dtype, int(count), offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            number = self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
            # Strings and nested arrays have a length of 8 bytes each: so many must follow at least.
            values = self._get(orig_offs + 12, number or np.uint64, count[0])
            if number is not None:
                return 12 + values.nbytes, [kind, count, values], [2], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
        return super()._get_field_parts(orig_offs, raw_type)


def _value(field: ReaderField) -> Any:
    try:
        return field.contents()
    except UnicodeDecodeError as error:
        raise ValueError(f"{field.name} is not UTF-8: {error}") from error


def _tensor(stored: ReaderTensor, reader: _Reader) -> GgufTensor:
    name, kind, shape = stored.name, stored.tensor_type, tuple(reversed(stored.shape.tolist()))
    if 0 in shape:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, sizes must be at least 1")
    if (stored.data_offset - reader.data_offset) % reader.alignment:
        raise ValueError(f"tensor {name!r} is at byte {stored.data_offset}, not aligned to {reader.alignment}")
    dtype = _PLAIN_TYPES.get(kind.name)
    if dtype is None:  # raises for a type that cannot be decoded
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    return GgufTensor(shape=shape, dtype=dtype or "float32", is_quantised=dtype is None, stored=stored)


# --- Hugging Face names and layout ------------------------------------------------------------------------------------

_ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""general.architecture -> (model_type, architectures[0]) of the Hugging Face config."""

_ADJACENT_ROPE: Final = frozenset({"llama", "mistral"})
"""Architectures whose rotary embedding turns adjacent pairs of a head in llama.cpp, and halves in Hugging Face."""

_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FREQS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies [head_size / 2]; read into the config, not a weight of the model."""


def hf_name(name: str) -> str:
    """The Hugging Face (LLaMA spelling) name of GGUF tensor `name`; a name that is not known is returned as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    block, part, suffix = match.groups()
    if block is None:
        return f"{_TOP_NAMES[part]}.{suffix}" if part in _TOP_NAMES else name
    return f"model.layers.{block}.{_BLOCK_NAMES[part]}.{suffix}" if part in _BLOCK_NAMES else name


def read_hf(file: GgufFile, name: str) -> Tensor:
    """GGUF tensor `name` in the layout of a Hugging Face checkpoint.

    Rows of q and k (and their biases) are reordered where llama.cpp rotates adjacent pairs: row 2i + j of a head in
    the file is row j * head_size / 2 + i.
    """
    tensor = file.read(name)
    match = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(weight|bias)", name)
    if match is None or file.metadata["general.architecture"] not in _ADJACENT_ROPE:
        return tensor
    num_heads = _Keys(file).heads()[0 if match[1] == "q" else 1]
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


# --- Hugging Face config ----------------------------------------------------------------------------------------------

_Value = TypeVar("_Value", int, float, str)


class _Keys:
    """Typed access to the metadata; keys are given without the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            allowed = ", ".join(_ARCHITECTURES)
            raise ValueError(f"{file.path}: general.architecture is {self.architecture}, supported: {allowed}")

    def get(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one value a layer, and all the same
            value = value[0]
        if not isinstance(value, kind):
            raise ValueError(f"{self.file.path}: {full} is {value!r}, must be one {kind.__name__}")
        return value

    def heads(self) -> tuple[int, int]:
        """Query heads, KV heads."""
        heads = self.get("attention.head_count", int)
        kv_heads = self.get("attention.head_count_kv", int, heads)
        if heads < 1 or kv_heads < 1:
            raise ValueError(f"{self.file.path}: head counts are {heads} and {kv_heads}, must be at least 1")
        return heads, kv_heads


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The content that `config.json` would have for this model, from the metadata and the tensors that are there.

    Raises ValueError naming the file and the key for an architecture, or a value, that is not supported.
    """
    keys = _Keys(file)
    model_type, class_name = _ARCHITECTURES[keys.architecture]
    heads, kv_heads = keys.heads()
    hidden_size = keys.get("embedding_length", int)
    head_dim = keys.get("attention.key_length", int, hidden_size // heads)
    if keys.get("attention.value_length", int, head_dim) != head_dim or keys.get("expert_count", int, 0):
        raise ValueError(f"{file.path}: value_length other than key_length, or experts, are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: token_embd.weight is missing or not a matrix")
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.get("feed_forward_length", int),
        "num_hidden_layers": keys.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.get("context_length", int),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    rotary_dim = keys.get("rope.dimension_count", int, head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if window := keys.get("attention.sliding_window", int, 0):
        config |= {"sliding_window": window, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    elif model_type == "mistral":
        config["sliding_window"] = None  # absent would mean 4096
    matrix = file.tensors.get("blk.0.attn_q.weight", embedding)
    if not matrix.is_quantised:
        config["torch_dtype"] = matrix.dtype
    for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token_id := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{token}_token_id"] = token_id
    return config


def hf_generation_config(file: GgufFile) -> dict[str, Any] | None:
    """The content that `generation_config.json` would have: every id that ends a text, and the sampling defaults."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    config = {
        names.get(key, key): value
        for key in ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
        if (value := file.metadata.get(f"general.sampling.{key}")) is not None
    }
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if eos := list(dict.fromkeys(end for end in ends if end is not None)):
        config["eos_token_id"] = eos
    return config or None


def _rope_scaling(keys: _Keys, head_dim: int) -> dict[str, Any] | None:
    if ROPE_FREQS in keys.file.tensors:
        return _llama3_scaling(keys, head_dim)
    kind = keys.get("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or keys.get("rope.scaling.attn_factor", float, 1.0) != 1.0:
        path = keys.file.path
        raise ValueError(f"{path}: rope.scaling.type {kind!r} with this attn_factor is not supported: linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.get("rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length", int)
        scaling["beta_fast"] = keys.get("rope.scaling.yarn_beta_fast", float, 32.0)
        scaling["beta_slow"] = keys.get("rope.scaling.yarn_beta_slow", float, 1.0)
    return scaling


def _llama3_scaling(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """The llama3 parameters that gave `rope_freqs.weight`, which llama.cpp's converter writes in their stead."""
    low, high, original = 1.0, 4.0, 8192
    stored = keys.file.tensors[ROPE_FREQS].stored
    divisors = dequantize(stored.data, stored.tensor_type).astype(np.float64)
    factor = round(float(divisors.max()), 4)
    theta = keys.get("rope.freq_base", float, 10000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{keys.file.path}: {ROPE_FREQS} does not follow the llama3 formula, no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
