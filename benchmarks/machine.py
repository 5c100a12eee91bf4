"""Where and with what a figure was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_LIBRARIES = ("onnxruntime", "ctranslate2", "numpy")
_VNNI_FLAGS = {"avx512_vnni", "avx_vnni"}


@dataclass(frozen=True)
class Machine:
    """The facts beside every table.

    Attributes:
        cpu: the CPU's own name.
        num_cores: cores this process may use.
        vnni: whether the CPU multiplies uint8 by int8 without an intermediate that saturates.
        avx512: whether it has AVX-512F.
        python: version.
        libraries: version by name, of those installed.
        commit: of this repository, with "-dirty" when the tree has changes.
    """

    cpu: str
    num_cores: int
    vnni: bool
    avx512: bool
    python: str
    libraries: dict[str, str]
    commit: str

    def line(self) -> str:
        """All of it on one line."""
        libraries = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        return (
            f"{self.cpu}, {self.num_cores} cores, {'' if self.vnni else 'no '}VNNI, "
            f"{'' if self.avx512 else 'no '}AVX-512, Python {self.python}, {libraries}, commit {self.commit}"
        )


def this_machine() -> Machine:
    """Look."""
    flags = _cpu_field("flags").split()
    return Machine(
        cpu=_cpu_field("model name") or platform.processor(),
        num_cores=num_usable_cores(),
        vnni=has_vnni(flags),
        avx512="avx512f" in flags,
        python=platform.python_version(),
        libraries=_library_versions(),
        commit=_commit(),
    )


def num_usable_cores() -> int:
    """Cores the operating system lets this process use."""
    return len(os.sched_getaffinity(0))


def has_vnni(flags: Collection[str]) -> bool:
    """Whether a CPU with these flags of /proc/cpuinfo has VNNI."""
    return not _VNNI_FLAGS.isdisjoint(flags)


def _cpu_field(name: str) -> str:
    if not _CPU_INFO.exists():
        return ""
    for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).resolve().parent
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
