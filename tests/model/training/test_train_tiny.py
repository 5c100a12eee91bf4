"""The example, made smaller: from a grammar's sentences to a bundle that the service's own decoder runs."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from app.bundle.manifest import LanguagePair
from exporters.export import ExportOptions, export_bundle
from exporters.trained import to_checkpoint, with_activation_scales
from model.saved_model import load_model
from model.training.config import RunConfig
from model.training.config_file import load_run_config
from model.training.metrics import read_metrics
from model.training.processes import Processes
from model.training.run import Surroundings, run_training

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_tiny"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "argv", ["make_text.py", str(folder / "text")])
    runpy.run_path(str(EXAMPLE / "make_text.py"), run_name="__main__")
    monkeypatch.undo()
    shutil.copy(EXAMPLE / "train.toml", folder)
    return folder


def smaller(config: RunConfig) -> RunConfig:
    assert config.model is not None
    assert config.dev is not None
    sizes = {"d_model": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "ffn_size": 64}
    training = {"max_steps": 60, "batch_tokens": 600, "warmup_steps": 20, "learning_rate": 5e-3}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=sizes | {"dropout": 0.0}),
            "dev": config.dev.model_copy(update={"every_steps": 30, "max_sentences": 20}),
            "training": config.training.model_copy(update=training | {"tensorboard": False}),
        }
    )


def test_no_sentence_of_the_dev_set_is_in_the_training_text(work: Path) -> None:
    train = (work / "text" / "train.tsv").read_text(encoding="utf-8").splitlines()
    dev = (work / "text" / "dev.en").read_text(encoding="utf-8").splitlines()
    sources = {line.split("\t")[0] for line in train}
    assert len(sources) == len(train) == 12_000
    assert len(set(dev)) == 200
    assert sources.isdisjoint(dev)


def test_the_example_trains_and_exports_at_a_smaller_size(work: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        around = Surroundings(
            open_model=lambda path: pytest.fail(f"{path} is not needed"),
            processes=Processes(),
            device=torch.device("cpu"),
            bfloat16=False,
            say=lambda _: None,
        )
        folder = run_training(smaller(load_run_config(work / "train.toml")), around)
    finally:
        torch.set_num_threads(threads)
    rows = read_metrics(work / "run" / "metrics.jsonl")
    dev_losses = [row["dev_loss"] for row in rows if "dev_loss" in row]
    assert len(dev_losses) == 2
    assert dev_losses[1] < dev_losses[0] < 5.2  # log(180): an even guess among the pieces

    model = load_model(folder)
    texts = (work / "text" / "dev.en").read_text(encoding="utf-8").splitlines()[:6]
    checkpoint = with_activation_scales(to_checkpoint(model), texts, max_source_tokens=128)
    bundle = export_bundle(
        checkpoint,
        work / "bundle",
        ExportOptions(
            bundle_id="tiny",
            pairs=[LanguagePair(source="en", target="pt")],
            licence="CC0-1.0",
            model_card="tiny\n",
            verification_texts=texts,
        ),
    )
    exact = next(report for report in bundle.manifest.verification if report.variant == "cpu-fp32")
    assert exact.num_identical == exact.num_segments == len(texts)
