"""What the runner of a device is made of: gate, buckets, row copies; and how a GPU's sessions are opened."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from device_guests import CONFIGS, Decoders
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_texts

from app.bundle import Bundle, open_bundle
from app.errors import BundleCorrupt, BundleUnsupported, DeviceUnavailable
from app.runtime.device import Device
from app.runtime.engine import Engine, EngineOptions
from app.runtime.gpu import model as device_model
from app.runtime.gpu.copies import PendingCopies
from app.runtime.gpu.cuda_driver import Gpu, GpuMemory
from app.runtime.gpu.memory import MemoryLedger
from app.runtime.gpu.model import load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.onnx_model import session_options
from app.runtime.onnx_providers import InstalledRuntime
from app.runtime.request import TranslationRequest
from app.runtime.served_model import load_served_model

PATIENCE_S = 30.0
GPU = Device("cuda", 1)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS["ssru"], tmp_path_factory.mktemp("parts") / "tiny")


copies = st.lists(
    st.tuples(st.sampled_from(["copy", "empty"]), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)))),
    max_size=8,
)


@given(orders=copies)
def test_pending_copies_do_at_once_what_was_asked_one_by_one(orders: list[tuple[str, list[Any]]]) -> None:
    expected = np.array([10, 11, 12, 13, 14, 15, 0])
    memory, pending = expected.copy(), PendingCopies(6)
    for order, pairs in orders:
        unique = {to_row: from_row for from_row, to_row in pairs}
        to_rows = np.array(list(unique), dtype=np.int64)
        from_rows = np.array(list(unique.values()), dtype=np.int64)
        if order == "copy":
            expected[to_rows] = expected[from_rows]
            pending.copy(from_rows, to_rows)
        else:
            expected[to_rows] = 0
            pending.empty(to_rows)
    outstanding = pending.outstanding()
    assert len(set(outstanding.to_rows.tolist())) == len(outstanding)
    assert 6 not in outstanding.to_rows
    memory[outstanding.to_rows] = memory[outstanding.from_rows]
    assert memory.tolist() == expected.tolist()
    pending.clear()
    assert len(pending.outstanding()) == 0


def test_the_ledger_counts_each_device_apart_and_refuses_before_it_takes() -> None:
    ledger = MemoryLedger()
    ledger.take(GPU, 600, what="x", limit_bytes=1000)
    ledger.take(Device("cuda", 0), 600, what="x", limit_bytes=1000)
    with pytest.raises(DeviceUnavailable, match="on cuda:1, where 1 MiB are in use and the limit is 1 MiB"):
        ledger.take(GPU, 401, what="x", limit_bytes=1000)
    assert ledger.held_bytes(GPU) == 600
    ledger.take(GPU, 400, what="x", limit_bytes=1000)
    ledger.give_back(GPU, 1000)
    assert ledger.held_bytes(GPU) == 0


class FakeDriver:
    version = 13, 1
    gpus = (Gpu(0, "NVIDIA A", (9, 0), 1 << 34), Gpu(1, "NVIDIA B", (9, 0), 1 << 34))

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.free_bytes = 1 << 33

    def create_stream(self, index: int) -> int:
        self.streams.append(index)
        return 4096 + len(self.streams)

    def memory_info(self, index: int) -> GpuMemory:
        assert index == GPU.index
        return GpuMemory(self.free_bytes, 1 << 34)


class CudaSessions:
    """Opens sessions on the CPU that were asked for on a GPU, and notes how they were asked for."""

    def __init__(self, driver: FakeDriver) -> None:
        self.options: dict[str, dict[str, str]] = {}
        self.weights_bytes, self.error = 1 << 20, ""
        self.silently_on_cpu = False
        self._driver = driver
        self._original = onnxruntime.InferenceSession

    def __call__(self, path: str, options: Any, *, providers: list[Any], enable_fallback: int = 1) -> Any:
        session = self._original(path, session_options(), providers=["CPUExecutionProvider"])
        if providers == ["CPUExecutionProvider"]:
            return session
        assert enable_fallback == 0
        assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
        if self.error:
            raise RuntimeError(self.error)
        ((provider, of_provider),) = providers
        assert provider == "CUDAExecutionProvider"
        self.options[Path(path).name] = of_provider
        self._driver.free_bytes -= self.weights_bytes
        if not self.silently_on_cpu:
            session.get_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
        return session


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaSessions:
    driver = FakeDriver()
    sessions = CudaSessions(driver)
    runtime = InstalledRuntime("1.99", ("CUDAExecutionProvider", "CPUExecutionProvider"), "13.0")
    monkeypatch.setattr(device_model, "_driver", lambda: driver)
    monkeypatch.setattr(device_model, "installed_runtime", lambda: runtime)
    monkeypatch.setattr(device_model, "cuda_provider_fault", lambda _index: None)
    monkeypatch.setattr(device_model, "LEDGER", MemoryLedger())
    monkeypatch.setattr(onnxruntime, "InferenceSession", sessions)
    return sessions


def test_all_sessions_of_a_gpu_share_a_stream_and_only_steps_capture(
    decoders: Decoders, cuda: CudaSessions
) -> None:
    limit = 1 << 30
    model = load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU, memory_limit_bytes=limit)
    graphs = decoders.bundle.manifest.variants["cuda-fp16"]
    assert set(cuda.options) == set(graphs.file_names)
    for options in cuda.options.values():
        assert options["device_id"] == "1"
        assert options["user_compute_stream"] == "4097"
        assert options["gpu_mem_limit"] == str(limit)
        assert options["arena_extend_strategy"] == "kSameAsRequested"
        assert options["enable_skip_layer_norm_strict_mode"] == "1"
        assert options["use_tf32"] == "0"
    capturing = {name for name, options in cuda.options.items() if options["enable_cuda_graph"] == "1"}
    assert capturing == {graphs.step, graphs.beam_step}
    assert model.captures
    assert model.succession is not None
    assert device_model.LEDGER.held_bytes(GPU) == len(cuda.options) << 20
    del model
    assert device_model.LEDGER.held_bytes(GPU) == 0


def test_without_cuda_graphs_and_limit_neither_is_asked_for(decoders: Decoders, cuda: CudaSessions) -> None:
    model = load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU, use_cuda_graphs=False)
    assert not model.captures
    assert {options["enable_cuda_graph"] for options in cuda.options.values()} == {"0"}
    assert not any("gpu_mem_limit" in options for options in cuda.options.values())


def test_weights_beyond_the_limit_are_refused(decoders: Decoders, cuda: CudaSessions) -> None:
    with pytest.raises(DeviceUnavailable, match=r"the weights of .* need 1 MiB on cuda:1, .* limit is 2 MiB"):
        load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU, memory_limit_bytes=2 << 20)


def test_a_gpu_that_refuses_a_sound_graph_is_named_with_driver_library_and_versions(
    decoders: Decoders, cuda: CudaSessions
) -> None:
    cuda.error = "CUDNN_STATUS_NOT_INITIALIZED"
    with pytest.raises(DeviceUnavailable) as refusal:
        load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU)
    for part in (
        "onnxruntime 1.99 for CUDA 13.0",
        "CUDAExecutionProvider",
        "cuda:1",
        "NVIDIA B",
        "CUDA 13.1",
    ):
        assert part in refusal.value.message
    assert cuda.error in refusal.value.message


def test_a_session_that_fell_to_the_cpu_in_silence_is_refused(decoders: Decoders, cuda: CudaSessions) -> None:
    cuda.silently_on_cpu = True
    with pytest.raises(DeviceUnavailable, match="the provider did not start"):
        load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU)


def test_a_provider_that_does_not_load_is_refused_before_any_graph(
    decoders: Decoders, cuda: CudaSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_model, "cuda_provider_fault", lambda _index: "libcudnn.so.9: cannot open")
    with pytest.raises(DeviceUnavailable, match=r"libcudnn\.so\.9: cannot open"):
        load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU)
    assert cuda.options == {}


def test_an_onnxruntime_without_cuda_is_told_from_a_broken_one(
    decoders: Decoders, cuda: CudaSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = InstalledRuntime("1.99", ("CPUExecutionProvider",))
    monkeypatch.setattr(device_model, "installed_runtime", lambda: plain)
    with pytest.raises(
        DeviceUnavailable, match=r"1\.99 has no CUDAExecutionProvider; install onnxruntime-gpu"
    ):
        load_device_model(decoders.bundle, variant="cuda-fp16", device=GPU)


def test_a_variant_that_is_missing_or_not_for_a_device_is_named(decoders: Decoders) -> None:
    with pytest.raises(BundleUnsupported, match=r"no variant cpu-int8; it has cpu-fp32, cuda-fp16"):
        load_device_model(decoders.bundle, variant="cpu-int8", device=Device())
    with pytest.raises(BundleUnsupported, match="cpu-fp32 has no graphs that copy rows on a device"):
        load_device_model(decoders.bundle, variant="cpu-fp32", device=Device())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_graphs_that_contradict_the_manifest_or_are_none_are_the_bundles_fault(
    decoders: Decoders, cuda: CudaSessions, on_gpu: bool
) -> None:
    device = GPU if on_gpu else Device()
    swapped = with_graphs(decoders.bundle, copy_cross="copy_state")
    with pytest.raises(BundleCorrupt, match=r"unexpected tensor cell_0|lacks tensor cross_"):
        load_device_model(swapped, variant="cuda-fp16", device=device)
    swapped = with_graphs(decoders.bundle, step="beam_step")
    with pytest.raises(BundleCorrupt, match=r"unexpected tensor|lacks tensor"):
        load_device_model(swapped, variant="cuda-fp16", device=device)
    garbage = dataclasses.replace(
        decoders.bundle,
        manifest=decoders.bundle.manifest.model_copy(
            update={
                "variants": {
                    "cuda-fp16": decoders.bundle.manifest.variants["cuda-fp16"].model_copy(
                        update={"encoder": "manifest.json"}
                    )
                }
            }
        ),
    )
    with pytest.raises(BundleCorrupt, match=r"manifest\.json"):
        load_device_model(garbage, variant="cuda-fp16", device=device)


def with_graphs(bundle: Bundle, **roles: str) -> Bundle:
    """The same bundle with graphs in the roles of others."""
    graphs = bundle.manifest.variants["cuda-fp16"]
    changed = graphs.model_copy(update={role: getattr(graphs, other) for role, other in roles.items()})
    variants = {**bundle.manifest.variants, "cuda-fp16": changed}
    return dataclasses.replace(bundle, manifest=bundle.manifest.model_copy(update={"variants": variants}))


async def test_the_simulated_device_serves_with_two_workers(decoders: Decoders) -> None:
    served = load_served_model(decoders.bundle, variant="cuda-fp16", max_rows=4, use_shortlist=True)
    assert served.shortlist is None
    assert served.can_guide
    assert served.max_beam_size == 16
    engine = Engine([served], EngineOptions(num_workers=2, max_rows=4))
    engine.start()
    texts = tiny_texts(9)
    found = await engine.translate(TranslationRequest(texts, "en", "pt"))
    again = [
        (await engine.translate(TranslationRequest((text,), "en", "pt"))).texts[0].text for text in texts
    ]
    assert [part.text for part in found.texts] == again
    assert len(set(again)) > 4
    assert await engine.stop(drain_s=PATIENCE_S)


def test_each_worker_gets_the_model_on_its_gpu_and_there_is_none_without(
    decoders: Decoders, cuda: CudaSessions
) -> None:
    gpus = Device("cuda", 1), Device("cuda", 1)
    served = load_served_model(
        decoders.bundle,
        variant="cuda-fp16",
        max_rows=4,
        use_shortlist=True,
        devices=gpus,
        use_cuda_graphs=False,
    )
    assert served.devices == gpus
    assert {options["enable_cuda_graph"] for options in cuda.options.values()} == {"0"}
    runners = [served.make_runner(index) for index in range(2)]
    models = [runner._model for runner in runners if isinstance(runner, DeviceRunner)]
    assert len({id(model) for model in models}) == 2
    assert served.make_runner(0)._model is models[0]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="worker 2 has no GPU of its own; there are 2"):
        served.make_runner(2)


def test_a_variant_for_the_cpu_is_not_taken_to_a_gpu(decoders: Decoders) -> None:
    with pytest.raises(DeviceUnavailable, match="cpu-fp32 runs on the CPU alone, not on cuda:1"):
        load_served_model(decoders.bundle, variant="cpu-fp32", max_rows=4, use_shortlist=True, devices=[GPU])


def test_the_bundle_on_disk_is_the_one_loaded(decoders: Decoders) -> None:
    """`export_bundle` hands over a manifest that was never read; this one was."""
    folder = decoders.bundle.path
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["variants"]["cuda-fp16"]
    model = load_device_model(open_bundle(folder), variant="cuda-fp16", device=Device())
    assert model.beam_step is not None
    assert not model.captures
    assert model.succession is None  # on the CPU all workers share the sessions
