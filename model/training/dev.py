"""How good a model is on sentences it does not train on: loss, and BLEU of greedy translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu
import torch

from app.errors import InvalidOption
from app.text import Tokenizer
from model.data.batches import padded, padded_batch
from model.data.text_files import lines_of
from model.greedy import greedy
from model.training.config import DevSection
from model.training.objective import LabelSmoothing
from model.transformer import Transformer

_BATCH_SENTENCES = 50
_MAX_STEPS_PER_SOURCE_TOKEN = 2.0


@dataclass(frozen=True)
class DevScores:
    """One evaluation.

    Attributes:
        loss: cross-entropy of a reference token, in nats.
        bleu: of greedy translations, sacrebleu's default; None where nothing was translated.
    """

    loss: float
    bleu: float | None


class DevSet:
    """Sentences with one reference each."""

    def __init__(self, section: DevSection, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        """Read and tokenise the first sentences; those that no training pair could be are left out.

        Raises:
            InvalidOption: a file is missing, they have not as many lines, or no sentence is short enough.
        """
        sources, references = (list(lines_of(path)) for path in (section.source_path, section.target_path))
        if len(sources) != len(references):
            raise InvalidOption(
                f"{section.source_path} has {len(sources)} lines and {section.target_path} has "
                f"{len(references)}; a dev set needs as many of both"
            )
        encoded = zip(
            references,
            tokenizer.encode_sources(sources[: section.max_sentences]),
            tokenizer.encode_sources(references[: section.max_sentences]),
            strict=False,
        )
        kept = [
            entry
            for entry in encoded
            if max(len(entry[1]), len(entry[2])) <= max_tokens and tokenizer.unknown_id not in entry[2]
        ]
        if not kept:
            raise InvalidOption(
                f"{section.source_path} has no sentence of at most {max_tokens} tokens whose reference the "
                "vocabulary can spell; raise data.max_tokens, or give other sentences"
            )
        kept.sort(key=lambda entry: len(entry[1]))
        self._references = [reference for reference, _, _ in kept]
        self._pairs = [(source, target) for _, source, target in kept]
        self._tokenizer = tokenizer
        self._decode = section.decode

    def __len__(self) -> int:
        """Sentences, without those that are too long or whose reference has unknown pieces."""
        return len(self._pairs)

    def evaluate(self, model: Transformer) -> DevScores:
        """Score a model; it is in training mode again when it was before."""
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                return self._scores(model)
        finally:
            model.train(was_training)

    def _scores(self, model: Transformer) -> DevScores:
        device = model.output_bias.device
        total, num_tokens = 0.0, 0
        translations: list[str] = []
        for start in range(0, len(self._pairs), _BATCH_SENTENCES):
            pairs = self._pairs[start : start + _BATCH_SENTENCES]
            batch = padded_batch(pairs).to(device)
            loss = LabelSmoothing()(model, batch, step=0)
            total, num_tokens = total + float(loss.total), num_tokens + loss.num_tokens
            if self._decode:
                translations.extend(self._translate(model, [source for source, _ in pairs]))
        bleu = sacrebleu.corpus_bleu(translations, [self._references]).score if self._decode else None
        return DevScores(total / num_tokens, bleu)

    def _translate(self, model: Transformer, sources: Sequence[Sequence[int]]) -> list[str]:
        ids, mask = (tensor.to(model.output_bias.device) for tensor in padded(sources))
        rows = greedy(model, ids, mask, max_steps=int(_MAX_STEPS_PER_SOURCE_TOKEN * ids.shape[1]) + 1)
        return [self._tokenizer.decode(list(row.token_ids)) for row in rows]
