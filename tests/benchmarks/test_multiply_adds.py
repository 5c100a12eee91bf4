from __future__ import annotations

import pytest

from app.bundle.manifest import Manifest, ModelSizes, StateTensor
from benchmarks.multiply_adds import (
    MatrixProduct,
    decoder_multiply_adds,
    encoder_multiply_adds,
    encoder_products,
    step_products,
)

SIZES = ModelSizes(
    d_model=4,
    num_heads=2,
    head_size=2,
    encoder_layers=3,
    decoder_layers=2,
    ffn_size=8,
    vocabulary_size=100,
)


def manifest(*, cell: bool) -> Manifest:
    """As much of a manifest as is counted from."""
    state = StateTensor.model_construct(name="state", kind="cell" if cell else "kv")
    return Manifest.model_construct(sizes=SIZES, state=(state,))


def by_hand(rows: int, inputs: int, outputs: int) -> int:
    """Count a product's multiply-adds one by one."""
    return sum(1 for _ in range(rows) for _ in range(outputs) for _ in range(inputs))


def test_a_product_counts_one_multiply_add_for_each_weight_and_row():
    assert MatrixProduct(3, 5, count=2).multiply_adds(7) == 2 * by_hand(7, 3, 5)


def test_one_token_through_the_encoder_meets_every_weight_once():
    layer = 4 * 12 + 4 * 4 + 4 * 8 + 8 * 4  # query, key and value; output; inner; outer
    cross = 2 * (4 * 4 + 4 * 4)  # keys and values of two decoder layers
    assert sum(product.multiply_adds(1) for product in encoder_products(SIZES)) == 3 * layer + cross


def test_encoder_attention_grows_with_the_square_of_each_sentence_alone():
    linear = 3 * 128 + 64
    one = encoder_multiply_adds(SIZES, [5])
    assert one == 5 * linear + 3 * (by_hand(5, 4, 5) + by_hand(5, 5, 4))  # QK, then AV
    assert encoder_multiply_adds(SIZES, [5, 5]) == 2 * one
    assert encoder_multiply_adds(SIZES, [10]) > 2 * one


@pytest.mark.parametrize(("cell", "recurrent"), [(False, 4 * 12 + 4 * 4), (True, 4 * 8)])
def test_a_step_meets_every_weight_of_the_decoder_once(cell, recurrent):
    layer = recurrent + 2 * 4 * 4 + 4 * 8 + 8 * 4
    products = step_products(manifest(cell=cell))
    assert sum(product.multiply_adds(1) for product in products) == 2 * layer + 4 * 100


def test_a_shortlist_narrows_the_output_projection_alone():
    whole, narrow = (
        sum(product.multiply_adds(1) for product in step_products(manifest(cell=False), num_outputs=number))
        for number in (None, 10)
    )
    assert whole - narrow == 4 * (100 - 10)


def test_a_decoded_token_attends_to_the_source_and_to_all_before_it():
    linear = sum(product.multiply_adds(1) for product in step_products(manifest(cell=False)))
    found = decoder_multiply_adds(manifest(cell=False), source_length=6, num_steps=3)
    cross = 3 * (by_hand(1, 4, 6) + by_hand(1, 6, 4))
    itself = sum(by_hand(1, 4, seen) + by_hand(1, seen, 4) for seen in (1, 2, 3))
    assert found == 3 * linear + 2 * (cross + itself)


def test_a_recurrent_decoder_attends_to_the_source_alone():
    linear = sum(product.multiply_adds(1) for product in step_products(manifest(cell=True)))
    found = decoder_multiply_adds(manifest(cell=True), source_length=6, num_steps=3)
    assert found == 3 * linear + 2 * 3 * 2 * 4 * 6


def test_beams_are_rows():
    one, four = (
        decoder_multiply_adds(manifest(cell=False), source_length=6, num_steps=3, num_beams=beams)
        for beams in (1, 4)
    )
    assert four == 4 * one
