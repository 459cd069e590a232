"""`ModelSpec`: all that tells one model family from another, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pyvllm.kernels import Attention
from pyvllm.layers.attention import QueryKeyNorm
from pyvllm.layers.moe import ExpertsSpec
from pyvllm.layers.norm import NormSpec
from pyvllm.layers.rope import RopeSpec
from pyvllm.models.stored import Stored, numbered, with_numbers

# Buffers that old checkpoints carry and that are computed here.
_SKIPPED_ENDS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model: sizes, which parts it has, and what its checkpoint calls them."""

    architecture: str
    """Name in `config.json`, for messages."""
    vocab_size: int
    """Rows of the embedding; ids are below it."""
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Tokens that a text may have by the model's own account, stretched rotary positions counted in."""
    windows: tuple[int | None, ...]
    """Of each layer, the keys that a query sees, itself included; None: all before it."""

    # Positions.
    ropes: tuple[RopeSpec | None, ...]
    """Of each layer, its rotary positions; None: it has none."""
    alibi_slopes: tuple[float, ...] | None = None
    """See `Attention`."""
    position_offset: int | None = None
    """Row of position 0 in the table of learned positions; None: there is no such table."""

    # Norms.
    norm: NormSpec
    """All norms but those of queries and keys."""
    arrangement: Literal["sequential", "parallel", "post_norm", "normed_residual"] = "sequential"
    """A key of `ARRANGEMENTS`, which see."""
    norms: tuple[str, ...] = ("norm1", "norm2")
    """Those of a layer: norm1 and norm2 before attention and MLP (in post_norm: after), attention_out_norm and
    mlp_out_norm of what these give."""
    embed_norm: bool = False
    final_norm: bool = True
    qk_norm: QueryKeyNorm | None = None

    # Attention and MLP.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    scale_falls_with_depth: bool = False
    """The factor is divided by the layer's number, counted from 1."""
    softcap: float | None = None
    """See `Attention`."""
    sinks: bool = False
    """See `Attention`."""
    clip_qkv: float | None = None
    """Queries, keys and values are cut off at this and at its negative."""
    gated: bool = True
    """The MLP is `GatedMLP`, else `PlainMLP`."""
    activation: str = "silu"
    """A key of `ACTIVATIONS`."""
    experts: ExpertsSpec | None = None
    """Takes the place of the MLP in some layers."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add."""

    # Embedding and output.
    embed_size: int | None = None
    """Size of the embedding's rows if matrices project them to `hidden_size` and back."""
    embed_scale: float = 1.0
    """Factor of the embedding."""
    tied: bool = False
    """The embedding is the output matrix too."""
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits become `cap * tanh(logits / cap)`."""

    # The checkpoint.
    names: tuple[tuple[str, str | Stored], ...]
    """Checkpoint name -> slot or slots, both without `.weight` and `.bias`. The first number in a name is N, a layer,
    the second E, an expert."""
    prefixes: tuple[str, ...] = ("model.",)
    """The first of these with which a checkpoint's name starts is left out of it."""
    skipped: tuple[str, ...] = ()
    """What names of tensors start with that are not needed."""

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.windows)

    @property
    def usual_len(self) -> int:
        """Tokens that a text may have if nobody asks for more. Longrope has worse angles where more are allowed."""
        lengths = [rope.trained_len for rope in self.ropes if rope is not None and rope.rope_type == "longrope"]
        return min([self.max_position_embeddings, *lengths])

    def attention(self, layer: int) -> Attention:
        """What attention computes in a layer."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=scale / (layer + 1) if self.scale_falls_with_depth else scale,
            window=self.windows[layer],
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )

    def lacks(self, name: str) -> bool:
        """Whether a checkpoint's tensor is a buffer, or of a part, that there is not here."""
        return name.endswith(_SKIPPED_ENDS) or name.startswith(self.skipped)

    def name_of(self, slot: str) -> str | None:
        """What the checkpoint calls the tensor that fills a slot, without a prefix; None if no name does."""
        bias = slot.endswith(".bias")
        pattern, numbers = numbered(slot.removesuffix(".bias"))
        for name, stored in self.names:
            if pattern in ((stored,) if isinstance(stored, str) else stored.slots):
                return with_numbers(name, numbers) + (".bias" if bias else ".weight")
        return None

    def unpack(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
        """A checkpoint's tensor as (slot, tensor) pairs; [] if it is known and not needed, None if it is unknown.

        Slots are the keys of `Decoder.slots`, or such as a model with more biases or experts would have. Shapes are not
        checked but for what is needed to take a tensor apart: raises RuntimeError. `tensor` may be on the meta device.
        """
        if self.lacks(name):
            return []
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        pattern, numbers = numbered(name.removeprefix(prefix))
        stem, _, kind = pattern.rpartition(".")
        names = dict(self.names)
        stored = names.get(pattern) if kind not in ("weight", "bias") else names.get(stem)
        if stored is None or numbers.get("N", 0) >= self.num_layers:
            return None
        if stored == "head" and self.tied and kind == "weight":
            return []
        stored = Stored(slots=(stored,)) if isinstance(stored, str) else stored
        return stored.unpack(tensor, numbers, ".bias" if kind == "bias" else "")
