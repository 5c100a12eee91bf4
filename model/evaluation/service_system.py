"""A running service, asked over HTTP: POST /v1/translate, one line a request, many at a time."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from app.errors import DragomanError, InvalidOption, InvalidRequest, Unavailable
from model.evaluation.line_progress import line_progress
from model.evaluation.measures import Speed
from model.evaluation.system import Decoding, Languages, Translations
from model.evaluation.testset import TestSet

DEFAULT_CONCURRENCY = 32
MAX_TRIES = 10
_TIMEOUT_S = 300.0
_MAX_WAIT_S = 60.0
_DEFAULT_WAIT_S = 1.0
_RETRYABLE_STATUSES = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})
_KEY_STATUSES = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
_KEY_REMEDY = "; name a file with the service's API key by --key-file"
_MAX_PORT = 65_535
_REMEDY = "write http://HOST:PORT"
_SPEED_COVERS = "from the first request to the last answer over HTTP"


class _Segment(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    num_target_tokens: int


class _Text(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    text: str
    segments: list[_Segment]


class _Answer(BaseModel):
    """What of the native dialect's answer is needed here."""

    model_config = ConfigDict(frozen=True, strict=True)

    texts: list[_Text]


class _ErrorDetail(BaseModel):
    message: str


class _ErrorAnswer(BaseModel):
    error: _ErrorDetail


def without_password(text: str) -> str:
    """What of an address may be shown: where it holds an @, only what follows the last one."""
    before, separator, after = text.rpartition("@")
    if not separator:
        return text
    scheme, separator, _ = before.partition("://")
    return f"{scheme}://…@{after}" if separator and scheme.isalpha() else f"…@{after}"


@dataclass(frozen=True)
class ServiceAddress:
    """Where a service is.

    Attributes:
        url: without the route, and without a password: it is printed and kept.
        credentials: user name and password for whoever guards it, or None.
        key: the service's API key, or None.
    """

    url: str
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, text: str, *, key: str | None = None) -> ServiceAddress:
        """Read `http://[USER:PASSWORD@]HOST[:PORT][/PATH]`.

        Args:
            text: the URL.
            key: the service's API key.

        Raises:
            InvalidOption: it is no such URL; the message does not repeat what may be a password.
        """
        shown = without_password(text)
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            # httpx's own words may repeat a part of it.
            reason = f" ({error})" if shown == text else ""
            raise InvalidOption(f"{shown} is no URL{reason}; {_REMEDY}") from None
        if url.scheme not in ("http", "https"):
            raise InvalidOption(f"{shown} is no address of a service; {_REMEDY}")
        if "@" in url.path or url.query or url.fragment:
            # Half of a password, where a sign of it ends the name of the host.
            raise InvalidOption(
                f"{re.split('[?#]', shown)[0]} goes on behind its path, or a password holds a sign that "
                f"ends it; {_REMEDY}, with /, ?, # and @ of a password or a path as %2F, %3F, %23 and %40"
            )
        if not url.host:
            raise InvalidOption(f"{shown} names no host; {_REMEDY}")
        if url.port is not None and not 0 < url.port <= _MAX_PORT:
            raise InvalidOption(f"{shown} names port {url.port}; the last is {_MAX_PORT}")
        credentials = (url.username, url.password) if url.userinfo else None
        return cls(str(url.copy_with(username=None, password=None)).rstrip("/"), credentials, key)

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries; `Authorization` is the credentials' place."""
        return {} if self.key is None else {"X-API-Key": self.key}


@dataclass(frozen=True)
class ServiceSystem:
    """A service that speaks this project's native dialect.

    Attributes:
        name: unique in the evaluation.
        address: where it is.
        languages: the direction.
        decoding: how to search.
        concurrency: requests under way at a time.
        sleep: waits; tests replace it.
        transport: carries the requests; None is the network.
        console: shows the progress; None is standard error.
    """

    name: str
    address: ServiceAddress
    languages: Languages
    decoding: Decoding
    concurrency: int = DEFAULT_CONCURRENCY
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    transport: httpx.AsyncBaseTransport | None = field(default=None, repr=False)
    console: Console | None = field(default=None, repr=False)

    @property
    def facts(self) -> dict[str, object]:
        """What was asked."""
        return {
            "kind": "service",
            "url": self.address.url,
            "beam_size": self.decoding.beam_size,
            "length_penalty": self.decoding.length_penalty,
        }

    def check(self, testset: TestSet) -> None:
        """Nothing can be said before it is asked."""

    def translate(self, testset: TestSet) -> Translations:
        """Ask for every line.

        Raises:
            InvalidRequest: the service refused a request, in its own words.
            Unavailable: it does not answer, or was overloaded `MAX_TRIES` times in a row.
        """
        return asyncio.run(self._translate(testset))

    async def _translate(self, testset: TestSet) -> Translations:
        found: dict[int, str] = {}
        num_target_tokens = 0
        started_s = time.perf_counter()
        with line_progress(
            f"{self.name} translates {testset.name}", num_lines=len(testset.sources), console=self.console
        ) as advance:

            async def work(client: httpx.AsyncClient, lines: Iterator[tuple[int, str]]) -> None:
                nonlocal num_target_tokens
                # All workers draw from one iterator, so no line is asked for twice.
                for index, line in lines:
                    text = await self._line(client, line, number=index + 1)
                    # A line end would shift every line after it, as in `dragoman translate`.
                    found[index] = text.text.replace("\r\n", " ").replace("\n", " ")
                    num_target_tokens += sum(segment.num_target_tokens for segment in text.segments)
                    advance()

            async with self._client() as client:
                lines = iter(enumerate(testset.sources))
                tasks = [asyncio.create_task(work(client, lines)) for _ in range(self.concurrency)]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        elapsed_s = time.perf_counter() - started_s
        speed = Speed(elapsed_s, len(found), num_target_tokens, _SPEED_COVERS)
        return Translations(tuple(found[index] for index in range(len(testset.sources))), speed)

    def _client(self) -> httpx.AsyncClient:
        try:
            return httpx.AsyncClient(
                base_url=self.address.url,
                auth=self.address.credentials,
                headers=self.address.headers,
                timeout=_TIMEOUT_S,
                limits=httpx.Limits(max_connections=self.concurrency),
                transport=self.transport,
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            # The address itself was read before; the words may hold a proxy's password.
            raise InvalidOption(
                "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names cannot be used "
                f"({type(error).__name__}); mend it, or name the service's host in NO_PROXY"
            ) from None

    async def _line(self, client: httpx.AsyncClient, line: str, *, number: int) -> _Text:
        body = {
            "texts": [line],
            "source": self.languages.source,
            "target": self.languages.target,
            "options": {
                "beam_size": self.decoding.beam_size,
                "length_penalty": self.decoding.length_penalty,
            },
        }
        for _ in range(MAX_TRIES):
            try:
                answer = await client.post("/v1/translate", json=body)
            except httpx.RequestError as error:
                raise Unavailable(
                    f"{self.address.url} does not answer ({type(error).__name__}: {error}); is "
                    "`dragoman serve` running there?"
                ) from error
            if answer.status_code not in _RETRYABLE_STATUSES:
                return self._text(answer, number)
            await self.sleep(_wait_s(answer))
        raise Unavailable(
            f"{self.address.url} answered {answer.status_code} to line {number} {MAX_TRIES} times in a row: "
            f"{_words(answer)}; lower --concurrency, now {self.concurrency}, or try when it is idle"
        )

    def _text(self, answer: httpx.Response, number: int) -> _Text:
        if answer.status_code != httpx.codes.OK:
            kind: type[DragomanError] = InvalidRequest if answer.is_client_error else Unavailable
            remedy = _KEY_REMEDY if answer.status_code in _KEY_STATUSES else ""
            raise kind(
                f"{self.address.url} answered {answer.status_code} to line {number}: {_words(answer)}{remedy}"
            )
        try:
            (text,) = _Answer.model_validate_json(answer.content).texts
        except (ValidationError, ValueError) as error:
            raise InvalidRequest(
                f"{self.address.url}/v1/translate does not answer as this project's service does; name the "
                "address of a `dragoman serve`, without a route"
            ) from error
        return text


def _wait_s(answer: httpx.Response) -> float:
    """The wait that the service asks for, in seconds; a date, or nothing, counts as one."""
    try:
        asked_s = float(answer.headers.get("Retry-After", _DEFAULT_WAIT_S))
    except ValueError:
        return _DEFAULT_WAIT_S
    return min(max(asked_s, 0.0), _MAX_WAIT_S) if asked_s == asked_s else _DEFAULT_WAIT_S


def _words(answer: httpx.Response) -> str:
    """What the service says of an error; of another server's words only the status' name."""
    try:
        return _ErrorAnswer.model_validate_json(answer.content).error.message
    except ValidationError:
        # Its body may repeat the text that was sent.
        return answer.reason_phrase
