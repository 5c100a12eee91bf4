"""From bundles to models, in a module of its own: `serve` loads while it imports everything else."""

from __future__ import annotations

from collections.abc import Sequence

from app.bundle import Bundle
from app.cli.placement import Placement
from app.errors import BundleError
from app.runtime.device_choice import require_gpu_graphs
from app.runtime.memory_shortage import lacks_memory
from app.runtime.served_model import ServedModel, load_served_model
from app.settings import Settings


def load_models(bundles: Sequence[Bundle], settings: Settings, placement: Placement) -> list[ServedModel]:
    """Load the bundles one after the other; takes seconds for large ones.

    Args:
        bundles: what to load.
        settings: whether with shortlists, and with CUDA graphs.
        placement: which arithmetic, on which devices, how many rows.

    Raises:
        BundleError: something in a bundle cannot be used, or there is too little memory for it.
        DeviceUnavailable: a GPU cannot be used after all, or has too little memory.
    """
    return [_loaded(bundle, settings, placement) for bundle in bundles]


def _loaded(bundle: Bundle, settings: Settings, placement: Placement) -> ServedModel:
    choice = placement.choice
    try:
        if choice.on_gpus:
            require_gpu_graphs(bundle)
        return load_served_model(
            bundle,
            variant=choice.variant,
            max_rows=placement.max_rows,
            use_shortlist=settings.use_shortlist,
            devices=choice.devices,
            gpu_memory_bytes=placement.gpu_memory_bytes,
            use_cuda_graphs=settings.cuda_graphs,
        )
    except Exception as error:
        # The runtime's own lack of memory passes for a file that it cannot read.
        if not lacks_memory(error):
            raise
        raise BundleError(
            f"bundle {bundle.path} could not be loaded: there is too little memory; give the process more, "
            "or serve fewer bundles"
        ) from error
