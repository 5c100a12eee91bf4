"""Measurements of the service; results and how they were made are in benchmarks/README.md."""
