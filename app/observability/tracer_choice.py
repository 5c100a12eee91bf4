"""Which tracer the settings ask for."""

from __future__ import annotations

from app.errors import SettingsError
from app.observability.tracing import PlainTracer, Tracer


def open_tracer(*, enabled: bool, version: str) -> Tracer:
    """The tracer that the settings ask for.

    Where spans go, how many and with which names of service and host, the standard variables say:
    ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME`` and their kin.

    Raises:
        SettingsError: tracing is on and the OpenTelemetry SDK is not installed.
    """
    if not enabled:
        return PlainTracer()
    try:
        from app.observability.opentelemetry_tracer import OpenTelemetryTracer
    except ImportError as error:
        raise SettingsError(
            f"DRAGOMAN_TRACING is on, but {error.name or 'OpenTelemetry'} is not installed; install "
            "dragoman[otel], or turn tracing off"
        ) from error
    return OpenTelemetryTracer.to_collector(version=version)
