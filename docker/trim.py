"""Take out of an environment what a serving process never loads, for the image's build.

It prints what that saved.

    python trim.py cpu /opt/dragoman

A pattern that matches nothing is an error, so that these lists cannot outlive what they were written for.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

_SERVICE = {
    # Wheels carry their tests.
    "**/tests": "tests",
    # The Python binding has the runtime linked in; this one is for C programs.
    "onnxruntime/capi/libonnxruntime.so*": "the runtime a second time",
    "onnxruntime/transformers": "conversion of models",
    "onnxruntime/quantization": "conversion of models",
    "onnxruntime/tools": "conversion of models",
    "onnxruntime/datasets": "example models",
    "numpy/f2py": "Fortran bindings",
    "numpy/_core/include": "headers",
    "numpy/**/*.a": "libraries for compilers",
    "numpy/**/*.pyi": "types for checkers",
}

PATTERNS = {
    "cpu": _SERVICE,
    "gpu": {
        **_SERVICE,
        "onnxruntime/capi/libonnxruntime_providers_tensorrt.so": "a provider nobody asks for",
    },
    "nvidia": {
        "nvidia/**/include": "headers",
        "nvidia/**/*.a": "libraries for compilers",
        # Nothing names it: programs are linked to one or the other.
        "nvidia/*/lib/*.alt.so*": "a second build of the compiler for kernels",
    },
}
"""Which environments there are: the service with either runtime, and NVIDIA's libraries."""


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_dir():
        return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    return path.lstat().st_size


def trim(site_packages: Path, patterns: Mapping[str, str]) -> int:
    """Delete what the patterns match.

    Returns:
        The bytes that were deleted.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    total = 0
    for pattern, what in patterns.items():
        # Nested matches go with their parents.
        found = [path for path in sorted(site_packages.glob(pattern)) if path.exists() or path.is_symlink()]
        if not found:
            raise SystemExit(f"{pattern} matches nothing in {site_packages}: remove it from the list")
        saved = 0
        for path in found:
            if not path.exists() and not path.is_symlink():
                continue
            saved += size_bytes(path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        print(f"{saved / 1e6:8.1f} MB  {pattern}  ({what})")
        total += saved
    return total


def main() -> int:
    """Trim every site-packages folder of an environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=PATTERNS)
    parser.add_argument("environment", type=Path)
    arguments = parser.parse_args()
    folders = sorted(arguments.environment.glob("lib/python3*/site-packages"))
    if not folders:
        raise SystemExit(f"{arguments.environment} is no environment: no lib/python3*/site-packages in it")
    total = sum(trim(folder, PATTERNS[arguments.kind]) for folder in folders)
    print(f"{total / 1e6:8.1f} MB  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
