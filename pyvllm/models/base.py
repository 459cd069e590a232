"""What the pages of families share: sizes that every model has, norms, names and slopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pyvllm.kernels import ACTIVATIONS
from pyvllm.layers.norm import NormSpec
from pyvllm.layers.rope import RopeSpec
from pyvllm.models.config_fields import called, choice, flag, integer, number, renamed, rope
from pyvllm.models.spec import ModelSpec
from pyvllm.models.stored import Stored

MakeSpec: TypeAlias = Callable[[Mapping[str, Any]], ModelSpec]
"""Makes a specification from the contents of `config.json`; raises `ValueError` naming the field that is wrong."""

# Far beyond any model: a corrupt number must not fill the memory with layers.
_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that one function specifies."""

    name: str
    """As people call it, with what else belongs to it."""
    architectures: tuple[str, ...]
    """Their names in `config.json`."""
    make: MakeSpec
    verified: str = "transformers"
    """What its logits are compared with in the tests."""


LLAMA_NAMES: Final = (
    ("embed_tokens", "embed"),
    ("layers.N.input_layernorm", "layers.N.norm1"),
    ("layers.N.self_attn.q_proj", "layers.N.q"),
    ("layers.N.self_attn.k_proj", "layers.N.k"),
    ("layers.N.self_attn.v_proj", "layers.N.v"),
    ("layers.N.self_attn.o_proj", "layers.N.o"),
    ("layers.N.post_attention_layernorm", "layers.N.norm2"),
    ("layers.N.mlp.gate_proj", "layers.N.gate"),
    ("layers.N.mlp.up_proj", "layers.N.up"),
    ("layers.N.mlp.down_proj", "layers.N.down"),
    ("norm", "final_norm"),
    ("lm_head", "head"),
)
HEAD_NORM_NAMES: Final = (
    ("layers.N.self_attn.q_norm", "layers.N.q_norm"),
    ("layers.N.self_attn.k_norm", "layers.N.k_norm"),
)


def base_spec(
    config: Mapping[str, Any],
    *,
    names: tuple[tuple[str, str | Stored], ...] = LLAMA_NAMES,
    norm: NormSpec | None = None,
    max_position_embeddings: int = 2048,
    activation: str = "silu",
    rotary: bool = True,
    tied: bool = False,
) -> ModelSpec:
    """A pre-norm decoder with a gated MLP and without biases, of the sizes that the config gives under LLaMA's names.

    `max_position_embeddings`, `activation` and `tied` are what their fields mean if they are absent; `norm` None is
    LLaMA's RMSNorm.
    """
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config field {called(config, 'hidden_size')} is {hidden_size}, must be a multiple of "
            f"{called(config, 'num_attention_heads')} {num_heads}"
        )
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config field {called(config, 'num_key_value_heads')} is {num_kv_heads}, must divide "
            f"{called(config, 'num_attention_heads')} {num_heads}"
        )
    num_layers = integer(config, "num_hidden_layers", most=_MOST_LAYERS)
    max_len = integer(config, "max_position_embeddings", max_position_embeddings)
    every = rope(config, head_dim=head_dim, max_position_embeddings=max_len) if rotary else None
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len if every is None else max(max_len, _stretched(every)),
        windows=(None,) * num_layers,
        ropes=(every,) * num_layers,
        norm=norm or rms_norm(config),
        activation=choice(config, "hidden_act", ACTIVATIONS, activation),
        tied=flag(config, "tie_word_embeddings", tied),
        names=names,
    )


def _stretched(rope: RopeSpec) -> int:
    """Tokens that a text may have; of other types than these, the config's number counts the stretching in."""
    known = rope.rope_type in ("linear", "dynamic", "yarn")
    return int(rope.trained_len * rope.factor) if known else 0


def rms_norm(config: Mapping[str, Any], *, eps: float = 1e-6, weight_in_float32: bool = False) -> NormSpec:
    """RMSNorm; `eps` is the default of `rms_norm_eps`."""
    return NormSpec(eps=number(config, "rms_norm_eps", eps), weight_in_float32=weight_in_float32)


def layer_norm(config: Mapping[str, Any], name: str, *, bias: bool = True, affine: bool = True) -> NormSpec:
    """LayerNorm whose epsilon is the field `name`, 1e-5 if that is absent."""
    return NormSpec(eps=number(config, name, 1e-5), centred=True, bias=bias, affine=affine)


def with_mlp_size(config: Mapping[str, Any], factor: int = 4) -> dict[str, Any]:
    """The config with `intermediate_size` set, to `factor` times the hidden size where it is absent or null."""
    size = integer(config, "intermediate_size", factor * integer(config, "hidden_size"))
    return renamed(config, {}) | {"intermediate_size": size}


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """One for each head: a geometric series; if their number is no power of two, every second one of a longer one."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def layer_windows(
    config: Mapping[str, Any], num_layers: int, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Of each layer, `window` or None as `layer_types` says; without that field, where `default(layer)` is true."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(window if default(layer) else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"config field layer_types is {layer_types!r}, must have {num_layers} entries, one a layer")
    kinds = {"full_attention": None, "sliding_attention": window}
    return tuple(kinds[choice({"layer_types": kind}, "layer_types", kinds)] for kind in layer_types)


def optional_window(config: Mapping[str, Any]) -> int | None:
    """`sliding_window`; absent and null mean none."""
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


def ropes_by_window(
    config: Mapping[str, Any], spec: ModelSpec, windows: tuple[int | None, ...], *, local: Mapping[str, Any]
) -> tuple[RopeSpec, ...]:
    """Rotary positions of layers that have a window, and of those that have none.

    `rope_parameters` may have a set for either kind. If it has none for layers with a window, these are not scaled, and
    `local` are their fields.
    """
    parameters = config.get("rope_parameters")
    ropes = []
    for kind, unscaled in (("full_attention", False), ("sliding_attention", True)):
        own = parameters.get(kind) if isinstance(parameters, Mapping) else None
        fields = dict(config)
        if isinstance(own, Mapping):
            fields |= {"rope_parameters": own, "rope_scaling": None}
        elif unscaled:
            fields |= {"rope_parameters": None, "rope_scaling": None} | dict(local)
        ropes.append(rope(fields, head_dim=spec.head_dim, max_position_embeddings=spec.max_position_embeddings))
    return tuple(ropes[0] if window is None else ropes[1] for window in windows)
