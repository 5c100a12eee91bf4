"""Checkpoints in, bundles out: importers, graph builders, quantisation and verification."""
