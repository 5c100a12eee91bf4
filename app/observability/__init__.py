"""What operators see: metrics and logs. Neither ever carries a text, an address or a key."""

from app.observability.log_handler import num_lines_dropped
from app.observability.logs import configure_logging, frames_of
from app.observability.metrics import NO_PAIR, Metrics, method_label

__all__ = ["NO_PAIR", "Metrics", "configure_logging", "frames_of", "method_label", "num_lines_dropped"]
