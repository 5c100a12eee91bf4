from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from app.errors import InvalidOption, TrainingFailed
from model.data.batches import padded_batch
from model.training.config import TrainingSection
from model.training.objective import LabelSmoothing
from model.training.optimization import Optimization, learning_rate_scales
from model.training.processes import Processes
from model.transformer import Transformer
from tests.model.training.conftest import reversed_pairs

ALONE = Processes()


def section(**changes: object) -> TrainingSection:
    return TrainingSection(
        **({"schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0} | changes)  # type: ignore[arg-type]
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def network() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def add_gradients(model: nn.Module, *, seed: int, times: float = 1.0) -> None:
    random = torch.Generator().manual_seed(seed)
    (model(torch.randn(5, 3, generator=random)).square().sum() * times).backward()


def test_micro_batches_add_up_to_the_one_big_batch(
    make_model: Callable[..., Transformer],
) -> None:
    packed = reversed_pairs(12, seed=2)
    pairs = [(packed.source(n).tolist(), packed.target(n).tolist()) for n in range(12)]
    after: list[dict[str, Tensor]] = []
    gradients: list[float] = []
    for parts in ([pairs], [pairs[:2], pairs[2:3], pairs[3:]]):
        torch.manual_seed(3)
        model = make_model()
        optimization = Optimization(model, section())
        num_tokens = 0
        for part in parts:
            loss = LabelSmoothing(0.1)(model, padded_batch(part), step=1)
            loss.total.backward()  # type: ignore[no-untyped-call]
            num_tokens += loss.num_tokens
        update = optimization.update(1, num_tokens, ALONE)
        assert update.num_tokens == sum(len(target) for _, target in pairs)
        gradients.append(update.gradient_norm)
        after.append({name: value for name, value in optimization.state().items() if "exp_avg" in name})
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)
    torch.testing.assert_close(after[0], after[1])


def test_updates_are_those_of_adamw_written_by_hand() -> None:
    """Loshchilov and Hutter 2019, algorithm 2: the rate is scaled, and decay leaves vectors alone."""
    mine, theirs = network(), network()
    optimization = Optimization(
        mine,
        section(
            learning_rate=0.01,
            warmup_steps=4,
            schedule="inverse_sqrt",
            weight_decay=0.1,
            betas=(0.8, 0.9),
            epsilon=1e-6,
            learning_rate_scales={"0.*": 0.25, "*.bias": 2.0},
        ),
    )
    by_hand = torch.optim.AdamW(
        [
            {"params": [theirs[0].weight], "scale": 0.25, "weight_decay": 0.1},
            {"params": [theirs[0].bias], "scale": 0.25, "weight_decay": 0.0},
            {"params": [theirs[2].weight], "scale": 1.0, "weight_decay": 0.1},
            {"params": [theirs[2].bias], "scale": 2.0, "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for step, share in enumerate((0.25, 0.5, 0.75, 1.0, (4 / 5) ** 0.5), start=1):
        add_gradients(mine, seed=step, times=10.0)
        optimization.update(step, 10, ALONE)
        add_gradients(theirs, seed=step)
        for group in by_hand.param_groups:
            group["lr"] = 0.01 * share * group["scale"]
        by_hand.step()
        by_hand.zero_grad()
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 3.0), (0.3, 0.3), (5.0, 3.0)])
def test_the_gradient_is_clipped_and_its_norm_told_as_it_was(clip_norm: float, expected: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimization = Optimization(model, section(clip_norm=clip_norm, betas=(0.0, 0.0)))
    model.weight.grad = torch.tensor([[6.0]])
    assert optimization.update(1, 2, ALONE).gradient_norm == pytest.approx(3.0)
    assert optimization.state()["weight:exp_avg"].item() == pytest.approx(expected, rel=1e-4)


def test_what_is_frozen_never_changes_and_has_no_gradient() -> None:
    model = network()
    before = weights(model)
    optimization = Optimization(model, section(learning_rate_scales={"0.*": 0.0}, weight_decay=0.5))
    for step in (1, 2, 3):
        add_gradients(model, seed=step)
        assert model[0].weight.grad is None
        optimization.update(step, 1, ALONE)
    after = weights(model)
    assert all(torch.equal(before[name], after[name]) == name.startswith("0.") for name in before)
    assert {name.partition(":")[0] for name in optimization.state()} == {"2.weight", "2.bias"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_gradient_that_is_no_number_leaves_the_weights_and_names_the_step(
    value: float, clip_norm: float
) -> None:
    model = network()
    optimization = Optimization(model, section(clip_norm=clip_norm))
    before = weights(model)
    add_gradients(model, seed=1)
    assert model[2].bias.grad is not None
    model[2].bias.grad[0] = value
    with pytest.raises(TrainingFailed, match="step 17"):
        optimization.update(17, 1, ALONE)
    after = weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"'decodr\.\*'.*0\.weight"):
        Optimization(network(), section(learning_rate_scales={"0.*": 0.5, "decodr.*": 0.1}))


def test_a_model_that_is_frozen_as_a_whole_is_refused() -> None:
    with pytest.raises(InvalidOption, match="freezes every parameter"):
        Optimization(network(), section(learning_rate_scales={"*": 0.0}))


def test_the_first_pattern_that_fits_counts() -> None:
    names = ["decoder.0.self_norm.weight", "decoder.0.ffn.weight", "encoder.0.ffn.weight"]
    patterns = {"decoder.*.self_norm.*": 0.5, "decoder.*": 0.1}
    scales = learning_rate_scales(names, section(learning_rate_scales=patterns))
    assert scales == dict(zip(names, (0.5, 0.1, 1.0), strict=True))


def test_moments_that_were_saved_go_on_as_if_nothing_had_been() -> None:
    whole, parts = network(), network()
    first = Optimization(whole, section())
    add_gradients(whole, seed=1)
    first.update(1, 1, ALONE)
    parts.load_state_dict(whole.state_dict())
    second = Optimization(parts, section())
    second.restore(first.state())
    for model, optimization in ((whole, first), (parts, second)):
        add_gradients(model, seed=2)
        optimization.update(2, 1, ALONE)
    assert all(torch.equal(whole.state_dict()[name], parts.state_dict()[name]) for name in whole.state_dict())


def test_moments_that_were_restored_are_not_the_file_s_own_memory() -> None:
    model = network()
    optimization = Optimization(model, section())
    add_gradients(model, seed=1)
    optimization.update(1, 1, ALONE)
    kept = {name: tensor.clone() for name, tensor in optimization.state().items()}
    given = {name: tensor.clone() for name, tensor in kept.items()}
    optimization.restore(given)
    add_gradients(model, seed=2)
    optimization.update(2, 1, ALONE)
    assert all(torch.equal(given[name], kept[name]) for name in kept)


def test_moments_are_restored_to_the_device_of_their_parameters() -> None:
    """No accelerator is needed to see it: the meta device is another one than the CPU."""
    model = network()
    optimization = Optimization(model, section())
    add_gradients(model, seed=1)
    optimization.update(1, 1, ALONE)
    elsewhere = network().to("meta")
    restored = Optimization(elsewhere, section())
    restored.restore(optimization.state())
    devices = {name.rpartition(":")[2]: tensor.device.type for name, tensor in restored.state().items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_moments_of_other_parameters_are_refused() -> None:
    model = network()
    optimization = Optimization(model, section())
    add_gradients(model, seed=1)
    optimization.update(1, 1, ALONE)
    with pytest.raises(ValueError, match=r"2 differ, such as 0\.bias"):
        Optimization(network(), section(learning_rate_scales={"0.*": 0.0})).restore(optimization.state())


def test_a_pattern_that_others_before_it_leave_nothing_is_refused() -> None:
    section = TrainingSection(learning_rate_scales={"*": 1.0, "0.*": 0.0})
    with pytest.raises(InvalidOption, match=r"'0\.\*', and all that it fits is taken"):
        Optimization(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), section)
