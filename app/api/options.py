"""What the web layer must know, and nothing else of the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiOptions:
    """Limits of the web layer.

    Attributes:
        max_body_bytes: largest request body.
        body_timeout_s: seconds that a request's body may take to arrive.
        max_texts: most texts in one request.
        max_text_characters: most characters in one request, all its texts together.
        max_heartbeat_age_s: seconds without a sign of life after which a worker counts as stuck.
        drain_s: seconds that admitted work may take when the service stops.
        cors_origins: origins whose web pages may call the service; ``*`` allows all, empty none.
        version: the service's version, shown in its API description.
    """

    max_body_bytes: int = 2 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_texts: int = 1024
    max_text_characters: int = 250_000
    max_heartbeat_age_s: float = 4.0
    drain_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    version: str = "0"
