"""What a run begins with: a vocabulary and weights, given or made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import sentencepiece

from app.errors import InvalidOption
from app.text import Tokenizer
from model.data.vocabulary import EOS_ID
from model.distillation.initialisation import student_of
from model.distillation.sampled_vocabulary import Candidates
from model.saved_model import SavedModel
from model.training.config import RunConfig, VocabularySection
from model.training.data import trained_vocabulary
from model.training.processes import Processes
from model.transformer import Transformer

TOKENIZER_NAME = "sentencepiece.model"


@dataclass(frozen=True)
class Given:
    """A model that a run was given.

    Attributes:
        model: a model folder's, or a bundle's.
        candidates: the bundle's lexical shortlist, or None.
    """

    model: SavedModel
    candidates: Candidates | None = None


@dataclass(frozen=True)
class GivenModels:
    """The models that a configuration names.

    Attributes:
        initial: whose weights the run starts from, or None.
        teacher: what a distillation learns from, or None.
    """

    initial: Given | None
    teacher: Given | None

    @classmethod
    def of(cls, config: RunConfig, open_model: Callable[[Path], Given]) -> GivenModels:
        """Open them.

        Raises:
            InvalidOption: the two have different vocabularies.
        """
        initial = open_model(config.initial) if config.initial is not None else None
        teacher = open_model(config.distillation.teacher) if config.distillation is not None else None
        if initial is not None and teacher is not None and initial.model.tokenizer != teacher.model.tokenizer:
            raise InvalidOption(
                f"{config.initial} has another vocabulary than the teacher, so they mean other words by the "
                "same token; start from a model with the teacher's vocabulary"
            )
        return cls(initial, teacher)

    @property
    def first(self) -> Given | None:
        """Whose vocabulary and facts the result has."""
        return self.initial or self.teacher


@dataclass(frozen=True)
class Vocabulary:
    """The run's SentencePiece model, and where it lies."""

    tokenizer: Tokenizer
    path: Path


def settle_vocabulary(
    config: RunConfig, given: GivenModels, processes: Processes, *, say: Callable[[str], None]
) -> Vocabulary:
    """The vocabulary of the given models, of the configuration, or a trained one, as a file of the run.

    Raises:
        InvalidOption: a file is missing or lacks an end-of-sentence piece, or the run began with another
            vocabulary.
    """
    path = config.output / TOKENIZER_NAME
    if processes.is_first:
        content = _content(config, given, path, say=say)
        _check_end(content, path)
        if path.exists() and path.read_bytes() != content:
            raise InvalidOption(
                f"{path} is another vocabulary than the configuration's; name another output, or remove it"
            )
        partial = path.with_name(f"{TOKENIZER_NAME}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)
        path.with_suffix(".json").write_text(_described(config), encoding="utf-8")
    processes.wait()
    if given.first is not None:
        return Vocabulary(Tokenizer.open(path, eos_id=given.first.model.config.eos_id), path)
    # A file of somebody else's has its own id for the end.
    eos_id = int(sentencepiece.SentencePieceProcessor(model_file=str(path)).eos_id())
    return Vocabulary(Tokenizer.open(path, eos_id=eos_id), path)


def _content(config: RunConfig, given: GivenModels, path: Path, *, say: Callable[[str], None]) -> bytes:
    if given.first is not None:
        return given.first.model.tokenizer
    named = config.vocabulary.path if config.vocabulary is not None else None
    if named is not None:
        try:
            return named.read_bytes()
        except OSError as error:
            raise InvalidOption(
                f"vocabulary.path is {named}, which cannot be read ({error.strerror}); name a SentencePiece "
                "model, or leave the key out to train one"
            ) from error
    if path.exists():  # trained when the run began
        described = path.with_suffix(".json")
        if not described.exists() or described.read_text(encoding="utf-8") != _described(config):
            raise InvalidOption(
                f"{path} was trained for another [vocabulary], seed or sources; name another output, "
                "or remove it and the checkpoints that were trained with it"
            )
        return path.read_bytes()
    return trained_vocabulary(config, say=say)


def _described(config: RunConfig) -> str:
    """What a trained vocabulary follows from."""
    section = config.vocabulary or VocabularySection()
    sources = [source.model_dump(mode="json", exclude={"weight", "name"}) for source in config.data.source]
    described = {"vocabulary": section.model_dump(mode="json"), "seed": config.seed, "sources": sources}
    return json.dumps(described, indent=2, sort_keys=True) + "\n"


def _check_end(content: bytes, path: Path) -> None:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise InvalidOption(
            f"the vocabulary for {path} is no SentencePiece model; name another file"
        ) from error
    if int(processor.eos_id()) < 0:
        raise InvalidOption(
            f"the vocabulary for {path} has no end-of-sentence piece; make one with `dragoman data "
            f"vocabulary`, where it is {EOS_ID}"
        )


def starting_model(config: RunConfig, given: GivenModels, tokenizer: Tokenizer) -> Transformer:
    """The weights before the first step; those that are drawn come from torch's generator."""
    dropout = config.training.dropout
    if config.model is not None:
        sizes = config.model.transformer(tokenizer.vocabulary_size, eos_id=tokenizer.eos_id)
        return Transformer(sizes if dropout is None else replace(sizes, dropout=dropout))
    if given.initial is not None:
        model = given.initial.model.module()
    else:
        assert given.teacher is not None
        model = student_of(given.teacher.model.module())
    return with_dropout(model, dropout or 0.0)


def with_dropout(model: Transformer, probability: float) -> Transformer:
    """The same model, its weights kept, with another dropout."""
    changed = Transformer(replace(model.config, dropout=probability))
    changed.load_state_dict(model.state_dict())
    return changed
