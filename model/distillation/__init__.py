"""Distillation: a student that learns a teacher's probabilities and hidden states."""
