"""What is asked of the NVIDIA driver, and in which words its refusals arrive."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import NO_DEVICE, SYSTEM_DRIVER_MISMATCH, UNKNOWN, FakeCuda, FakeGpu

from app.errors import DeviceUnavailable
from app.runtime.gpu.cuda_driver import LIBRARY, Gpu, probe


def load_of(library: FakeCuda) -> Any:
    def load(name: str) -> FakeCuda:
        assert name == LIBRARY
        return library

    return load


def test_the_gpus_are_listed_as_the_driver_shows_them() -> None:
    library = FakeCuda(gpus=[FakeGpu(), FakeGpu("Fake T4", (7, 5), 15 << 30)], version=12_080)
    driver = probe(load_of(library))
    assert driver.version == (12, 8)
    assert driver.gpus == (
        Gpu(0, "Fake H200", (9, 0), 140 << 30),
        Gpu(1, "Fake T4", (7, 5), 15 << 30),
    )


def test_without_a_driver_the_loaders_words_and_the_remedy_are_given() -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    with pytest.raises(DeviceUnavailable) as refused:
        probe(absent)
    assert f"{LIBRARY}: cannot open shared object file" in refused.value.message
    assert "install the driver" in refused.value.message
    assert not refused.value.has_gpu


@pytest.mark.parametrize(
    ("status", "words", "has_gpu"),
    [
        (NO_DEVICE, "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)", False),
        (SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (system has unsupported driver)", True),
        (UNKNOWN, "CUresult 999;", True),
    ],
)
def test_a_driver_that_does_not_start_is_named_with_its_version_and_error(
    status: int, words: str, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceUnavailable) as refused:
        probe(load_of(FakeCuda(failing={"cuInit": status})))
    assert words in refused.value.message
    assert "for CUDA 13.0" in refused.value.message
    assert refused.value.message.endswith("CUDA_VISIBLE_DEVICES is '7'")
    assert refused.value.has_gpu is has_gpu


@pytest.mark.parametrize(
    "function",
    [
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceTotalMem_v2",
    ],
)
def test_whichever_question_fails_is_named(function: str) -> None:
    with pytest.raises(DeviceUnavailable, match=rf"refuses {function}: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        probe(load_of(FakeCuda(failing={function: SYSTEM_DRIVER_MISMATCH})))


def test_memory_is_read_in_the_gpus_own_context_and_the_threads_is_left_as_it_was() -> None:
    library = FakeCuda(gpus=[FakeGpu(), FakeGpu(total_bytes=16 << 30, free_bytes=3 << 30)])
    driver = probe(load_of(library))
    library.current = [0]
    for _ in range(3):
        assert driver.memory_info(1) == (3 << 30, 16 << 30)
    assert library.current == [0]
    assert library.capture_mode == 0
    assert library.num_retained == {1: 1}


def test_a_refused_reading_leaves_neither_context_nor_capture_mode_behind() -> None:
    library = FakeCuda(failing={"cuMemGetInfo_v2": UNKNOWN})
    with pytest.raises(DeviceUnavailable, match="refuses cuMemGetInfo_v2: CUresult 999"):
        probe(load_of(library)).memory_info(0)
    assert library.current == []
    assert library.capture_mode == 0


def test_a_gpu_that_the_driver_does_not_know_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="refuses cuDeviceGet: "):
        probe(load_of(FakeCuda())).memory_info(4)


def test_streams_differ_and_their_gpus_context_becomes_current() -> None:
    library = FakeCuda(gpus=[FakeGpu(), FakeGpu()])
    driver = probe(load_of(library))
    streams = [driver.create_stream(index) for index in (0, 1, 1)]
    assert len(set(streams)) == 3
    assert all(streams)
    assert library.current == [1]


def test_a_refused_stream_is_an_error_and_not_the_default_stream() -> None:
    with pytest.raises(DeviceUnavailable, match="refuses cuStreamCreate"):
        probe(load_of(FakeCuda(failing={"cuStreamCreate": UNKNOWN}))).create_stream(0)
