"""Evaluation of translation systems: scores, faults, speed, and whether a difference is chance."""

from model.evaluation.evaluation import Outcome, TestSetOutcome, evaluate, quality_scores
from model.evaluation.measures import Measures, Speed, measure
from model.evaluation.testset import TestSet, read_testset

__all__ = [
    "Measures",
    "Outcome",
    "Speed",
    "TestSet",
    "TestSetOutcome",
    "evaluate",
    "measure",
    "quality_scores",
    "read_testset",
]
