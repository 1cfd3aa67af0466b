"""Blocks give the same results, to the bit, with their saved tensors on the host, which the hooks really copy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.adapter import DeepSpeed
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.shared.checkpointing import checkpoint_blocks, facts_of_model
from ddlbench.frameworks.shared.offloading import Host, OffloadedBlock, Saved, offload_blocks
from ddlbench.frameworks.single import Single
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from tests.support.jobs import CPU, MODEL, job, refused

TEXT = GPT2("gpt2", n_layer=3, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.3)
TRAINED: dict[str, Model] = {"batch norm": MODEL, "dropout": TEXT}


def built(model: Model, offload: list[str]) -> tuple[nn.Sequential, Host]:
    torch.manual_seed(0)
    network = model.build()
    return network, offload_blocks(network, offload, CPU)


def passed(network: nn.Sequential, model: Model, precision: torch.dtype | None = None) -> list[Tensor]:
    """Gradients and buffers after two passes forward, then the backward passes, the second one first."""
    torch.manual_seed(1)
    inputs = [
        torch.randint(0, 61, (4, 16)) if model.kind == "text" else torch.randn(4, *model.input_shape()) for _ in "12"
    ]
    outputs = list[Tensor]()
    for each in inputs:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            outputs.append(network(each).float().square().mean())
    while outputs:
        outputs.pop().backward()
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None] + [
        buffer.clone() for buffer in network.buffers()
    ]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", TRAINED)
def test_offloading_changes_nothing_but_memory(kind: str, precision: torch.dtype | None) -> None:
    """Also beside blocks that run again, and with two micro batches in flight."""
    model = TRAINED[kind]
    names = [name for name, _ in model.build().named_children()]
    plain = passed(built(model, [])[0], model, precision)
    for chosen, again in [
        (names[:-1], []),
        (names[:2], []),
        (names[1:2], [names[2]]),
        ([names[0], names[2]], names[1:2]),
    ]:
        torch.manual_seed(0)
        network = model.build()
        checkpoint_blocks(network, [[name] if name in again else name for name in names])
        offload_blocks(network, chosen, CPU)
        result = passed(network, model, precision)
        assert len(result) == len(plain)
        assert all(map(torch.equal, plain, result)), (chosen, again)


def test_buffers_are_used_again_in_the_next_step() -> None:
    """As many as one step needs, and all of them are free between two steps."""
    network, host = built(TEXT, ["embed", "h0", "h1"])
    seen: list[set[int]] = []
    for _ in range(3):
        passed(network, TEXT)
        seen.append({buffer.data_ptr() for free in host.free.values() for buffer in free})
        assert not host.present
    assert seen[0]
    assert seen[0] == seen[1] == seen[2]


def copies(network: nn.Sequential, value: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Saved]:
    """What a forward pass copies."""
    made, init = list[Saved](), Saved.__init__

    def noted(self: Saved, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Saved, "__init__", noted)
    network(value)
    return made


class Twice(nn.Module):
    """Two operations save x; two save views of one storage."""

    def forward(self, value: Tensor) -> Tensor:
        x = value * 2
        left, right = (x * x).chunk(2, dim=1)
        return left * right * left.sin()


def test_a_storage_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many operations and views save it, and whichever of two blocks."""
    network = nn.Sequential(nn.Linear(8, 32), Twice(), nn.Linear(16, 300))
    offload_blocks(network, ["0", "1"], CPU)
    value = torch.randn(40, 8, requires_grad=True)
    made = copies(network, value, monkeypatch)
    # x, x * x, left.sin(), left * right and sin's input is a view of x * x; the input of the first layer.
    assert [saved.buffer.numel() for saved in made] == [40 * 8, 40 * 32, 40 * 32, 40 * 16, 40 * 16]


def test_weights_batches_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also weights that autocast casts, and their transposed views."""
    for precision in (torch.float32, torch.bfloat16):
        network = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 2))
        offload_blocks(network, ["0", "1"], CPU)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            made = copies(network, torch.randn(16, 64), monkeypatch)
        # The second layer's input and what the ReLU saves; under autocast also the batch, which was cast.
        assert [saved.buffer.shape for saved in made] == [(16 * 64,)] * (2 if precision == torch.float32 else 3)
        assert not copies(network, torch.randn(1, 64), monkeypatch)


def test_the_device_has_a_block_again_when_it_is_needed() -> None:
    """The content leaves at the end of the next block's forward pass, and is a copy in other memory afterwards, which
    begins to come back with the gradient of the next block's output."""
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
    offload_blocks(network, ["1"], CPU)
    block: Any = network[1].forward
    assert isinstance(block, OffloadedBlock)
    value = network[1](network[0](torch.randn(8, 8)))
    (saved,) = block.saved
    assert saved.content is not None
    assert saved.content.data_ptr() == value.data_ptr() != saved.buffer.data_ptr()
    output = network[2](value)
    assert saved.content is None
    events = list[str]()
    output.register_hook(lambda _: events.append("back" if saved.content is not None else "away"))
    loss = network[3](output).sum()
    loss.backward()
    assert events == ["back"]
    assert saved.content is not None
    assert saved.content.data_ptr() not in (value.data_ptr(), saved.buffer.data_ptr())


def test_a_copy_that_nothing_asks_for_ends_before_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd may free what it saved without using it, while the copy stream still writes it."""
    calls: list[object] = []
    monkeypatch.setattr(Host, "copy", lambda *_: len(calls) + 1)  # the end of a copy
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=calls.append))
    host = Host(CPU)
    saved = Saved(host, (0, 0, torch.float32), torch.ones(4))
    saved.leave()
    saved.fetch()
    assert calls == [1]
    del saved
    assert calls == [1, 2]
    assert len(host.free[4, torch.float32]) == 1


def test_nothing_is_copied_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = built(TEXT, ["embed", "h0"])
    with torch.no_grad():
        assert not copies(network, torch.randint(0, 61, (4, 16)), monkeypatch)


class Wrong(OffloadedBlock):
    """Comes back as what the buffer's next user wrote."""

    def leave(self, output: Tensor) -> None:
        for one in self.saved:
            one.buffer.zero_()
        super().leave(output)


def test_a_wrong_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddlbench.frameworks.shared.offloading.OffloadedBlock", Wrong)
    plain, wrong = (passed(built(TEXT, chosen)[0], TEXT) for chosen in ([], ["h0"]))
    assert not all(map(torch.equal, plain, wrong))


def test_what_cannot_be_offloaded_is_refused_before_anything_starts() -> None:
    offloading = replace(job(), offload_activations=True)
    refused(Single(), replace(job(), offload_activations=["h9"]), r"the model has no block h9: its blocks are stem, ")
    with pytest.raises(Unsupported, match=r"budget:1e-6: no number of blocks fits: the least for stem to .* is .* GiB"):
        Single().check(replace(job(), offload_activations="budget:1e-6"))
    with pytest.raises(Unsupported, match=r"train\.compile and train\.offload_activations cannot be combined"):
        Single().check(replace(offloading, compile=True))
    two = replace(offloading, world_size=2, micro_batch=None)
    full = r"offload_activations=True needs a full replica on each rank, .*: set train\.offload_activations=none"
    for framework in (TensorParallel(tp=2), Pipeline(), DeepSpeed(zero_stage=3)):
        refused(framework, replace(two, model=TEXT), full)
    for framework in (DDP(), FSDP(), DeepSpeed(zero_stage=1)):
        framework.check(two)


def test_a_model_says_what_was_done_to_it() -> None:
    assert facts_of_model(built(TEXT, [])[0]) == {}
    assert facts_of_model(built(TEXT, ["h0"])[0]) == {"offloaded": ["h0"]}
