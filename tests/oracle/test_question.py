from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.oracle.question import ask, numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("[1,2,4]", [1, 2, 4]),
        ("[4,8,...,64]", [4, 8, 16, 32, 64]),
        ("[4,8,...,1000]", [4, 8, 16, 32, 64, 128, 256, 512, 1000]),
        ("[4,6,...,12]", [4, 6, 8, 10, 12]),
        ("[1,4,16,...,256]", [1, 4, 16, 64, 256]),
    ],
)
def test_numbers_of_gpus(text: str, expected: list[int]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize("text", ["", "[]", "0", "-1", "[8,4,...,1]", "[4,...,8]", "[4,8,...]", "x", "99999999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="gpus="):
        numbers(text)


def test_words_for_hydra_keep_their_order() -> None:
    question = ask(["+model=vgg16", "cluster=abci", "train.batch_per_gpu=32", "gpus=4", "overlap=true", "--json"])
    assert question.words == ["+model=vgg16", "train.batch_per_gpu=32"]
    assert (question.cluster, question.gpus, question.overlap, question.framework) == ("abci", [4], True, None)


def test_degrees_of_strategies_that_can_only_be_predicted() -> None:
    question = ask(["+model=vgg16", "+framework=spatial", "framework.dp=2", "framework.sp=4"])
    assert (question.only_here.dp, question.only_here.sp, question.words) == (2, 4, ["+model=vgg16"])
    with pytest.raises(UserError, match=r"framework.pp does not exist: spatial has framework.dp, framework.sp"):
        ask(["+model=vgg16", "+framework=spatial", "framework.pp=4"])
