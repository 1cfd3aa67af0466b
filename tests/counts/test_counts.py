from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ddlbench.counts.counting import FakeModel, count
from ddlbench.counts.counts import Share
from ddlbench.counts.operations import Observer
from ddlbench.frameworks.shared.checkpointing import keep_costly_outputs
from ddlbench.frameworks.spatial.layers import Window
from ddlbench.job import Model, example_batch
from ddlbench.measure.formulas.flops import forward_flops_per_block, training_flops
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG

SELECTIVE = Share(selective=True)
MODELS = [
    ResNet("resnet50", [1, 1, 1, 1], width_per_group=16, image_size=64, num_classes=10),
    VGG("vgg16", channels=[8, 8, 16, 16, 16], hidden=32, dropout=0.0, image_size=64, num_classes=10),
    GPT2("gpt2_small", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=16, dropout=0.0),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_flops_and_parameters_are_those_of_the_model(model) -> None:
    counts = count(model, "fp32", "cpu")
    assert {block.name: block.flops for block in counts.blocks} == forward_flops_per_block(model)
    assert counts.parameter_count == sum(parameter.numel() for parameter in model.build().parameters())


@pytest.mark.parametrize(("model", "again"), [*zip(MODELS, (0, 0, 2 * (2 * 16 * 16 * 32)), strict=True)])
def test_training_flops_and_the_products_that_fused_attention_computes_again(model: Model, again: int) -> None:
    """Backward of attention: 5 matrix products of which one is a recomputation; 2 B H T T D each."""
    counts = count(model, "fp32", "cuda")
    total = sum(block.flops + block.backward.flops.sum() for block in counts.blocks)
    assert total == training_flops(model) + again


def test_saved_bytes_are_what_autograd_saves() -> None:
    """Beside the real model with 3 samples, whose storages are counted as it runs, without weights and images."""
    model = MODELS[1]
    counts = count(model, "fp32", "cpu")
    saved: dict[int, int] = {}
    real = model.build()
    images = torch.zeros(3, 3, 64, 64)
    uncounted = {tensor.untyped_storage().data_ptr() for tensor in (*real.parameters(), images)}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in uncounted:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = real(images)
        torch.nn.functional.cross_entropy(output, torch.zeros(3, dtype=torch.int64)).backward()
    predicted = sum(block.saved.at(3) for block in counts.blocks)
    assert predicted == pytest.approx(sum(saved.values()), rel=0.01)


@pytest.mark.parametrize("model", [*MODELS[:2], replace(MODELS[2], dropout=0.5)], ids=lambda model: model.name)
def test_selective_keeps_inputs_and_outputs_of_costly_operators(model: Model) -> None:
    """Beside the storages that exist after the forward pass of the model: three samples of GPT-2 and images."""
    samples, counts = 3, count(model, "fp32", "cpu", share=SELECTIVE)
    with FakeTensorMode():
        network, batch = model.build().train(), example_batch(model, samples)
        keep_costly_outputs(network)
        uncounted = [*network.parameters(), *network.buffers(), batch.inputs, batch.targets]
        with Observer(samples, uncounted, batch.inputs) as observer:
            loss = torch.nn.functional.cross_entropy(network(batch.inputs).flatten(0, -2), batch.targets.flatten())
            kept = observer.alive.bytes_ - observer.start - loss.nbytes + batch.targets.nbytes  # which autograd saves
    assert kept == sum(block.saved.at(samples) for block in counts.blocks)


def test_bytes_of_selective_by_hand() -> None:
    """One sample of a block of GPT-2 in fp32: 16 positions of 32 numbers in, 96 of queries, keys and values, 32 of
    attention with 4 logarithms, 32 of its projection, 128 and 32 of the MLP."""
    block = count(MODELS[2], "fp32", "cpu", share=SELECTIVE).blocks[1]
    assert block.saved.at(1) == 4 * 16 * (32 + 96 + 32 + 4 + 32 + 128 + 32)
    assert block.selective


def test_selective_moves_bytes_twice_but_computes_no_product_again() -> None:
    for model in MODELS:
        plain, selective = (count(model, "fp32", "cpu", share=Share(selective=value)) for value in (False, True))
        for once, twice in zip(plain.blocks, selective.blocks, strict=True):
            assert twice.backward.flops.sum() == once.backward.flops.sum()
            moved = [block.backward.moved.at(2).sum() for block in (once, twice)]
            assert moved[0] < moved[1] if twice.selective else moved[0] == moved[1]


def test_bytes_of_a_linear_layer_by_hand() -> None:
    """fc8: 32 inputs, 10 outputs, one sample: reads 32 + 320 + 10 numbers, writes 10. The weights do not grow with the
    batch."""
    last = count(MODELS[1], "fp32", "cpu").blocks[-1]
    assert last.forward.moved.fixed[0] + 0 == 4 * (320 + 10)
    assert last.forward.moved.per_sample[0] == 4 * (32 + 10)
    assert last.output == last.weighted_outputs == 40
    assert last.unsaved_output == 40  # the loss saves its logarithms of probabilities


def test_mixed_precision_moves_less_and_keeps_cast_weights() -> None:
    full, half = (count(MODELS[0], precision, "cuda") for precision in ("fp32", "bf16"))
    assert sum(b.saved.per_sample for b in half.blocks) < 0.6 * sum(b.saved.per_sample for b in full.blocks)
    assert sum(b.saved.fixed for b in half.blocks) > 2 * half.parameter_count * 0.9  # 2 bytes a weight


def test_equal_blocks_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the two batch sizes; the input of h0 is not the output of an equal block."""
    ran = list[str]()
    block = FakeModel._block

    def recorded(self: FakeModel, samples: int, name: str, *more: Any) -> Any:
        ran.append(name)
        return block(self, samples, name, *more)

    monkeypatch.setattr(FakeModel, "_block", recorded)
    counts = count(replace(MODELS[2], n_layer=6), "fp32", "cpu")
    assert sorted(ran) == sorted(2 * ["embed", "h0", "ln_f", "head"])
    assert [block.name for block in counts.blocks] == ["embed", *(f"h{index}" for index in range(6)), "ln_f", "head"]


def test_a_tied_head_counts_once() -> None:
    counts = count(MODELS[2], "fp32", "cpu")
    assert counts.tied == 64 * 32
    assert counts.blocks[-1].parameter_count == 0


def test_windows_of_convolutions_and_poolings() -> None:
    """3x3 convolutions of stride 1, pooling by halves; no gradient of the images is needed."""
    rows = {item.name: item for block in count(MODELS[1], "fp32", "cpu").blocks for item in block.rows}
    assert rows["conv1_1.conv"].window == Window(64, 3, 1, 1)
    assert rows["conv1_1.conv"].row == 3 * 64 * 4
    assert [name for name, item in rows.items() if item.first] == ["conv1_1.conv"]
    assert (rows["conv1_2.pool"].window, rows["conv5_1.conv"].window.height) == (Window(64, 2, 2), 4)


def test_ranks_on_gpus_add_bf16_without_a_copy_in_fp32() -> None:
    """gloo cannot: on CPUs also the gradient of a block's input, which all ranks have, is there in fp32."""
    cuda, cpu = (count(MODELS[0], "bf16", kind, 0.0, Share(tp=2)).blocks for kind in ("cuda", "cpu"))
    there, here = (float(blocks[2].live_backward.at(8).max()) for blocks in (cuda, cpu))
    assert here - there == pytest.approx(2 * 8 * cuda[1].output, rel=0.01)
