"""AdamW with moments in 8 bits against torch's, within bounds that follow from the table and the scales of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddlbench.job import example_batch
from ddlbench.models.gpt2 import GPT2
from ddlbench.recipe import adamw8bit
from ddlbench.recipe.optimizers import BLOCK, SMALLEST, OptimizerConfig, make_optimizer, optimizers
from ddlbench.recipe.recipe import CrossEntropy
from tests.support.processes import PYTHON, run

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
SHAPES = ((64, 128), (129, 67), (SMALLEST - 1,), (32, 16, 3, 3))  # the second one ends within a block


def made(name: str, *weights: nn.Parameter) -> torch.optim.Optimizer:
    named = [(str(index), weight) for index, weight in enumerate(weights)]
    return make_optimizer(OptimizerConfig(name, **OPTIONS), named)


def start() -> list[nn.Parameter]:
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 0.02 for shape in SHAPES]
    return [*map(nn.Parameter, weights[:-1]), nn.Parameter(weights[-1].to(memory_format=torch.channels_last))]


def set_gradients(step: int, *copies: list[nn.Parameter]) -> None:
    """Gradients of many magnitudes, as in a network."""
    torch.manual_seed(100 + step)
    for weights in zip(*copies, strict=True):
        gradient = torch.randn(weights[0].shape) * 10 ** torch.empty(weights[0].shape).uniform_(-4, -2)
        for weight in weights:
            weight.grad = gradient.clone()


def updated(steps: int) -> tuple[list[nn.Parameter], list[nn.Parameter], torch.optim.Optimizer, torch.optim.Optimizer]:
    """Weights after so many updates in 8 bits, those of torch's AdamW, and both optimizers."""
    weights, expected = start(), start()
    ours, torchs = made("adamw8bit", *weights), made("adamw", *expected)
    for step in range(steps):
        set_gradients(step, weights, expected)
        ours.step()
        torchs.step()
    return weights, expected, ours, torchs


def unpacked(optimizer: Any, weight: nn.Parameter, signed: bool) -> tuple[Tensor, Tensor]:
    """A moment as it is kept, and how far it can be from what was rounded: half of the larger gap beside its value in
    the table, times the scale of its block. On the CPU bitsandbytes first rounds m / scale to a multiple of 2^-15
    (docs/adr/0027). In the order of the memory."""
    state, table = optimizer.state[weight], optimizer.tables[0 if signed else 1]
    name = adamw8bit.MOMENTS[0 if signed else 1]
    codes = state[name].as_strided((weight.numel(),), (1,)).int()
    gaps = table.diff()
    beside = torch.maximum(torch.cat([gaps, gaps[-1:]]), torch.cat([gaps[:1], gaps]))
    scale = state[f"{name}_scale"].repeat_interleave(BLOCK)[: weight.numel()]
    return (table[codes] * scale).double(), ((beside[codes] / 2 + 2**-15) * scale).double()


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def quantized(weights: list[nn.Parameter]) -> list[int]:
    return [index for index, weight in enumerate(weights) if weight.numel() >= SMALLEST]


def test_the_first_update_is_that_of_adamw() -> None:
    """Bit for bit: weights move by moments that are not rounded yet."""
    weights, expected, *_ = updated(1)
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))


def test_a_small_tensor_has_the_updates_of_adamw() -> None:
    weights, expected, *_ = updated(3)
    same = [torch.equal(*pair) for pair in zip(weights, expected, strict=True)]
    assert same == [False, False, True, False]
    assert quantized(weights) == [0, 1, 3]


def test_moments_are_rounded_to_the_nearest_code_of_their_block() -> None:
    weights, expected, ours, torchs = updated(1)
    for index in quantized(weights):
        exact = torchs.state[expected[index]]
        for name, signed in zip(adamw8bit.MOMENTS, (True, False), strict=True):
            kept, off = unpacked(ours, weights[index], signed)
            assert ((kept - flat(exact[name])).abs() <= off).all(), (index, name)


def test_an_update_is_within_the_quantisers_bound_of_adamws() -> None:
    """The second update, from moments that have been rounded once. A weight's step is monotonic in either moment, so
    the corners of m +- dm and v +- dv bound what torch's AdamW makes of the moments that it has not rounded:

    w' in (1 - lr wd) w - lr / c1 [min, max] of m' / (sqrt(v') / c2 + eps), m' = b1 (m +- dm) + (1 - b1) g, v' alike
    """
    weights, expected, ours, torchs = updated(1)
    large = quantized(weights)
    before = [flat(weights[index]).clone().double() for index in large]
    kept = [[unpacked(ours, weights[index], signed) for signed in (True, False)] for index in large]
    set_gradients(1, weights, expected)
    ours.step()
    torchs.step()
    (b1, b2), lr, eps = OPTIONS["betas"], OPTIONS["lr"], 1e-8
    c1, c2 = 1 - b1**2, (1 - b2**2) ** 0.5
    for index, old, ((m, dm), (v, dv)) in zip(large, before, kept, strict=True):
        gradient = expected[index].grad
        assert gradient is not None
        g = flat(torch.empty_like(expected[index]).copy_(gradient)).double()
        steps = [
            lr / c1 * (b1 * (m + one * dm) + (1 - b1) * g)
            / ((b2 * (v + other * dv).clamp(min=0) + (1 - b2) * g * g).sqrt() / c2 + eps)
            for one in (-1, 0, 1)
            for other in (-1, 0, 1)
        ]  # fmt: skip
        decayed, corners = old * (1 - lr * OPTIONS["weight_decay"]), torch.stack(steps)
        assert torch.allclose(flat(weights[index]).double(), decayed - steps[4], rtol=0, atol=1e-8)
        exact = flat(expected[index]).double()
        assert (exact >= decayed - corners.amax(0) - 1e-8).all()
        assert (exact <= decayed - corners.amin(0) + 1e-8).all()
        assert (corners.amax(0) - corners.amin(0)).median() < 0.25 * lr  # the bound says something


def test_pieces_on_the_cpu_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = start(), start()
    one, other = made("adamw8bit", *whole), made("adamw8bit", *pieces)
    for step in range(2):
        set_gradients(step, whole, pieces)
        one.step()
        with monkeypatch.context() as patched:
            patched.setattr(adamw8bit, "CPU_PIECE", 2 * BLOCK)
            other.step()
    assert all(torch.equal(*pair) for pair in zip(whole, pieces, strict=True))


def test_bytes_of_the_state_are_those_of_the_formula() -> None:
    """Two codes a number and two scales for each 256 numbers that are begun; a small tensor has 8 bytes a number."""
    weights = start()
    ours = made("adamw8bit", *weights)
    set_gradients(0, weights)
    ours.step()
    held = [sum(value.nbytes for value in ours.state[weight].values()) - 4 for weight in weights]  # without `step`
    assert held == [2 * 8192 + 8 * 32, 2 * 8643 + 8 * 34, 8 * 4095, 2 * 4608 + 8 * 18]
    costs = optimizers["adamw8bit"].costs
    assert [costs.state_bytes([weight.numel()]) for weight in weights] == held
    assert costs.state_bytes([weight.numel() for weight in weights]) == sum(held)


def final_loss(name: str, seed: int) -> float:
    """The mean loss of the last 10 of 40 updates of a small GPT-2 that learns a permutation of its input."""
    model = GPT2("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=64, seq_len=16, dropout=0.0)
    torch.manual_seed(seed)
    net, loss = model.build(), CrossEntropy(0.0)
    config = OptimizerConfig(name, lr=3e-3, betas=[0.9, 0.95], weight_decay=0.1)
    optimizer, batch = make_optimizer(config, net.named_parameters()), example_batch(model, 8)
    losses = list[float]()
    for _ in range(40):
        tokens = torch.randint(64, batch.inputs.shape)
        value = loss(net(tokens), (5 * tokens + 3) % 64)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[0] > 4.0  # chance: ln 64 = 4.16
    return sum(losses[-10:]) / 10


@pytest.mark.slow
def test_losses_are_within_the_band_of_seeds() -> None:
    """In 8 bits the loss of each seed differs from that of AdamW by less than the seeds of AdamW differ."""
    ours, torchs = ([final_loss(name, seed) for seed in range(4)] for name in ("adamw8bit", "adamw"))
    band = max(torchs) - min(torchs)
    assert max(torchs) < 1.0, "it learns"
    assert all(abs(one - other) < band / 4 for one, other in zip(ours, torchs, strict=True))
    assert min(torchs) < sum(ours) / len(ours) < max(torchs)


def test_the_library_prints_no_line_of_its_own(tmp_path: Path) -> None:
    """It warns at its import, for example on a GPU with another version of CUDA than it is built for."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes/__init__.py").write_text("import logging; logging.getLogger(__name__).warning('planted')")
    (tmp_path / "bitsandbytes/functional.py").write_text("create_dynamic_map = None")
    source = Path(adamw8bit.__file__).parents[2]
    done = run(PYTHON, "-c", "import ddlbench.recipe.adamw8bit", PYTHONPATH=f"{tmp_path}:{source}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
