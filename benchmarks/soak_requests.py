"""What a soak test sends: a seeded mix of all that clients send, each request with the answers it may get."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

NATIVE, LIBRETRANSLATE = "/v1/translate", "/translate"
GREEDY = "greedy"
PAIRS = ("en-pt", "pt-en")
"""Of the shipped models."""
_POOL_SIZE = 24
"""Texts of each direction that are asked for again and again; few, so that a small cache keeps them."""
_REPEATED_AFTER = 2_000
"""New texts after which one comes again: a small cache has dropped it, so it is decoded twice."""
MAX_BEAM_SIZE = 4
"""Widest beams that the mix asks for."""
_BULK_SHARE = 0.15

_SENTENCES = {
    "en-pt": (
        "The {0} boats left the harbour before the storm.",
        "Please send invoice number {0} to the office in Lisbon.",
        "Ticket {0} was closed by the technician this morning.",
        "We walked {0} metres along the river and then had lunch.",
        "Is room {0} free next weekend?",
    ),
    "pt-en": (
        "Os {0} barcos saíram do porto antes da tempestade.",
        "Por favor, envie a fatura número {0} para o escritório de Lisboa.",
        "O pedido {0} foi encerrado pelo técnico esta manhã.",
        "Andámos {0} metros ao longo do rio e depois almoçámos.",
        "O quarto {0} está livre no próximo fim de semana?",
    ),
}
_STRANGE = (
    "The order 🚚 {0} arrived 🎉 today 👩‍👩‍👧.",
    "Zażółć {0} gęślą jaźń, she said.",
    "Room {0}\u00a0is on the left\u200b; 房间 is on the right.",
    "e\u0301te\u0301 {0} \U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522 текст שלום",
)
_ENDLESS = "the wind and the rain and the sea and the snow and "


@dataclass(frozen=True)
class SoakRequest:
    """One request.

    Attributes:
        kind: its name in the table.
        method: HTTP method.
        path: of the service.
        headers: beside Host and Content-Length.
        body: as sent.
        statuses: HTTP statuses that are right answers to it.
        pair: language pair, empty where nothing is translated.
        texts: what is to be translated; a 200 has a translation of each.
        options: all else that the translations depend on.
        num_segments: of all texts together, as far as the service may keep them; 0 where it may not.
        leaves_after_s: seconds after which the client closes its connection; None for one that waits.
    """

    kind: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    statuses: frozenset[int]
    pair: str = ""
    texts: tuple[str, ...] = ()
    options: str = GREEDY
    num_segments: int = 0
    leaves_after_s: float | None = None


def soak_requests(num_requests: int, *, seed: int) -> Iterator[SoakRequest]:
    """The requests of a soak test, the same for the same seed."""
    mix = _Mix(random.Random(seed))
    for _ in range(num_requests):
        yield mix.draw()


class _Mix:
    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._pairs_of_new: list[str] = []
        self._num_long = 0
        self._kinds: dict[Callable[[str], SoakRequest], float] = {
            self._known_native: 34,
            self._known_libretranslate: 10,
            self._form: 4,
            self._new: 25,
            self._repeated: 4,
            self._list: 5,
            self._beams: 4,
            self._guided: 1,
            self._strange: 3,
            self._blank: 2,
            self._wrong: 3,
            self._huge: 0.3,
            self._leaves: 2,
            self._deadline: 2,
            self._looks: 0.7,
        }

    def draw(self) -> SoakRequest:
        """The next request."""
        kind = self._draws.choices(tuple(self._kinds), tuple(self._kinds.values()))[0]
        return kind(self._draws.choice(PAIRS))

    def _known(self, pair: str) -> str:
        return sentence(pair, self._draws.randrange(_POOL_SIZE))

    def _unknown(self, pair: str) -> str:
        self._pairs_of_new.append(pair)
        return sentence(pair, _POOL_SIZE + len(self._pairs_of_new) - 1)

    def _long(self, length: int) -> str:
        self._num_long += 1
        return endless_text(length, self._num_long)

    def _known_native(self, pair: str) -> SoakRequest:
        return self._native("known text", pair, [self._known(pair)])

    def _known_libretranslate(self, pair: str) -> SoakRequest:
        return self._libretranslate("known text, LibreTranslate", pair, self._known(pair))

    def _form(self, pair: str) -> SoakRequest:
        source, _, target = pair.partition("-")
        text = self._known(pair)
        return SoakRequest(
            "form, LibreTranslate",
            "POST",
            LIBRETRANSLATE,
            (("Content-Type", "application/x-www-form-urlencoded"),),
            urlencode({"q": text, "source": source, "target": target}).encode(),
            frozenset({200}),
            pair,
            (text,),
            num_segments=1,
        )

    def _new(self, pair: str) -> SoakRequest:
        if self._draws.random() < 0.3:
            return self._libretranslate("new text, LibreTranslate", pair, self._unknown(pair))
        return self._native("new text", pair, [self._unknown(pair)])

    def _repeated(self, pair: str) -> SoakRequest:
        num_new = len(self._pairs_of_new)
        if not num_new:
            return self._new(pair)
        # Early in the test the cache may have it still; the question is the same.
        number = num_new - _REPEATED_AFTER if num_new > _REPEATED_AFTER else self._draws.randrange(num_new)
        pair = self._pairs_of_new[number]
        return self._native("old text again", pair, [sentence(pair, _POOL_SIZE + number)])

    def _list(self, pair: str) -> SoakRequest:
        texts = [self._known(pair) for _ in range(self._draws.randint(1, 4))]
        texts += [self._unknown(pair), f"{self._known(pair)}\n\n{self._unknown(pair)}", ""]
        self._draws.shuffle(texts)
        num_segments = len(texts)
        if self._draws.random() < 0.4:
            return self._libretranslate("list, LibreTranslate", pair, texts, num_segments=num_segments)
        return self._native("list", pair, texts, num_segments=num_segments)

    def _beams(self, pair: str) -> SoakRequest:
        if self._draws.random() < 0.25:
            return self._libretranslate(
                "alternatives, LibreTranslate", pair, self._known(pair), alternatives=MAX_BEAM_SIZE - 1
            )
        beam_size = self._draws.randint(2, MAX_BEAM_SIZE)
        text = self._draws.choice((self._known, self._unknown))(pair)
        options = {"beam_size": beam_size, "num_hypotheses": self._draws.randint(1, beam_size)}
        return self._native("beams", pair, [text], options=options)

    def _guided(self, pair: str) -> SoakRequest:
        options: dict[str, Any] = self._draws.choice(
            (
                {"forbidden": ["storm", "tempestade"]},
                {"no_repeat_ngram_size": 2},
                {"min_target_tokens": 12},
                {"alignment": True},
            )
        )
        # Alignments are not kept.
        num_segments = 0 if "alignment" in options else 1
        return self._native(
            "guided or aligned", pair, [self._known(pair)], options=options, num_segments=num_segments
        )

    def _strange(self, pair: str) -> SoakRequest:
        text = self._draws.choice(_STRANGE).format(self._draws.randrange(10))
        return self._native("unicode and emoji", pair, [text])

    def _blank(self, pair: str) -> SoakRequest:
        texts: Sequence[str] = self._draws.choice(([""], [" \n\t "], [], ["", "\u2028"]))
        if texts and self._draws.random() < 0.5:
            return self._libretranslate("empty", pair, texts[0], num_segments=0)
        return self._native("empty", pair, texts, num_segments=0)

    def _wrong(self, pair: str) -> SoakRequest:
        source, _, target = pair.partition("-")
        good = {"q": "Hello.", "source": source, "target": target}
        texts = {"texts": ["Hello."], "source": source, "target": target}
        path, body, status = self._draws.choice(
            (
                (LIBRETRANSLATE, {**good, "format": "html"}, 400),
                (LIBRETRANSLATE, {**good, "source": "auto"}, 400),
                (LIBRETRANSLATE, {**good, "alternatives": "many"}, 400),
                (LIBRETRANSLATE, {"source": source, "target": target}, 400),
                (NATIVE, {**texts, "options": {"beam_size": 99}}, 422),
                (NATIVE, {**texts, "options": {"beam_size": 2, "num_hypotheses": 3}}, 422),
                (NATIVE, {**texts, "target": source}, 422),
                (NATIVE, {**texts, "format": "html"}, 422),
                (NATIVE, {**texts, "texts": "Hello."}, 422),
                (NATIVE, "{", 400),
                ("/no-such-path", {}, 404),
            )
        )
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return SoakRequest("wrong", "POST", path, _JSON, raw, frozenset({status}))

    def _huge(self, pair: str) -> SoakRequest:
        num_characters = self._draws.choice((250_001, 250_001, 2_200_000))
        source, _, target = pair.partition("-")
        text = ("word " * (num_characters // 5 + 1))[:num_characters]
        raw = json.dumps({"texts": [text], "source": source, "target": target}).encode()
        return SoakRequest("too large", "POST", NATIVE, _JSON, raw, frozenset({413}))

    def _leaves(self, pair: str) -> SoakRequest:
        # Long, so that most of them leave while their rows are decoded.
        text = self._long(self._draws.randint(2, 8))
        leaves_after_s = self._draws.uniform(0.001, 0.15)
        return self._native("client leaves", pair, [text], leaves_after_s=leaves_after_s)

    def _deadline(self, pair: str) -> SoakRequest:
        timeout_s = self._draws.choice((0.001, 0.02, 0.1, 0.5, 30))
        text = self._long(self._draws.randint(1, 6))
        # 429: it is known at once that it cannot be met.
        statuses = frozenset({200, 429, 504}) if timeout_s < 30 else frozenset({200})
        headers = (("X-Request-Timeout", f"{timeout_s:g}"),)
        return self._native("deadline", pair, [text], statuses=statuses, headers=headers)

    def _looks(self, _pair: str) -> SoakRequest:
        path = self._draws.choice(("/v1/models", "/languages", "/livez", "/docs", "/openapi.json"))
        return SoakRequest("look", "GET", path, (), b"", frozenset({200}))

    def _priority(self) -> tuple[tuple[str, str], ...]:
        return (("X-Priority", "bulk"),) if self._draws.random() < _BULK_SHARE else ()

    def _native(
        self,
        kind: str,
        pair: str,
        texts: Sequence[str],
        *,
        options: dict[str, Any] | None = None,
        statuses: frozenset[int] = frozenset({200}),
        headers: tuple[tuple[str, str], ...] = (),
        num_segments: int = 1,
        leaves_after_s: float | None = None,
    ) -> SoakRequest:
        source, _, target = pair.partition("-")
        body: dict[str, Any] = {"texts": list(texts), "source": source, "target": target}
        if options:
            body["options"] = options
        return SoakRequest(
            kind,
            "POST",
            NATIVE,
            (*_JSON, *self._priority(), *headers),
            json.dumps(body).encode(),
            statuses,
            pair,
            tuple(texts),
            _named(options or {}),
            num_segments,
            leaves_after_s,
        )

    def _libretranslate(
        self, kind: str, pair: str, q: str | Sequence[str], *, alternatives: int = 0, num_segments: int = 1
    ) -> SoakRequest:
        source, _, target = pair.partition("-")
        body: dict[str, Any] = {"q": q, "source": source, "target": target}
        if alternatives:
            body["alternatives"] = alternatives
        return SoakRequest(
            kind,
            "POST",
            LIBRETRANSLATE,
            (*_JSON, *self._priority()),
            json.dumps(body).encode(),
            frozenset({200}),
            pair,
            (q,) if isinstance(q, str) else tuple(q),
            _named({"beam_size": max(4, alternatives + 1)} if alternatives else {}),
            num_segments,
        )


_JSON = (("Content-Type", "application/json"),)


def endless_text(length: int, number: int) -> str:
    """A text of about ten English words times `length`, without an end of a sentence in between."""
    return f"{_ENDLESS * length}the number {number}."


def sentence(pair: str, number: int) -> str:
    """A short text that differs from those of other numbers."""
    sentences = _SENTENCES[pair]
    return sentences[number % len(sentences)].format(number)


def _named(options: dict[str, Any]) -> str:
    """Options as a name; how many of the beams are shown does not change the best one."""
    told = {name: value for name, value in options.items() if name != "num_hypotheses"}
    return json.dumps(told, sort_keys=True) if told else GREEDY
