"""The two descriptions of a plan's buffer are one: `rust_core/src/plan.rs` and `pyvllm/step.py`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pyvllm.step import HEADER_LEN, MAGIC, SECTION_ALIGNMENT, SECTIONS, Flags, Header, RowParam, StepView
from tests.plans import Entry, encode, plan_buffer, view

PLAN_RS = (Path(__file__).parents[1] / "rust_core" / "src" / "plan.rs").read_text(encoding="utf-8")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", name).lower()


def rust_enum(name: str) -> list[str]:
    """Variants in snake case; their values are their places."""
    body = re.search(rf"pub enum {name} \{{(.*?)\n\}}", PLAN_RS, re.DOTALL)
    assert body is not None
    return [snake(variant) for variant in re.findall(r"^ +(\w+),$", body[1], re.MULTILINE)]


def rust_constant(name: str) -> int:
    value = re.search(rf"pub const {name}: \w+ = (\w+);", PLAN_RS)
    assert value is not None
    return int(value[1], 0)


@pytest.mark.parametrize(("enum", "members"), [("Header", Header), ("RowParam", RowParam)])
def test_enums_are_those_of_the_core(enum: str, members: type[Header] | type[RowParam]) -> None:
    assert [(member.name.lower(), member.value) for member in members] == [
        (name, value) for value, name in enumerate(rust_enum(enum))
    ]


def test_sections_are_those_of_the_core() -> None:
    assert list(SECTIONS) == rust_enum("Section")


def test_section_widths_are_those_of_the_cores_table() -> None:
    widths = {}
    for name, shape in re.findall(r"^//! \| `(\w+)` \| ([^|]+) \|", PLAN_RS, re.MULTILINE):
        width = [*shape.split(" \N{MULTIPLICATION SIGN} "), "1"][1].strip()
        widths[name] = rust_constant(width.strip("`")) if width.startswith("`") else int(width)
    assert widths == SECTIONS


def test_constants_are_those_of_the_core() -> None:
    assert rust_constant("MAGIC") == MAGIC
    assert rust_constant("NUM_SCALARS") == len(Header)
    assert rust_constant("NUM_SECTIONS") == len(SECTIONS)
    assert rust_constant("ROW_PARAMS") == len(RowParam)
    assert rust_constant("SECTION_ALIGNMENT") == SECTION_ALIGNMENT
    assert len(Header) + 2 * len(SECTIONS) == HEADER_LEN


def test_flags_are_those_of_the_core() -> None:
    body = re.search(r"pub mod flags \{(.*?)\n\}", PLAN_RS, re.DOTALL)
    assert body is not None
    found = {name: int(value) for name, value in re.findall(r"pub const (\w+): i32 = (\d+);", body[1])}
    assert found == {flag.name: flag.value for flag in Flags}


def test_a_view_gives_back_what_was_written() -> None:
    generator = np.random.default_rng(0)
    contents = {
        name: generator.integers(-(2**31), 2**31, (3 + i) * width) for i, (name, width) in enumerate(SECTIONS.items())
    }
    scalars: dict[Header, int] = {
        scalar: 100 + scalar for scalar in Header if scalar not in (Header.MAGIC, Header.NUM_SECTIONS)
    }
    step = view(encode(scalars, contents))
    for scalar, value in scalars.items():
        assert getattr(step, scalar.name.lower()) == value
    for name, width in SECTIONS.items():
        section = getattr(step, name)
        assert section.shape == ((len(contents[name]),) if width == 1 else (len(contents[name]) // width, width))
        assert section.dtype == torch.int32
        assert section.flatten().tolist() == contents[name].tolist()


def test_a_view_shares_the_buffers_memory() -> None:
    buffer = plan_buffer([Entry(token_ids=[5, 6], blocks=[1])], block_size=4)
    step = view(buffer)
    offset, length = step.span("token_ids")
    buffer[offset : offset + length] = [7, 8]
    assert step.token_ids.tolist() == [7, 8]


def test_floats_travel_by_bit_pattern() -> None:
    step = view(plan_buffer([Entry(token_ids=[5, 6], blocks=[1], num_rows=2)], block_size=4))
    assert step.row_floats(RowParam.TOP_P).tolist() == [1.0, 1.0]
    assert step.row_floats(RowParam.TEMPERATURE).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("scalar", "value"), [(Header.MAGIC, 1), (Header.NUM_SECTIONS, len(SECTIONS) + 1)])
def test_a_buffer_of_another_version_is_refused(scalar: Header, value: int) -> None:
    buffer = plan_buffer([Entry(token_ids=[5], blocks=[1])], block_size=4)
    buffer[scalar] = value
    with pytest.raises(ValueError, match="not a StepPlan of this version"):
        StepView(torch.from_numpy(buffer), buffer[:HEADER_LEN].tolist())
