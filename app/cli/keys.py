"""`dragoman keys`: make, list and revoke API keys in a file."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from app.errors import InvalidRequest, SettingsError

if TYPE_CHECKING:
    from app.keys import ApiKey, KeyFile

_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "w": timedelta(weeks=1)}

keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

File = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option("--file", help="File of keys. Default: DRAGOMAN_KEYS_FILE."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will use the key.")],
    file: File = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="translate (default), or admin, which opens /metrics and /v1/reload and no more; repeatable."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 12h, 90d, 52w, or a date such as 2027-01-31 (UTC).")
    ] = None,
    requests_per_second: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    characters_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    characters_per_day: Annotated[
        int | None, typer.Option(min=1, help="From midnight UTC. Default: no limit.")
    ] = None,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    A running service knows it within a second. The key alone goes to standard output.
    """
    from app.keys import Limits, Scope, new_key

    key_file = _key_file(file)
    now = datetime.now(UTC)
    try:
        scopes = frozenset(Scope(word) for word in scope or [Scope.TRANSLATE])
    except ValueError:
        raise InvalidRequest("--scope must be translate or admin; give it twice for both") from None
    made = new_key(
        name,
        scopes,
        created_at=now.replace(microsecond=0),
        expires_at=None if expires is None else _end(expires, now),
        limits=Limits(requests_per_second, characters_per_minute, characters_per_day),
    )
    key_file.update(lambda present: (*present, made.key))
    print(
        f"Key {made.key.id} for {name} is in {key_file.path}. It is shown this once; keep it safe:",
        file=sys.stderr,
    )
    print(made.text)


@keys.command("list")
def list_keys(file: File = None, as_json: AsJson = False) -> None:
    """List the keys: id, name, scopes, times, limits, and whether each is valid; never a key itself."""
    key_file = _key_file(file)
    now = datetime.now(UTC)
    facts = [_facts(key, now) for key in key_file.read()]
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    if not facts:
        print(f"{key_file.path} has no keys", file=sys.stderr)
    for one in facts:
        limits = ", ".join(
            f"{value} {name.replace('_', ' ')}" for name, value in one["limits"].items() if value is not None
        )
        print(
            f"{one['id']}  {one['state']:<7}  {'+'.join(one['scopes']):<15}  "
            f"expires {one['expires_at'] or 'never'}  {limits or 'no limits'}  {one['name']}"
        )


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `dragoman keys list` shows it.")],
    file: File = None,
) -> None:
    """Revoke a key for good. A running service refuses it within a second."""
    from dataclasses import replace

    key_file = _key_file(file)
    now = datetime.now(UTC).replace(microsecond=0)

    def without(present: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if all(key.id != key_id for key in present):
            raise InvalidRequest(
                f"{key_file.path} has no key with this id; `dragoman keys list` shows the ids"
            )
        return tuple(
            replace(key, revoked_at=now) if key.id == key_id and key.revoked_at is None else key
            for key in present
        )

    key_file.read()
    key_file.update(without)
    print(f"Key {key_id} is revoked", file=sys.stderr)


def _key_file(given: Path | None) -> KeyFile:
    from app.keys import KeyFile

    if given is None:
        from app.settings import load_settings

        configured = load_settings().keys_file
        if not configured:
            raise SettingsError("no file of keys is named; give --file, or set DRAGOMAN_KEYS_FILE")
        given = Path(configured)
    return KeyFile(given)


def _end(expires: str, now: datetime) -> datetime:
    """The moment that ``90d`` or a date means; a date's key ends as that day begins, in UTC."""
    try:
        if span := re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", expires, re.ASCII):
            end = (now + int(span[1]) * _UNITS[span[2]]).replace(microsecond=0)
        else:
            end = datetime.fromisoformat(expires)
            end = end.replace(tzinfo=UTC) if end.tzinfo is None else end.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"--expires is {expires!r}; write a span such as 12h, 90d or 52w, or a date such as 2027-01-31"
        ) from None
    if end <= now:
        raise InvalidRequest(f"--expires is {expires!r}, which is past; name a time to come")
    return end


def _facts(key: ApiKey, now: datetime) -> dict[str, Any]:
    is_over = key.expires_at is not None and key.expires_at <= now
    return {
        "id": key.id,
        "name": key.name,
        "state": "revoked" if key.revoked_at else "expired" if is_over else "valid",
        "scopes": sorted(key.scopes),
        "created_at": _written(key.created_at),
        "expires_at": _written(key.expires_at),
        "revoked_at": _written(key.revoked_at),
        "limits": {
            "requests_per_second": key.limits.requests_per_second,
            "characters_per_minute": key.limits.characters_per_minute,
            "characters_per_day": key.limits.characters_per_day,
        },
    }


def _written(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
