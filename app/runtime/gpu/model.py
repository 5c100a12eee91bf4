"""A bundle's graphs loaded for one device, with everything in that device's memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.bundle import Bundle, Manifest, Variant
from app.errors import BundleCorrupt, BundleUnsupported, DeviceUnavailable
from app.runtime.device import Device
from app.runtime.gpu import cuda_driver
from app.runtime.gpu.graphs import GATE, CaptureGate, Succession
from app.runtime.gpu.memory import LEDGER
from app.runtime.onnx_model import (
    TensorDims,
    check_encoder,
    check_external_files,
    cross_dims,
    graphs_of,
    open_cpu_session,
    require_tensors,
    session_options,
    state_dims,
)
from app.runtime.onnx_providers import CUDA_PROVIDER, cuda_provider_fault, installed_runtime

DEVICE_VARIANTS: tuple[Variant, ...] = ("cuda-fp16",)
"""Those whose graphs this file loads; all others are for the CPU's runner."""
_DTYPES: Mapping[str, npt.DTypeLike] = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


@dataclass(frozen=True)
class DeviceModel:
    """Sessions of one variant on one device, for one runner at a time if that is a GPU.

    Attributes:
        manifest: the bundle's facts.
        device: where they run.
        encoder: source ids and mask to the cross-attention cache.
        step: the decoder step.
        copy_state: copies rows of the decoder state.
        copy_cross: copies rows of the cross-attention cache.
        beam_step: the decoder step of beam search, or None when the bundle has none.
        guided_step: the decoder step of guided beam search, likewise.
        captures: whether `step` and `beam_step` run as CUDA graphs once captured.
        memory_limit_bytes: most that weights and row slots may hold on the device, or None.
        gate: every call for the device passes through it.
        succession: holds back all runners but the newest, on a GPU; None lets many use the sessions.
    """

    manifest: Manifest
    device: Device
    encoder: onnxruntime.InferenceSession
    step: onnxruntime.InferenceSession
    copy_state: onnxruntime.InferenceSession
    copy_cross: onnxruntime.InferenceSession
    beam_step: onnxruntime.InferenceSession | None = None
    guided_step: onnxruntime.InferenceSession | None = None
    captures: bool = False
    memory_limit_bytes: int | None = None
    gate: CaptureGate = GATE
    succession: Succession | None = None

    def dtypes(self) -> dict[str, npt.DTypeLike]:
        """Element types of the step's floating-point inputs, by name: those of caches and state."""
        return {item.name: _DTYPES[item.type] for item in self.step.get_inputs() if item.type in _DTYPES}


def load_device_model(
    bundle: Bundle,
    *,
    variant: Variant,
    device: Device,
    memory_limit_bytes: int | None = None,
    use_cuda_graphs: bool = True,
) -> DeviceModel:
    """Load the graphs; takes seconds and runs in the calling thread.

    Args:
        bundle: a verified bundle.
        variant: one with graphs for a device; on the CPU its float16 arithmetic is simulated.
        device: where to run them.
        memory_limit_bytes: most that all models together may hold there in weights and row slots. Each
            session's own arena, in which it computes, is limited to as much.
        use_cuda_graphs: launch whole decoder steps at once, on a GPU.

    Raises:
        BundleUnsupported: the bundle has no such variant, or it is none for a device.
        BundleCorrupt: onnxruntime refuses a graph, or a graph contradicts the manifest or reads a file
            that the manifest does not record.
        DeviceUnavailable: the device cannot be used or has too little memory; names driver, library and
            versions.
    """
    manifest = bundle.manifest
    graphs = graphs_of(manifest, variant)
    if graphs.copy_state is None or graphs.copy_cross is None:
        raise BundleUnsupported(
            f"bundle {manifest.id}: variant {variant} has no graphs that copy rows on a device, so it is for "
            "the CPU alone; ask for cuda-fp16"
        )
    open_session = _Opener(
        bundle, device, memory_limit_bytes=memory_limit_bytes, use_cuda_graphs=use_cuda_graphs
    )
    model = DeviceModel(
        manifest=manifest,
        device=device,
        encoder=open_session(graphs.encoder),
        step=open_session(graphs.step, captures=True),
        copy_state=open_session(graphs.copy_state),
        copy_cross=open_session(graphs.copy_cross),
        beam_step=None if graphs.beam_step is None else open_session(graphs.beam_step, captures=True),
        guided_step=None if graphs.guided_step is None else open_session(graphs.guided_step),
        captures=use_cuda_graphs and device.kind == "cuda",
        memory_limit_bytes=memory_limit_bytes,
        succession=Succession() if device.kind == "cuda" else None,
    )
    check_encoder(bundle, graphs.encoder, model.encoder)
    _check_copy(bundle, graphs.copy_state, model.copy_state, state_dims(manifest))
    _check_copy(bundle, graphs.copy_cross, model.copy_cross, cross_dims(manifest))
    for name, session in (
        (graphs.step, model.step),
        (graphs.beam_step, model.beam_step),
        (graphs.guided_step, model.guided_step),
    ):
        if name is not None and session is not None:
            _check_step(bundle, name, session, model)
    return model


class _Opener:
    """Opens a bundle's graphs on one device."""

    def __init__(
        self, bundle: Bundle, device: Device, *, memory_limit_bytes: int | None, use_cuda_graphs: bool
    ) -> None:
        self._bundle = bundle
        self._device = device
        self._memory_limit_bytes = memory_limit_bytes
        self._use_cuda_graphs = use_cuda_graphs
        self._stream = 0
        if device.kind == "cuda":
            runtime = installed_runtime()
            if CUDA_PROVIDER not in runtime.providers:
                raise DeviceUnavailable(
                    f"{device} was asked for, and this onnxruntime {runtime.version} has no {CUDA_PROVIDER}; "
                    "install onnxruntime-gpu in its place"
                )
            with GATE.using():
                if (fault := cuda_provider_fault(device.index)) is not None:
                    raise DeviceUnavailable(_refusal(device, "any graph", fault))
                # One stream for all sessions: encoder, copies and steps keep their order without waiting.
                self._stream = _driver().create_stream(device.index)

    def __call__(self, name: str, *, captures: bool = False) -> onnxruntime.InferenceSession:
        if self._device.kind == "cpu":
            return open_cpu_session(self._bundle, name)
        with GATE.using():
            return self._open_on_gpu(name, captures=captures and self._use_cuda_graphs)

    def _open_on_gpu(self, name: str, *, captures: bool) -> onnxruntime.InferenceSession:
        path = self._bundle.file(name)
        check_external_files(self._bundle, path)
        before_bytes = _driver().memory_info(self._device.index).free_bytes
        options = session_options()
        # A node without a CUDA kernel is an error, not a detour of every step through the CPU.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        provider = (
            CUDA_PROVIDER,
            cuda_options(
                self._device,
                stream=self._stream,
                memory_limit_bytes=self._memory_limit_bytes,
                captures=captures,
            ),
        )
        try:
            # Without `enable_fallback` a provider that does not start is replaced by the CPU's, in silence.
            session = onnxruntime.InferenceSession(
                str(path), options, providers=[provider], enable_fallback=0
            )
        except Exception as error:
            # The CPU runs the same graph: if it refuses it too, the bundle is at fault.
            open_cpu_session(self._bundle, name)
            raise DeviceUnavailable(_refusal(self._device, str(path), str(error))) from error
        if CUDA_PROVIDER not in session.get_providers():
            raise DeviceUnavailable(_refusal(self._device, str(path), "the provider did not start"))
        taken_bytes = max(0, before_bytes - _driver().memory_info(self._device.index).free_bytes)
        LEDGER.take(
            self._device,
            taken_bytes,
            what=f"the weights of {path.name} of bundle {self._bundle.manifest.id}",
            limit_bytes=self._memory_limit_bytes,
        )
        weakref.finalize(session, LEDGER.give_back, self._device, taken_bytes)
        return session


def cuda_options(
    device: Device, *, stream: int, memory_limit_bytes: int | None, captures: bool
) -> dict[str, str]:
    """Options of onnxruntime's CUDA provider for a session.

    Args:
        device: a GPU.
        stream: handle of the stream it works on.
        memory_limit_bytes: most that its arena may take, or None.
        captures: whether runs may be captured as CUDA graphs.
    """
    options = {
        "device_id": str(device.index),
        "user_compute_stream": str(stream),
        # The other strategy takes up to twice of what is needed.
        "arena_extend_strategy": "kSameAsRequested",
        # Statistics of layer norms in float32.
        "enable_skip_layer_norm_strict_mode": "1",
        "use_tf32": "0",
        "enable_cuda_graph": "1" if captures else "0",
    }
    if memory_limit_bytes is not None:
        options["gpu_mem_limit"] = str(memory_limit_bytes)
    return options


@functools.cache
def _driver() -> cuda_driver.CudaDriver:
    return cuda_driver.probe()


def _refusal(device: Device, what: str, reason: str) -> str:
    driver = _driver()
    gpu = next((gpu.name for gpu in driver.gpus if gpu.index == device.index), "no such GPU")
    major, minor = driver.version
    return (
        f"{installed_runtime()} with {CUDA_PROVIDER} cannot run {what} on {device} ({gpu}; driver for "
        f"CUDA {major}.{minor}): {reason.rstrip('.')}. onnxruntime-gpu needs the CUDA and cuDNN libraries "
        "that it was built for, and a driver at least as new"
    )


def _check_copy(
    bundle: Bundle, name: str, session: onnxruntime.InferenceSession, tensors: Mapping[str, TensorDims]
) -> None:
    inputs: dict[str, TensorDims] = {"from_rows": (None,), "to_rows": (None, 1)}
    require_tensors(bundle, name, session.get_inputs(), inputs | dict(tensors))
    outputs = {f"next_{tensor}": dims for tensor, dims in tensors.items()}
    require_tensors(bundle, name, session.get_outputs(), outputs)


def _check_step(bundle: Bundle, name: str, session: onnxruntime.InferenceSession, model: DeviceModel) -> None:
    state = state_dims(bundle.manifest)
    inputs: dict[str, TensorDims] = {"last_ids": (None, 1), "positions": (None,), "source_mask": (None, None)}
    inputs |= cross_dims(bundle.manifest) | state
    outputs: dict[str, TensorDims] = {f"next_{key}": dims for key, dims in state.items()}
    if session is model.step:
        outputs |= {"token_ids": (), "log_probs": ()}
    else:
        inputs |= {"row_scores": (None,), "hidden_shape": (3,), "scores_shape": (2,)}
        outputs |= {"token_ids": (None, None), "beams": (None, None), "scores": (None, None)}
    if session is model.guided_step:
        inputs |= {"adjusted_columns": (None, 2), "adjusted_divisors": (), "adjusted_addends": ()}
        outputs |= {"attention": (None, None, None)}
    require_tensors(bundle, name, session.get_inputs(), inputs)
    require_tensors(bundle, name, session.get_outputs(), outputs)
    expected = {item.name: item.type for item in model.step.get_inputs()}
    for item in session.get_inputs():
        is_cache = item.name in cross_dims(bundle.manifest) | state
        if is_cache and (item.type not in _DTYPES or item.type != expected[item.name]):
            raise BundleCorrupt(
                f"{bundle.path / name}: tensor {item.name} is a {item.type}, and the step's a "
                f"{expected[item.name]}; caches are one and the same {' or '.join(_DTYPES)}. Export the "
                "bundle again"
            )
