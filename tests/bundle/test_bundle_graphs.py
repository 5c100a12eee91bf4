"""Graphs that read what they must not, or do not fit their manifest, are refused before they run."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnxruntime
import pytest
from edited_bundles import Edit, edit_manifest, record

from app.bundle import open_bundle
from app.bundle.onnx_paths import external_files
from app.errors import BundleCorrupt
from app.runtime.onnx_model import load_model


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
