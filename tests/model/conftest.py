from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from model.config import TransformerConfig
from model.transformer import Transformer

ConfigMaker = Callable[..., TransformerConfig]
ModelMaker = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(20170612)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_config() -> ConfigMaker:
    def make(**changes: object) -> TransformerConfig:
        sizes: dict[str, object] = {
            "vocabulary_size": 23,
            "d_model": 16,
            "num_heads": 4,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "ffn_size": 24,
            "dropout": 0.0,
        }
        return TransformerConfig(**(sizes | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def randomise() -> Callable[[nn.Module], None]:
    """Give every parameter, biases and norms included, a value that a wrong copy would show."""

    def draw(module: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                is_scale = "norm" in name and name.endswith("weight")
                parameter.normal_(1.0 if is_scale else 0.0, 0.3)

    return draw


@pytest.fixture
def make_model(make_config: ConfigMaker, randomise: Callable[[nn.Module], None]) -> ModelMaker:
    def make(**changes: object) -> Transformer:
        model = Transformer(make_config(**changes))
        randomise(model)
        return model.eval()

    return make
