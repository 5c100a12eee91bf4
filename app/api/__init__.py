"""The web layer: FastAPI routes by dialect, the error table, pure ASGI middleware."""

from app.api.options import ApiOptions
from app.api.server import create_app

__all__ = ["ApiOptions", "create_app"]
