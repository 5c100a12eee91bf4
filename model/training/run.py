"""A configuration becomes a run: vocabulary, data, model, objective, and at the end a model folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.text import Tokenizer
from model.config import TransformerConfig
from model.data.batches import BatchStream, WeightedSource
from model.data.dataset import TokenPairs
from model.distillation.objective import Distillation, LossWeights
from model.distillation.sampled_vocabulary import SampledVocabulary
from model.saved_model import SavedModel, save_model
from model.training.config import DistillationSection, RunConfig
from model.training.data import prepared_sources
from model.training.dev import DevSet
from model.training.imitation import has_recurrences_to_imitate, imitate_teacher
from model.training.objective import LabelSmoothing, Objective
from model.training.processes import Processes
from model.training.run_lock import sole_run
from model.training.start import (
    Given,
    GivenModels,
    Vocabulary,
    settle_vocabulary,
    starting_model,
    with_dropout,
)
from model.training.trainer import Judge, Trainer, seed_of
from model.transformer import Transformer

MODEL = "model"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Surroundings:
    """What a run is given besides its configuration.

    Attributes:
        open_model: reads a model folder or a bundle.
        processes: those that share the run.
        device: where to train.
        bfloat16: whether matrices are multiplied in 16 bits.
        say: told what happens before the first step.
    """

    open_model: Callable[[Path], Given]
    processes: Processes
    device: torch.device
    bfloat16: bool
    say: Callable[[str], None]


def run_training(config: RunConfig, around: Surroundings, *, overfit: bool = False) -> Path:
    """Train as configured, going on from the newest checkpoint if there is one.

    Args:
        config: what to do; see `model.training.config_file`.
        around: where to do it.
        overfit: train on the first batch alone, without dropout: a sane model learns it by heart.

    Returns:
        The model folder.

    Raises:
        InvalidOption: data or start do not fit the configuration, or another run writes into its output.
        CheckpointError: the newest checkpoint is damaged or of another run.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    with sole_run(config.output) if around.processes.is_first else nullcontext():
        return _run(config, around, overfit=overfit)


def _run(config: RunConfig, around: Surroundings, *, overfit: bool) -> Path:
    torch.manual_seed(seed_of(config.seed, 0))
    given = GivenModels.of(config, around.open_model)
    vocabulary = settle_vocabulary(config, given, around.processes, say=around.say)
    model = starting_model(config, given, vocabulary.tokenizer)
    model = (with_dropout(model, 0.0) if overfit else model).to(around.device)

    sources = prepared_sources(
        config, vocabulary.tokenizer, vocabulary.path, around.processes, say=around.say
    )
    names = [source.name for source in config.data.source]
    if overfit:
        sources, names = _first_batch(config, sources, names)
    if given.teacher is not None:
        teacher = given.teacher.model.module().to(around.device)
        if has_recurrences_to_imitate(config, teacher):
            imitate_teacher(config, model, teacher, sources, around.processes, say=around.say)
    stream = BatchStream(
        sources, max_tokens=config.training.batch_tokens, seed=config.seed, rounds=_rounds(config)
    )
    trainer = Trainer(
        model,
        lambda prepared: _objective(
            config, prepared, given.teacher, names, vocabulary.tokenizer, overfit=overfit
        ),
        config.training,
        stream=stream,
        folder=config.output,
        seed=config.seed,
        fingerprint=_fingerprint(config, sources),
        judge=_judge(config, vocabulary.tokenizer, overfit=overfit),
        processes=around.processes,
        bfloat16=around.bfloat16,
    )
    _announce(trainer, model, sources, around)
    trainer.run()
    folder = config.output / MODEL
    if around.processes.is_first:
        save_model(_saved_model(config, model, trainer, vocabulary, given), folder)
        if config.training.average > 1:
            around.say(f"the model is the mean of the weights after steps {_listed(trainer.result_steps())}")
        _write_summary(config, trainer, stream, sources)
    around.processes.wait()
    return folder


def _first_batch(
    config: RunConfig, sources: Sequence[WeightedSource], names: Sequence[str]
) -> tuple[list[WeightedSource], list[str]]:
    """The pairs of the first batch, still by their sources; those that gave none are left out."""
    batch = BatchStream(sources, max_tokens=config.training.batch_tokens, seed=config.seed).next_batch()
    assert batch is not None
    pairs_of_source: dict[int, list[tuple[list[int], list[int]]]] = {}
    for pair, origin in zip(batch.pairs(), batch.origins.tolist(), strict=True):
        pairs_of_source.setdefault(origin, []).append(pair)
    # As many of each as there are: a pass over all is the batch again.
    kept = [WeightedSource(TokenPairs.from_pairs(pairs), len(pairs)) for pairs in pairs_of_source.values()]
    return kept, [names[origin] for origin in pairs_of_source]


def _objective(
    config: RunConfig,
    model: Transformer,
    teacher: Given | None,
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    overfit: bool,
) -> Objective:
    """The loss; the model's parameters are frozen already where they shall be."""
    distillation = config.distillation
    if distillation is None or teacher is None:
        return LabelSmoothing(
            0.0 if overfit else config.training.label_smoothing, unknown_id=tokenizer.unknown_id
        )
    return Distillation(
        teacher.model.module().to(model.output_bias.device),
        model,
        SampledVocabulary(
            vocabulary_size=model.config.vocabulary_size,
            candidates=teacher.candidates,
            num_best=distillation.teacher_best,
            num_candidates=distillation.sampled_candidates,
            num_others=distillation.sampled_others,
            seed=config.seed,
        ),
        weights_of_source=[
            _loss_weights(distillation, is_human=name in distillation.human) for name in names
        ],
        keeps=distillation.rounds > 1,
    )


def _loss_weights(section: DistillationSection, *, is_human: bool) -> LossWeights:
    if is_human:
        return LossWeights(
            section.human_divergence_weight, section.human_token_weight, section.human_hidden_weight
        )
    return LossWeights(section.divergence_weight, section.token_weight, section.hidden_weight)


def _rounds(config: RunConfig) -> int:
    return config.distillation.rounds if config.distillation is not None else 1


def _judge(config: RunConfig, tokenizer: Tokenizer, *, overfit: bool) -> Judge | None:
    if config.dev is None or overfit:
        return None
    return Judge(DevSet(config.dev, tokenizer, max_tokens=config.data.max_tokens), config.dev)


def _fingerprint(config: RunConfig, sources: Sequence[WeightedSource]) -> str:
    """Of everything that the batches follow from."""
    digest = hashlib.sha256()
    digest.update(
        json.dumps(
            [
                config.seed,
                config.training.batch_tokens,
                config.training.accumulate,
                config.training.processes,
                [source.weight for source in sources],
                *([_rounds(config)] if _rounds(config) > 1 else []),
            ]
        ).encode()
    )
    for source in sources:
        for array in (
            source.pairs.source_ids,
            source.pairs.source_starts,
            source.pairs.target_ids,
            source.pairs.target_starts,
        ):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _announce(
    trainer: Trainer, model: Transformer, sources: Sequence[WeightedSource], around: Surroundings
) -> None:
    if not around.processes.is_first:
        return
    parameters = list(model.parameters())
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    num_pairs = sum(len(source.pairs) for source in sources)
    around.say(
        f"{sum(parameter.numel() for parameter in parameters):,} parameters, of which {num_trained:,} are "
        f"trained; {num_pairs:,} pairs; {'bfloat16' if around.bfloat16 else 'float32'} on {around.device}"
    )
    if trainer.state.step:
        around.say(f"going on from step {trainer.state.step:,}")


def _saved_model(
    config: RunConfig, model: Transformer, trainer: Trainer, vocabulary: Vocabulary, given: GivenModels
) -> SavedModel:
    provenance = dict(given.first.model.provenance) if given.first is not None else {}
    provenance["training"] = (
        f"{trainer.state.step} steps, {trainer.state.num_tokens} target tokens, seed {config.seed}"
    )
    no_dropout: TransformerConfig = replace(model.config, dropout=0.0)
    return SavedModel(
        config=no_dropout,
        weights=trainer.result(),
        tokenizer=vocabulary.path.read_bytes(),
        source=config.source,
        target=config.target,
        unknown_id=vocabulary.tokenizer.unknown_id,
        provenance=provenance,
        max_source_tokens=config.data.max_tokens,
        max_target_tokens=3 * config.data.max_tokens,
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)


def _write_summary(
    config: RunConfig, trainer: Trainer, stream: BatchStream, sources: Sequence[WeightedSource]
) -> None:
    """What a training log wants to know."""
    state = trainer.state
    summary = {
        "steps": state.step,
        "target_tokens": state.num_tokens,
        "trained_s": round(state.time_s, 1),
        "processes": config.training.processes,
        "pairs": [len(source.pairs) for source in sources],
        "passes": [round(passes, 2) for passes in stream.passes()],
        "evaluations": state.evaluations,
        "result_steps": trainer.result_steps(),
    }
    path = config.output / SUMMARY
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
