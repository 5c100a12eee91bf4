"""What each process of `test_training_processes` does: toy runs, with files of its weights and threads."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import TransformerConfig
from model.training.processes import Processes, joined, left
from tests.model.training.conftest import TrainerMaker

# Some of these batches hold a single pair, so that one process has nothing to do. The large epsilon keeps
# AdamW from blowing up rounding errors where a gradient is 0 by nature, as that of a key's bias is.
SIZES = {"batch_tokens": 16, "accumulate": 2, "log_every_steps": 1, "epsilon": 1e-3}


def train(
    folder: Path, name: str, config: TransformerConfig, processes: Processes, *, interrupt_at: int = 0
) -> None:
    """One run; at a step, if it is not 0, the first process is interrupted as by Ctrl-C."""
    trainer = TrainerMaker(folder, config, dropout=0.0)(name, processes=processes, **SIZES)
    change = trainer._optimization._adamw.step

    def interrupted() -> object:
        if trainer.state.step + 1 == interrupt_at and processes.is_first:
            signal.raise_signal(signal.SIGINT)
        return change()

    trainer._optimization._adamw.step = interrupted  # type: ignore[method-assign,assignment]
    try:
        trainer.run()
        assert not interrupt_at
    except KeyboardInterrupt:
        assert trainer.state.step == interrupt_at
    weights = dict(trainer._model.state_dict())
    save_file(weights, folder / f"{name}-{trainer.state.step}-rank-{processes.rank}.safetensors")


def main(folder: Path) -> None:
    """A run without a stop, one with, and its rest; then the first one's values for all."""
    torch.set_num_threads(1)
    processes = joined(torch.device("cpu"))
    config = TransformerConfig(
        23, d_model=16, num_heads=4, encoder_layers=1, decoder_layers=1, ffn_size=24, dropout=0.0
    )
    train(folder, "whole", config, processes)
    train(folder, "parts", config, processes, interrupt_at=7)
    train(folder, "parts", config, processes)
    own = torch.full((3,), float(processes.rank + 1))
    processes.share([own])
    save_file({"own": own}, folder / f"shared-rank-{processes.rank}.safetensors")
    left()
    (folder / f"threads-rank-{processes.rank}.txt").write_text("\n".join(names_of_threads()))


def names_of_threads() -> list[str]:
    """Of this process, Python's and others, where the system tells them as Linux does."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
