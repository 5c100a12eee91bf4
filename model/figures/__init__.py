"""Pictures of the Transformer, its training and what it costs: `dragoman plot` (needs the `train` extra)."""
