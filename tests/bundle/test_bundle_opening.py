"""Every way a bundle can be damaged or hostile ends in a named error before anything uses it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edited_bundles import Edit, edit_manifest, record, serve

from app.bundle import MANIFEST_NAME, discover, open_bundle
from app.decoding.shortlist import Shortlist
from app.errors import BundleCorrupt, BundleNotFound, BundleUnsupported
from app.runtime.onnx_model import load_model


def test_an_intact_bundle_opens_and_can_be_discovered_from_itself_or_its_parent(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert discover(folder) == discover(folder.parent) == (bundle,)
    assert serve(bundle).id == "tiny"


@pytest.mark.parametrize(
    "name", ["weights.bin", "encoder.cpu-int8.onnx", "sentencepiece.model", "MODEL_CARD.md"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "altered", "a folder"])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "altered":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "a folder":
        path.mkdir()
    with pytest.raises(BundleCorrupt, match=name):
        open_bundle(folder)


def test_an_altered_file_passes_only_when_nobody_asks_for_checksums(folder: Path) -> None:
    path = folder / "MODEL_CARD.md"
    path.write_bytes(path.read_bytes()[::-1])
    assert open_bundle(folder, verify=False).manifest.id == "tiny"
    path.write_bytes(b"")
    with pytest.raises(BundleCorrupt, match="0 bytes"):
        open_bundle(folder, verify=False)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1], {"a": 1}])
def test_another_format_version_is_unsupported_whatever_else_the_manifest_says(
    folder: Path, version: object
) -> None:
    def edit(document: dict[str, Any]) -> None:
        document.clear()
        document["format_version"] = version

    edit_manifest(folder, edit)
    with pytest.raises(BundleUnsupported, match="reads 1"):
        open_bundle(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"1", b'"x"', b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000]
)
def test_a_manifest_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises((BundleCorrupt, BundleUnsupported), match=MANIFEST_NAME):
        open_bundle(folder)


def test_a_huge_manifest_is_refused_before_it_is_read(folder: Path) -> None:
    with (folder / MANIFEST_NAME).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleCorrupt, match="at most"):
        open_bundle(folder)


def test_a_folder_without_manifest_is_no_bundle(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST_NAME).rename(folder / "manifest.json.partial")
    with pytest.raises(BundleNotFound, match="not a finished bundle"):
        open_bundle(folder)
    with pytest.raises(BundleNotFound, match="no bundle"):
        discover(folder.parent)
    with pytest.raises(BundleNotFound, match="not a folder"):
        discover(tmp_path / "nowhere")


NAMES = [
    "../weights.bin",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "",
    ".hidden",
    "a\\b",
    "a\n",
    "a\0",
    "C:x",
    "x" * 200,
    "é",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["files", "tokenizer", "shortlist", "graph"])
def test_a_name_that_could_leave_the_folder_is_refused(folder: Path, name: str, where: str) -> None:
    def edit(document: dict[str, Any]) -> None:
        if where == "files":
            document["files"][name] = document["files"]["weights.bin"]
        elif where == "graph":
            document["variants"]["cpu-int8"]["encoder"] = name
        else:
            document[where] = name

    edit_manifest(folder, edit)
    with pytest.raises(BundleCorrupt, match=MANIFEST_NAME):
        open_bundle(folder)


EDITS: dict[str, Edit] = {
    "unknown key": lambda d: d.update(colour="blue"),
    "unknown key inside": lambda d: d["sizes"].update(colour="blue"),
    "missing key": lambda d: d.pop("licence"),
    "no files": lambda d: d.update(files={}),
    "no variant": lambda d: d.update(variants={}),
    "unknown variant": lambda d: d["variants"].update({"cpu-int4": d["variants"]["cpu-int8"]}),
    "no pair": lambda d: d.update(pairs=[]),
    "no state": lambda d: d.update(state=[]),
    "language that is none": lambda d: d["pairs"][0].update(source="english please"),
    "id that is a path": lambda d: d.update(id="../tiny"),
    "number as text": lambda d: d["sizes"].update(d_model="32"),
    "fraction of a layer": lambda d: d["sizes"].update(decoder_layers=1.5),
    "more layers than fit in memory": lambda d: d["sizes"].update(decoder_layers=2**31),
    "layers nobody would build": lambda d: d["sizes"].update(decoder_layers=10**6),
    "sources shorter than a word": lambda d: d["limits"].update(max_source_tokens=2),
    "more positions than fit in memory": lambda d: d["limits"].update(max_target_tokens=2**40),
    "no heads": lambda d: d["sizes"].update(num_heads=0),
    "ratio not a number": lambda d: d["limits"].update(max_target_ratio=float("nan")),
    "infinite ratio": lambda d: d["limits"].update(max_target_ratio=float("inf")),
    "half a shortlist": lambda d: d["variants"]["cpu-int8"].update(candidates=None),
    "graph that is not recorded": lambda d: d["variants"]["cpu-int8"].update(step="other.onnx"),
    "end of sentence outside the vocabulary": lambda d: d["tokens"].update(eos_id=10**6),
    "negative start": lambda d: d["tokens"].update(start_id=-1),
    "state of no known kind": lambda d: d["state"][0].update(kind="tape"),
    "state without heads": lambda d: d["state"][0].update(shape=[32]),
    "checksum that is none": lambda d: d["files"]["weights.bin"].update(sha256="x"),
    "negative size": lambda d: d["files"]["weights.bin"].update(size_bytes=-1),
}


@pytest.mark.parametrize("edit", [pytest.param(edit, id=name) for name, edit in EDITS.items()])
def test_a_manifest_that_says_something_impossible_is_refused(folder: Path, edit: Edit) -> None:
    edit_manifest(folder, edit)
    with pytest.raises(BundleCorrupt, match=MANIFEST_NAME):
        open_bundle(folder)


@pytest.mark.parametrize("verify", [True, False])
def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(folder: Path, verify: bool) -> None:
    moved = folder.parent.parent / "elsewhere.bin"
    (folder / "weights.bin").rename(moved)
    (folder / "weights.bin").symlink_to(moved)
    with pytest.raises(BundleCorrupt, match="link out of its bundle"):
        open_bundle(folder, verify=verify)
    (folder / "weights.bin").unlink()
    moved.rename(folder / "weights.real")
    (folder / "weights.bin").symlink_to("weights.real")
    assert open_bundle(folder, verify=verify).manifest.id == "tiny"


def test_a_manifest_that_is_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    moved = folder.parent.parent / "elsewhere.json"
    (folder / MANIFEST_NAME).rename(moved)
    (folder / MANIFEST_NAME).symlink_to(moved)
    with pytest.raises(BundleCorrupt, match="link out of its bundle"):
        open_bundle(folder)


def test_a_version_of_any_length_is_named_in_a_short_message(folder: Path) -> None:
    edit_manifest(folder, lambda document: document.update(format_version="9" * 3000))
    with pytest.raises(BundleUnsupported) as refused:
        open_bundle(folder)
    assert len(refused.value.message) < 400 + len(str(folder))


def test_a_linked_bundle_folder_is_opened_like_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(folder)
    assert open_bundle(tmp_path / "current").manifest.id == "tiny"


def test_two_bundles_of_one_id_are_refused_with_both_names(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    with pytest.raises(BundleCorrupt, match="same id tiny") as caught:
        discover(folder.parent)
    assert str(folder) in str(caught.value)
    assert str(folder.parent / "copy") in str(caught.value)


def test_a_file_nobody_recorded_cannot_be_asked_for(folder: Path) -> None:
    with pytest.raises(BundleCorrupt, match="records no file"):
        open_bundle(folder).file("other.bin")


def test_a_variant_the_bundle_lacks_is_named_beside_those_it_has(folder: Path) -> None:
    edit_manifest(folder, lambda document: document["variants"].pop("cpu-fp32"))
    with pytest.raises(BundleUnsupported, match="cpu-fp32; it has cpu-int8"):
        load_model(open_bundle(folder), variant="cpu-fp32", use_shortlist=False)


def test_a_multilingual_bundle_is_refused_and_not_served_into_some_language(folder: Path) -> None:
    edit_manifest(folder, lambda document: document["pairs"][0].update(target_token_id=5))
    with pytest.raises(BundleUnsupported, match="by a token"):
        serve(open_bundle(folder))


def test_a_tokenizer_of_another_vocabulary_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda document: document["sizes"].update(vocabulary_size=97))
    with pytest.raises(BundleCorrupt, match="96 pieces and the model 97"):
        serve(open_bundle(folder))


@pytest.mark.parametrize(
    ("shortlist", "message"),
    [
        (Shortlist(np.zeros(96, np.int64), np.zeros(0, np.int32), num_frequent=10), "for 95 tokens"),
        (Shortlist(np.zeros(97, np.int64), np.zeros(0, np.int32), num_frequent=0), "never allows the end"),
    ],
)
def test_a_shortlist_that_would_break_every_translation_is_refused(
    folder: Path, shortlist: Shortlist, message: str
) -> None:
    shortlist.save(folder / "shortlist.bin")
    record(folder, "shortlist.bin")
    with pytest.raises(BundleCorrupt, match=message):
        serve(open_bundle(folder))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    os.mkfifo(folder / "weights.bin")
    with pytest.raises(BundleCorrupt, match="missing"):
        open_bundle(folder)
