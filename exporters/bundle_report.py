"""What a command tells of the bundle it wrote."""

from __future__ import annotations

from rich.console import Console

from app.bundle import Bundle


def report(bundle: Bundle, console: Console) -> None:
    """Its size, and how its graphs compare with PyTorch."""
    manifest = bundle.manifest
    num_bytes = sum(record.size_bytes for record in manifest.files.values())
    console.print(f"{manifest.id}: {num_bytes / 1e6:.1f} MB in {bundle.path}")
    for found in manifest.verification:
        console.print(
            f"  {found.variant}: {found.num_identical} of {found.num_segments} segments as PyTorch, "
            f"scores within {found.max_score_difference:.1e}"
        )
