"""What share of the CPU's integer matrix product the graphs reach, counting the real work alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bundle import Manifest
from benchmarks.breakdown import Observation, Setting
from benchmarks.gemm_peak import GemmRates, WeightType
from benchmarks.multiply_adds import (
    MatrixProduct,
    decoder_multiply_adds,
    encoder_multiply_adds,
    encoder_products,
    step_products,
)

ONE_SENTENCE_ROWS = 32
"""Source tokens that the encoder sees at a time when sentences come alone: a typical sentence."""
NEWCOMERS_ROWS = 256
"""Source tokens that the encoder sees at a time under load: the newcomers a row group takes together."""


@dataclass(frozen=True)
class PeakShare:
    """What a graph reaches of the CPU's integer matrix product.

    Attributes:
        name: the setting's.
        graph: role.
        achieved: GFLOP/s (two for each multiply-add of real work) of the graph's calls.
        attainable: GFLOP/s of its matrix products alone, at their shapes and `num_rows` rows.
        num_rows: rows `attainable` was measured with.
        peak: GFLOP/s of the fastest shape.
    """

    name: str
    graph: str
    achieved: float
    attainable: float
    num_rows: int
    peak: float

    @property
    def share_of_attainable(self) -> float:
        """Achieved by attainable."""
        return self.achieved / self.attainable

    @property
    def share_of_peak(self) -> float:
        """Achieved by peak."""
        return self.achieved / self.peak


def shapes_to_measure(manifests: Sequence[Manifest]) -> list[tuple[int, int]]:
    """K and N of every linear layer of these models."""
    products: list[MatrixProduct] = []
    for manifest in manifests:
        products += encoder_products(manifest.sizes) + step_products(manifest)
    return sorted({(product.inputs, product.outputs) for product in products})


def row_counts_to_measure(max_rows: int) -> list[int]:
    """Row counts of encoder and step, for one sentence and under load."""
    return sorted({1, max_rows, ONE_SENTENCE_ROWS, NEWCOMERS_ROWS})


def peak_shares(
    setting: Setting, observation: Observation, rates: GemmRates, weights: WeightType
) -> list[PeakShare]:
    """Encoder and step of a greedy run without a shortlist, against the measured products.

    Args:
        setting: what was observed.
        observation: its times and translations.
        rates: measured at this model's shapes.
        weights: the type of weights that the engine's kernels use on this CPU.
    """
    manifest, workload = setting.bundle.manifest, setting.workload
    encoder_adds = encoder_multiply_adds(manifest.sizes, [len(source) for source in workload.sources])
    step_adds = sum(
        decoder_multiply_adds(
            manifest,
            source_length=len(source),
            num_steps=hypotheses[0].num_decoded,
        )
        for source, hypotheses in zip(workload.sources, observation.translations, strict=True)
    )
    encoder_rows, step_rows = (ONE_SENTENCE_ROWS, 1) if setting.alone else (NEWCOMERS_ROWS, setting.max_rows)
    seconds_of = {graph.graph: graph.seconds for graph in observation.breakdown.graphs}
    return [
        PeakShare(
            name=setting.name,
            graph=graph,
            achieved=2 * adds / seconds_of[graph] / 1e9,
            attainable=rates.of_products(products, weights, num_rows),
            num_rows=num_rows,
            peak=rates.best(weights),
        )
        for graph, adds, products, num_rows in (
            ("encoder", encoder_adds, encoder_products(manifest.sizes), encoder_rows),
            ("step", step_adds, step_products(manifest), step_rows),
        )
    ]
