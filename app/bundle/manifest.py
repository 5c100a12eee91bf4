"""The export contract, format version 1: what a bundle's manifest.json states."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

Variant = Literal["cpu-int8", "cpu-fp32", "cuda-fp16"]
LanguageCode = Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128)]
"""A plain name: bundles have no sub-folders, so nothing in them can point outside."""
PositiveInt = Annotated[int, Field(ge=1, le=1 << 20)]
"""Bounded, so that a damaged number is refused instead of filling the memory."""
NumLayers = Annotated[int, Field(ge=1, le=256)]
NumPositions = Annotated[int, Field(ge=8, le=1 << 14)]
"""Below 8 a word might not fit into a segment."""


class _Model(BaseModel):
    # Not a number is unlike itself: a manifest that held one would differ from itself at every reload.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)


class LanguagePair(_Model):
    """A direction the model translates.

    Attributes:
        source: BCP-47 code.
        target: BCP-47 code.
        target_token_id: for multilingual models, the token that selects the target language.
    """

    source: LanguageCode
    target: LanguageCode
    target_token_id: int | None = None


class ModelSizes(_Model):
    """The Transformer's sizes, by their names in `model.config`."""

    d_model: PositiveInt
    num_heads: PositiveInt
    head_size: PositiveInt
    encoder_layers: NumLayers
    decoder_layers: NumLayers
    ffn_size: PositiveInt
    vocabulary_size: PositiveInt


class SpecialTokens(_Model):
    """Special token ids.

    Attributes:
        eos_id: ends source and target.
        unknown_id: stands for text the vocabulary cannot spell.
        start_id: first decoder input; None when the decoder starts from a zero embedding.
    """

    eos_id: int
    unknown_id: int
    start_id: int | None


class Limits(_Model):
    """How long sequences may be, in tokens, end-of-sentence included.

    Attributes:
        max_source_tokens: longer segments are wrapped before translation.
        max_target_tokens: positions the decoder has.
        max_target_ratio: default limit of target tokens per source token.
    """

    max_source_tokens: NumPositions
    max_target_tokens: NumPositions
    max_target_ratio: Annotated[float, Field(gt=0, le=10)]


class StateTensor(_Model):
    """One decoder state tensor of one row.

    Attributes:
        name: graph input; the graph output is the same with the prefix ``next_``.
        kind: ``kv``, shape [H, T, D] growing with the target, written in place; or ``cell``, fixed.
        shape: without the row axis; for ``kv`` [H, D], for ``cell`` [1, d].
        dtype: element type in the graphs of the CPU variants. Those of cuda-fp16 take a ``kv`` tensor as
            float16 and a ``cell`` as float32; their own inputs say so.
    """

    name: str
    kind: Literal["kv", "cell"]
    shape: tuple[PositiveInt, ...]
    dtype: Literal["float32"] = "float32"

    @model_validator(mode="after")
    def _rows_have_two_axes(self) -> StateTensor:
        if len(self.shape) != 2 or (self.kind == "cell" and self.shape[0] != 1):
            raise ValueError("a kv tensor's shape is [H, D], a cell's is [1, d]")
        return self


class VariantGraphs(_Model):
    """The graphs of one variant, as file names.

    Attributes:
        encoder: source ids and mask to cross-attention keys and values.
        step: one decoder step over the whole vocabulary.
        beam_step: one decoder step of beam search, likewise; None when the bundle cannot search beams.
        guided_step: as `beam_step`, with adjusted logits and attention; None when the bundle cannot.
        shortlist_step: one decoder step over given candidates; None without a shortlist.
        shortlist_beam_step: one decoder step of beam search over given candidates.
        shortlist_guided_step: likewise, with adjusted logits and attention.
        candidates: candidate ids to the output projection restricted to them; None likewise.
        copy_state: decoder state with some rows copied onto others, in place; for cuda-fp16 alone.
        copy_cross: encoder outputs likewise.
    """

    encoder: FileName
    step: FileName
    beam_step: FileName | None = None
    guided_step: FileName | None = None
    shortlist_step: FileName | None = None
    shortlist_beam_step: FileName | None = None
    shortlist_guided_step: FileName | None = None
    candidates: FileName | None = None
    copy_state: FileName | None = None
    copy_cross: FileName | None = None

    @property
    def file_names(self) -> tuple[str, ...]:
        """The graphs that exist."""
        return tuple(
            name
            for name in (
                self.encoder,
                self.step,
                self.beam_step,
                self.guided_step,
                self.shortlist_step,
                self.shortlist_beam_step,
                self.shortlist_guided_step,
                self.candidates,
                self.copy_state,
                self.copy_cross,
            )
            if name is not None
        )

    @model_validator(mode="after")
    def _shortlist_graphs_come_together(self) -> VariantGraphs:
        if (self.shortlist_step is None) != (self.candidates is None):
            raise ValueError("shortlist_step and candidates must be given together")
        for kind in ("beam_step", "guided_step"):
            needed = getattr(self, kind) is not None and self.shortlist_step is not None
            if (getattr(self, f"shortlist_{kind}") is not None) != needed:
                raise ValueError(f"shortlist_{kind} goes with {kind} and shortlist_step")
        return self

    @model_validator(mode="after")
    def _copies_come_together(self) -> VariantGraphs:
        if (self.copy_state is None) != (self.copy_cross is None):
            raise ValueError("copy_state and copy_cross must be given together")
        return self


class QualityScore(_Model):
    """Measured translation quality.

    Attributes:
        test_set: its name.
        variant: the variant measured.
        shortlist: whether the shortlist was used.
        beam_size: live beams; 1 is greedy search, as in manifests that do not say.
        length_penalty: exponent of beam search's length normalisation.
        num_segments: lines scored.
        bleu: sacrebleu corpus BLEU.
        bleu_signature: sacrebleu's signature.
        chrf: sacrebleu corpus chrF.
        chrf_signature: sacrebleu's signature.
    """

    test_set: str
    variant: Variant
    shortlist: bool
    beam_size: PositiveInt = 1
    length_penalty: Annotated[float, Field(ge=0)] = 1.0
    num_segments: PositiveInt
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


class Verification(_Model):
    """How the exported graphs compared with their PyTorch reference when the bundle was made.

    Attributes:
        variant: the variant compared; fp32 must agree, the others are reported.
        num_segments: segments translated by both.
        num_identical: segments whose tokens were the same.
        max_score_difference: largest absolute difference of scores among identical ones.
    """

    variant: Variant
    num_segments: PositiveInt
    num_identical: Annotated[int, Field(ge=0)]
    max_score_difference: float


class FileRecord(_Model):
    """Size and checksum of one file of the bundle."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Model):
    """manifest.json, written last: a folder without it is not a bundle.

    Attributes:
        format_version: version of this contract.
        id: unique name of the bundle.
        pairs: directions it translates.
        sizes: the Transformer's sizes.
        tokens: special ids.
        limits: sequence limits.
        state: decoder state tensors, in graph order.
        tokenizer: SentencePiece model, one vocabulary for source and target.
        shortlist: lexical shortlist, or None.
        variants: graphs by variant.
        quality: measured scores.
        verification: comparison with the reference at export.
        licence: SPDX expression of the weights.
        provenance: where the weights came from, free facts.
        files: every file of the bundle but the manifest itself.
    """

    format_version: Literal[1]
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
    pairs: Annotated[tuple[LanguagePair, ...], Field(min_length=1)]
    sizes: ModelSizes
    tokens: SpecialTokens
    limits: Limits
    state: Annotated[tuple[StateTensor, ...], Field(min_length=1)]
    tokenizer: FileName
    shortlist: FileName | None
    variants: dict[Variant, VariantGraphs]
    quality: tuple[QualityScore, ...] = ()
    verification: tuple[Verification, ...] = ()
    licence: str
    provenance: dict[str, str]
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _special_tokens_are_in_the_vocabulary(self) -> Manifest:
        ids = (self.tokens.eos_id, self.tokens.unknown_id, self.tokens.start_id)
        size = self.sizes.vocabulary_size
        if any(token_id is not None and not 0 <= token_id < size for token_id in ids):
            raise ValueError(f"a special token is outside the vocabulary of {size} tokens")
        return self

    @model_validator(mode="after")
    def _every_named_file_is_recorded(self) -> Manifest:
        named = {self.tokenizer, *(graph for graphs in self.variants.values() for graph in graphs.file_names)}
        if self.shortlist is not None:
            named.add(self.shortlist)
        if missing := sorted(named - self.files.keys()):
            raise ValueError(f"named but not recorded under files: {', '.join(missing)}")
        if not self.variants:
            raise ValueError("a bundle needs at least one variant")
        return self

    @model_validator(mode="after")
    def _graphs_are_those_of_their_variant(self) -> Manifest:
        for variant, graphs in self.variants.items():
            if (graphs.copy_state is not None) != (variant == "cuda-fp16"):
                raise ValueError(
                    f"{variant}: copy_state and copy_cross are graphs of cuda-fp16, and of no other"
                )
            if variant == "cuda-fp16" and graphs.shortlist_step is not None:
                raise ValueError("cuda-fp16: there are no shortlist graphs for a GPU")
        return self
