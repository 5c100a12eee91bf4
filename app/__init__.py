"""The translation service: bundles in, HTTP out. Never imports torch (docs/architecture.md)."""

__version__ = "0.1.0"
