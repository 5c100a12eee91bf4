"""`dragoman serve`: one process, one engine. The bundles load while the web framework is imported.

It must not import that framework itself before they do (docs/decisions/0003): `app.cli.web_server` does.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import structlog
from prometheus_client import CollectorRegistry

from app.bundle import discover
from app.cli.listening import Listeners
from app.cli.opening import open_engine
from app.cli.version import installed_version
from app.observability import Metrics, configure_logging
from app.observability.tracing import Tracer, open_tracer
from app.settings import load_settings


def serve(overrides: Mapping[str, object]) -> None:
    """Load the bundles and answer requests until a signal comes.

    Args:
        overrides: settings from the command line, by field name.
    """
    # As process 1 of a container Python has no default action for SIGTERM; uvicorn's handler comes later.
    signal.signal(signal.SIGTERM, _leave_while_loading)
    settings = load_settings(overrides)
    configure_logging(settings.log_format, settings.log_level)
    log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")
    listeners = Listeners(settings.host, settings.port)
    tracer: Tracer | None = None
    try:
        metrics = Metrics(CollectorRegistry())
        metrics.set_limits(max_waiting_tokens=settings.max_waiting_tokens)
        tracer = open_tracer(enabled=settings.tracing, version=installed_version())
        bundles = discover(settings.bundles)
        # Loading is the runtime's work and importing the interpreter's: each has a core to itself.
        with ThreadPoolExecutor(1, thread_name_prefix="dragoman-load") as loader:
            opening = loader.submit(
                open_engine,
                bundles,
                settings,
                max_waiting_tokens=settings.max_waiting_tokens,
                observer=metrics,
                cache_observer=metrics,
                request_timeout_s=settings.request_timeout_s,
            )
            from app.cli import web_server
            from app.cli.access import access_options

            access = access_options(settings, [bound.getsockname()[0] for bound in listeners.sockets])
            engine = opening.result()
        log.info(
            "loaded",
            models=[f"{pair.source}-{pair.target}" for pair in engine.pairs],
            variant=settings.variant,
            num_workers=settings.num_workers,
        )
        drain = web_server.Drain()
        app = web_server.create_app(
            engine,
            web_server.api_options(settings),
            metrics=metrics,
            drain=drain,
            tracer=tracer,
            access=access,
        )
        listeners.listen()
        server = web_server.DrainingServer(
            web_server.server_config(app, settings),
            engine,
            drain=drain,
            url=listeners.url,
            drain_s=settings.drain_s,
            drain_grace_s=settings.drain_grace_s,
            max_heartbeat_age_s=settings.max_heartbeat_age_s,
        )
        server.run(listeners.sockets)
        if server.is_broken:
            raise SystemExit(1)
    except SystemExit as ended:
        # Uvicorn has logged why it could not start; its own exit codes are not part of our contract.
        raise SystemExit(1 if ended.code else 0) from None
    finally:
        listeners.close()
        if tracer is not None:
            tracer.close()


def _leave_while_loading(sig: int, frame: FrameType | None) -> None:  # noqa: ARG001  # signal's signature
    """Nothing is admitted yet, so there is nothing to drain."""
    raise SystemExit(0)
