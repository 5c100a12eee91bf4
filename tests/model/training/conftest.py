from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from model.config import TransformerConfig
from model.data.batches import BatchStream, WeightedSource
from model.data.dataset import TokenPairs
from model.training.config import TrainingSection
from model.training.objective import LabelSmoothing
from model.training.processes import Processes
from model.training.trainer import Judge, Trainer
from model.transformer import Transformer

VOCABULARY = 23


def reversed_pairs(num_pairs: int, *, seed: int) -> TokenPairs:
    """A toy language: the target is the source backwards."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(num_pairs):
        words = [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, 9))]
        pairs.append(([*words, 0], [*reversed(words), 0]))
    return TokenPairs.from_pairs(pairs)


@dataclass(frozen=True)
class TrainerMaker:
    """Makes a run over the toy language, always the same one."""

    folder: Path
    config: TransformerConfig
    dropout: float = 0.2

    def __call__(
        self, name: str, *, processes: Processes | None = None, judge: Judge | None = None, **changes: object
    ) -> Trainer:
        torch.manual_seed(7)  # the model's weights; the run itself must not depend on it
        section = TrainingSection(
            **(
                {
                    "max_steps": 12,
                    "batch_tokens": 120,
                    "learning_rate": 3e-3,
                    "warmup_steps": 4,
                    "checkpoint_every_steps": 5,
                    "log_every_steps": 3,
                    "tensorboard": False,
                }
                | changes
            )  # type: ignore[arg-type]
        )
        sources = [
            WeightedSource(reversed_pairs(60, seed=1), 2.0),
            WeightedSource(reversed_pairs(25, seed=2), 1.0),
        ]
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return Trainer(
            Transformer(replace(self.config, dropout=self.dropout)),
            lambda _: LabelSmoothing(section.label_smoothing),
            section,
            stream=BatchStream(sources, max_tokens=section.batch_tokens, seed=5, chunk_pairs=64),
            folder=folder,
            seed=5,
            fingerprint="toy",
            processes=processes,
            judge=judge,
        )


@pytest.fixture
def make_trainer(tmp_path: Path, make_config: Callable[..., TransformerConfig]) -> TrainerMaker:
    return TrainerMaker(tmp_path, make_config(decoder_layers=1, encoder_layers=1))
