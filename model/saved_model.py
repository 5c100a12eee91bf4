"""Trained models on disk: a *model folder* of weights, what they are the weights of, and the vocabulary.

``model.safetensors``   every tensor of ``Transformer.state_dict()`` by its name, float32
``model.json``          the format's version, every field of `TransformerConfig`, languages, facts
``sentencepiece.model`` the vocabulary of source and target

Nothing in it is executable. `dragoman export trained` makes a bundle of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import safetensors
import safetensors.torch
import sentencepiece
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from app.bundle.manifest import LanguageCode, ModelSizes, NumPositions, PositiveInt
from app.errors import CheckpointError
from model.config import TransformerConfig
from model.transformer import Transformer

FORMAT_VERSION = 1
WEIGHTS_NAME = "model.safetensors"
DESCRIPTION_NAME = "model.json"
TOKENIZER_NAME = "sentencepiece.model"

_FILE_NAMES = frozenset({WEIGHTS_NAME, DESCRIPTION_NAME, TOKENIZER_NAME})
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_NAMED = 3
_CONFIG_FIELDS = frozenset(each.name for each in dataclasses.fields(TransformerConfig))
_BEFORE = {"decoder_query_heads": None}
"""What the configurations meant that were written before these fields existed."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """One trained model and what translating with it needs.

    Attributes:
        config: sizes and choices.
        weights: by the names of ``Transformer(config).state_dict()``.
        tokenizer: the bytes of the SentencePiece model.
        source: source language, BCP-47.
        target: target language, BCP-47.
        unknown_id: token of text the vocabulary cannot spell.
        provenance: facts for the manifest and the model card (training run, data, checksums).
        max_source_tokens: longest source, end-of-sentence included, that it was trained for; None if unknown.
        max_target_tokens: longest target, likewise.
    """

    config: TransformerConfig
    weights: Mapping[str, Tensor]
    tokenizer: bytes
    source: str
    target: str
    unknown_id: int = 1
    provenance: Mapping[str, str] = field(default_factory=dict)
    max_source_tokens: int | None = None
    max_target_tokens: int | None = None

    def module(self) -> Transformer:
        """A `Transformer` in eval mode with a copy of these weights in float32, on the CPU.

        Raises:
            CheckpointError: a tensor is missing, superfluous, misshaped or not finite.
        """
        weights = _checked_weights(self.weights, self.config, where="the model")
        module = Transformer(self.config)
        module.load_state_dict(weights, strict=True)
        return module.eval()


class _QueryHeads(BaseModel):
    """What the sizes of a bundle leave to its graphs."""

    decoder_query_heads: PositiveInt


class _Description(BaseModel):
    """model.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Literal[1]
    config: TransformerConfig
    source: LanguageCode
    target: LanguageCode
    unknown_id: Annotated[int, Field(ge=0)]
    provenance: dict[str, str]
    max_source_tokens: NumPositions | None
    max_target_tokens: NumPositions | None


def save_model(model: SavedModel, folder: Path) -> None:
    """Write a model folder that appears complete or not at all.

    It is made beside `folder` and renamed. An older model of that name is set aside as ``.NAME.previous`` and
    removed when the new one is in place: at every moment one of them is whole.

    Args:
        model: weights of any float type and device; they are stored as float32.
        folder: does not exist, is empty, or is a model folder without other files.

    Raises:
        CheckpointError: the model is not consistent, or the folder holds something else.
    """
    where = f"the model for {folder}"
    weights = _checked_weights(model.weights, model.config, where=where)
    content = {
        WEIGHTS_NAME: safetensors.torch.save(weights),
        DESCRIPTION_NAME: _description(model, where),
        TOKENIZER_NAME: model.tokenizer,
    }
    _check_tokenizer(model.tokenizer, model.config, where)
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, data in content.items():
            _write_through(work / name, data)
        work.chmod(0o755)
        _sync_folder(work)
        _put_in_place(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def load_model(folder: Path) -> SavedModel:
    """Read a model folder.

    Returns:
        The model; it owns its tensors, float32 on the CPU, and does not need the folder any more.

    Raises:
        CheckpointError: the folder is no model folder, of another format version, damaged, or its parts
            contradict each other.
    """
    if not (folder / DESCRIPTION_NAME).is_file():
        hint = "name a folder that a training run or `dragoman export weights` wrote"
        if (previous := _previous(folder)).is_dir():
            hint = f"a replacement of it was interrupted: rename {previous} to {folder.name}"
        raise CheckpointError(f"{folder} has no {DESCRIPTION_NAME}, so it is not a model folder; {hint}")
    description = _read_description(folder / DESCRIPTION_NAME)
    raw = _read(folder / WEIGHTS_NAME)
    try:
        weights = safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} ({len(raw)} bytes) is not a whole safetensors file "
            f"({type(error).__name__}); restore it or save the model again"
        ) from error
    del raw
    if wrong := [name for name, tensor in weights.items() if tensor.dtype != torch.float32]:
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME}: {_named(wrong)} {'is' if len(wrong) == 1 else 'are'} not float32, "
            "which is what this format stores; convert and save the model again"
        )
    config = description.config
    weights = _checked_weights(weights, config, where=str(folder / WEIGHTS_NAME))
    tokenizer = _read(folder / TOKENIZER_NAME)
    _check_tokenizer(tokenizer, config, str(folder / TOKENIZER_NAME))
    return SavedModel(
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        source=description.source,
        target=description.target,
        unknown_id=description.unknown_id,
        provenance=description.provenance,
        max_source_tokens=description.max_source_tokens,
        max_target_tokens=description.max_target_tokens,
    )


def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ``Transformer(config).state_dict()``, in its order; no memory is taken."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}


def _description(model: SavedModel, where: str) -> bytes:
    document = {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(model.config),
        "source": model.source,
        "target": model.target,
        "unknown_id": model.unknown_id,
        "provenance": dict(model.provenance),
        "max_source_tokens": model.max_source_tokens,
        "max_target_tokens": model.max_target_tokens,
    }
    raw = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    _parse_description(raw, where)  # nothing is written that could not be read
    return raw


def _read_description(path: Path) -> _Description:
    if (size := path.stat().st_size) > _MAX_DESCRIPTION_BYTES:
        raise CheckpointError(
            f"{path} has {size} bytes; a model's description has at most {_MAX_DESCRIPTION_BYTES}. "
            "Restore it or save the model again"
        )
    return _parse_description(_read(path), str(path))


def _parse_description(raw: bytes, where: str) -> _Description:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON; restore the file or save the model again") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} states format version {reprlib.repr(version)}; this version of dragoman reads "
            f"{FORMAT_VERSION}. Save the model again with this version"
        )
    # A configuration's defaults may change one day, so each of its fields must be stated.
    stated = document.get("config")
    if isinstance(stated, dict):
        stated = document["config"] = _BEFORE | stated
    if isinstance(stated, dict) and stated.keys() != _CONFIG_FIELDS:
        faults = [
            f"{what} {_named(names)}"
            for what, names in (
                ("lacks", _CONFIG_FIELDS - stated.keys()),
                ("has", stated.keys() - _CONFIG_FIELDS),
            )
            if names
        ]
        raise CheckpointError(
            f"{where}: config {' and '.join(faults)}; this version of dragoman needs "
            f"{len(_CONFIG_FIELDS)} fields and knows no other. Save the model again with this version"
        )
    try:
        description = _Description.model_validate_json(json.dumps(document))
        _sizes(description.config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise CheckpointError(
            f"{where}: {place}: {first['msg']} ({error.error_count()} such faults); correct it, or save the "
            "model again"
        ) from error
    config = description.config
    for name, token_id in (
        ("unknown_id", description.unknown_id),
        ("eos_id", config.eos_id),
        ("start_id", config.start_id),
    ):
        if token_id is not None and not 0 <= token_id < config.vocabulary_size:
            raise CheckpointError(
                f"{where}: {name} is {token_id}, outside the vocabulary of {config.vocabulary_size} tokens; "
                "correct it, or save the model again"
            )
    return description


def _sizes(config: TransformerConfig) -> ModelSizes:
    """The bounds that a bundle sets, so that a damaged number is refused before anything is made of it."""
    _QueryHeads(decoder_query_heads=config.num_query_heads)
    return ModelSizes(
        d_model=config.d_model,
        num_heads=config.num_heads,
        head_size=config.head_size,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        ffn_size=config.ffn_size,
        vocabulary_size=config.vocabulary_size,
    )


def _checked_weights(
    weights: Mapping[str, Tensor], config: TransformerConfig, *, where: str
) -> dict[str, Tensor]:
    """The weights as contiguous float32 on the CPU, of the names and shapes that the configuration gives."""
    expected = parameter_shapes(config)
    faults = {
        "missing": expected.keys() - weights.keys(),
        "superfluous": weights.keys() - expected.keys(),
    }
    listed = [f"{len(names)} tensors are {what}: {_named(names)}" for what, names in faults.items() if names]
    if listed:
        raise CheckpointError(
            f"{where}: {'; '.join(listed)}. The configuration describes another model than the weights "
            "are of; take both from one training run"
        )
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(weights[name].shape)}, expected {list(shape)} by the "
                "configuration; take both from one training run"
            )
    checked = {
        # A copy, because two names may share memory, which safetensors refuses.
        name: weights[name].detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
        for name in expected
    }
    if broken := [name for name, tensor in checked.items() if not bool(torch.isfinite(tensor).all())]:
        raise CheckpointError(
            f"{where}: {_named(broken)} {'holds' if len(broken) == 1 else 'hold'} values that are not finite "
            "numbers: training diverged or the file is damaged; take an earlier checkpoint"
        )
    return checked


def _check_tokenizer(tokenizer: bytes, config: TransformerConfig, where: str) -> None:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(tokenizer)
    except RuntimeError as error:
        raise CheckpointError(
            f"{where}: the vocabulary ({len(tokenizer)} bytes) is not a SentencePiece model; take the one "
            "the model was trained with"
        ) from error
    if (found := processor.GetPieceSize()) != config.vocabulary_size:
        raise CheckpointError(
            f"{where}: the vocabulary has {found} pieces, the model {config.vocabulary_size}; take the one "
            "the model was trained with"
        )


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if found and (DESCRIPTION_NAME not in found or found - _FILE_NAMES):
        raise CheckpointError(
            f"{folder} holds {_named(found - _FILE_NAMES or found)}, so it is not a model folder that could "
            "be replaced; name another folder"
        )


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _put_in_place(work: Path, folder: Path) -> None:
    previous = _previous(folder)
    if folder.exists():
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    try:
        work.rename(folder)
    except BaseException:
        if previous.exists():
            previous.rename(folder)
        raise
    _sync_folder(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _write_through(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); restore it or save the model again"
        ) from error


def _named(names: Iterable[str]) -> str:
    """The first few of some names."""
    every = sorted(names)
    more = f" and {len(every) - _MAX_NAMED} more" if len(every) > _MAX_NAMED else ""
    return ", ".join(every[:_MAX_NAMED]) + more
