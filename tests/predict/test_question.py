from __future__ import annotations

import pytest

from ddlbench.errors import UserError
from ddlbench.predict.question import ask, numbers


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


@pytest.mark.parametrize(
    "text", ["", "[]", "0", "-1", "[8,4,...,1]", "[4,...,8]", "[4,8,...]", "x", "99999999", "[4,6,...,20000]"]
)
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="gpus="):
        numbers(text)


def test_words_for_hydra_keep_their_order() -> None:
    question = ask(["+model=vgg16", "cluster=abci", "train.batch_per_gpu=32", "gpus=4", "overlap=true", "--json"])
    assert question.words == ["+model=vgg16", "train.batch_per_gpu=32"]
    assert (question.machine, question.gpus, question.overlap, question.framework) == ("abci", [4], True, None)


def test_a_degree_of_spatial_is_no_word_of_others() -> None:
    assert "framework.sp=2" in ask(["+model=vgg16", "+framework=ddp", "framework.sp=2"]).words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-gpus", "0"], "--max-gpus=0 must be a number above 0"),
        (["--max-memory-gib", "nan"], "--max-memory-gib=nan must be a number above 0"),
        (["--one-gpu-batch", "8"], "--one-gpu-batch=8 is of a measured step: give --one-gpu-step-s, too"),
        (["--from", "results", "--one-gpu-step-s", "1"], "both say what a step on one device takes"),
        (["--json", "--check-volumes"], "--check-volumes adds lines to the table, and --json has rows only"),
        (["--json", "--max-gpus", "8"], "--max-gpus adds lines to the table, and --json has rows only"),
        (["--json", "--blocks"], "--blocks adds lines to the table, and --json has rows only"),
        (["--grade", "points.csv", "--algorithm", "tree"], "--algorithm=tree: the points of points.csv have"),
        (["--grade", "points.csv", "--figure", "f", "--from", "r"], "leave --from, --figure, +model=vgg16 out"),
        (["--one-gpu-step-s", "fast"], "invalid float value: 'fast': see python -m ddlbench.predict --help"),
        (["--plan", "train.batch_per_gpu=8", "train.global_batch=[32,64]"], "train.batch_per_gpu=8 and several"),
        (["--plan", "--one-gpu-step-s", "1", "train.global_batch=[32,64]"], "give its samples with --one-gpu-batch"),
        (["--nothing"], "--nothing is no option and no key=value"),
        (["overlap=maybe"], "overlap=maybe must be true or false"),
        (["+framework=ddp", "+framework=fsdp"], "+framework is there twice: give it once"),
        (["gpus=4", "gpus=8"], "gpus is there twice: give it once (several numbers of GPUs: gpus=[4,8,16]"),
    ],
)
def test_options_that_cannot_be_meant(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        ask(["+model=vgg16", *words])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
