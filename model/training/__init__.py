"""Training: from batches of token pairs to a model folder."""
