"""`dragoman serve`: the bundles load in a thread while the interpreter imports everything else.

This module must not import the web framework, the log library or the engine, which take as long to import
as the bundles to load (docs/decisions/0003): `app.cli.web_server` does, once the loading has begun.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from app.bundle import discover
from app.cli.listening import Listeners
from app.cli.loading import load_models
from app.cli.placement import place_models
from app.settings import load_settings


def serve(overrides: Mapping[str, object]) -> None:
    """Load the bundles and answer requests until a signal comes.

    Args:
        overrides: settings from the command line, by field name.
    """
    # As process 1 of a container Python has no default action for SIGTERM; uvicorn's handler comes later.
    signal.signal(signal.SIGTERM, _leave_while_loading)
    # Later it has the bundles loaded anew; its default action would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = load_settings(overrides)
    listeners = Listeners(settings.host, settings.port)
    try:
        bundles = discover(settings.bundles)
        # Loading is the runtime's work and importing the interpreter's: each has a core to itself.
        loader = ThreadPoolExecutor(1, thread_name_prefix="dragoman-load")
        placing = loader.submit(place_models, settings, bundles)
        loading = [loader.submit(lambda: load_models(bundles, settings, placing.result()))]
        loader.shutdown(wait=False)
        from app.cli.web_server import run

        # Taken out, for what refers to the models would keep them in memory when others take their place.
        run(
            settings,
            listeners,
            bundles=bundles,
            placement=placing.result,
            models=lambda: loading.pop().result(),
        )
    except SystemExit as ended:
        # Uvicorn has logged why it could not start; its own exit codes are not part of our contract.
        raise SystemExit(1 if ended.code else 0) from None
    finally:
        listeners.close()


def _leave_while_loading(sig: int, frame: FrameType | None) -> None:  # noqa: ARG001  # signal's signature
    """Nothing is admitted yet, so there is nothing to drain."""
    raise SystemExit(0)
