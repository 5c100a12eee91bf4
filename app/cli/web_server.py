"""The HTTP server of `dragoman serve`, and a shutdown that loses nothing.

`app.cli.serve` imports it while the bundles load.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.api.body_limits import Drain
from app.api.engine_protocol import TranslationEngine
from app.api.reload import Reload
from app.bundle import Bundle
from app.cli.access import access_options, trusted_proxies
from app.cli.connections import bounded_connections
from app.cli.device_reports import gpu_memory, log_choice
from app.cli.idle_connections import MAX_ACCEPTED_AT_ONCE
from app.cli.listening import BACKLOG, Listeners
from app.cli.opening import open_engine, open_reloader
from app.cli.placement import Placement
from app.cli.terminal import has_hung_up
from app.cli.version import installed_version
from app.errors import DragomanError
from app.observability import Metrics, configure_logging, num_lines_dropped
from app.observability.tracer_choice import open_tracer
from app.observability.tracing import Tracer
from app.runtime.served_model import ServedModel
from app.settings import Settings

_MAX_HEAD_BYTES = 16 * 1024
"""Request line and headers together."""
_ANSWER_S = 5
"""Seconds that slow readers get to take finished answers once the engine has stopped."""
_QUIET_S = 0.1
"""Before connections are closed no request should have come for so long: each is answered, if with 503."""
_MAX_LINGER_S = 1.0
"""Longer than this nobody is waited for who might send a request."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it closes its port.

    On the first SIGTERM or SIGINT readiness turns red and new work is refused, as are requests whose body
    has not arrived; admitted work goes on for up to ``drain_s`` seconds. The port stays open while admitted
    work goes on, and for ``drain_grace_s`` seconds in any case, so that a load balancer that asks at least
    that often sees the red readiness: without admitted work and without grace the port closes at once.
    Whoever was connected by then is still answered. Then the process ends with exit code 0. A second signal
    ends it at once.

    Meanwhile it has the engine supervised. When the engine cannot mend itself it drains likewise, and
    `is_broken` is true.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: TranslationEngine,
        *,
        drain: Drain,
        reload: Reload,
        url: str,
        drain_s: float,
        drain_grace_s: float,
        max_heartbeat_age_s: float,
    ) -> None:
        """Serve `config.app`, whose engine is `engine`, at `url`.

        SIGHUP has `reload` called, or the server drain where the terminal it was started in is gone.
        """
        super().__init__(config)
        self._engine = engine
        self._url = url
        self._drain = drain
        self._reload = reload
        self._reloads: set[asyncio.Task[None]] = set()
        self._drain_s = drain_s
        self._drain_grace_s = drain_grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_heartbeat_age_s = max_heartbeat_age_s
        self._finishing: asyncio.Task[None] | None = None
        self._supervision: asyncio.Task[str] | None = None
        self._signalled = False
        self.is_broken = False
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and say where."""
        await super().startup(sockets)
        for listener in sockets or []:
            # Uvicorn has one number for how many may wait and for how many one turn of the loop accepts.
            listener.listen(BACKLOG)
        self._supervision = asyncio.create_task(
            self._engine.supervise(max_heartbeat_age_s=self._max_heartbeat_age_s)
        )
        self._supervision.add_done_callback(self._note_end_of_supervision)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        self._log.info("listening", url=self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port without losing anybody who is connected, then the connections."""
        if not self.force_exit:
            for connection in self._close_port(sockets or []):
                await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
            self._drain.note_arrival()
            await self._drain.until_quiet(_QUIET_S, at_most_s=_MAX_LINGER_S)
        await super().shutdown(sockets)

    def _close_port(self, listeners: Sequence[socket.socket]) -> list[socket.socket]:
        """Whoever had connected and was not accepted yet: closing a listening socket would reset them."""
        accepted = []
        for listener in listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        return accepted

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn makes it for connections that it accepts itself."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        """Begin to drain; called in the main thread, between two of its instructions."""
        if self._signalled or self._loop is None:
            self.force_exit = self.should_exit = True
            return
        self._signalled = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _hang_up(self) -> None:
        if has_hung_up():  # nobody asked for other models: whoever started the service closed its window
            self._signalled = True
            self._begin_drain()
        else:
            self._begin_reload()

    def _begin_reload(self) -> None:
        async def reload() -> None:
            with contextlib.suppress(DragomanError):  # logged and counted where it arose
                await self._reload()

        task = asyncio.ensure_future(reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def _note_end_of_supervision(self, supervision: asyncio.Task[str]) -> None:
        if supervision.cancelled():
            return
        fault = supervision.exception()
        self.is_broken = True
        self._log.critical("broken", reason=supervision.result() if fault is None else type(fault).__name__)
        self._begin_drain()

    def _begin_drain(self) -> None:
        if self._finishing is not None:
            return
        self._engine.begin_drain()
        self._drain.begin()
        self._finishing = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        self._log.info("draining", running_requests=self._engine.num_running_requests, drain_s=self._drain_s)
        try:
            # The engine works on meanwhile: stopped, it would look dead to the liveness probe.
            await asyncio.sleep(self._drain_grace_s)
            finished = await self._engine.stop(drain_s=max(0.0, self._drain_s - self._drain_grace_s))
            self._log.info("drained", finished=finished)
        finally:
            if self._supervision is not None:
                self._supervision.cancel()
            self.should_exit = True


def run(
    settings: Settings,
    listeners: Listeners,
    *,
    bundles: Sequence[Bundle],
    placement: Callable[[], Placement],
    models: Callable[[], Sequence[ServedModel]],
) -> None:
    """Answer requests until a signal comes.

    Args:
        settings: of the service.
        listeners: the bound sockets, which the caller closes.
        bundles: what the models are made of.
        placement: waits until it is known where the models run, and returns that.
        models: waits for the models, which are still being loaded, and returns them.
    """
    configure_logging(settings.log_format, settings.log_level)
    log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")
    tracer: Tracer | None = None
    try:
        access = access_options(settings, [bound.getsockname()[0] for bound in listeners.sockets])
        metrics = Metrics(CollectorRegistry())
        metrics.set_limits(max_waiting_tokens=settings.max_waiting_tokens)
        metrics.watch_log(num_lines_dropped=num_lines_dropped)
        tracer = open_tracer(enabled=settings.tracing, version=installed_version())
        placed = placement()
        choice = placed.choice
        log_choice(choice)
        metrics.watch_devices(
            variant=choice.variant,
            devices=[str(device) for device in choice.devices],
            memory=functools.partial(gpu_memory, choice),
        )
        engine = open_engine(
            models(),
            settings,
            placed,
            max_waiting_tokens=settings.max_waiting_tokens,
            observer=metrics,
            cache_observer=metrics,
            request_timeout_s=settings.request_timeout_s,
        )
        log.info(
            "loaded",
            models=[f"{pair.source}-{pair.target}" for pair in engine.pairs],
            variant=choice.variant,
            num_workers=placed.num_workers,
        )
        drain = Drain()
        reloader = open_reloader(engine, bundles, settings, placed, observe=metrics.on_reload)
        app = create_app(
            engine,
            api_options(settings),
            metrics=metrics,
            drain=drain,
            tracer=tracer,
            access=access,
            reload=reloader.reload,
        )
        listeners.listen()
        server = DrainingServer(
            server_config(app, settings),
            engine,
            drain=drain,
            reload=reloader.reload,
            url=listeners.url,
            drain_s=settings.drain_s,
            drain_grace_s=settings.drain_grace_s,
            max_heartbeat_age_s=settings.max_heartbeat_age_s,
        )
        # What is there now stays to the end: a full collection over it would hold the event loop for 50 ms.
        gc.freeze()
        server.run(listeners.sockets)
        if server.is_broken:
            raise SystemExit(1)
    finally:
        if tracer is not None:
            tracer.close()


def server_config(app: Callable[..., Any], settings: Settings) -> uvicorn.Config:
    """The HTTP server's part of the settings."""
    proxies = trusted_proxies(settings)
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # A server that closes idle connections before its clients do closes some at the very moment a
        # request arrives, and that request is lost.
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_ANSWER_S,
        # On h11, because the server's other parser, where it is installed, does not limit a request's head.
        http=bounded_connections(head_timeout_s=settings.head_timeout_s, max_head_bytes=_MAX_HEAD_BYTES),
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        backlog=MAX_ACCEPTED_AT_ONCE,
        # By default the server would believe whatever runs on this machine, and an environment variable.
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
    )


def api_options(settings: Settings) -> ApiOptions:
    """The web layer's part of the settings."""
    origins = (origin.strip() for origin in settings.cors_origins.split(","))
    return ApiOptions(
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        max_texts=settings.max_texts,
        max_text_characters=settings.max_text_characters,
        max_heartbeat_age_s=settings.max_heartbeat_age_s,
        drain_s=settings.drain_s,
        cors_origins=tuple(origin for origin in origins if origin),
        version=installed_version(),
    )
