"""What the API description says of keys and limits, the same for every route that needs a key."""

from __future__ import annotations

from typing import Any

from app.api.authentication import OPEN_PATHS
from app.api.errors import AccessDenied, Dialect, status_of_class

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where the service has keys."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}
_RATE_HEADERS = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}},
    "RateLimit": {
        "description": "What is left of each of the caller's limits (r), and until when (t, seconds).",
        "schema": {"type": "string"},
    },
}


def describe_access(openapi: dict[str, Any]) -> None:
    """Add the ways to send a key, and the answers to those who lack one, to an OpenAPI document."""
    openapi.setdefault("components", {})["securitySchemes"] = _SCHEMES
    for path, operations in openapi["paths"].items():
        status = str(status_of_class(AccessDenied, Dialect.of(path)))
        for method, operation in operations.items():
            if path in OPEN_PATHS and method == "get":
                continue
            # The empty alternative: a service without keys asks for none.
            operation["security"] = [{"bearer": []}, {"header": []}, {}]
            responses = operation["responses"]
            body = responses.get("500", {}).get("content")
            denied = {"description": "The call needs an API key that allows it."}
            responses.setdefault(status, denied if body is None else {**denied, "content": body})
            if "429" in responses:
                limited = "Too much work is waiting, or the caller's limits do not allow so much now."
                responses["429"] = {
                    **responses["429"],
                    "description": limited,
                    "headers": {**responses["429"].get("headers", {}), **_RATE_HEADERS},
                }
