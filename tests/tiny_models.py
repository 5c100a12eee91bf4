"""Random Transformers, a few kB each, with a tokenizer: everything an export needs."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Mapping

import numpy as np
import sentencepiece
import torch

from app.bundle import Variant
from app.bundle.manifest import LanguagePair
from app.decoding.shortlist import Shortlist
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions
from model.config import TransformerConfig
from model.transformer import Transformer

VOCABULARY_SIZE = 96


@functools.cache
def tiny_words(count: int = 400) -> tuple[str, ...]:
    choice = random.Random(7)
    return tuple("".join(choice.choices("abcdefghijklmnop", k=choice.randint(2, 7))) for _ in range(count))


@functools.cache
def tiny_texts(count: int = 12) -> tuple[str, ...]:
    choice = random.Random(11)
    return tuple(" ".join(choice.choices(tiny_words(), k=1 + index % 5)) for index in range(count))


@functools.cache
def tiny_tokenizer(vocabulary_size: int = VOCABULARY_SIZE) -> bytes:
    """A byte-pair model of exactly this many pieces; 0 ends a sentence, 1 is unknown."""
    choice = random.Random(3)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(choice.choices(tiny_words(), k=6)) for _ in range(800)]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary_size,
        character_coverage=1.0,
        eos_id=0,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tiny_shortlist(vocabulary_size: int = VOCABULARY_SIZE) -> Shortlist:
    """Eight targets for each source token, and the ten lowest ids for all."""
    choice = np.random.default_rng(5)
    lists = [np.sort(choice.choice(vocabulary_size, 8, replace=False)) for _ in range(vocabulary_size)]
    offsets = np.arange(0, 8 * vocabulary_size + 1, 8, dtype=np.int64)
    return Shortlist(offsets, np.concatenate(lists).astype(np.int32), num_frequent=10)


def tiny_checkpoint(
    *,
    shortlist: bool = False,
    activation_scales: Mapping[str, float] | None = None,
    eos_bias: float = 1.0,
    **changes: object,
) -> Checkpoint:
    """A float checkpoint whose every parameter has a value that a wrong copy would show."""
    sizes: dict[str, object] = {
        "vocabulary_size": VOCABULARY_SIZE,
        "d_model": 32,
        "num_heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "ffn_size": 48,
        "dropout": 0.0,
    }
    config = TransformerConfig(**(sizes | changes))  # type: ignore[arg-type]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(20170612)
        module = Transformer(config)
        for name, parameter in module.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            # Weak embeddings and biases between strong layers: else one token is repeated for ever.
            deviation = 0.1 if name.endswith("bias") else 0.2 if name.startswith("embedding") else 0.8
            parameter.normal_(1.0 if is_scale else 0.0, 0.3 if is_scale else deviation)
        module.output_bias[config.eos_id] += eos_bias
    return Checkpoint(
        config=config,
        weights={name: value.numpy().copy() for name, value in module.state_dict().items()},
        tokenizer=tiny_tokenizer(config.vocabulary_size),
        activation_scales=activation_scales or {},
        shortlist=tiny_shortlist(config.vocabulary_size) if shortlist else None,
    )


def tiny_options(
    bundle_id: str = "tiny", variants: tuple[Variant, ...] = ("cpu-int8", "cpu-fp32")
) -> ExportOptions:
    return ExportOptions(
        bundle_id=bundle_id,
        pairs=[LanguagePair(source="en", target="pt")],
        licence="CC0-1.0",
        model_card="A random model.\n",
        verification_texts=tiny_texts(),
        variants=variants,
        max_source_tokens=40,
        max_target_tokens=24,
        max_target_ratio=2.5,
    )
