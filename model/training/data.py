"""A run's text: its sources prepared, its vocabulary trained on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from app.text import Tokenizer
from model.data.batches import WeightedSource
from model.data.exclusions import Exclusions
from model.data.filter_counts import FilterCounts
from model.data.prepare import Preparation, PreparedSource, prepare
from model.data.progress import reading_progress
from model.data.sources import pairs_of
from model.data.vocabulary import VocabularyOptions, train_vocabulary
from model.training.config import RunConfig, VocabularySection
from model.training.processes import Processes

COUNTS_NAME = "data.json"


def prepared_sources(
    config: RunConfig,
    tokenizer: Tokenizer,
    tokenizer_path: Path,
    processes: Processes,
    *,
    say: Callable[[str], None],
) -> list[WeightedSource]:
    """The sources of a run as token pairs, made by the first process and read by the others.

    What was read, kept and left out by which rule goes into ``data.json`` of the run.

    Raises:
        InvalidOption: a file is missing or damaged, or a source keeps no pair.
    """
    preparation = Preparation(
        source_language=config.source,
        target_language=config.target,
        filters=config.data.filters,
        exclusions=_exclusions(config),
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        max_tokens=config.data.max_tokens,
        seed=config.seed,
        cache_directory=config.data.cache or config.output / "data",
    )
    if not processes.is_first:
        processes.wait()
    prepared = list(_prepared(config, preparation))
    if processes.is_first:
        counts = FilterCounts({})
        for source in prepared:
            counts += source.counts
            for note in source.notes:
                say(note)
        described = json.dumps(counts.to_json(), indent=2)
        (config.output / COUNTS_NAME).write_text(f"{described}\n", encoding="utf-8")
        processes.wait()
    return [
        WeightedSource(source.pairs, section.weight)
        for source, section in zip(prepared, config.data.source, strict=True)
    ]


def _exclusions(config: RunConfig) -> Exclusions:
    """Sentences that no model may be trained on: those of the test sets and those that judge the run."""
    dev = () if config.dev is None else (config.dev.source_path, config.dev.target_path)
    return Exclusions.from_files([*config.data.exclude, *dev])


def _prepared(config: RunConfig, preparation: Preparation) -> Iterator[PreparedSource]:
    files = [path for source in config.data.source for path in source.files()]
    with reading_progress("preparing pairs", files) as on_read:
        for source in config.data.source:
            yield prepare(source, preparation, on_read=on_read)


def trained_vocabulary(config: RunConfig, *, say: Callable[[str], None]) -> bytes:
    """A SentencePiece model of both sides of all sources, without the sentences that are excluded.

    Raises:
        InvalidOption: there is too little text for so many pieces.
    """
    section = config.vocabulary or VocabularySection()
    options = VocabularyOptions(
        num_pieces=section.size,
        byte_fallback=section.byte_fallback,
        user_symbols=section.user_symbols,
        num_sentences=section.max_sentences,
        seed=config.seed,
    )
    exclusions = _exclusions(config)
    texts = (
        text
        for source in config.data.source
        for pair in pairs_of(source, seed=config.seed)
        for text in pair
        if not exclusions.holds(text)
    )
    say(f"training a vocabulary of {section.size:,} pieces")
    return train_vocabulary(texts, options)
