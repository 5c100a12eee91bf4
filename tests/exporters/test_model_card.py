"""What a model card says of a decoder."""

from __future__ import annotations

import pytest
from tiny_models import tiny_checkpoint

from app.bundle.manifest import LanguagePair
from exporters.model_card import ModelFacts, model_card


@pytest.mark.parametrize(
    ("changes", "decoder"),
    [
        ({}, "decoder: self-attention,"),
        ({"decoder_cell": "ssru"}, "decoder: SSRU recurrence,"),
        ({"decoder_cell": "gated_attention"}, "decoder: gated self-attention,"),
        (
            {"decoder_cell": "gated_attention", "decoder_query_heads": 8},
            "decoder: gated self-attention with 8 queries,",
        ),
    ],
)
def test_the_card_names_what_stands_first_in_a_decoder_layer(
    changes: dict[str, object], decoder: str
) -> None:
    card = model_card(
        bundle_id="tiny",
        pairs=[LanguagePair(source="en", target="pt")],
        config=tiny_checkpoint(**changes).config,  # type: ignore[arg-type]
        licence="CC0-1.0",
        facts=ModelFacts(origin="here", changes="none"),
        provenance={},
    )
    assert decoder in card
