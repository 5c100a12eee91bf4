"""MODEL_CARD.md of a bundle: what it is, where it came from, how good it is, where it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.bundle.manifest import LanguagePair, QualityScore
from model.config import DecoderCell, TransformerConfig

_DECODERS: Mapping[DecoderCell, str] = {
    "attention": "self-attention",
    "gated_attention": "gated self-attention",
    "ssru": "SSRU recurrence",
}


@dataclass(frozen=True)
class ModelFacts:
    """What only the person exporting knows about a model.

    Attributes:
        origin: who trained it, and how it got here; Markdown.
        changes: what was changed on the way; Markdown.
        training_data: what it was trained on; Markdown.
        limitations: known weaknesses; Markdown list.
    """

    origin: str
    changes: str
    training_data: str = "Not stated by the origin."
    limitations: str = "- Translates sentence by sentence: nothing is carried from one to the next."


def model_card(
    *,
    bundle_id: str,
    pairs: Sequence[LanguagePair],
    config: TransformerConfig,
    licence: str,
    facts: ModelFacts,
    provenance: Mapping[str, str],
) -> str:
    """The card, without quality; `quality_section` is appended when scores are recorded."""
    directions = ", ".join(f"{pair.source} to {pair.target}" for pair in pairs)
    decoder = _DECODERS[config.decoder_cell]
    if config.num_query_heads != config.num_heads:
        decoder += f" with {config.num_query_heads} queries"
    sources = "\n".join(f"| {key} | `{value}` |" for key, value in sorted(provenance.items()))
    return f"""# {bundle_id}

Translates {directions}. Licence of the weights: {licence}.

## Model

A Transformer: {config.encoder_layers} encoder and {config.decoder_layers} decoder layers (decoder: {decoder},
cross-attention, feed-forward), width {config.d_model}, {config.num_heads} heads, feed-forward width
{config.ffn_size}, vocabulary {config.vocabulary_size} SentencePiece pieces shared by source and target,
embedding tied with the output projection.

## Origin

{facts.origin}

## Changes

{facts.changes}

## Training data

{facts.training_data}

## Limitations

{facts.limitations}

## Provenance

| fact | value |
|---|---|
{sources}
"""


QUALITY_HEADING = "## Quality"


def quality_section(scores: Sequence[QualityScore]) -> str:
    """The quality table, with the signatures that make the scores repeatable."""
    rows = "\n".join(
        f"| {score.test_set} | {score.variant} | {_decoding(score)} | {'yes' if score.shortlist else 'no'} "
        f"| {score.num_segments} | {score.bleu:.2f} | {score.chrf:.2f} |"
        for score in scores
    )
    signatures = "\n".join(
        sorted({f"- BLEU `{score.bleu_signature}`, chrF `{score.chrf_signature}`" for score in scores})
    )
    return f"""{QUALITY_HEADING}

Translated by dragoman, scored with sacrebleu:

| test set | variant | decoding | shortlist | lines | BLEU | chrF |
|---|---|---|---|---|---|---|
{rows}

{signatures}
"""


def _decoding(score: QualityScore) -> str:
    """How a score's translations were searched for; greedy search knows no length penalty."""
    if score.beam_size == 1:
        return "greedy"
    return f"beam {score.beam_size}, length penalty {score.length_penalty:g}"
