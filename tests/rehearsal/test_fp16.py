"""The update of fp16 on "cuda": a scaled loss, gradients that are checked for an overflow, and weights that change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ddlbench.config.choices import choices
from tests.support.libraries import why_no_horovod
from tests.support.rehearsals import MODELS, OF_IMAGES, OF_TEXT, apart, config, rehearsed

FP16, WEIGHTS = "train.precision=fp16", "framework.mixed_precision=weights"
ZERO = ("deepspeed", "zero1", "zero2", "zero3")  # in fp16 with weights that DeepSpeed casts, and without BatchNorm
REFUSED = {
    "parameter_server": "cannot skip an update that overflows elsewhere",
    "local_sgd": "replicas would skip different updates",
    "pipedream": "gradients in flight have several loss scales",
    "pipedream_2bw": "gradients in flight have several loss scales",
}
NOT_HERE = {"single", *ZERO, *(["horovod"] if why_no_horovod() else [])}
OTHERS = [name for name in choices("framework") if name not in NOT_HERE]


def check(results: dict[str, Any]) -> None:
    """An update was made: its optimizer has state."""
    assert results.get("refused") is None
    assert results["error"] is None
    assert all(results["memory"].values()), "parameters, gradients, optimizer and peak"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_framework_is_rehearsed_in_fp16(model: str) -> None:
    """Or refuses it, with the reason."""
    result = apart("cuda", model, OTHERS, FP16)
    assert sorted(result) == sorted(OTHERS)
    other = dict.fromkeys(OF_IMAGES, "to split") if model == "gpt2_small" else dict.fromkeys(OF_TEXT, "choose GPT-2")
    refused = REFUSED | other
    for framework, why in refused.items():
        assert why in result.pop(framework)["refused"]
    for row in result.values():
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_small", "vgg16"])
def test_zero_casts_its_weights_to_fp16(model: str) -> None:
    """Stages 1 and 2 gather the new weights after each update that was made, in two bytes."""
    for framework, row in apart("cuda", model, [*ZERO], FP16, WEIGHTS).items():
        check(row)
        if framework != "zero3":
            numbers = sum(each.numel() for each in config("single", model).model.build().parameters())
            (gathered,) = (each for each in row["collectives"] if each["kind"] == "all_gather")
            assert 2 * numbers <= gathered["bytes_"] < 2.1 * numbers  # padded to equal shards


@pytest.mark.slow
def test_zero_refuses_what_it_cannot_do_in_fp16() -> None:
    for row in apart("cuda", "resnet50", [*ZERO], FP16, WEIGHTS).values():
        assert "BatchNorm's weights would be cast, its running statistics would not" in row["refused"]
    for row in apart("cuda", "gpt2_small", [*ZERO], FP16).values():
        assert "under autocast DeepSpeed does not lower the loss scale after an overflow" in row["refused"]


def all_reduces(framework: str, *more: str) -> Counter[tuple[int, int]]:
    """How many in a step, by ranks and stride of the group."""
    result = rehearsed(framework, "gpt2_small", *more, device="cuda")
    assert result.error is None
    sent = [each for each in result.collectives or () if each.kind == "all_reduce"]
    return Counter({(each.ranks, each.stride): int(each.count) for each in sent})


@pytest.mark.parametrize(
    ("framework", "group"), [("ddp", None), ("fsdp", (8, 1)), ("gpipe", (4, 2)), ("tensor", (4, 1)), ("hybrid", (4, 1))]
)
def test_ranks_with_parts_of_one_model_agree_on_an_overflow(framework: str, group: tuple[int, int] | None) -> None:
    """One all-reduce more than in fp32; replicas find the same in the averaged gradients."""
    more = all_reduces(framework, FP16) - all_reduces(framework)
    assert more == ({group: 1} if group else {})


@pytest.mark.parametrize(("framework", "fused"), [("ddp", "null"), ("ddp", "true"), ("1f1b", "true"), ("fsdp", "true")])
def test_the_host_waits_once_an_update_for_the_overflow(framework: str, fused: str) -> None:
    """Torch's scaler reads it before it steps an optimizer; after the step of a fused one ddlbench reads it, unless
    ranks with parts of one model agree on it before."""
    words = ("recipe=adamw", f"recipe.optimizer.fused={fused}")
    result = rehearsed(framework, "gpt2_small", FP16, *words, device="cuda")
    waits = result.host_waits
    assert result.error is None
    assert waits is not None
    ((call, count),) = waits.items()
    assert call.startswith("item at ddlbench/frameworks/shared/replica.py:")
    assert count == 1
