"""What share of the CPU's integer matrix product the graphs reach, counting the real work alone."""

from __future__ import annotations

import math
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

ROW_COUNTS = (1, 4, 8, 16, 32, 64, 256)
"""What the products are measured with: a step's rows, and the tokens that the encoder sees at a time."""


@dataclass(frozen=True)
class PeakShare:
    """What a graph reaches of the CPU's integer matrix product.

    Attributes:
        name: the setting's.
        graph: role.
        mean_rows: tokens a call, without padding.
        achieved: GFLOP/s (two for each multiply-add of real work) of the graph's calls.
        attainable: GFLOP/s of its matrix products alone, at their shapes and the measured row count
            nearest to `mean_rows`.
        peak: GFLOP/s of the fastest shape.
    """

    name: str
    graph: str
    mean_rows: float
    achieved: float
    attainable: float
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


def nearest_row_count(num_rows: float) -> int:
    """The measured row count that is nearest by ratio."""
    return min(ROW_COUNTS, key=lambda measured: abs(math.log(measured / num_rows)))


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
    graph_of = {graph.graph: graph for graph in observation.breakdown.graphs}
    num_source_tokens = sum(len(source) for source in workload.sources)
    shares = []
    for name, adds, products, num_tokens in (
        ("encoder", encoder_adds, encoder_products(manifest.sizes), num_source_tokens),
        ("step", step_adds, step_products(manifest), observation.breakdown.num_tokens),
    ):
        graph = graph_of[name]
        mean_rows = num_tokens / graph.num_calls
        shares.append(
            PeakShare(
                name=setting.name,
                graph=name,
                mean_rows=mean_rows,
                achieved=2 * adds / graph.seconds / 1e9,
                attainable=rates.of_products(products, weights, nearest_row_count(mean_rows)),
                peak=rates.best(weights),
            )
        )
    return shares
