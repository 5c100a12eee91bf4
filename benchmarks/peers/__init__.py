"""Other engines, given the same weights, for comparison only."""
