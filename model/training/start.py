"""What a run begins with: a vocabulary and weights, given or made."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch

from app.errors import InvalidOption
from app.text import Tokenizer
from model.data.vocabulary import EOS_ID
from model.distillation.initialisation import student_of
from model.distillation.objective import Candidates
from model.saved_model import SavedModel
from model.training.config import RunConfig
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
        if path.exists() and path.read_bytes() != content:
            raise InvalidOption(
                f"{path} is another vocabulary than the configuration's; name another output, or remove it"
            )
        partial = path.with_name(f"{TOKENIZER_NAME}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)
    processes.wait()
    if given.first is not None:
        return Vocabulary(Tokenizer.open(path, eos_id=given.first.model.config.eos_id), path)
    # A file of somebody else's has its own id for the end.
    eos_id = int(sentencepiece.SentencePieceProcessor(model_file=str(path)).eos_id())
    if eos_id < 0:
        raise InvalidOption(
            f"{path} has no end-of-sentence piece; make a vocabulary with `dragoman data vocabulary`, where "
            f"it is {EOS_ID}"
        )
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
        return path.read_bytes()
    return trained_vocabulary(config, say=say)


def starting_model(config: RunConfig, given: GivenModels, tokenizer: Tokenizer) -> Transformer:
    """The weights before the first step; those that are drawn come from torch's generator."""
    if given.initial is not None:
        return given.initial.model.module()
    if config.model is not None:
        return Transformer(config.model.transformer(tokenizer.vocabulary_size, eos_id=tokenizer.eos_id))
    assert given.teacher is not None
    return student_of(given.teacher.model.module())


def without_dropout(model: Transformer) -> None:
    """Switch dropout off for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
