"""A bundle's graphs loaded into onnxruntime, once, shared by all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnxruntime

from app.bundle import Bundle, Manifest, Variant
from app.bundle.manifest import VariantGraphs
from app.bundle.onnx_paths import external_files
from app.errors import BundleCorrupt, BundleUnsupported
from app.runtime.runner import SearchKind

_PROVIDERS = ["CPUExecutionProvider"]

TensorDims = tuple[int | None, ...]
"""Sizes that a graph must state for a tensor; None leaves one free, and () all of them."""


@dataclass(frozen=True)
class OnnxModel:
    """Sessions of one variant; ``run`` is re-entrant, so threads share them.

    Attributes:
        manifest: the bundle's facts.
        encoder: the encoder graph.
        step: the decoder step, over the shortlist's candidates when `candidates` is set.
        candidates: gathers the output projection for a set of candidates, or None.
        beam_step: the decoder step of beam search, likewise, or None when the bundle has none.
        guided_step: the decoder step of guided beam search, likewise.
    """

    manifest: Manifest
    encoder: onnxruntime.InferenceSession
    step: onnxruntime.InferenceSession
    candidates: onnxruntime.InferenceSession | None
    beam_step: onnxruntime.InferenceSession | None
    guided_step: onnxruntime.InferenceSession | None


class StepGraphs(Protocol):
    """What models have in common, whatever they run on."""

    @property
    def manifest(self) -> Manifest:
        """The bundle's facts."""
        ...

    @property
    def step(self) -> onnxruntime.InferenceSession:
        """The decoder step of greedy search."""
        ...

    @property
    def beam_step(self) -> onnxruntime.InferenceSession | None:
        """The decoder step of beam search, or None when the bundle has none."""
        ...

    @property
    def guided_step(self) -> onnxruntime.InferenceSession | None:
        """The decoder step of guided beam search, likewise."""
        ...


def step_session(model: StepGraphs, kind: SearchKind) -> onnxruntime.InferenceSession:
    """The step graph that runs a kind of search.

    Raises:
        ValueError: the bundle has none.
    """
    session = {
        SearchKind.GREEDY: model.step,
        SearchKind.BEAMS: model.beam_step,
        SearchKind.GUIDED: model.guided_step,
    }[kind]
    if session is None:
        raise ValueError(f"bundle {model.manifest.id} has no graph for {kind.value} search; export it again")
    return session


def load_model(bundle: Bundle, *, variant: Variant, use_shortlist: bool) -> OnnxModel:
    """Load the graphs; takes up to a second and runs in the calling thread.

    Args:
        bundle: a verified bundle.
        variant: which arithmetic.
        use_shortlist: limit the output to the bundle's shortlist, if it has one.

    Raises:
        BundleUnsupported: the bundle has no such variant.
        BundleCorrupt: onnxruntime refuses a graph, or a graph contradicts the manifest or reads a file
            that the manifest does not record.
    """
    manifest = bundle.manifest
    graphs = graphs_of(manifest, variant)
    if use_shortlist and manifest.shortlist is not None and graphs.shortlist_step and graphs.candidates:
        candidates = open_cpu_session(bundle, graphs.candidates)
        steps = graphs.shortlist_step, graphs.shortlist_beam_step, graphs.shortlist_guided_step
    else:
        candidates = None
        steps = graphs.step, graphs.beam_step, graphs.guided_step
    step, beam_step, guided_step = steps
    model = OnnxModel(
        manifest=manifest,
        encoder=open_cpu_session(bundle, graphs.encoder),
        step=open_cpu_session(bundle, step),
        candidates=candidates,
        beam_step=None if beam_step is None else open_cpu_session(bundle, beam_step),
        guided_step=None if guided_step is None else open_cpu_session(bundle, guided_step),
    )
    check_encoder(bundle, graphs.encoder, model.encoder)
    for name, session in zip(steps, (model.step, model.beam_step, model.guided_step), strict=True):
        if name is not None and session is not None:
            _check_step(bundle, name, session, model)
    return model


def graphs_of(manifest: Manifest, variant: Variant) -> VariantGraphs:
    """The graphs of a variant.

    Raises:
        BundleUnsupported: there are none; names those there are.
    """
    graphs = manifest.variants.get(variant)
    if graphs is None:
        raise BundleUnsupported(
            f"bundle {manifest.id} has no variant {variant}; it has {', '.join(sorted(manifest.variants))}. "
            "Export it again with that variant"
        )
    return graphs


def check_encoder(bundle: Bundle, name: str, session: onnxruntime.InferenceSession) -> None:
    """Compare an encoder graph with the manifest.

    Raises:
        BundleCorrupt: as `require_tensors`.
    """
    require_tensors(bundle, name, session.get_inputs(), {"source_ids": (), "source_mask": ()})
    require_tensors(bundle, name, session.get_outputs(), cross_dims(bundle.manifest))


def _check_step(bundle: Bundle, name: str, session: onnxruntime.InferenceSession, model: OnnxModel) -> None:
    state = state_dims(bundle.manifest)
    inputs: dict[str, TensorDims] = {"last_ids": (None, 1), "positions": (None,), "source_mask": (None, None)}
    inputs |= cross_dims(bundle.manifest) | state
    if model.candidates is not None:
        inputs |= {"candidate_ids": (), "candidate_mask": ()}
        inputs |= {output.name: () for output in model.candidates.get_outputs()}
    outputs: dict[str, TensorDims] = {f"next_{key}": dims for key, dims in state.items()}
    if session is model.step:
        outputs |= {"token_ids": (), "log_probs": ()}
    else:
        inputs |= {"row_scores": (), "num_candidates": ()}
        outputs |= {"token_ids": (), "beams": (), "scores": ()}
    if session is model.guided_step:
        inputs |= {"adjusted_columns": (None, 2), "adjusted_divisors": (), "adjusted_addends": ()}
        outputs |= {"attention": ()}
    require_tensors(bundle, name, session.get_inputs(), inputs)
    require_tensors(bundle, name, session.get_outputs(), outputs)


def state_dims(manifest: Manifest) -> dict[str, TensorDims]:
    """The decoder state's tensors, in graph order: [R,H,T,D] or [R,1,d]."""
    return {
        state.name: (None, state.shape[0], None, state.shape[1])
        if state.kind == "kv"
        else (None, *state.shape)
        for state in manifest.state
    }


def cross_dims(manifest: Manifest) -> dict[str, TensorDims]:
    """The cross-attention cache's tensors, [B,H,S,D] each, by layer."""
    return {
        f"cross_{kind}_{layer}": (None, manifest.sizes.num_heads, None, manifest.sizes.head_size)
        for layer in range(manifest.sizes.decoder_layers)
        for kind in ("key", "value")
    }


def require_tensors(
    bundle: Bundle, name: str, found: Sequence[onnxruntime.NodeArg], expected: Mapping[str, TensorDims]
) -> None:
    """Compare a graph's inputs or outputs with the manifest; None and () leave sizes free.

    Raises:
        BundleCorrupt: naming the first tensor that is missing, unknown or of another shape.
    """
    dims_of = {tensor.name: tensor.shape for tensor in found}
    for tensor in sorted(dims_of.keys() ^ expected.keys()):
        what = "lacks" if tensor in expected else "has an unexpected"
        raise BundleCorrupt(
            f"{bundle.path / name} {what} tensor {tensor}, so it does not fit the manifest; export the "
            "bundle again"
        )
    for tensor, dims in expected.items():
        if dims and (
            len(dims_of[tensor]) != len(dims)
            or any(dim not in (None, size) for dim, size in zip(dims, dims_of[tensor], strict=True))
        ):
            raise BundleCorrupt(
                f"{bundle.path / name}: tensor {tensor} has shape {dims_of[tensor]}, the manifest says "
                f"{list(dims)} (None: any size); export the bundle again"
            )


def session_options() -> onnxruntime.SessionOptions:
    """The options every session is loaded with."""
    options = onnxruntime.SessionOptions()
    # One thread a call and no spinning: workers are the parallelism, and spinning threads halve
    # the throughput of two of them (docs/decisions).
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Unpack int8 weights of float32 graphs once at load instead of in every call.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.log_severity_level = 3
    return options


def open_cpu_session(bundle: Bundle, name: str) -> onnxruntime.InferenceSession:
    """Load one graph for the CPU.

    Raises:
        BundleCorrupt: onnxruntime refuses it, or it reads a file that the manifest does not record.
    """
    path = bundle.file(name)
    check_external_files(bundle, path)
    try:
        return onnxruntime.InferenceSession(str(path), session_options(), providers=_PROVIDERS)
    except Exception as error:
        raise BundleCorrupt(
            f"onnxruntime {onnxruntime.__version__} cannot load {path} ({type(error).__name__}); "
            "export the bundle again with this version"
        ) from error


def check_external_files(bundle: Bundle, graph: Path) -> None:
    """Let a graph read nothing but files that the manifest records, which have plain, checked names.

    Raises:
        BundleCorrupt: names the file that is not recorded.
    """
    try:
        locations = external_files(graph.read_bytes())
    except ValueError as error:
        raise BundleCorrupt(f"{graph} is not an ONNX graph ({error}); export the bundle again") from error
    if foreign := sorted(locations - bundle.manifest.files.keys()):
        raise BundleCorrupt(
            f"{graph} reads its weights from {foreign[0]!r}, which the manifest does not record; do not use "
            "this bundle unless you trust its maker, and export it again"
        )
