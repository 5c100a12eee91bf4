"""A small parallel corpus from a small grammar: English sentences and their Portuguese translations.

Portuguese asks for what English does not: articles, adjectives and numerals agree with their noun in gender
and number, adjectives follow it, and questions keep the order of statements. A word-by-word dictionary cannot
do that; a tiny Transformer learns it in minutes.

    python make_text.py FOLDER

writes train.tsv (English, tab, Portuguese) and dev.en / dev.pt, whose sentences are not in train.tsv. The
same files come out every time.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

NUM_TRAIN = 12_000
NUM_DEV = 200
SEED = 2017


@dataclass(frozen=True)
class Noun:
    """A noun in both languages; Portuguese words are masculine or feminine."""

    english: str
    portuguese: str
    feminine: bool
    english_plural: str = ""
    portuguese_plural: str = ""

    def both(self, *, plural: bool) -> tuple[str, str]:
        """English and Portuguese."""
        if not plural:
            return self.english, self.portuguese
        return self.english_plural or f"{self.english}s", self.portuguese_plural or f"{self.portuguese}s"


NOUNS = (
    Noun("cat", "gato", False),
    Noun("dog", "cachorro", False),
    Noun("bird", "pássaro", False),
    Noun("book", "livro", False),
    Noun("boy", "menino", False),
    Noun("girl", "menina", True),
    Noun("house", "casa", True),
    Noun("door", "porta", True),
    Noun("table", "mesa", True),
    Noun("letter", "carta", True),
    Noun("flower", "flor", True, portuguese_plural="flores"),
    Noun("teacher", "professor", False, portuguese_plural="professores"),
    Noun("child", "criança", True, english_plural="children"),
    Noun("woman", "mulher", True, english_plural="women", portuguese_plural="mulheres"),
    Noun("man", "homem", False, english_plural="men", portuguese_plural="homens"),
    Noun("city", "cidade", True, english_plural="cities"),
)
# English, then masculine and feminine singular.
ADJECTIVES = (
    ("red", "vermelho", "vermelha"),
    ("white", "branco", "branca"),
    ("old", "velho", "velha"),
    ("new", "novo", "nova"),
    ("small", "pequeno", "pequena"),
    ("beautiful", "bonito", "bonita"),
    ("big", "grande", "grande"),
    ("green", "verde", "verde"),
)
# English base form and past; Portuguese past, singular and plural.
VERBS = (
    ("see", "saw", "viu", "viram"),
    ("find", "found", "encontrou", "encontraram"),
    ("buy", "bought", "comprou", "compraram"),
    ("draw", "drew", "desenhou", "desenharam"),
    ("forget", "forgot", "esqueceu", "esqueceram"),
    ("clean", "cleaned", "limpou", "limparam"),
)
NUMERALS = (("two", "dois", "duas"), ("three", "três", "três"), ("four", "quatro", "quatro"))
TIMES = (
    ("yesterday", "ontem"),
    ("today", "hoje"),
    ("on Monday", "na segunda-feira"),
    ("in the morning", "de manhã"),
    ("at night", "à noite"),
)


@dataclass(frozen=True)
class Phrase:
    """A noun with what belongs to it, in both languages."""

    english: str
    portuguese: str
    plural: bool


def noun_phrase(draw: random.Random) -> Phrase:
    """Such as "the two small houses", "as duas casas pequenas"."""
    noun = draw.choice(NOUNS)
    plural = draw.random() < 0.5
    english_noun, portuguese_noun = noun.both(plural=plural)
    english, portuguese = [], []
    if plural:
        english.append("the")
        portuguese.append("as" if noun.feminine else "os")
        if draw.random() < 0.5:
            numeral = draw.choice(NUMERALS)
            english.append(numeral[0])
            portuguese.append(numeral[2 if noun.feminine else 1])
    elif draw.random() < 0.5:
        english.append("the")
        portuguese.append("a" if noun.feminine else "o")
    else:
        english.append("a")
        portuguese.append("uma" if noun.feminine else "um")
    after = []
    if draw.random() < 0.6:
        adjective = draw.choice(ADJECTIVES)
        if english[-1] == "a" and adjective[0][0] in "aeiou":
            english[-1] = "an"
        english.append(adjective[0])
        after.append(adjective[2 if noun.feminine else 1] + ("s" if plural else ""))
    return Phrase(
        " ".join([*english, english_noun]), " ".join([*portuguese, portuguese_noun, *after]), plural
    )


def sentence(draw: random.Random) -> tuple[str, str]:
    """A statement, a denial or a question, perhaps with a time."""
    subject, thing = noun_phrase(draw), noun_phrase(draw)
    base, past, singular, plural = draw.choice(VERBS)
    verb = plural if subject.plural else singular
    kind = draw.choice(("statement", "denial", "question"))
    english = {
        "statement": f"{subject.english} {past} {thing.english}",
        "denial": f"{subject.english} did not {base} {thing.english}",
        "question": f"did {subject.english} {base} {thing.english}",
    }[kind]
    denied = "não " if kind == "denial" else ""
    portuguese = f"{subject.portuguese} {denied}{verb} {thing.portuguese}"
    if draw.random() < 0.5:
        when = draw.choice(TIMES)
        english, portuguese = f"{english} {when[0]}", f"{portuguese} {when[1]}"
    end = "?" if kind == "question" else "."
    return f"{english[0].upper()}{english[1:]}{end}", f"{portuguese[0].upper()}{portuguese[1:]}{end}"


def main() -> None:
    """Write the files into the folder named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {Path(sys.argv[0]).name} FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    pairs: dict[str, str] = {}
    while len(pairs) < NUM_TRAIN + NUM_DEV:
        pairs.setdefault(*sentence(draw))
    drawn = list(pairs.items())
    dev, train = drawn[:NUM_DEV], drawn[NUM_DEV:]
    (folder / "train.tsv").write_text("".join(f"{en}\t{pt}\n" for en, pt in train), encoding="utf-8")
    (folder / "dev.en").write_text("".join(f"{en}\n" for en, _ in dev), encoding="utf-8")
    (folder / "dev.pt").write_text("".join(f"{pt}\n" for _, pt in dev), encoding="utf-8")
    print(f"{len(train)} pairs to train on, {len(dev)} to judge by, in {folder}")


if __name__ == "__main__":
    main()
