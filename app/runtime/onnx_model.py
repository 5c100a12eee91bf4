"""A bundle's graphs loaded into onnxruntime, once, shared by all workers."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime

from app.bundle import Bundle, Manifest, Variant
from app.errors import BundleCorrupt, BundleUnsupported

_PROVIDERS = ["CPUExecutionProvider"]


@dataclass(frozen=True)
class OnnxModel:
    """Sessions of one variant; ``run`` is re-entrant, so threads share them.

    Attributes:
        manifest: the bundle's facts.
        encoder: the encoder graph.
        step: the decoder step, over the shortlist's candidates when `candidates` is set.
        candidates: gathers the output projection for a set of candidates, or None.
    """

    manifest: Manifest
    encoder: onnxruntime.InferenceSession
    step: onnxruntime.InferenceSession
    candidates: onnxruntime.InferenceSession | None


def load_model(bundle: Bundle, *, variant: Variant, use_shortlist: bool) -> OnnxModel:
    """Load the graphs; takes up to a second and runs in the calling thread.

    Args:
        bundle: a verified bundle.
        variant: which arithmetic.
        use_shortlist: limit the output to the bundle's shortlist, if it has one.

    Raises:
        BundleUnsupported: the bundle has no such variant.
        BundleCorrupt: onnxruntime refuses a graph.
    """
    manifest = bundle.manifest
    graphs = manifest.variants.get(variant)
    if graphs is None:
        raise BundleUnsupported(
            f"bundle {manifest.id} has no variant {variant}; it has {', '.join(sorted(manifest.variants))}"
        )
    if use_shortlist and manifest.shortlist is not None and graphs.shortlist_step and graphs.candidates:
        step, candidates = graphs.shortlist_step, _session(bundle, graphs.candidates)
    else:
        step, candidates = graphs.step, None
    return OnnxModel(
        manifest=manifest,
        encoder=_session(bundle, graphs.encoder),
        step=_session(bundle, step),
        candidates=candidates,
    )


def _session(bundle: Bundle, name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    # One thread a call and no spinning: workers are the parallelism, and spinning threads halve
    # the throughput of two of them (docs/decisions).
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Without VNNI, uint8 x int8 products saturate in 16 bits and results are wrong; this turns the
    # weights to uint8 there, whose kernel is exact. It does nothing on CPUs with VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    # Unpack int8 weights of float32 graphs once at load instead of in every call.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    path = bundle.file(name)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=_PROVIDERS)
    except Exception as error:
        raise BundleCorrupt(
            f"onnxruntime {onnxruntime.__version__} cannot load {path} ({type(error).__name__}); "
            "export the bundle again with this version"
        ) from error
