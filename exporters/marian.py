"""Importer of Marian Transformers (Firefox Translations, Bergamot, OPUS-MT in Marian's own format).

A folder with a model, a SentencePiece vocabulary and usually a lexical shortlist becomes a
`Checkpoint`. The computation is marian-dev, src/models/transformer.h: post-norm layers, LayerNorm with
epsilon 1e-6, sinusoidal positions in two halves, a decoder that starts from a zero embedding, and one
embedding for source, target and output. Any option that asks for something else is refused.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from pathlib import Path

import sentencepiece
import yaml

from app.errors import CheckpointError
from exporters.checkpoint import Checkpoint
from exporters.marian_binary import MarianItem, damaged, read_marian_binary
from exporters.marian_shortlist import read_marian_shortlist
from exporters.marian_tensors import EMBEDDING, convert_tensors
from model.config import Activation, DecoderCell, TransformerConfig

MODEL_PATTERN = "model*.bin"
VOCABULARY_PATTERN = "*.spm"
SHORTLIST_PATTERN = "lex*.bin"

LAYER_NORM_EPSILON = 1e-6
EOS_ID = 0
UNKNOWN_ID = 1

_CONFIG_ITEM = "special:model.yml"
_MAX_CONFIG_BYTES = 1 << 16
_MAX_CONFIG_DEPTH = 4
_MAX_SIZE = 1 << 24
"""Bound of every size in the configuration; the tensors' shapes are compared with it afterwards."""

# Marian's gelu is the approximation x * sigmoid(1.702 x), another function than ours.
_ACTIVATIONS: Mapping[str, Activation] = {"relu": "relu", "swish": "silu"}
# "d" is dropout, which does nothing at inference; "a" adds the input and "n" normalises.
_REQUIRED_STEPS: Mapping[str, tuple[str, str]] = {
    "transformer-preprocess": ("", "steps before a sub-layer"),
    "transformer-postprocess": ("an", "steps after a sub-layer (residual sum, then normalisation)"),
    "transformer-postprocess-emb": ("", "steps after the embedding"),
    "transformer-postprocess-top": ("", "steps after the last layer"),
}
_REQUIRED_VALUES: Mapping[str, tuple[object, object]] = {
    # option: (what it must be, what Marian takes where it is absent)
    "type": ("transformer", None),
    "tied-embeddings-all": (True, False),
    "transformer-train-position-embeddings": (False, False),
    "transformer-no-projection": (False, False),
    "transformer-no-bias": (False, False),
    "transformer-no-affine": (False, False),
    "transformer-rnn-projection": (False, False),
    "transformer-pool": (False, False),
    "transformer-tied-layers": ([], []),
    "transformer-ffn-depth": (2, 2),
    "transformer-decoder-ffn-depth": (0, 0),
    "transformer-decoder-dim-ffn": (0, 0),
    "output-omit-bias": (False, False),
    "lemma-dim-emb": (0, 0),
    "input-types": ([], []),
    "right-left": (False, False),
    "ulr": (False, False),
}


def import_marian(directory: Path, *, shortlist: bool = True) -> Checkpoint:
    """Read the Marian model in a folder.

    Args:
        directory: holds one ``model*.bin``, one ``*.spm`` and one ``lex*.bin``.
        shortlist: whether to import the shortlist; False looks for none.

    Returns:
        The checkpoint; it owns its arrays and does not need the folder any more.

    Raises:
        CheckpointError: a file is absent, ambiguous or damaged, or the model is of a kind that
            `TransformerConfig` cannot describe.
    """
    model_path = _only_file(directory, MODEL_PATTERN, "a Marian binary model")
    vocabulary_path = _only_file(directory, VOCABULARY_PATTERN, "a SentencePiece vocabulary")
    shortlist_path = None
    if shortlist:
        shortlist_path = _only_file(
            directory, SHORTLIST_PATTERN, "a lexical shortlist", remedy="import without a shortlist"
        )

    items = read_marian_binary(model_path)
    options = _read_options(items, model_path.name)
    config = config_from_options(options, source=model_path.name)
    tensors = convert_tensors(items, config, source=model_path.name)

    tokenizer = _read(vocabulary_path)
    _check_tokenizer(tokenizer, config, vocabulary_path.name)
    provenance = {
        "importer": "marian",
        "marian_version": str(options.get("version", "unknown")),
        "marian_weights": items[EMBEDDING].type_name,
        **_file_facts("model", model_path, _read(model_path)),
        **_file_facts("tokenizer", vocabulary_path, tokenizer),
    }
    lexicon = None
    if shortlist_path is not None:
        shortlist_bytes = _read(shortlist_path)
        lexicon = read_marian_shortlist(shortlist_bytes, source=shortlist_path.name)
        if lexicon.vocabulary_size != config.vocabulary_size:
            raise CheckpointError(
                f"{shortlist_path.name}: the shortlist is for a vocabulary of {lexicon.vocabulary_size}, the "
                f"model's has {config.vocabulary_size}; take the files of one model"
            )
        provenance |= _file_facts("shortlist", shortlist_path, shortlist_bytes)
    return Checkpoint(
        config=config,
        weights=tensors.weights,
        tokenizer=tokenizer,
        activation_scales=tensors.activation_scales,
        shortlist=lexicon,
        unknown_id=UNKNOWN_ID,
        provenance=provenance,
    )


def config_from_options(options: Mapping[str, object], *, source: str) -> TransformerConfig:
    """Translate Marian's model options; ``source`` names the file in messages.

    Raises:
        CheckpointError: an option has a value that we do not implement, or none at all.
    """
    for name, (required, default) in _REQUIRED_VALUES.items():
        value = options.get(name, default)
        if value != required or isinstance(value, bool) != isinstance(required, bool):
            raise _unsupported(source, name, value, repr(required))
    for name, (steps, what) in _REQUIRED_STEPS.items():
        value = options.get(name, "")
        if not isinstance(value, str) or value.replace("d", "") != steps:
            raise _unsupported(source, name, value, f"{steps!r} besides dropout: {what}")

    activation_name = options.get("transformer-ffn-activation", "swish")
    if not isinstance(activation_name, str) or activation_name not in _ACTIVATIONS:
        raise _unsupported(source, "transformer-ffn-activation", activation_name, " or ".join(_ACTIVATIONS))

    vocabulary_sizes = options.get("dim-vocabs")
    if not isinstance(vocabulary_sizes, list) or len(vocabulary_sizes) != 2:
        raise _unsupported(source, "dim-vocabs", vocabulary_sizes, "two sizes, source and target")
    if vocabulary_sizes[0] != vocabulary_sizes[1]:
        raise _unsupported(source, "dim-vocabs", vocabulary_sizes, "one vocabulary for source and target")

    def size(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
            raise _unsupported(source, name, value, f"a whole number from 1 to {_MAX_SIZE}")
        return value

    try:
        return TransformerConfig(
            vocabulary_size=size("dim-vocabs", vocabulary_sizes[0]),
            d_model=size("dim-emb", options.get("dim-emb")),
            num_heads=size("transformer-heads", options.get("transformer-heads")),
            encoder_layers=size("enc-depth", options.get("enc-depth")),
            decoder_layers=size("dec-depth", options.get("dec-depth")),
            ffn_size=size("transformer-dim-ffn", options.get("transformer-dim-ffn")),
            activation=_ACTIVATIONS[activation_name],
            norm="post",
            positions="halves",
            decoder_cell=_decoder_cell(options, source),
            layer_norm_epsilon=LAYER_NORM_EPSILON,
            eos_id=EOS_ID,
            start_id=None,
        )
    except ValueError as error:
        raise CheckpointError(
            f"{source}: the embedded configuration describes no Transformer ({error}); "
            "the file is damaged, download or convert it again"
        ) from error


def _decoder_cell(options: Mapping[str, object], source: str) -> DecoderCell:
    autoregression = options.get("transformer-decoder-autoreg", "self-attention")
    if autoregression == "self-attention":
        return "attention"
    if autoregression != "rnn":
        raise _unsupported(source, "transformer-decoder-autoreg", autoregression, "'self-attention' or 'rnn'")
    if options.get("dec-cell") != "ssru":
        raise _unsupported(source, "dec-cell", options.get("dec-cell"), "'ssru'")
    return "ssru"


def _unsupported(source: str, option: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: the Marian option {option} is {reprlib.repr(found)}, which is not supported; "
        f"expected {expected}. Import a model of the supported kind, for instance of Firefox Translations"
    )


def _read_options(items: Mapping[str, MarianItem], source: str) -> dict[str, object]:
    item = items.get(_CONFIG_ITEM)
    if item is None:
        raise damaged(source, f"there is no item {_CONFIG_ITEM!r}", "Marian's model options as YAML")
    if item.num_elements > _MAX_CONFIG_BYTES:
        raise damaged(source, f"{_CONFIG_ITEM} has {item.num_elements} bytes", f"at most {_MAX_CONFIG_BYTES}")
    text = item.text()
    try:
        _refuse_costly_yaml(text, source)
        options = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # A YAML error quotes the document; its kind is enough.
        raise damaged(source, f"{_CONFIG_ITEM} is not YAML ({type(error).__name__})", "YAML") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise damaged(source, f"{_CONFIG_ITEM} is no mapping of names", "Marian's model options")
    return options


def _refuse_costly_yaml(text: str, source: str) -> None:
    """Let only plain YAML pass: aliases can expand without bound, tags ask for any type, depth costs time."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
            raise damaged(source, f"{_CONFIG_ITEM} has an anchor, alias or tag", "plain YAML")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_CONFIG_DEPTH:
            raise damaged(source, f"{_CONFIG_ITEM} is nested", f"a depth of at most {_MAX_CONFIG_DEPTH}")


def _check_tokenizer(tokenizer: bytes, config: TransformerConfig, source: str) -> None:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(tokenizer)
    except RuntimeError as error:
        raise damaged(source, "the vocabulary cannot be loaded", "a SentencePiece model") from error
    facts = {
        "number of pieces": (processor.GetPieceSize(), config.vocabulary_size),
        "end-of-sentence id": (processor.eos_id(), EOS_ID),
        "unknown id": (processor.unk_id(), UNKNOWN_ID),
    }
    for what, (found, expected) in facts.items():
        if found != expected:
            raise CheckpointError(
                f"{source}: the vocabulary's {what} is {found}, expected {expected} as in the model; "
                "take the files of one model"
            )


def _only_file(directory: Path, pattern: str, what: str, remedy: str | None = None) -> Path:
    found = sorted(path for path in directory.glob(pattern) if path.is_file())
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(
            f"{directory}: {len(found)} files match {pattern} ({names}), expected one, {what}; "
            "put one model's files into a folder of their own"
        )
    if any(directory.glob(f"{pattern}.gz")):
        raise CheckpointError(
            f"{directory}: no file matches {pattern} ({what}), only compressed ones do; "
            "decompress them with gunzip"
        )
    remedies = "download the model's files into one folder" + (f", or {remedy}" if remedy else "")
    raise CheckpointError(f"{directory}: no file matches {pattern}, expected one, {what}; {remedies}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), expected a readable file; check its permissions"
        ) from error


def _file_facts(role: str, path: Path, content: bytes) -> dict[str, str]:
    return {f"{role}_file": path.name, f"{role}_sha256": hashlib.sha256(content).hexdigest()}
