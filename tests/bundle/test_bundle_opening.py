"""Every way a bundle can be damaged or hostile ends in a named error before anything uses it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options

from app.bundle import MANIFEST_NAME, Bundle, discover, open_bundle, sha256_of
from app.bundle.onnx_paths import external_files
from app.decoding.shortlist import Shortlist
from app.errors import BundleCorrupt, BundleNotFound, BundleUnsupported
from app.runtime.onnx_model import load_model
from app.runtime.served_model import ServedModel, load_served_model
from exporters.export import export_bundle

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("original") / "tiny"
    export_bundle(tiny_checkpoint(shortlist=True), path, tiny_options())
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundles" / "tiny"))


def edit_manifest(folder: Path, edit: Edit) -> None:
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def record(folder: Path, name: str) -> None:
    """Make the manifest agree with a file, as a bundle's maker would."""
    facts = {"size_bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    edit_manifest(folder, lambda document: document["files"].__setitem__(name, facts))


def serve(bundle: Bundle) -> ServedModel:
    return load_served_model(bundle, variant="cpu-int8", max_rows=4, use_shortlist=True)


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


def redirect(folder: Path, location: str) -> None:
    """Let the encoder read its weights from somewhere else, as a hostile bundle's maker would."""
    name = "encoder.cpu-int8.onnx"
    model = onnx.load(str(folder / name), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / name).write_bytes(model.SerializeToString())
    record(folder, name)


@pytest.mark.parametrize("kind", ["above", "absolute", "through a folder", "a link", "not recorded"])
def test_a_graph_cannot_read_a_file_that_the_manifest_does_not_record(folder: Path, kind: str) -> None:
    secret = folder.parent / "secret.bin"
    shutil.copy(folder / "weights.bin", secret)
    (folder / "sub").mkdir()
    (folder / "link.bin").symlink_to(secret)
    shutil.copy(secret, folder / "loose.bin")
    location = {
        "above": "../secret.bin",
        "absolute": str(secret),
        "through a folder": "sub/../../secret.bin",
        "a link": "link.bin",
        "not recorded": "loose.bin",
    }[kind]
    redirect(folder, location)
    with pytest.raises(BundleCorrupt, match="does not record"):
        load_model(open_bundle(folder), variant="cpu-int8", use_shortlist=False)


def test_a_graph_may_read_another_recorded_file(folder: Path) -> None:
    shutil.copy(folder / "weights.bin", folder / "other.bin")
    record(folder, "other.bin")
    redirect(folder, "other.bin")
    load_model(open_bundle(folder), variant="cpu-int8", use_shortlist=False)


def hidden_models() -> dict[str, onnx.ModelProto]:
    """A model for each place of onnx.proto3 where a tensor with external data can hide."""

    def outside() -> onnx.TensorProto:
        tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="offset", value="0")
        tensor.external_data.add(key="location", value="../secret.bin")
        return tensor

    def graph(**parts: object) -> onnx.GraphProto:
        return onnx.GraphProto(name="g", **parts)

    def node(**attribute: object) -> onnx.NodeProto:
        return onnx.NodeProto(op_type="If", attribute=[onnx.AttributeProto(name="a", **attribute)])

    sparse = onnx.SparseTensorProto(values=outside(), dims=[4])
    deep = graph(initializer=[outside()])
    for _ in range(20):
        deep = graph(node=[node(g=deep)])
    function = onnx.FunctionProto(name="f", node=[node(t=outside())])
    default = onnx.FunctionProto(name="f", attribute_proto=[onnx.AttributeProto(name="a", t=outside())])
    return {
        "an initializer": onnx.ModelProto(graph=graph(initializer=[outside()])),
        "a sparse initializer": onnx.ModelProto(graph=graph(sparse_initializer=[sparse])),
        "a constant": onnx.ModelProto(graph=graph(node=[node(t=outside())])),
        "constants": onnx.ModelProto(graph=graph(node=[node(tensors=[outside()])])),
        "sub-graphs": onnx.ModelProto(graph=graph(node=[node(graphs=[graph(initializer=[outside()])])])),
        "a sparse constant": onnx.ModelProto(graph=graph(node=[node(sparse_tensor=sparse)])),
        "sparse constants": onnx.ModelProto(graph=graph(node=[node(sparse_tensors=[sparse])])),
        "twenty branches deep": onnx.ModelProto(graph=deep),
        "a function": onnx.ModelProto(functions=[function]),
        "a function's default": onnx.ModelProto(functions=[default]),
        "training": onnx.ModelProto(
            training_info=[onnx.TrainingInfoProto(algorithm=graph(initializer=[outside()]))]
        ),
    }


@pytest.mark.parametrize("place", list(hidden_models()))
def test_external_data_is_found_wherever_a_tensor_can_be(place: str) -> None:
    assert external_files(hidden_models()[place].SerializeToString()) == {"../secret.bin"}


def test_a_file_that_is_no_protobuf_is_no_graph(folder: Path) -> None:
    assert external_files(b"") == set()
    for content in (b"\xff" * 20, b"\x3a\x7f", b"\x3b", b"\x3d\x00", b"hello world"):
        with pytest.raises(ValueError, match=r"field|number|message|wire type"):
            external_files(content)
    (folder / "encoder.cpu-int8.onnx").write_bytes(b"\xff" * 20)
    record(folder, "encoder.cpu-int8.onnx")
    with pytest.raises(BundleCorrupt, match="not an ONNX graph"):
        load_model(open_bundle(folder), variant="cpu-int8", use_shortlist=False)


def test_a_graph_that_onnxruntime_refuses_is_named(folder: Path) -> None:
    (folder / "encoder.cpu-int8.onnx").write_bytes(b"")
    record(folder, "encoder.cpu-int8.onnx")
    with pytest.raises(BundleCorrupt, match=f"onnxruntime {onnxruntime.__version__} cannot load"):
        load_model(open_bundle(folder), variant="cpu-int8", use_shortlist=False)


MISFITS: dict[str, Edit] = {
    "a decoder layer too many": lambda d: d["sizes"].update(decoder_layers=3),
    "a decoder layer too few": lambda d: d["sizes"].update(decoder_layers=1),
    "another number of heads": lambda d: d["sizes"].update(num_heads=2),
    "another head size": lambda d: d["sizes"].update(head_size=9),
    "a state too few": lambda d: d["state"].pop(),
    "a state of another name": lambda d: d["state"][0].update(name="self_key_9"),
    "a state of another shape": lambda d: d["state"][0].update(shape=[4, 9]),
    "a state of another kind": lambda d: d["state"][0].update(kind="cell", shape=[1, 32]),
    "encoder and step exchanged": lambda d: d["variants"]["cpu-int8"].update(encoder="step.cpu-int8.onnx"),
    "shortlist step for the plain one": lambda d: d["variants"]["cpu-int8"].update(
        step="shortlist_step.cpu-int8.onnx"
    ),
    "another variant's candidates": lambda d: d["variants"]["cpu-int8"].update(
        candidates="candidates.cpu-fp32.onnx"
    ),
}


@pytest.mark.parametrize("edit", [pytest.param(edit, id=name) for name, edit in MISFITS.items()])
def test_graphs_that_do_not_fit_the_manifest_are_refused_at_load_and_not_by_the_first_request(
    folder: Path, edit: Edit
) -> None:
    edit_manifest(folder, edit)
    bundle = open_bundle(folder)

    def load_both() -> None:
        for use_shortlist in (False, True):
            load_model(bundle, variant="cpu-int8", use_shortlist=use_shortlist)

    with pytest.raises(BundleCorrupt, match="tensor"):
        load_both()


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
