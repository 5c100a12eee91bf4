from __future__ import annotations

import math

import pytest
import torch

from model.positions import Positions, position_codes


@pytest.mark.parametrize("d_model", [2, 6, 64])
def test_interleaved_codes_are_the_papers_formula(d_model: int) -> None:
    codes = position_codes(40, d_model, layout="interleaved")
    assert codes.dtype == torch.float32
    assert codes.shape == (40, d_model)
    for position in range(40):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            assert codes[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert codes[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("d_model", [4, 6, 64])
def test_halves_are_marians_formula(d_model: int) -> None:
    codes = position_codes(40, d_model, layout="halves")
    half = d_model // 2
    for position in range(40):
        for i in range(half):
            angle = position * math.exp(i * -math.log(10000.0) / (half - 1))
            assert codes[position, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert codes[position, half + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(("d_model", "layout"), [(7, "interleaved"), (7, "halves"), (2, "halves")])
def test_a_width_without_a_formula_is_refused(d_model: int, layout: str) -> None:
    with pytest.raises(ValueError, match=f"d_model is {d_model}"):
        position_codes(3, d_model, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_the_table_grows_past_its_first_size_and_keeps_its_formula(layout: str) -> None:
    positions = Positions(8, layout=layout)  # type: ignore[arg-type]
    expected = position_codes(3000, 8, layout=layout)  # type: ignore[arg-type]
    assert torch.equal(positions(2, 3), expected[2:5])
    assert torch.equal(positions(0, 600), expected[:600])
    assert torch.equal(positions(2995, 5), expected[2995:])
    assert positions.state_dict() == {}


def test_a_table_that_grows_keeps_the_models_dtype() -> None:
    positions = Positions(8, layout="interleaved").to(torch.bfloat16)
    assert positions(700, 2).dtype == torch.bfloat16
