"""Text on its way to and from the model: segments, wrapping, token ids."""
