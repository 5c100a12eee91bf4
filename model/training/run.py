"""A configuration becomes a run: vocabulary, data, model, objective, and at the end a model folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.errors import InvalidOption
from app.text import Tokenizer
from model.config import TransformerConfig
from model.data.batches import BatchStream, WeightedSource
from model.data.dataset import TokenPairs
from model.distillation.initialisation import student_of
from model.distillation.objective import Candidates, Distillation, LossWeights, SampledVocabulary
from model.saved_model import SavedModel, save_model
from model.training.config import DistillationSection, RunConfig
from model.training.data import prepared_sources, trained_vocabulary
from model.training.dev import DevSet
from model.training.objective import LabelSmoothing, Objective
from model.training.processes import Processes
from model.training.trainer import Judge, Trainer, seed_of
from model.transformer import Transformer

MODEL = "model"
TOKENIZER = "sentencepiece.model"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Start:
    """Weights and words that a run begins with.

    Attributes:
        model: a model folder's, or a bundle's.
        candidates: the bundle's lexical shortlist, or None.
    """

    model: SavedModel
    candidates: Candidates | None = None


@dataclass(frozen=True)
class Surroundings:
    """What a run is given besides its configuration.

    Attributes:
        open_start: reads a model folder or a bundle.
        processes: those that share the run.
        device: where to train.
        bfloat16: whether matrices are multiplied in 16 bits.
        say: told what happens before the first step.
    """

    open_start: Callable[[Path], Start]
    processes: Processes
    device: torch.device
    bfloat16: bool
    say: Callable[[str], None]


def run_training(config: RunConfig, around: Surroundings, *, overfit: bool = False) -> Path:
    """Train as configured, going on from the newest checkpoint if there is one.

    Args:
        config: what to do; see `load_run_config`.
        around: where to do it.
        overfit: train on the first batch alone, without dropout: a sane model learns it by heart.

    Returns:
        The model folder.

    Raises:
        InvalidOption: data or start do not fit the configuration.
        CheckpointError: the newest checkpoint is damaged or of another run.
    """
    torch.manual_seed(seed_of(config.seed, 0))
    config.output.mkdir(parents=True, exist_ok=True)
    distillation = config.distillation
    teacher = around.open_start(distillation.teacher) if distillation is not None else None
    start = around.open_start(config.initial) if config.initial is not None else None
    tokenizer_path = _tokenizer(config, start or teacher, around)
    tokenizer = Tokenizer.open(tokenizer_path, eos_id=_eos_id(start or teacher))
    model = _model(config, start, teacher, tokenizer).to(around.device)
    if overfit:
        _without_dropout(model)

    sources = prepared_sources(config, tokenizer, tokenizer_path, around.processes, say=around.say)
    if overfit:
        sources = [_first_batch(config, sources)]
    stream = BatchStream(sources, max_tokens=config.training.batch_tokens, seed=config.seed)
    trainer = Trainer(
        model,
        lambda prepared: _objective(config, prepared, teacher, overfit=overfit),
        config.training,
        stream=stream,
        folder=config.output,
        seed=config.seed,
        fingerprint=_fingerprint(config, sources),
        judge=_judge(config, tokenizer, overfit=overfit),
        processes=around.processes,
        bfloat16=around.bfloat16,
    )
    _announce(trainer, model, sources, around)
    trainer.run()
    folder = config.output / MODEL
    if around.processes.is_first:
        save_model(_saved_model(config, model, trainer, tokenizer_path, tokenizer, start or teacher), folder)
        _write_summary(config, trainer, stream, sources)
    around.processes.wait()
    return folder


def _tokenizer(config: RunConfig, given: Start | None, around: Surroundings) -> Path:
    """The run's vocabulary, as a file of its folder."""
    path = config.output / TOKENIZER
    if around.processes.is_first:
        if given is not None:
            content = given.model.tokenizer
        elif config.vocabulary is not None and config.vocabulary.path is not None:
            content = config.vocabulary.path.read_bytes()
        elif path.exists():  # trained when the run began
            content = path.read_bytes()
        else:
            content = trained_vocabulary(config, say=around.say)
        if path.exists() and path.read_bytes() != content:
            raise InvalidOption(
                f"{path} is another vocabulary than the configuration's; name another output, or remove it"
            )
        with tempfile.NamedTemporaryFile(dir=config.output, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    around.processes.wait()
    return path


def _eos_id(given: Start | None) -> int:
    return given.model.config.eos_id if given is not None else 0


def _model(
    config: RunConfig, start: Start | None, teacher: Start | None, tokenizer: Tokenizer
) -> Transformer:
    if start is not None:
        return start.model.module()
    if config.model is not None:
        return Transformer(config.model.transformer(tokenizer.vocabulary_size))
    assert teacher is not None
    return student_of(teacher.model.module())


def _without_dropout(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _first_batch(config: RunConfig, sources: Sequence[WeightedSource]) -> WeightedSource:
    """The pairs of the first batch, as a source of their own."""
    batch = BatchStream(sources, max_tokens=config.training.batch_tokens, seed=config.seed).next_batch()
    assert batch is not None
    pairs = TokenPairs.from_pairs(
        (source[source_mask].tolist(), target[target_mask].tolist())
        for source, source_mask, target, target_mask, _ in zip(*batch, strict=True)
    )
    return WeightedSource(pairs, 1.0)


def _objective(config: RunConfig, model: Transformer, teacher: Start | None, *, overfit: bool) -> Objective:
    """The loss; the model's parameters are frozen already where they shall be."""
    distillation = config.distillation
    if distillation is None or teacher is None:
        return LabelSmoothing(0.0 if overfit else config.training.label_smoothing)
    names = [source.name for source in config.data.source]
    return Distillation(
        teacher.model.module().to(model.output_bias.device),
        model,
        SampledVocabulary(
            vocabulary_size=model.config.vocabulary_size,
            candidates=teacher.candidates,
            num_candidates=distillation.sampled_candidates,
            num_others=distillation.sampled_others,
            seed=config.seed,
        ),
        weights_of_source=[
            _loss_weights(distillation, is_human=name in distillation.human) for name in names
        ],
    )


def _loss_weights(section: DistillationSection, *, is_human: bool) -> LossWeights:
    if is_human:
        return LossWeights(
            section.human_divergence_weight, section.human_token_weight, section.human_hidden_weight
        )
    return LossWeights(section.divergence_weight, section.token_weight, section.hidden_weight)


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
            ]
        ).encode()
    )
    for source in sources:
        for array in (source.pairs.source_ids, source.pairs.source_starts, source.pairs.target_ids):
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
    config: RunConfig,
    model: Transformer,
    trainer: Trainer,
    tokenizer_path: Path,
    tokenizer: Tokenizer,
    given: Start | None,
) -> SavedModel:
    provenance = dict(given.model.provenance) if given is not None else {}
    provenance["training"] = (
        f"{trainer.state.step} steps, {trainer.state.num_tokens} target tokens, seed {config.seed}"
    )
    no_dropout: TransformerConfig = replace(model.config, dropout=0.0)
    return SavedModel(
        config=no_dropout,
        weights=trainer.result(),
        tokenizer=tokenizer_path.read_bytes(),
        source=config.source,
        target=config.target,
        unknown_id=tokenizer.unknown_id,
        provenance=provenance,
        max_source_tokens=config.data.max_tokens,
        max_target_tokens=3 * config.data.max_tokens,
    )


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
    }
    path = config.output / SUMMARY
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
