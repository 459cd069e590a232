"""Filling parameters: what does not fit is named before anything is written; formats, tied heads, dummy weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pyvllm.config import LoadFormat
from pyvllm.weights import WeightError, load_weights
from tests.small_weights import VOCABULARY, WIDTH, Spec, check, load, make_slots, make_state, source, untouched


def test_formats(tmp_path: Path) -> None:
    torch_state, state = make_state(), {name: tensor + 1 for name, tensor in make_state().items()}
    torch.save(torch_state, tmp_path / "pytorch_model.bin")
    check(load(tmp_path), torch_state)
    check(load(tmp_path, load_format="npcache"), torch_state)
    with pytest.raises(FileNotFoundError, match=r"no weights found \(\*\.safetensors\)"):
        load(tmp_path, load_format="safetensors")
    save_file(state, tmp_path / "model.safetensors")
    check(load(tmp_path), state)
    check(load(tmp_path, load_format="safetensors"), state)
    check(load(tmp_path, load_format="pt"), torch_state)
    with pytest.raises(ValueError, match=r"load_format is 'gguf', but .* is a folder"):
        load(tmp_path, load_format="gguf")


def test_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    state = {name: tensor for name, tensor in make_state().items() if "layers" not in name}
    for name, tensor in state.items():
        stem = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name, "output")
        writer.add_tensor(f"{stem}.weight", tensor.numpy())
    writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    formats: tuple[LoadFormat, ...] = ("auto", "gguf")
    for load_format in formats:
        slots = {name: tensor for name, tensor in make_slots().items() if not name.startswith("layers")}
        load_weights(Spec(), slots, source(tmp_path / "m.gguf"), load_format=load_format)
        check(slots, state)
    with pytest.raises(WeightError, match=r"m\.gguf: .* 15 missing: layers\.0\.q; "):
        load(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"load_format is 'pt', but .*m\.gguf is a GGUF file"):
        load(tmp_path / "m.gguf", load_format="pt")


def test_all_that_does_not_fit_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = make_state()
    del state["model.layers.1.qkv.weight"], state["model.norm.weight"], state["lm_head.weight"]
    state["model.layers.0.qkv.extra"] = torch.zeros(1)
    state["model.layers.3.norm.weight"] = torch.zeros(WIDTH)  # a layer more than the model has
    state["model.embed_tokens.weight"] = torch.zeros(VOCABULARY + 1, WIDTH)
    state["model.layers.2.qkv.weight"] = torch.zeros(9, WIDTH)
    state["model.layers.0.norm.weight"] = torch.zeros(WIDTH, dtype=torch.int64)
    save_file(state, tmp_path / "model.safetensors")
    slots = make_slots()
    with pytest.raises(WeightError) as caught:
        load_weights(Spec(), slots, source(tmp_path))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "8 missing: final_norm; model.layers.1.qkv.weight (layers.1.q)" in message
    assert "head (lm_head.weight; the config does not tie it to the embedding)" in message
    assert "2 unexpected: " in message
    assert "model.layers.0.qkv.extra" in message
    assert "model.layers.3.norm.weight" in message
    assert "3 of the wrong shape or dtype: " in message
    assert "model.embed_tokens.weight: expected [8, 4], found [9, 4] for embed" in message
    assert "model.layers.2.qkv.weight: found [9, 4], which cannot be taken apart" in message
    assert "model.layers.0.norm.weight: found dtype I64, expected one of float32, float16, bfloat16" in message
    assert untouched(slots)


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    state = make_state() | {f"extra.{i:02}": torch.zeros(1) for i in range(25)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"25 unexpected: extra\.00; .*extra\.09; …$") as caught:
        load(tmp_path)
    assert "extra.10" not in str(caught.value)


def test_a_slot_is_filled_once(tmp_path: Path) -> None:
    save_file(make_state() | {"model.layers.1.norm.alias": torch.zeros(WIDTH)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"fills layers\.1\.norm1, which model\.layers\.1\.norm\.\w+ fills already"):
        load(tmp_path)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Records of the package's logger, whether or not it propagates."""
    logger = logging.getLogger("pyvllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("case", ["equal head", "no head", "other head", "head in another dtype", "longer head"])
def test_b122_tied(case: str, warnings_logged: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    state = make_state()
    embed = state["model.embed_tokens.weight"]
    if case == "no head":
        del state["lm_head.weight"]
    elif case == "equal head":
        state["lm_head.weight"] = embed.clone()
    elif case == "head in another dtype":
        state["model.embed_tokens.weight"] = embed = embed.to(torch.bfloat16)
        state["lm_head.weight"] = embed.float()
    elif case == "longer head":
        state["lm_head.weight"] = torch.cat([embed, embed])
    save_file(state, tmp_path / "model.safetensors")
    slots = load(tmp_path, tied=True)
    check(slots, state)
    assert "head" not in slots
    messages = {record.getMessage() for record in warnings_logged.records if record.levelno == logging.WARNING}
    if case in ("other head", "longer head"):
        assert len(messages) == 1
        assert "ties lm_head.weight to model.embed_tokens.weight" in messages.pop()
    else:
        assert not messages


def test_b122_tied_and_only_the_head_is_stored(tmp_path: Path) -> None:
    state = make_state()
    save_file({name: tensor for name, tensor in state.items() if "embed" not in name}, tmp_path / "model.safetensors")
    slots = load(tmp_path, tied=True)
    check(slots, state | {"model.embed_tokens.weight": state["lm_head.weight"]})
    save_file(
        {
            name: torch.zeros(5, WIDTH) if name == "lm_head.weight" else tensor
            for name, tensor in state.items()
            if "embed" not in name
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(WeightError, match=r"lm_head\.weight: expected \[8, 4\], found \[5, 4\] for embed"):
        load(tmp_path, tied=True)


def test_b122_not_tied_and_absent(tmp_path: Path) -> None:
    state = make_state()
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    slots = make_slots()
    with pytest.raises(WeightError, match=r"1 missing: head \(lm_head\.weight; the config does not tie it"):
        load_weights(Spec(), slots, source(tmp_path))
    assert untouched(slots)


def test_dummy_is_random_reproducible_and_never_zero(tmp_path: Path) -> None:
    slots, again = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    wide = {"embed": torch.empty(500, 400), "layers.0.q": torch.empty(500, 400), "layers.0.q_norm": torch.empty(9)}
    load_weights(Spec(), wide, source(tmp_path), load_format="dummy")
    assert wide["embed"].std() == pytest.approx(0.05, rel=0.02)
    assert not torch.equal(wide["embed"], wide["layers.0.q"])
    for name, tensor in (slots | wide).items():
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert tensor.isfinite().all()
            assert tensor.abs().min() > 0
    assert all(torch.equal(slots[name], again[name]) for name in slots)


def test_progress_bar_only_if_asked(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_file(make_state(), tmp_path / "model.safetensors")
    load_weights(Spec(), make_slots(), source(tmp_path))
    assert capfd.readouterr() == ("", "")
    load_weights(Spec(), make_slots(), source(tmp_path), progress=True)
    out, err = capfd.readouterr()
    assert not out
    assert "Loading weights: 100%" in err
