"""The GPU's ModelRunner: row slots in its memory, captured graphs, one stream a worker."""
