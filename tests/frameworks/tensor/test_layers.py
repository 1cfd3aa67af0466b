"""Plans and splits: pure slicing, no processes. That the layers train right is tested in tests/equality/."""

from __future__ import annotations

import pytest
import torch

from ddlbench.frameworks.tensor.collectives import Part
from ddlbench.frameworks.tensor.layers import Split, Splits, full_state, local_state, split_model, splits_output
from ddlbench.job import Model
from ddlbench.models.gpt2 import GPT2
from ddlbench.models.resnet import ResNet
from ddlbench.models.vgg import VGG

MODELS: list[Model] = [
    ResNet(name="resnet", layers=[1, 2, 1, 1], width_per_group=8, image_size=64, num_classes=7),
    VGG(name="vgg", channels=[8, 8, 16, 16, 16], hidden=32, image_size=32, num_classes=7),
    GPT2(name="gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16),
]


def own_part(model: Model, rank: int) -> tuple[torch.nn.Sequential, Splits]:
    torch.manual_seed(0)
    built = model.build()
    return built, split_model(built, model.tensor_plan(), Part(None, rank, 2))


def test_queries_keys_and_values_are_split_each_by_itself() -> None:
    fused = torch.tensor([[1, 2, 10, 20, 100, 200]])
    split = Split(dim=1, pieces=3)
    slices = [split.of(fused, Part(None, rank, 2)) for rank in (0, 1)]
    assert [each.tolist() for each in slices] == [[[1, 10, 100]], [[2, 20, 200]]]
    assert torch.equal(split.join(slices), fused)


def test_an_uneven_split_joins_to_the_whole() -> None:
    rows = torch.arange(14).view(7, 2)
    slices = [Split(0).of(rows, Part(None, rank, 3)) for rank in range(3)]
    assert [len(each) for each in slices] == [3, 2, 2]
    assert torch.equal(Split(0).join(slices), rows)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parts_make_the_whole_model_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = model.build().state_dict()
    parts = [own_part(model, rank) for rank in (0, 1)]
    splits, states = parts[0][1], [part.state_dict() for part, _ in parts]

    def gather(_: object, gathered: list[object] | None, **__: object) -> None:
        if gathered is not None:
            gathered[:] = states

    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    joined = full_state(states[0], splits, Part(None, 0, 2))
    assert full_state(states[1], splits, Part(None, 1, 2)) is None
    assert joined is not None
    assert list(joined) == list(whole)
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    for rank, (part, _) in enumerate(parts):
        own = local_state(whole, splits, Part(None, rank, 2))
        assert all(torch.equal(tensor, own[name]) for name, tensor in part.state_dict().items())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_matrix_and_filter_is_split(model: Model) -> None:
    part, splits = own_part(model, 0)
    whole = {name for name, parameter in part.named_parameters() if parameter.ndim > 1} - set(splits)
    assert whole == ({"embed.wpe.weight"} if model.kind == "text" else set())


def test_one_rank_keeps_the_model_as_it_is() -> None:
    built = MODELS[1].build()
    assert split_model(built, MODELS[1].tensor_plan(), Part(None, 0, 1)) == {}
    assert "forward" not in vars(built.get_submodule("fc6.linear"))


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_of_single_tokens_change_with_sequence_parallelism_only(sequence: bool) -> None:
    built = MODELS[2].build()
    split_model(built, MODELS[2].tensor_plan(), Part(None, 0, 2, sequence))
    for name in ("embed.wpe", "embed.drop", "h0.mlp.dropout"):
        assert ("forward" in vars(built.get_submodule(name))) == sequence


def test_only_some_blocks_give_a_slice_of_the_features() -> None:
    result = {
        model.name: [name for name, _ in model.build().named_children() if splits_output(name, model.tensor_plan())]
        for model in MODELS
    }
    assert result == {"resnet": ["head"], "vgg": ["fc6", "fc8"], "gpt2": ["head"]}
