"""The /docs page: the OpenAPI description as plain HTML, without scripts and without outside resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}
h2{border-top:1px solid #ccc;padding-top:1rem}code,pre{font-family:ui-monospace,monospace;font-size:.9em}
pre{background:#f4f4f4;padding:.8rem;overflow:auto}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;border-bottom:1px solid #ddd;padding:.3rem .6rem .3rem 0}
.method{display:inline-block;min-width:3.5rem;font-weight:700;color:#0b5}
"""
_MAX_DEPTH = 6


def docs_page(openapi: dict[str, Any]) -> str:
    """Render an OpenAPI document.

    Args:
        openapi: the document, as `FastAPI.openapi` returns it.
    """
    info = openapi["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('description', ''))}</p>",
        '<p>For programs: <a href="openapi.json">openapi.json</a>. What can go wrong: '
        '<a href="#errors">errors</a>.</p>',
    ]
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            parts += _operation(openapi, path, method, operation)
    parts += _errors(openapi)
    return "\n".join(parts)


def _operation(openapi: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><span class=method>{escape(method.upper())}</span> <code>{escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield f"<h3>Body</h3><p>{escape(', '.join(body))}</p>"
        yield from _schema(openapi, next(iter(body.values())))
    yield "<h3>Answers</h3>"
    for status, response in operation.get("responses", {}).items():
        codes = [code["code"] for code in openapi["x-error-codes"] if str(_status(code, path)) == str(status)]
        named = f" <code>{escape(', '.join(codes))}</code>" if codes and str(status) != "200" else ""
        yield f"<p><b>{escape(str(status))}</b> {escape(response.get('description', ''))}{named}</p>"
        content = response.get("content", {})
        if content and str(status) == "200":
            yield from _schema(openapi, next(iter(content.values())))


def _status(code: dict[str, Any], path: str) -> int:
    return int(code["status" if path.startswith("/v1/") else "libretranslate_status"])


def _errors(openapi: dict[str, Any]) -> Iterator[str]:
    """The shapes of error bodies, and every code."""
    yield "<h2 id=errors>Errors</h2><h3>Body below /v1</h3>"
    yield from _schema(openapi, {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}})
    yield "<h3>Body at every other path</h3>"
    yield from _schema(openapi, {"schema": {"$ref": "#/components/schemas/LibreTranslateError"}})
    yield (
        "<p>Retryable errors carry a Retry-After header, in seconds. Every answer carries X-Request-ID, "
        "under which the service's log has it. Codes with 500 other than internal are the command line's, "
        "where the process ends with them.</p>"
        "<h3>Codes</h3><table><tr><th>Code<th>Status below /v1<th>elsewhere<th>Retryable<th>Meaning</tr>"
    )
    for code in openapi["x-error-codes"]:
        yield (
            f"<tr><td><code>{escape(code['code'])}</code><td>{code['status']}"
            f"<td>{code['libretranslate_status']}<td>{'yes' if code['retryable'] else 'no'}"
            f"<td>{escape(code['meaning'])}</tr>"
        )
    yield "</table>"


def _schema(openapi: dict[str, Any], media: dict[str, Any]) -> Iterator[str]:
    schema = _resolved(openapi, media.get("schema", {}))
    rows = list(_rows(openapi, schema, "", 0))
    if rows:
        yield "<table><tr><th>Field<th>Type<th>Meaning</tr>"
        yield from rows
        yield "</table>"
    example = media.get("example", schema.get("example"))
    if example is not None:
        yield f"<pre>{escape(json.dumps(example, indent=2, ensure_ascii=False))}</pre>"


def _rows(openapi: dict[str, Any], schema: dict[str, Any], prefix: str, depth: int) -> Iterator[str]:
    if schema.get("type") == "array":
        yield from _rows(openapi, _resolved(openapi, schema.get("items", {})), f"{prefix}[]", depth)
        return
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        resolved = _resolved(openapi, field)
        label = f"{prefix}.{name}".lstrip(".")
        mark = "" if name in required else " (optional)"
        meaning = field.get("description") or resolved.get("description", "")
        yield (
            f"<tr><td><code>{escape(label)}</code>{mark}<td>{escape(_type_of(openapi, field))}"
            f"<td>{escape(meaning)}</tr>"
        )
        if depth < _MAX_DEPTH:
            yield from _rows(openapi, resolved, label, depth + 1)


def _type_of(openapi: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_of(openapi, option) for option in schema["anyOf"])
    resolved = _resolved(openapi, schema)
    if resolved.get("type") == "array":
        return f"array of {_type_of(openapi, resolved.get('items', {}))}"
    bounds = [
        f"{word} {resolved[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in resolved
    ]
    return " ".join([str(resolved.get("type", "any")), *bounds])


def _resolved(openapi: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: dict[str, Any] = openapi["components"]["schemas"][reference.rpartition("/")[2]]
    return found
