"""Parallel text on its way to batches of token ids."""
