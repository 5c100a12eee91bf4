"""The mean of several models, and `dragoman export average`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint
from typer.testing import CliRunner

import exporters.cli as cli_module
from app.errors import InvalidOption
from exporters.torch_reference import to_module
from model.averaging import mean_model
from model.saved_model import SavedModel, load_model, save_model


def tiny_model(account: str, *, shift: float = 0.0) -> SavedModel:
    """A tiny model whose decoder's weights are all moved by `shift`."""
    checkpoint = tiny_checkpoint()
    weights = {
        name: tensor + shift if name.startswith("decoder") else tensor.clone()
        for name, tensor in to_module(checkpoint).state_dict().items()
    }
    return SavedModel(
        config=checkpoint.config,
        weights=weights,
        tokenizer=checkpoint.tokenizer,
        source="en",
        target="pt",
        provenance={"licence": "CC0-1.0", "training": account},
        max_source_tokens=40,
    )


def test_a_mean_lies_between_and_what_is_equal_stays_to_the_bit() -> None:
    models = [tiny_model("9 steps"), tiny_model("5 steps", shift=0.5), tiny_model("1 step", shift=1.0)]
    mean = mean_model(models)
    moved = [name for name in mean.weights if name.startswith("decoder")]
    assert moved
    for name, tensor in mean.weights.items():
        assert tensor.dtype == torch.float32
        if name in moved:
            torch.testing.assert_close(tensor, models[1].weights[name])
        else:
            assert torch.equal(tensor, models[0].weights[name])
    assert mean.provenance == {
        "licence": "CC0-1.0",
        "training": "mean of 3 models: (9 steps), (5 steps), (1 step)",
    }
    assert (mean.config, mean.source, mean.max_source_tokens) == (models[0].config, "en", 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "es"}, "model 2 has another pair of languages than the first one"),
        ({"tokenizer": b"other"}, "model 2 has another vocabulary"),
        ({"unknown_id": 5}, "model 2 has another vocabulary"),
        ({"provenance": {"licence": "MPL-2.0"}}, "model 2 has another licence"),
    ],
)
def test_models_that_mean_other_things_have_no_mean(change: dict[str, object], message: str) -> None:
    other = dataclasses.replace(tiny_model("1 step"), **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=message):
        mean_model([tiny_model("9 steps"), other])
    with pytest.raises(InvalidOption, match=message.replace("2", "3")):
        mean_model([tiny_model("9 steps"), tiny_model("5 steps"), other])


def test_models_of_another_shape_have_no_mean() -> None:
    first = tiny_model("9 steps")
    other = dataclasses.replace(first, config=dataclasses.replace(first.config, activation="gelu"))
    with pytest.raises(InvalidOption, match="another shape"):
        mean_model([first, other])


def test_a_run_and_the_weights_of_the_bundle_that_it_went_on_from_have_a_mean() -> None:
    # A bundle's weights come with the default dropout, a run's with its own.
    run = tiny_model("9 steps")
    of_bundle = dataclasses.replace(run, config=dataclasses.replace(run.config, dropout=0.25))
    assert run.config.dropout != 0.25
    assert mean_model([of_bundle, run]).config.dropout == 0.25


def test_one_model_is_no_mean() -> None:
    with pytest.raises(InvalidOption, match="models given: 1; a mean needs at least 2"):
        mean_model([tiny_model("9 steps")])


def test_the_command_writes_a_model_folder_and_replaces_none(tmp_path: Path) -> None:
    for name, shift in {"one": 0.0, "two": 2.0}.items():
        save_model(tiny_model(name, shift=shift), tmp_path / name)
    arguments = ["average", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "mean")]
    assert CliRunner().invoke(cli_module.app, arguments).exit_code == 0
    written = load_model(tmp_path / "mean")
    expected = tiny_model("", shift=1.0)
    for name, tensor in written.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name])
    again = CliRunner().invoke(cli_module.app, arguments)
    assert isinstance(again.exception, InvalidOption)
    assert "exists" in again.exception.message
