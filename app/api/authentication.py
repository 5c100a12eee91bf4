"""Pure ASGI middleware: who is calling, and whether the path is open to them.

Everything needs a key except what is listed here as open, so that a route that is new is closed until
somebody decides otherwise. Every refusal reads the same, whatever was wrong with the key.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.body import (
    is_json,
    media_type_of,
    read_form,
    read_json_object,
    read_multipart,
    read_query,
)
from app.api.errors import AccessDenied, Dialect, error_response
from app.api.forms import Fields
from app.api.health import LIVE_PATHS, READY_PATHS, STARTUP_PATH
from app.api.own_machine import is_from_own_machine
from app.errors import DragomanError, RequestCancelled
from app.keys import NO_LIMITS, ApiKey, KeySource, Limits
from app.keys import Scope as KeyScope

OPEN_PATHS = frozenset(
    {
        # Probes: whoever restarts the service has no key.
        *(*LIVE_PATHS, *READY_PATHS, STARTUP_PATH),
        # The same for every installation.
        *("/", "/docs", "/openapi.json"),
        # Clients of LibreTranslate ask these before their user has typed a key.
        *("/languages", "/frontend/settings"),
    }
)
"""Paths whose GET and HEAD need no key."""
_LOCAL_PATHS = frozenset({"/v1/reload"})
"""Paths that change the service: where there are no keys, callers must be on its own machine."""
_ADMIN_PATHS = frozenset({"/metrics"}) | _LOCAL_PATHS
_ADMIN_PREFIX = "/admin"
_KEY_FIELD = "api_key"
_KEY_HEADERS = (b"x-api-key", b"ocp-apim-subscription-key", b"x-goog-api-key")
_SCHEMES = frozenset({b"bearer", b"deepl-auth-key"})
_MESSAGE = (
    "this needs a valid API key that allows it; send it in the header Authorization: Bearer KEY, or ask the "
    "operator for one"
)
_LOCAL_MESSAGE = (
    "while the service has no API keys, this is for programs on its own machine that connect to it directly; "
    "ask there, send the process SIGHUP, or give the service a key of scope admin"
)


@dataclass(frozen=True)
class AccessOptions:
    """Who may use the service.

    Attributes:
        keys: where the API keys are; None when none are configured, and keys that callers send are ignored.
        allow_anonymous: whether callers without a key may translate.
        open_metrics: whether /metrics needs no key.
        anonymous_limits: how much each address may ask for without a key.
    """

    keys: KeySource | None = None
    allow_anonymous: bool = True
    open_metrics: bool = False
    anonymous_limits: Limits = NO_LIMITS


@dataclass(frozen=True)
class Caller:
    """Who is calling.

    Attributes:
        identity: what its use is counted under: its key's id, or its address.
        key: None for an anonymous caller.
        limits: how much it may ask for.
    """

    identity: str
    key: ApiKey | None
    limits: Limits


_caller: ContextVar[Caller | None] = ContextVar("dragoman_caller", default=None)


def current_caller() -> Caller | None:
    """Who made the request that is being answered; None at open paths and outside requests."""
    return _caller.get()


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Authentication:
    """Lets a request through if its path is open, or to callers whose key opens it."""

    def __init__(
        self, app: ASGIApp, *, options: AccessOptions, now: Callable[[], datetime] = _utc_now
    ) -> None:
        """Wrap `app`; `now` tells the time against which keys expire."""
        self._app = app
        self._options = options
        self._now = now
        self._large_forms = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = _path_in_app(scope)
        caller = None
        if not self._is_open(scope, path):
            try:
                caller, receive = await self._caller_of(scope, path, receive)
            except DragomanError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                    return
                await error_response(error, Dialect.of(scope["path"]))(scope, receive, send)
                return
        token = _caller.set(caller)
        try:
            await self._app(scope, receive, send)
        finally:
            _caller.reset(token)

    def _is_open(self, scope: Scope, path: str) -> bool:
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        return is_read and (path in OPEN_PATHS or (path == "/metrics" and self._options.open_metrics))

    async def _caller_of(self, scope: Scope, path: str, receive: Receive) -> tuple[Caller, Receive]:
        options = self._options
        if options.keys is None:
            if not options.allow_anonymous:
                raise _denied()
            if path in _LOCAL_PATHS and not is_from_own_machine(scope):
                raise AccessDenied(_LOCAL_MESSAGE)
            return self._anonymous(scope), receive
        presented = _key_in_head(scope, path)
        if presented is None and _may_have_key_in_body(scope):
            presented, receive = await self._key_in_body(scope, receive)
        needed = (
            KeyScope.ADMIN
            if path in _ADMIN_PATHS or path == _ADMIN_PREFIX or path.startswith(f"{_ADMIN_PREFIX}/")
            else KeyScope.TRANSLATE
        )
        if presented is None and options.allow_anonymous and needed is KeyScope.TRANSLATE:
            return self._anonymous(scope), receive
        if options.keys.has_changed():
            await asyncio.to_thread(options.keys.reload)
        # Hashed, looked up and compared also where there is no key, so that a refusal always takes as long.
        key = options.keys.ring.find(presented or b"")
        if key is None or not key.opens(needed, self._now()):
            raise _denied()
        return Caller(f"key {key.id}", key, key.limits), receive

    def _anonymous(self, scope: Scope) -> Caller:
        limits = self._options.anonymous_limits
        # The address is worked out only where something is counted under it.
        return Caller(f"address {client_network(scope)}" if limits.any_set else "", None, limits)

    async def _key_in_body(self, scope: Scope, receive: Receive) -> tuple[bytes | None, Receive]:
        """The key in a body's field, and what receives the same body once more.

        Raises:
            DragomanError: the body did not arrive, or exceeds a limit.
        """
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            raise RequestCancelled("the client closed the connection while it sent its body") from None
        replayed = False

        async def receive_again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        # Most bodies have none, and are not parsed twice.
        presented = await self._field_of(request) if _KEY_FIELD.encode() in body else None
        return presented, receive_again

    async def _field_of(self, request: Request) -> bytes | None:
        media_type = media_type_of(request)
        try:
            if is_json(media_type):
                value = (await read_json_object(request)).get(_KEY_FIELD)
                # JSON's escapes can spell half a character, which no key has.
                return value.encode("utf-8", "replace") if isinstance(value, str) and value else None
            if media_type == "multipart/form-data":
                return _first(await read_multipart(request), _KEY_FIELD)
            return _first(await read_form(request, large_forms=self._large_forms), _KEY_FIELD)
        except DragomanError:
            # What cannot be read has no key in it; the caller is told no more than that.
            return None


def client_network(scope: Scope) -> str:
    """What an anonymous caller's use is counted under: its IPv4 address, or its IPv6 network of 64 bits.

    A household or a server gets a whole /64, so single IPv6 addresses would be no limit. Whatever is no
    address, such as junk that a trusted proxy passed on, is counted together.
    """
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0] if client else "")
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


def _denied() -> AccessDenied:
    return AccessDenied(_MESSAGE)


def _path_in_app(scope: Scope) -> str:
    """The path as the router sees it, without the prefix that a server was told it is mounted under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _key_in_head(scope: Scope, path: str) -> bytes | None:
    """The key in the headers or, where a dialect has it there, in the query string; the first one found."""
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    scheme, _, value = headers.get(b"authorization", b"").strip().partition(b" ")
    # Another scheme, such as Basic, is a proxy's business.
    if scheme.lower() in _SCHEMES and (presented := value.strip()):
        return presented
    for header in _KEY_HEADERS:
        if presented := headers.get(header, b"").strip():
            return presented
    name = "key" if path.startswith("/language/translate/") else _KEY_FIELD
    if name.encode() not in scope.get("query_string", b""):
        return None
    try:
        return _first(read_query(Request(scope)), name)
    except DragomanError:
        return None


def _first(fields: Fields, name: str) -> bytes | None:
    return next((value.encode() for field, value in fields if field == name and value), None)


def _may_have_key_in_body(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and Dialect.of(scope["path"]) is Dialect.LIBRETRANSLATE
    )
