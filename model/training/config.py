"""What a training run is to do, key by key, with units and defaults; read by `model.training.config_file`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.bundle.manifest import LanguageCode, NumLayers
from model.config import Activation, DecoderCell, NormPlacement, PositionLayout, TransformerConfig
from model.data.filters import FilterConfig
from model.data.sources import SourceConfig
from model.training.schedule import Schedule

Precision = Literal["auto", "float32", "bfloat16"]
Count = Annotated[int, Field(ge=1)]
SampleSize = Annotated[int, Field(ge=0, le=1_000_000)]
MAX_TOKENS = 4096
"""Of a side: the longest that `dragoman export trained` makes a bundle for."""
HEAD_MULTIPLE = 8


class Section(BaseModel):
    """A table of the file: unknown keys are errors, values do not change, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Sizes of a model that is trained from nothing; see `TransformerConfig`.

    The vocabulary's size and its end token come from the vocabulary.
    """

    d_model: Count = 256
    num_heads: Count = 8
    encoder_layers: NumLayers = 6
    decoder_layers: NumLayers = 2
    ffn_size: Count = 1536
    activation: Activation = "relu"
    norm: NormPlacement = "post"
    positions: PositionLayout = "interleaved"
    decoder_cell: DecoderCell = "attention"
    decoder_query_heads: Count | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _is_possible(self) -> ModelSection:
        head_size = self.transformer(1, eos_id=0).head_size  # raises ValueError
        if head_size % HEAD_MULTIPLE:
            raise ValueError(
                f"d_model / num_heads is {head_size}; ONNX Runtime's attention needs a multiple of "
                f"{HEAD_MULTIPLE}, or no bundle can be made of the model"
            )
        return self

    def transformer(self, vocabulary_size: int, *, eos_id: int) -> TransformerConfig:
        """The configuration of a model with this vocabulary."""
        return TransformerConfig(vocabulary_size=vocabulary_size, eos_id=eos_id, **self.model_dump())


class VocabularySection(Section):
    """The SentencePiece model: a file, or one that is trained on the run's own sources.

    Attributes:
        path: a model; None trains one.
        size: pieces to train.
        byte_fallback: whether unknown characters become bytes instead of the unknown piece.
        user_symbols: texts that stay one piece.
        max_sentences: sentences that are sampled for training it.
    """

    path: Path | None = None
    size: Annotated[int, Field(ge=64, le=256_000)] = 8000
    byte_fallback: bool = True
    user_symbols: tuple[str, ...] = ()
    max_sentences: Count = 1_000_000

    @model_validator(mode="after")
    def _is_given_or_trained(self) -> VocabularySection:
        if self.path is not None and (others := sorted(self.model_fields_set - {"path"})):
            raise ValueError(
                f"path is given, so that no vocabulary is trained and nothing looks at {', '.join(others)}; "
                "leave one or the other out"
            )
        return self


class DevSection(Section):
    """Sentences that judge the model while it trains, never trained on.

    Attributes:
        source_path: one sentence a line.
        target_path: their translations.
        max_sentences: only the first ones are used.
        every_steps: how often; 0 only at the end.
        decode: whether they are translated too (greedy), for a BLEU beside the loss.
        stop_by: what decides which checkpoint is best and when to stop.
        patience: evaluations without a better value after which the run stops; 0 never stops it.
    """

    source_path: Path
    target_path: Path
    max_sentences: Count = 200
    every_steps: Annotated[int, Field(ge=0)] = 1000
    decode: bool = True
    stop_by: Literal["loss", "bleu"] = "loss"
    patience: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _bleu_needs_decoding(self) -> DevSection:
        if self.stop_by == "bleu" and not self.decode:
            raise ValueError("stop_by = 'bleu' needs decode = true")
        return self

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> DevSection:
        if self.patience and not self.every_steps:
            raise ValueError(
                f"patience = {self.patience} counts evaluations, and every_steps = 0 has one at the end "
                "alone; give every_steps, or leave patience out"
            )
        return self


class DataSection(Section):
    """The text.

    Attributes:
        source: where pairs come from, and how much of each.
        filters: which pairs are left out.
        exclude: files of sentences, one a line, that no training pair may contain (test sets).
        max_tokens: pairs with more tokens on a side are left out; at most what the model will be served with.
        cache: folder for prepared pairs; None: beside the run.
    """

    source: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    filters: FilterConfig = FilterConfig()
    exclude: tuple[Path, ...] = ()
    max_tokens: Annotated[int, Field(ge=8, le=MAX_TOKENS)] = 128
    cache: Path | None = None


class TrainingSection(Section):
    """The optimisation.

    Attributes:
        max_steps: updates of the weights.
        batch_tokens: of one forward pass, padding included, of the longer side; of all processes together.
        accumulate: forward passes whose gradients make one update.
        learning_rate: the peak.
        schedule: see `learning_rate_share`.
        warmup_steps: steps of linear rise.
        schedule_power: of the linear schedule.
        dropout: in the place of the model's own; None: what [model] says, or 0 where weights are given.
        label_smoothing: Szegedy et al. 2016; for training from text.
        betas: of AdamW (Loshchilov and Hutter 2019).
        epsilon: of AdamW.
        weight_decay: of AdamW; matrices only.
        clip_norm: largest norm of the gradient; 0 does not clip.
        learning_rate_scales: patterns of parameter names (as of shell files) and a factor; the first that
            matches counts, 0 freezes. Others have 1.
        precision: bfloat16 multiplies matrices in 16 bits; auto does so where the device is built for it.
        device: cpu, cuda, or auto.
        processes: that share the work, each with its part of every batch.
        threads: of each process.
        checkpoint_every_steps: besides the last step and every evaluation that was the best.
        keep_checkpoints: the newest ones that stay.
        average: how many checkpoints are averaged into the result; 1 takes one.
        average_of: the newest, or the best by the dev set.
        log_every_steps: how often the losses are written.
        tensorboard: whether they are written for TensorBoard too.
    """

    max_steps: Count = 10_000
    batch_tokens: Count = 2048
    accumulate: Count = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    schedule: Schedule = "inverse_sqrt"
    warmup_steps: Annotated[int, Field(ge=0)] = 400
    schedule_power: Annotated[float, Field(gt=0)] = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.98)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    learning_rate_scales: dict[str, Annotated[float, Field(ge=0)]] = {}
    precision: Precision = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: Count = 1
    threads: Count = 1
    checkpoint_every_steps: Count = 1000
    keep_checkpoints: Count = 3
    average: Count = 1
    average_of: Literal["last", "best"] = "last"
    log_every_steps: Count = 50
    tensorboard: bool = True


class DistillationSection(Section):
    """Learning from a teacher's probabilities and hidden states; see `model.distillation`.

    Attributes:
        teacher: a bundle or a model folder with the same vocabulary.
        from_teacher: whether the student starts as the teacher, self-attention in the place of a recurrence.
        fit_steps: steps before the first one, in which each such self-attention alone learns to imitate the
            recurrence; see `model.distillation.recurrence`.
        rounds: how often some thousand pairs are gone through before the next ones. What stays the same, the
            teacher's states and those of its encoder, is computed in the first round and kept: at the shipped
            size 1 KB for a source token and 3 KB for a target token, with padding.
        divergence_weight: of KL(teacher || student) on pairs whose target the teacher made.
        token_weight: of the target token's cross-entropy on such pairs.
        hidden_weight: of the squared difference of hidden states on such pairs.
        human_divergence_weight: likewise on pairs of the sources in `human`.
        human_token_weight: likewise.
        human_hidden_weight: likewise.
        human: names of sources whose targets people wrote.
        teacher_best: how many of the teacher's likeliest tokens of every position, within its shortlist, the
            probabilities run over.
        sampled_candidates: random tokens of a batch's shortlist besides.
        sampled_others: random tokens of the whole vocabulary besides.
    """

    teacher: Path
    from_teacher: bool = True
    fit_steps: Annotated[int, Field(ge=0)] = 400
    rounds: Count = 1
    divergence_weight: Annotated[float, Field(ge=0)] = 1.0
    token_weight: Annotated[float, Field(ge=0)] = 0.2
    hidden_weight: Annotated[float, Field(ge=0)] = 1.0
    human_divergence_weight: Annotated[float, Field(ge=0)] = 0.3
    human_token_weight: Annotated[float, Field(ge=0)] = 1.0
    human_hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    human: tuple[str, ...] = ()
    teacher_best: SampleSize = 8
    sampled_candidates: SampleSize = 3000
    sampled_others: SampleSize = 500

    @model_validator(mode="after")
    def _teaches(self) -> DistillationSection:
        for prefix in ("", "human_") if self.human else ("",):
            names = [f"{prefix}{part}_weight" for part in ("divergence", "token", "hidden")]
            if not any(getattr(self, name) for name in names):
                raise ValueError(
                    f"{', '.join(names)} are all 0, so that nothing is learnt; give one a weight"
                )
        return self


class RunConfig(Section):
    """One run. Paths are relative to the file.

    Attributes:
        source: language, BCP-47.
        target: language, BCP-47.
        output: folder of the run.
        seed: everything random follows from it.
        initial: model folder (or bundle) to start from, in the place of `model` and `vocabulary`.
    """

    source: LanguageCode
    target: LanguageCode
    output: Path
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1
    initial: Path | None = None
    model: ModelSection | None = None
    vocabulary: VocabularySection | None = None
    data: DataSection
    dev: DevSection | None = None
    training: TrainingSection = TrainingSection()
    distillation: DistillationSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        teacher_is_start = self.distillation is not None and self.distillation.from_teacher
        starts = [self.initial is not None, self.model is not None, teacher_is_start]
        if sum(starts) != 1:
            raise ValueError(
                "the weights start from one of `initial`, `[model]` and `[distillation] from_teacher = true` "
                f"and {sum(starts)} of them are given; give exactly one"
            )
        if (self.initial is not None or self.distillation is not None) and self.vocabulary is not None:
            raise ValueError(
                "the vocabulary is that of `initial` or of the teacher; leave `[vocabulary]` out"
            )
        if self.training.average_of == "best" and self.dev is None:
            raise ValueError("average_of = 'best' needs a [dev] section")
        self._check_average()
        names = [source.name for source in self.data.source]
        if len(set(names)) != len(names):
            raise ValueError("two [[data.source]] have the same name")
        if self.distillation is not None and (unknown := set(self.distillation.human) - set(names)):
            raise ValueError(f"[distillation] human names {sorted(unknown)}; the sources are {names}")
        if ignored := list(self._ignored()):
            raise ValueError("; ".join(ignored))
        return self

    def _check_average(self) -> None:
        """Refuse to average more checkpoints than the run will have."""
        section = self.training
        every = section.checkpoint_every_steps
        if section.average_of == "best" and self.dev is not None:
            every = self.dev.every_steps or section.max_steps
        num_checkpoints = -(-section.max_steps // every)
        if section.average > num_checkpoints:
            raise ValueError(
                f"training.average is {section.average}, but {section.max_steps} steps with one checkpoint "
                f"every {every} make {num_checkpoints}; average fewer, or make them more often"
            )

    def _ignored(self) -> Iterator[str]:
        """Keys that are given although nothing would look at them."""
        training, distillation = self.training, self.distillation
        if "schedule_power" in training.model_fields_set and training.schedule != "linear":
            yield (
                f"training.schedule_power is of the linear schedule, and this one is {training.schedule}; "
                "leave it out"
            )
        if "warmup_steps" in training.model_fields_set and training.warmup_steps >= training.max_steps:
            yield (
                f"training.warmup_steps is {training.warmup_steps} and training.max_steps "
                f"{training.max_steps}, so that the learning rate rises to the end; make it shorter"
            )
        if distillation is None:
            return
        if "label_smoothing" in training.model_fields_set and training.label_smoothing:
            yield (
                "training.label_smoothing is for training from text; a teacher's probabilities are smooth "
                "already; leave it out"
            )
        if "fit_steps" in distillation.model_fields_set and not distillation.from_teacher:
            yield (
                "distillation.fit_steps is for a student that starts as its teacher, and from_teacher is "
                "false; leave one or the other out"
            )
        of_teacher = {"divergence_weight", "token_weight", "hidden_weight"} & distillation.model_fields_set
        if of_teacher and set(distillation.human) == {source.name for source in self.data.source}:
            yield (
                f"{', '.join(f'distillation.{name}' for name in sorted(of_teacher))}: for targets that the "
                "teacher made, and `human` names every source; leave them out, or name fewer"
            )
        weights = [name for name in distillation.model_fields_set if name.startswith("human_")]
        if weights and not distillation.human:
            yield (
                f"{', '.join(f'distillation.{name}' for name in sorted(weights))}: for the sources that "
                "`human` names, and it names none; name them, or leave the weights out"
            )
