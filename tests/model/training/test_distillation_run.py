"""A whole distillation: from a recurrent teacher, in rounds, stopped and gone on with."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from model.data.batches import Batch
from model.distillation import recurrence
from model.distillation.objective import Distillation
from model.saved_model import load_model
from model.training.config_file import load_run_config
from model.training.processes import Processes
from model.training.run import Surroundings, run_training
from model.training.start import Given

ROOT = Path(__file__).resolve().parents[3]
DRAW = random.Random(4)
WORDS = ["".join(DRAW.choices("abcdefghijklmnopqrstuvwxyz", k=DRAW.randint(3, 7))) for _ in range(60)]
SOURCE = """
source = "en"
target = "pt"
[data]
cache = "cache"
[data.filters]
off = ["language"]
[[data.source]]
name = "pairs"
path = "pairs.tsv"
[training]
schedule = "constant"
batch_tokens = 100
tensorboard = false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text, and a teacher that has learnt next to nothing of it."""
    monkeypatch.setattr(recurrence, "_SAMPLE_TOKENS", 500)
    pairs = [f"{a} sees {b} now\t{b} vê {a} agora\n" for a, b in itertools.pairwise(WORDS)]
    (tmp_path / "pairs.tsv").write_text("".join(pairs), encoding="utf-8")
    (tmp_path / "teacher.toml").write_text(
        f"""output = "teacher"
{SOURCE}
max_steps = 3
[vocabulary]
size = 64
byte_fallback = false
[model]
d_model = 16
num_heads = 2
encoder_layers = 1
ffn_size = 16
decoder_cell = "ssru"
""",
        encoding="utf-8",
    )
    distilled(tmp_path, "teacher", [])
    return tmp_path


def distilled(folder: Path, name: str, said: list[str]) -> dict[str, torch.Tensor]:
    around = Surroundings(
        open_model=lambda path: Given(load_model(path)),
        processes=Processes(),
        device=torch.device("cpu"),
        bfloat16=False,
        say=said.append,
    )
    return dict(load_model(run_training(load_run_config(folder / f"{name}.toml"), around)).weights)


def write(folder: Path, name: str, *, max_steps: int, rounds: int = 2) -> None:
    (folder / f"{name}.toml").write_text(
        f"""output = "{name}"
{SOURCE}
max_steps = {max_steps}
warmup_steps = 0
[training.learning_rate_scales]
"encoder*" = 0.0
"embedding.*" = 0.0
[distillation]
teacher = "teacher/model"
fit_steps = 4
rounds = {rounds}
""",
        encoding="utf-8",
    )


def test_a_distillation_in_rounds_goes_on_where_it_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[tuple[int, int] | None] = []
    new_lesson = Distillation._new_lesson

    def counting(self: Distillation, batch: Batch) -> object:
        taught.append(batch.place)
        return new_lesson(self, batch)

    monkeypatch.setattr(Distillation, "_new_lesson", counting)
    said: list[str] = []
    write(folder, "whole", max_steps=20)
    whole = distilled(folder, "whole", said)
    assert sum("unexplained after 4 steps" in line for line in said) == 2
    assert len(taught) == len(set(taught)) < 20  # in the second round the teacher was not asked again

    write(folder, "parts", max_steps=9)
    distilled(folder, "parts", [])
    write(folder, "parts", max_steps=20)
    said.clear()
    parts = distilled(folder, "parts", said)
    assert not any("unexplained" in line for line in said)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)

    write(folder, "once", max_steps=20, rounds=1)
    once = distilled(folder, "once", [])
    assert any(not torch.equal(whole[name], once[name]) for name in whole)


def test_the_configuration_of_the_guide_runs(folder: Path) -> None:
    guide = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    (whole,) = (block for block in blocks if "[distillation]" in block)
    for written, small in {
        'exclude = ["test.en", "test.pt"]': 'exclude = ["test.en", "test.pt"]\nfilters.off = ["language"]',
        "max_steps = 5000": "max_steps = 3\ntensorboard = false",
        "warmup_steps = 100": "warmup_steps = 1",
        '"../teachers/en-pt"': '"teacher/model"',
        "fit_steps = 2400": "fit_steps = 2",
    }.items():
        assert written in whole
        whole = whole.replace(written, small)
    lines = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "mono.tsv").write_text("".join(lines[:40]), encoding="utf-8")
    (folder / "rare.tsv").write_text("".join(lines[40:]), encoding="utf-8")
    for side in ("en", "pt"):
        (folder / f"test.{side}").write_text("What is tested.\n", encoding="utf-8")
    (folder / "guide.toml").write_text(whole, encoding="utf-8")

    said: list[str] = []
    distilled(folder, "guide", said)
    teacher, student = (
        dict(load_model(folder / name / "model").weights) for name in ("teacher", "run-en-pt")
    )
    assert any("unexplained after 2 steps" in line for line in said)
    for name in student.keys() & teacher.keys():
        is_frozen = name.startswith(("encoder", "embedding", "output_bias"))
        assert torch.equal(student[name], teacher[name]) == is_frozen, name
