"""Specifications, decoder and runner against transformers, on tiny random models in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pyvllm.kernels import AnyKernels, select
from pyvllm.kv_cache import KVCache, block_bytes
from pyvllm.layers.norm import RMSNorm
from pyvllm.layers.rope import Rope, RopeSpec, inverse_frequencies
from pyvllm.models import ARCHITECTURES, Decoder, ModelSpec, build_spec
from pyvllm.runner import Runner
from tests.plans import Entry, plan_buffer, view

CPU = torch.device("cpu")
VOCAB_SIZE = 96
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
# Name -> (model type, fields of its config beside SIZES).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_new"}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-nemo": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}


def hf_model(name: str) -> Any:
    """A random model whose constants (norms, biases) are random too."""
    model_type, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | fields))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float(parameter_name.endswith("norm.weight")), std=0.3)
    return model


def config_of(model: Any) -> dict[str, Any]:
    """What its config.json holds."""
    return dict(model.config.to_dict()) | {"architectures": [type(model).__name__]}


def load(spec: ModelSpec, state: Mapping[str, Tensor], *, max_model_len: int = 80) -> Decoder:
    decoder = Decoder(spec, max_model_len=max_model_len, dtype=torch.float32, device=CPU)
    slots = decoder.slots()
    with torch.no_grad():
        for name, tensor in state.items():
            parts = spec.unpack(name, tensor)
            assert parts is not None, name
            for slot, part in parts:
                slots.pop(slot).copy_(part)
    assert not slots
    return decoder


class Paged:
    """Feeds a decoder sequences, their KV strewn over a pool."""

    def __init__(self, decoder: Decoder, *, block_size: int, kernels: AnyKernels | None = None) -> None:
        self.decoder = decoder
        self.kernels = kernels or select(CPU, torch.float32)
        self.block_size = block_size
        num_blocks = 400 // block_size + 8
        self.kv = KVCache(
            decoder.spec,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=block_size,
            dtype=torch.float32,
            device=CPU,
        )
        self.free = torch.randperm(num_blocks).tolist()
        self.lens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def entry(self, sequence: int, token_ids: Sequence[int]) -> Entry:
        start = self.lens.get(sequence, 0)
        self.lens[sequence] = start + len(token_ids)
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.block_size < self.lens[sequence]:
            table.append(self.free.pop())
        return Entry(token_ids=token_ids, start=start, blocks=list(table))

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Query tokens by sequence -> logits [query tokens, V] by sequence."""
        order = sorted(tokens, key=lambda sequence: len(tokens[sequence]) != 1)
        buffer = plan_buffer([self.entry(i, tokens[i]) for i in order], block_size=self.block_size)
        step = view(buffer)
        hidden = self.decoder.forward(step.token_ids, step, self.kv.layers, self.kernels)
        parts = torch.split(self.decoder.logits(hidden), [len(tokens[i]) for i in order])
        return dict(zip(order, parts, strict=True))


def random_ids(length: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,)).tolist()


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return hf_model(request.param)


# --- the whole model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_equal_transformers_at_every_position(model: Any, block_size: int) -> None:
    """Three texts side by side: one whole and then token by token, one in chunks, one that starts later."""
    paged = Paged(load(build_spec(config_of(model)), model.state_dict()), block_size=block_size)
    texts = [random_ids(26), random_ids(31), random_ids(19)]
    steps = [
        {0: texts[0][:20], 1: texts[1][:1]},
        {0: texts[0][20:21], 1: texts[1][1:9], 2: texts[2][:11]},
        {0: texts[0][21:22], 1: texts[1][9:25], 2: texts[2][11:12]},
        *({0: texts[0][i : i + 1], 1: texts[1][i + 3 : i + 4], 2: texts[2][i - 10 : i - 9]} for i in range(22, 26)),
        {1: texts[1][29:30], 2: texts[2][16:19]},
        {1: texts[1][30:31]},
    ]
    found: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    fed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in steps:
        for sequence, logits in paged.step(step).items():
            found[sequence].append(logits)
            fed[sequence] += step[sequence]
    assert [fed[i] for i in range(3)] == texts
    for sequence, text in enumerate(texts):
        expected = hf_logits(model, text)
        torch.testing.assert_close(torch.cat(found[sequence]), expected, atol=1e-4, rtol=1e-5)


def test_reference_kernels_run_the_model_too() -> None:
    model = hf_model("mistral-window")
    decoder = load(build_spec(config_of(model)), model.state_dict())
    paged = Paged(decoder, block_size=4, kernels=select(torch.device("meta"), torch.float32))
    assert paged.kernels.name == "reference"
    text = random_ids(20)
    logits = [paged.step({0: text[:9]})[0], paged.step({0: text[9:19]})[0], paged.step({0: text[19:]})[0]]
    torch.testing.assert_close(torch.cat(logits), hf_logits(model, text), atol=1e-4, rtol=1e-5)


def test_packed_weights_give_the_same_logits(model: Any) -> None:
    decoder = load(build_spec(config_of(model)), model.state_dict())
    decoder.pack(select(CPU, torch.float32))
    text = random_ids(12)
    logits = Paged(decoder, block_size=4).step({0: text})[0]
    torch.testing.assert_close(logits, hf_logits(model, text), atol=1e-4, rtol=1e-5)
    with pytest.raises(RuntimeError, match="packed"):
        decoder.slots()


def test_bfloat16_errs_no_more_than_transformers_does() -> None:
    model = hf_model("llama-gqa")
    text = random_ids(40)
    exact = hf_logits(model, text)
    decoder = Decoder(build_spec(config_of(model)), max_model_len=64, dtype=torch.bfloat16, device=CPU)
    slots = decoder.slots()
    for name, tensor in model.state_dict().items():
        for slot, part in decoder.spec.unpack(name, tensor) or []:
            slots[slot].copy_(part)
    kernels = select(CPU, torch.bfloat16)
    decoder.pack(kernels)
    kv = KVCache(decoder.spec, num_blocks=10, num_host_blocks=0, block_size=4, dtype=torch.bfloat16, device=CPU)
    step = view(plan_buffer([Entry(token_ids=text, blocks=range(10))], block_size=4))
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(step.token_ids, step, kv.layers, kernels)).float()
    theirs = hf_logits(model.to(torch.bfloat16), text).float()
    assert (logits - exact).square().mean() <= 1.2 * (theirs - exact).square().mean()


def test_dynamic_rope_goes_on_past_training_as_transformers_generates() -> None:
    model = hf_model("llama-dynamic")
    text = random_ids(75)
    paged = Paged(load(build_spec(config_of(model)), model.state_dict()), block_size=4)
    found = [paged.step({0: text[:60]})[0], *(paged.step({0: [token]})[0] for token in text[60:])]
    with torch.no_grad():
        output = model(torch.tensor([text[:60]]), use_cache=True)
        expected = [output.logits[0]]
        for token in text[60:]:
            output = model(torch.tensor([[token]]), cache=output.past_key_values, use_cache=True)
            expected.append(output.logits[0])
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-4, rtol=1e-5)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "num_positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 1.3}, 5000),
        (LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}, 1),
        ({"rope_type": "yarn", "factor": 32.0}, 1),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}, 1),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0}, 1),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1, "rope_theta": 1e6}, 1),
    ],
)
def test_rope_frequencies_equal_transformers(fields: dict[str, Any], num_positions: int) -> None:
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(fields))
    spec = build_spec(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    assert spec is not None
    length = torch.tensor(num_positions) if num_positions > 1 else None
    expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(spec, num_positions)[-1], expected, atol=0, rtol=1e-6)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 6])
def test_rope_turns_pairs_in_the_plane(interleaved: bool, dim: int) -> None:
    """As multiplication of complex numbers; what is beyond `dim` stays."""
    torch.manual_seed(0)
    spec = RopeSpec(theta=100.0, dim=dim, interleaved=interleaved)
    rope = Rope(spec, num_positions=16, dtype=torch.float32, device=CPU)
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 15], dtype=torch.int32)
    turned = x.clone()
    rope.rotate_(turned, rope.at(positions))
    half = dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = x.clone()
    for i, (first, second) in enumerate(pairs):
        angle = positions.double() * 100.0 ** (-2 * i / dim)
        product = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones(3), angle.float())[:, None]
        expected[..., first], expected[..., second] = product.real, product.imag
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight_in_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_where_the_family_does(weight_in_float32: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(64, eps=1e-5, weight_in_float32=weight_in_float32, dtype=dtype, device=CPU)
    norm.weight.normal_(1, 0.5)
    x = torch.randn(50, 64).to(dtype)
    quotient = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    at_once, rounded = (quotient * norm.weight.float()).to(dtype), quotient.to(dtype) * norm.weight
    expected, other = (at_once, rounded) if weight_in_float32 else (rounded, at_once)
    found = norm(x)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected)
    else:
        assert (found != expected).float().mean() < 0.01 < (other != expected).float().mean()


# --- specifications ---------------------------------------------------------------------------------------------------


def plain_config(**fields: Any) -> dict[str, Any]:
    return SIZES | {"architectures": ["LlamaForCausalLM"]} | fields


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ({"rope_scaling": None}, {"rope_parameters": None}),
        (
            {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 7.0},
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0}},
        ),
    ],
)
def test_old_and_new_spelling_of_rope_are_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert build_spec(plain_config(**old)) == build_spec(plain_config(**new))


def test_absent_and_null_fields_take_their_meaning() -> None:
    spec = build_spec(plain_config(head_dim=None, num_key_value_heads=None, attention_bias=None))
    assert (spec.head_dim, spec.num_kv_heads, spec.qkv_bias, spec.norm_eps) == (12, 4, False, 1e-6)
    assert spec.attention(0).scale == pytest.approx(1 / math.sqrt(12))
    mistral = plain_config(architectures=["MistralForCausalLM"])
    assert build_spec(mistral).windows == (4096,) * 3
    assert build_spec(mistral | {"sliding_window": None}).windows == (None,) * 3
    assert build_spec(mistral | {"sliding_window": 7}).windows == (7,) * 3
    qwen = plain_config(architectures=["Qwen2ForCausalLM"], sliding_window=9, max_window_layers=2)
    assert build_spec(qwen).windows == (None,) * 3
    assert build_spec(qwen | {"use_sliding_window": True}).windows == (None, None, 9)
    layer_types = ["sliding_attention", "full_attention", "full_attention"]
    typed = qwen | {"use_sliding_window": True, "layer_types": layer_types}
    assert build_spec(typed).windows == (9, None, None)
    assert build_spec(plain_config(architectures=["Qwen3ForCausalLM"])).head_dim == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, r"architectures is \['NoSuchModel'\], supported: LlamaForCausalLM, "),
        ({"architectures": None}, r"architectures is \[\], supported: "),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', must be a whole number >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 5}, "hidden_size is 48, must be a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must divide num_attention_heads 4"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh', supported: silu"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', must be true or false"),
        ({"head_dim": 15}, "head_dim and partial_rotary_factor rotate 15 of 15"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type is 'su', supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is .* must be one set"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window is -1"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 3}, "layer_types is 'linear_"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(plain_config(**fields))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_a_spec(architecture: str) -> None:
    assert build_spec(plain_config(architectures=[architecture])).architecture == architecture


def test_checkpoint_names() -> None:
    spec = build_spec(plain_config(architectures=["YiForCausalLM"], tie_word_embeddings=True, attention_bias=True))
    tensor = torch.empty(3, 2, device="meta")

    def slots(name: str) -> list[str] | None:
        parts = spec.unpack(name, tensor)
        assert parts is None or all(part is tensor for _, part in parts)
        return None if parts is None else [slot for slot, _ in parts]

    assert slots("model.embed_tokens.weight") == slots("embed_tokens.weight") == ["embed"]
    assert slots("model.layers.2.ln1.weight") == slots("layers.2.input_layernorm.weight") == ["layers.2.norm1"]
    assert slots("model.layers.0.self_attn.q_proj.bias") == ["layers.0.q.bias"]
    assert slots("model.norm.weight") == ["final_norm"]
    assert slots("lm_head.weight") == []
    assert slots("model.layers.1.self_attn.rotary_emb.inv_freq") == []
    for unknown in (
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.qweight",
        "model.norm.bias",
        "model.layers.N.mlp.up_proj.weight",
        "score.weight",
    ):
        assert slots(unknown) is None
    assert replace(spec, tied=False).unpack("lm_head.weight", tensor) == [("head", tensor)]


# --- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def running() -> tuple[Any, Runner, Paged]:
    model = hf_model("llama-gqa")
    paged = Paged(load(build_spec(config_of(model)), model.state_dict()), block_size=4)
    return model, Runner(paged.decoder, paged.kv, paged.kernels), paged


def test_steps_run_ahead_of_their_tokens(running: tuple[Any, Runner, Paged]) -> None:
    """Each step names the token before it by its row; nothing waits in between."""
    model, runner, paged = running
    texts = [random_ids(9), random_ids(14)]
    buffers = [plan_buffer([paged.entry(i, texts[i]) for i in (0, 1)], block_size=4)]
    order = [(0, 1), (1, 0)] * 3
    for number in range(1, 6):
        entries = [paged.entry(i, [-1 - order[number - 1].index(i)]) for i in order[number]]
        buffers.append(plan_buffer(entries, block_size=4, step=number))
    launched = [runner.launch(buffer) for buffer in buffers]
    assert [step.step for step in launched] == list(range(6))
    found: dict[int, list[int]] = {0: [], 1: []}
    for number, step in enumerate(launched):
        token_ids, logprobs, table, prompt = step.wait()
        assert token_ids.shape == logprobs.shape == (2, 1)
        assert table is None
        assert prompt is None
        for sequence, token in zip(order[number], token_ids[:, 0].tolist(), strict=True):
            found[sequence].append(token)
    for sequence, text in enumerate(texts):
        output = model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert found[sequence] == output[0, len(text) :].tolist()


def test_rows_may_share_a_token_and_padding_is_dropped(running: tuple[Any, Runner, Paged]) -> None:
    model, runner, paged = running
    text = random_ids(7)
    entry = replace(paged.entry(0, text), num_rows=3)
    token_ids, _, table, _ = runner.launch(plan_buffer([entry], block_size=4, num_logprobs=2)).wait()
    logprobs = hf_logits(model, text)[-1].log_softmax(-1)
    assert token_ids.tolist() == [[int(logprobs.argmax())]] * 3
    assert table is not None
    torch.testing.assert_close(torch.from_numpy(table.logprobs[:, 1:]), logprobs.topk(2).values.expand(3, 2))
    padded = plan_buffer([paged.entry(0, [token_ids[0, 0]])], block_size=4, pad_to=4)
    token_ids, sampled_logprobs, _, _ = runner.launch(padded).wait()
    assert token_ids.shape == sampled_logprobs.shape == (1, 1)


def test_prompt_logprobs_equal_transformers(running: tuple[Any, Runner, Paged]) -> None:
    model, runner, paged = running
    text = random_ids(150)
    paged.kv.pool.zero_()
    decoder = load(paged.decoder.spec, model.state_dict(), max_model_len=160)
    runner = Runner(decoder, paged.kv, paged.kernels)
    rows = [(i, text[i + 1], 3) for i in range(149)]
    buffer = plan_buffer([paged.entry(0, text)], block_size=4, sections={"prompt_rows": rows})
    _, _, _, table = runner.launch(buffer).wait()
    assert table is not None
    logprobs = hf_logits(model, text)[:-1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(text[1:])[:, None])
    expected = torch.cat([own, logprobs.topk(3).values], 1)
    torch.testing.assert_close(torch.from_numpy(table.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert table.token_ids[:, 0].tolist() == text[1:]
    assert table.ranks.tolist() == ((logprobs > own).sum(1) + 1).tolist()


def test_memory_of_prompt_logprobs_does_not_grow_with_the_prompt(
    running: tuple[Any, Runner, Paged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S031: logits are made for a bounded number of positions at once."""
    model, _, paged = running
    decoder = load(paged.decoder.spec, model.state_dict(), max_model_len=400)
    runner = Runner(decoder, paged.kv, paged.kernels)
    most = 0
    compute = decoder.logits

    def logits(hidden: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return compute(hidden)

    monkeypatch.setattr(decoder, "logits", logits)
    text = random_ids(400)
    rows = [(i, text[i + 1], 0) for i in range(399)]
    entry = replace(paged.entry(0, text), num_rows=0)
    token_ids, _, table, prompt = runner.launch(
        plan_buffer([entry], block_size=4, sections={"prompt_rows": rows})
    ).wait()
    assert token_ids.shape == (0, 1)
    assert table is None
    assert prompt is not None
    assert len(prompt.ranks) == 399
    assert most <= 64


def test_blocks_move_before_the_step_reads_them(running: tuple[Any, Runner, Paged]) -> None:
    """Swap out, swap in, copy, in this order, then the step: with other orders the text would be another."""
    model, _, paged = running
    spec = paged.decoder.spec
    kv = KVCache(spec, num_blocks=6, num_host_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    runner = Runner(paged.decoder, kv, paged.kernels)
    text = random_ids(7)
    runner.launch(plan_buffer([Entry(token_ids=text[:6], blocks=[1, 2])], block_size=4))
    # Block 1 leaves for the host's 0 and comes back as 4, block 2 is then 1's old place and copied on to 5.
    moves = {"swap_out": [(1, 0), (2, 1)], "swap_in": [(0, 4), (1, 1)], "copies": [(1, 5)]}
    entry = Entry(token_ids=text[6:], start=6, blocks=[4, 5])
    token_ids, *_ = runner.launch(plan_buffer([entry], block_size=4, sections=moves)).wait()
    assert int(token_ids[0, 0]) == int(hf_logits(model, text)[-1].argmax())
    # A step may do nothing but move.
    token_ids, *_ = runner.launch(plan_buffer([], block_size=4, sections={"copies": [(5, 0)]})).wait()
    assert token_ids.shape == (0, 1)
    assert torch.equal(kv.pool[:, 0], kv.pool[:, 5])


def test_block_bytes_are_those_of_the_pool() -> None:
    spec = build_spec(plain_config())
    kv = KVCache(spec, num_blocks=5, num_host_blocks=2, block_size=16, dtype=torch.bfloat16, device=CPU)
    assert kv.pool.nbytes == 5 * block_bytes(spec, block_size=16, dtype=torch.bfloat16)
    assert kv.host_pool.nbytes == 2 * block_bytes(spec, block_size=16, dtype=torch.bfloat16)
