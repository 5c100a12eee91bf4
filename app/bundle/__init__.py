"""Bundles: the folders of graphs, vocabulary and facts that the service runs."""

from app.bundle.bundle import Bundle, bundle_folders, default_directory, discover, open_bundle, sha256_of
from app.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, Variant

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "Bundle",
    "Manifest",
    "Variant",
    "bundle_folders",
    "default_directory",
    "discover",
    "open_bundle",
    "sha256_of",
]
