"""`ModelSpec`: all that tells one model family from another, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from pyvllm.kernels import Attention
from pyvllm.layers.rope import RopeSpec

_LAYER: Final = re.compile(r"(?<![^.])layers\.(\d+)\.")
# Buffers that old checkpoints carry and that are computed here.
_SKIPPED: Final = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model: sizes, which parts it has, and what its checkpoint calls them."""

    architecture: str
    """Name in `config.json`, for messages."""
    vocab_size: int
    """Rows of the embedding; ids are below it."""
    hidden_size: int
    intermediate_size: int
    """Width of the gated MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Tokens that a text may have by the model's own account."""
    windows: tuple[int | None, ...]
    """Of each layer, the keys that a query sees, itself included; None: all before it."""
    norm_eps: float
    norm_weight_in_float32: bool = False
    """See `Norm`."""
    rope: RopeSpec | None
    """None: no rotary positions."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """RMSNorm of each query and key head before the rotation."""
    activation: str = "silu"
    """A key of `ACTIVATIONS`."""
    tied: bool = False
    """The embedding is the output matrix too."""
    names: tuple[tuple[str, str], ...]
    """Checkpoint name -> slot, both without `.weight`, `layers.N` standing for any layer and `prefix` left out."""
    prefix: str = "model."
    """What checkpoint names start with, or not."""

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.windows)

    def attention(self, layer: int) -> Attention:
        """What attention computes in a layer."""
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
        )

    def unpack(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """A checkpoint's tensor as (slot, tensor) pairs; [] if it is known and not needed, None if it is unknown.

        Slots are the keys of `Decoder.slots`. Shapes are not checked; `tensor` may be on the meta device.
        """
        if name.endswith(_SKIPPED):
            return []
        stem, _, kind = name.removeprefix(self.prefix).rpartition(".")
        layer = _LAYER.search(stem)
        number = int(layer[1]) if layer else 0
        pattern = _LAYER.sub("layers.N.", stem, count=1)
        slot = dict(self.names).get(pattern)
        if slot is None or number >= self.num_layers or "layers.N." in stem:
            return None
        if kind != "weight" and not (kind == "bias" and self._has_bias(slot)):
            return None
        if slot == "head" and self.tied:
            return []
        slot = slot.replace(".N.", f".{number}.")
        return [(slot if kind == "weight" else f"{slot}.bias", tensor)]

    def _has_bias(self, slot: str) -> bool:
        part = slot.removeprefix("layers.N.")
        return (
            (self.qkv_bias and part in ("q", "k", "v"))
            or (self.o_bias and part == "o")
            or (self.mlp_bias and part in ("gate", "up", "down"))
        )
