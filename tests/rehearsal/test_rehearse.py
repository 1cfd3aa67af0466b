"""One rank of jobs that nobody started: what it holds, sends and waits for, against sums by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration
from ddlbench.errors import Unsupported
from ddlbench.frameworks.shared.replica import Replica
from ddlbench.frameworks.single import Single
from ddlbench.job import Job
from ddlbench.measure.formulas.flops import training_flops
from ddlbench.ranks.launch import Launch
from ddlbench.recipe.recipe import CrossEntropy
from ddlbench.rehearsal.observed import UNPINNED
from ddlbench.rehearsal.rehearse import Rehearsal, Sent, rehearse
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import MODELS, OF_IMAGES, OF_TEXT, WORLD, apart, config, rehearsed

MISSING = {"horovod"} if why_no_horovod() else set[str]()
PARAMETERS = 40  # of the small GPT-2
FRAMEWORKS = [name for name in choices("framework") if name not in {"single", *MISSING}]


def sent(results: Rehearsal, kind: str) -> tuple[float, float]:
    """Count and bytes of all collectives of a kind."""
    each = [sent for sent in results.collectives or () if sent.kind == kind]
    return sum(sent.count for sent in each), sum(sent.bytes_ for sent in each)


def memory_of(results: Rehearsal) -> dict[str, int]:
    """The bytes of a rehearsal that had no error."""
    assert results.error is None
    assert results.memory is not None
    return {name: bytes_ for name, bytes_ in results.memory.items() if bytes_ is not None}


@cache
def gpt2_bytes() -> int:
    """Bytes of the weights in fp32; the tied embedding once."""
    return 4 * sum(parameter.numel() for parameter in config("single", "gpt2_small").model.build().parameters())


def check(results: dict[str, Any], framework: str, device: str) -> None:
    assert results["error"] is None
    assert (results["framework"], results["device"], results["gpus"]) == (framework, device, WORLD)
    assert results["collectives"]
    assert all(results["memory"].values()), "parameters, gradients, optimizer and peak"
    assert results["memory"]["peak"] > results["memory"]["parameters"]


def test_blocks_that_would_be_measured_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"balance_by=seconds: a rehearsal computes nothing"):
        rehearsed("gpipe", "gpt2_small", "framework.balance_by=seconds")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda bf16"])
def test_every_framework_is_rehearsed(device: str, model: str) -> None:
    """On "cuda" nothing but this test runs the steps for it on a machine without a GPU."""
    device, _, precision = device.partition(" ")
    refusing = OF_IMAGES if model == "gpt2_small" else OF_TEXT
    frameworks = [name for name in FRAMEWORKS if name not in refusing]
    result = apart(device, model, frameworks, *([f"train.precision={precision}"] if precision else []))
    assert sorted(result) == sorted(frameworks)
    for framework in frameworks:
        check(result[framework], framework, device)


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("fsdp", "resnet50"),
        ("spatial", "resnet50"),
        ("gpipe", "vgg16"),
        ("zero2", "gpt2_small"),
        ("hybrid", "gpt2_small"),
    ],
)
def test_steps_on_cuda(framework: str, model: str) -> None:
    """One of each family; all of them are slow."""
    result = rehearsed(framework, model, "train.precision=bf16", device="cuda")
    check(result.printed(), framework, "cuda")
    on_cpu = rehearsed(framework, model, "train.precision=bf16")
    assert memory_of(result)["parameters"] == memory_of(on_cpu)["parameters"]
    kinds = [sorted(sent.kind for sent in each.collectives or ()) for each in (result, on_cpu)]
    assert kinds[0] == kinds[1]


def test_all_that_can_be_offloaded_is_rehearsed_on_cuda() -> None:
    """Weights, optimizer states and activations of FSDP on the host: the steps fit together, and the device holds
    less."""
    kept = rehearsed("fsdp", "gpt2_small", device="cuda")
    words = ("framework.offload_parameters=true", "train.offload_activations=blocks")
    offloaded = rehearsed("fsdp", "gpt2_small", *words, device="cuda")
    assert memory_of(offloaded)["peak"] < memory_of(kept)["peak"]


@pytest.mark.parametrize(
    ("framework", "device", "count", "steps"),
    [
        ("ddp", "cpu", 1, 1),  # torch fills its first bucket with 1 MiB, and this model has less
        ("ddp", "cuda", 1, 1),
        ("horovod", "cpu", PARAMETERS, 1),
        ("local_sgd", "cpu", 1, 8),
    ],
)
def test_replicas_send_all_weights_in_some_messages_every_few_steps(
    framework: str, device: str, count: int, steps: int
) -> None:
    if framework in MISSING:
        pytest.skip(str(why_no_horovod()))
    result = rehearsed(framework, "gpt2_small", device=device)
    assert sent(result, "all_reduce") == (count / steps, gpt2_bytes() / steps)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shards_by_hand(device: str) -> None:
    """FSDP with AdamW: an eighth of everything; each weight is gathered for both passes, but the last block's once."""
    result, whole = rehearsed("fsdp", "gpt2_small", device=device), gpt2_bytes()
    steps = 4 * PARAMETERS  # AdamW's step counters
    eighth = whole // WORLD
    held = {"parameters": eighth, "gradients": eighth, "optimizer": 2 * eighth + steps}
    assert memory_of(result) == memory_of(result) | held
    assert sent(result, "reduce_scatter")[1] == whole
    assert whole < sent(result, "all_gather")[1] < 2 * whole


@pytest.mark.parametrize(
    ("framework", "words", "groups"),
    [
        ("fsdp", ["framework.replicate=2"], {("all_gather", 4, 1), ("reduce_scatter", 4, 1), ("all_reduce", 2, 4)}),
        ("1f1b", ["framework.sharded=true"], {("all_gather", 2, 1), ("reduce_scatter", 2, 1)}),
        ("hybrid", [], {("all_reduce", 2, 1), ("all_reduce", 2, 2), ("send", 2, 4), ("recv", 2, 4)}),
    ],
)
def test_a_group_is_named_by_its_ranks_and_how_far_apart_they_are(
    framework: str, words: list[str], groups: set[tuple[str, int, int]]
) -> None:
    """8 ranks: two replicas in shards over four neighbours each; two pipelines, whose neighbours share a stage; two
    stages of two replicas of two parts, where neighbours share layers and the stages are four ranks apart."""
    result = rehearsed(framework, "gpt2_small", *words)
    assert result.error is None
    assert {(each.kind, each.ranks, each.stride) for each in result.collectives or ()} >= groups


@pytest.mark.parametrize(
    ("framework", "model", "words"),
    [
        ("1f1b", "resnet50", ["framework.sharded=true"]),
        *((f"zero{stage}", "resnet50", []) for stage in range(4)),
        ("ddp", "gpt2_small", []),
    ],
)
def test_channels_last(framework: str, model: str, words: list[str]) -> None:
    """Shards are of contiguous weights; DeepSpeed views weights as bytes; tokens have no channels."""
    assert rehearsed(framework, model, *words, "train.channels_last=true").error is None


def test_stages_of_zero_by_hand() -> None:
    """Every stage below 3 keeps the whole weights; 2 keeps a part of the gradients only."""
    whole = gpt2_bytes()
    for stage in (0, 1, 2):
        memory = memory_of(rehearsed(f"zero{stage}", "gpt2_small"))
        assert memory["parameters"] == whole
        gradients = memory["gradients"]
        assert gradients == whole if stage == 0 else gradients < whole / 2 if stage == 2 else gradients > 0


def test_a_rehearsal_does_not_depend_on_the_one_before() -> None:
    """DeepSpeed remembers that an engine of the process used autocast; fp32 buckets of the next were in 16 bits."""
    anew, small = rehearsed.__wrapped__, ("train.precision=bf16", "model.n_layer=1")
    weights = (*small, "framework.mixed_precision=weights")
    first = anew("zero3", "gpt2_small", *weights)
    anew("zero3", "gpt2_small", *small)
    assert anew("zero3", "gpt2_small", *weights).memory == first.memory


@dataclass
class Broken(Single):
    """A product of matrices that do not fit together."""

    def setup(self, job: Job) -> Replica:
        return torch.zeros(2, 3, device=job.device) @ torch.zeros(4, 5, device=job.device)  # pyright: ignore


@dataclass
class Reading(Single):
    """A step that reads its loss."""

    def setup(self, job: Job) -> Replica:
        trainer: Any = super().setup(job)
        step = trainer.step
        trainer.step = lambda batch: step(batch).item()
        return trainer


@dataclass
class Copying(Single):
    """A step that copies three numbers from memory that is not pinned."""

    def setup(self, job: Job) -> Replica:
        trainer: Any = super().setup(job)
        step = trainer.step
        trainer.step = lambda batch: (torch.ones(3).to(job.device, non_blocking=True), step(batch))[1]
        return trainer


def with_framework(framework: Any, device: str = "cpu", *more: str) -> Rehearsal:
    made = replace(config("single", "gpt2_small", *more), framework=framework)
    return rehearse(made, Launch("alone"), torch.device(device))


@cache
def single(device: str, dropout: float) -> Rehearsal:
    return with_framework(Single("single"), device, f"model.dropout={dropout}")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_that_do_not_fit_are_one_line(device: str) -> None:
    result = with_framework(Broken("single"), device)
    assert all(shape in str(result.error) for shape in ("[2, 3]", "[4, 5]"))
    assert "\n" not in str(result.error)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_names_the_line_of_the_framework(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the line below it that fakes the device."""
    monkeypatch.setattr(CrossEntropy, "__call__", lambda _, logits, targets: torch.mm(logits, targets))
    result = with_framework(Single("single"), device)
    assert " at ddlbench/frameworks/shared/replica.py:" in str(result.error)


@pytest.mark.parametrize(
    ("framework", "device", "call"), [(Reading, "cpu", "item"), (Reading, "cuda", "item"), (Copying, "cuda", UNPINNED)]
)
def test_what_the_host_waits_for_has_its_line(framework: Any, device: str, call: str) -> None:
    """On "cuda" nothing else makes it wait: not the feed from pinned memory, not the clock, not the optimizer."""
    line, others = framework.setup.__code__.co_firstlineno + 3, single(device, 0.1).host_waits or {}
    waits = with_framework(framework("single"), device).host_waits
    assert waits == others | {f"{call} at test_rehearse.py:{line}": 1}
    assert device == "cpu" or not others


@pytest.mark.parametrize(("model", "parts"), [("gpt2_small", 3), ("vgg16", 3)])
def test_a_loader_that_does_not_pin_makes_the_host_wait(model: str, parts: int) -> None:
    """For inputs, targets and which of them are valid."""
    made = config("single", model, "loader=native", "loader.pin_memory=false")
    result = rehearse(made, Launch("alone"), torch.device("cuda", 0)).host_waits
    assert result is not None
    assert sum(result.values()) == parts
    assert all(call.startswith(f"{UNPINNED} at ddlbench/job.py:") for call in result)


@pytest.mark.parametrize(
    ("device", "dropout", "products"), [("cpu", 0.0, 7), ("cpu", 0.1, 6), ("cuda", 0.0, 7), ("cuda", 0.1, 7)]
)
def test_flops_of_gpt2_by_hand(device: str, dropout: float, products: int) -> None:
    """Three blocks of width 32 on 16 tokens, a vocabulary of 64, 4 samples. Attention is 2 products of [16, 16] and
    [16, 32] forward and 4 backward; as one kernel it computes the first of them again. With dropout, the CPU has no
    such kernel."""
    result = single(device, dropout)
    layers = 2 * 16 * 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32)  # tokens x width x (qkv, output, MLP up and down)
    head, product = 2 * 16 * 32 * 64, 2 * 16 * 16 * 32
    assert result.flops == 4 * (3 * (3 * layers + head) + 3 * products * product)
    assert result.flops == 4 * (training_flops(config("single", "gpt2_small").model) + 3 * (products - 6) * product)


def test_an_optimizer_without_a_state_holds_nothing() -> None:
    """It is not unknown: SGD without momentum has made its updates."""
    made = config("ddp", "gpt2_small", "recipe=sgd", "recipe.optimizer.momentum=0")
    row = rehearse(made, Launch("torchrun", 0, 2, 0, 2), torch.device("cpu"))
    assert (row.memory or {})["optimizer"] == 0
    assert (row.memory or {})["gradients"] == gpt2_bytes()


@pytest.mark.slow  # 15 s
@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 0)], ids=lambda device: device.type)
def test_one_of_1024_ranks_answers_in_under_a_minute(device: torch.device) -> None:
    """The process's own seconds, which other work does not move."""
    began = time.process_time()
    degrees = ("framework.dp=64", "framework.tp=4", "framework.pp=4")
    made = configuration("+framework=hybrid", "+model=gpt2_small", *degrees)
    results = rehearse(made, Launch("torchrun", 0, 1024, 0, 8), device)
    assert time.process_time() - began < 60
    assert results.coordinates == {"dp": 0, "pp": 0, "tp": 0}
    assert memory_of(results)["parameters"] == memory_of(results)["gradients"]
    assert sent(results, "send")[0] == sent(results, "recv")[0] > 0


@pytest.mark.parametrize(
    ("kind", "on_the_wire"),
    [("all_reduce", 150.0), ("all_gather", 75.0), ("reduce_scatter", 75.0), ("send", 100.0), ("recv", 0.0)],
)
def test_what_a_rank_puts_on_the_wire_of_a_complete_message_of_100_bytes(kind: str, on_the_wire: float) -> None:
    assert Sent(kind, ranks=4, stride=1, count=1.0, bytes_=100.0).sent_bytes == on_the_wire
