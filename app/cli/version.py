"""The version, as the installed package states it."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """The installed package's version; says so where the code runs without being installed."""
    try:
        return metadata.version("dragoman")
    except metadata.PackageNotFoundError:
        return "0+not.installed"
