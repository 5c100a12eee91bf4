"""Writes small Marian files, right and wrong ones, independently of the reader."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece
import yaml

TYPE_CODES = {
    "int8": 0x0101,
    "int32": 0x0104,
    "uint32": 0x0204,
    "float16": 0x0402,
    "float32": 0x0404,
    "intgemm8": 0x4101,
}


@dataclass(frozen=True)
class RawItem:
    """One item as it goes into the file; every field can be made to lie."""

    name: bytes
    type_code: int
    shape: tuple[int, ...]
    data: bytes
    name_length: int | None = None
    num_dimensions: int | None = None
    data_length: int | None = None


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 256)


def plain(name: str, values: npt.NDArray[np.generic], type_name: str = "float32") -> RawItem:
    dtype = {"float32": "<f4", "float16": "<f2", "int8": "<i1", "int32": "<i4", "uint32": "<u4"}[type_name]
    data = padded(values.astype(dtype).tobytes())
    return RawItem(name.encode() + b"\0", TYPE_CODES[type_name], values.shape, data)


def intgemm8(
    name: str, integers: npt.NDArray[np.int8], multiplier: float, *, transposed: bool = True
) -> RawItem:
    """``integers`` as [in, out]; the file keeps all but the embedding as [out, in]."""
    stored = integers.T if transposed else integers
    data = padded(np.ascontiguousarray(stored).tobytes() + struct.pack("<f", multiplier))
    return RawItem(name.encode() + b"\0", TYPE_CODES["intgemm8"], integers.shape, data)


def text_item(name: str, text: str | bytes) -> RawItem:
    data = (text.encode() if isinstance(text, str) else text) + b"\0"
    return RawItem(name.encode() + b"\0", TYPE_CODES["int8"], (len(data),), data)


def marian_bytes(items: Sequence[RawItem], *, version: int = 1, count: int | None = None) -> bytes:
    file = io.BytesIO()
    file.write(struct.pack("<QQ", version, len(items) if count is None else count))
    for item in items:
        name_length = len(item.name) if item.name_length is None else item.name_length
        num_dimensions = len(item.shape) if item.num_dimensions is None else item.num_dimensions
        data_length = len(item.data) if item.data_length is None else item.data_length
        file.write(struct.pack("<4Q", name_length, item.type_code, num_dimensions, data_length))
    for item in items:
        file.write(item.name)
    for item in items:
        file.write(struct.pack(f"<{len(item.shape)}i", *item.shape))
    padding = -(file.tell() + 8) % 256
    file.write(struct.pack("<Q", padding) + bytes(padding))
    for item in items:
        file.write(item.data)
    return file.getvalue()


OPTIONS: Mapping[str, object] = {
    "type": "transformer",
    "dim-vocabs": [32, 32],
    "dim-emb": 4,
    "enc-depth": 2,
    "dec-depth": 1,
    "transformer-heads": 2,
    "transformer-dim-ffn": 6,
    "transformer-ffn-activation": "relu",
    "transformer-ffn-depth": 2,
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "rnn",
    "dec-cell": "ssru",
    "tied-embeddings-all": True,
    "version": "v1.test",
}
"""The options of the smallest model that has every kind of tensor."""


def tensor_shapes(options: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Every tensor Marian has for these options, by its name, [in, out] or [1, n]."""
    vocabulary, width, inner = options["dim-vocabs"][0], options["dim-emb"], options["transformer-dim-ffn"]
    shapes = {"Wemb": (vocabulary, width), "decoder_ff_logit_out_b": (1, vocabulary)}

    def attention(prefix: str) -> None:
        for letter in "qkvo":
            shapes[f"{prefix}_W{letter}"] = (width, width)
            shapes[f"{prefix}_b{letter}"] = (1, width)
        norm(f"{prefix}_Wo")

    def norm(prefix: str) -> None:
        shapes[f"{prefix}_ln_scale"] = shapes[f"{prefix}_ln_bias"] = (1, width)

    def ffn(prefix: str) -> None:
        shapes[f"{prefix}_ffn_W1"] = (width, inner)
        shapes[f"{prefix}_ffn_b1"] = (1, inner)
        shapes[f"{prefix}_ffn_W2"] = (inner, width)
        shapes[f"{prefix}_ffn_b2"] = (1, width)
        norm(f"{prefix}_ffn_ffn")

    for layer in range(1, options["enc-depth"] + 1):
        attention(f"encoder_l{layer}_self")
        ffn(f"encoder_l{layer}")
    for layer in range(1, options["dec-depth"] + 1):
        prefix = f"decoder_l{layer}"
        if options["transformer-decoder-autoreg"] == "rnn":
            shapes[f"{prefix}_rnn_W"] = shapes[f"{prefix}_rnn_Wf"] = (width, width)
            shapes[f"{prefix}_rnn_bf"] = (1, width)
            norm(f"{prefix}_rnn_ffn")
        else:
            attention(f"{prefix}_self")
        attention(f"{prefix}_context")
        ffn(prefix)
    return shapes


@dataclass(frozen=True)
class SyntheticModel:
    """A small model with random tensors: what they are in truth, and how a file says it."""

    options: Mapping[str, object] = field(default_factory=lambda: dict(OPTIONS))
    seed: int = 1
    integers: dict[str, npt.NDArray[np.int8]] = field(default_factory=dict)
    floats: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    multipliers: dict[str, float] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        for name, shape in tensor_shapes(self.options).items():
            if shape[0] == 1:
                self.floats[name] = generator.normal(size=shape).astype(np.float32)
                continue
            self.integers[name] = generator.integers(-127, 128, size=shape).astype(np.int8)
            self.multipliers[name] = float(np.float32(generator.uniform(20, 200)))
            self.alphas[name] = float(np.float32(generator.uniform(5, 30)))
            self.floats[name] = self.integers[name].astype(np.float32) / np.float32(self.multipliers[name])

    def config_item(self) -> RawItem:
        return text_item("special:model.yml", yaml.safe_dump(dict(self.options)))

    def float_items(self, type_name: str = "float32") -> list[RawItem]:
        tensors = [plain(name, values, type_name) for name, values in self.floats.items()]
        return [*tensors, self.config_item()]

    def intgemm8_items(self, *, alphas: bool = True) -> list[RawItem]:
        items = []
        for name, values in self.floats.items():
            if name not in self.integers:
                items.append(plain(name, values))
                continue
            items.append(
                intgemm8(name, self.integers[name], self.multipliers[name], transposed=name != "Wemb")
            )
            if alphas:
                alpha_name = "none_QuantMultA" if name == "Wemb" else f"{name}_QuantMultA"
                items.append(plain(alpha_name, np.array([[self.alphas[name]]], dtype=np.float32)))
        if alphas:
            items.append(intgemm8("Wemb_QuantMultA", np.array([[127]], dtype=np.int8), 14.5))
        return [*items, self.config_item()]


def with_item(items: Sequence[RawItem], name: str, **changes: object) -> list[RawItem]:
    """The items with one of them changed."""
    raw_name = name.encode() + b"\0"
    assert any(item.name == raw_name for item in items), name
    return [replace(item, **changes) if item.name == raw_name else item for item in items]


def without_item(items: Sequence[RawItem], name: str) -> list[RawItem]:
    kept = [item for item in items if item.name != name.encode() + b"\0"]
    assert len(kept) == len(items) - 1, name
    return kept


def shortlist_bytes(
    lists: Sequence[Sequence[int]], *, num_frequent: int, best: int = 50, right_checksum: bool = True
) -> bytes:
    """A Marian binary shortlist; the checksum is computed word by word with 64-bit arithmetic of numpy."""
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])]).astype("<u8")
    targets = np.array([target for ids in lists for target in ids], dtype="<u4")
    body = struct.pack("<4Q", num_frequent, best, len(offsets), len(targets))
    return with_checksum(body + offsets.tobytes() + targets.tobytes(), right=right_checksum)


def with_checksum(body: bytes, *, right: bool = True) -> bytes:
    """Prefix what follows the checksum with the magic number and the checksum."""
    seed = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in np.frombuffer(body[: len(body) // 8 * 8], dtype="<u8"):
            seed ^= word + np.uint64(0x9E3779B9) + (seed << np.uint64(6)) + (seed >> np.uint64(2))
    return struct.pack("<QQ", 0xF11A48D5013417F5, int(seed) ^ (not right)) + body


def tokenizer_bytes(num_pieces: int = 32) -> bytes:
    """A SentencePiece model with Marian's special ids: </s> is 0 and <unk> is 1."""
    words = ["".join(chr(97 + (i * j) % 26) for j in range(1, 6)) for i in range(1, 60)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words),
        model_writer=model,
        vocab_size=num_pieces,
        hard_vocab_limit=True,
        eos_id=0,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def write_folder(folder: Path, model: bytes, tokenizer: bytes, shortlist: bytes | None) -> Path:
    (folder / "model.test.bin").write_bytes(model)
    (folder / "vocab.test.spm").write_bytes(tokenizer)
    if shortlist is not None:
        (folder / "lex.50.50.test.s2t.bin").write_bytes(shortlist)
    return folder
