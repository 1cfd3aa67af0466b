"""What is a row of the table, and what ends the prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ddlbench.config.compose import configuration
from ddlbench.config.schema import Config
from ddlbench.errors import UserError
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.oracle.predictor import Inputs, predict
from ddlbench.oracle.timing.computation import Computation
from tests.oracle.made import MACHINE, RESNET, setting


def config(*words: str) -> Config:
    return configuration("+framework=ddp", "+model=resnet50", "train.global_batch=8", *words)


def failing(error: UserError, _config: Config) -> Computation:
    raise error


@pytest.mark.parametrize("message", ["the speed is not known", "framework.x: not known", "train.global_batch=8: why"])
def test_a_missing_input_ends_the_prediction_however_its_message_begins(message: str) -> None:
    inputs = Inputs(MACHINE, partial(failing, UserError(message)))
    with pytest.raises(UserError, match=message):
        predict(config(), 4, inputs)


@pytest.mark.parametrize(
    ("framework", "gpus", "words", "said"),
    [
        (Spatial(dp=3, sp=1), 3, (), "train.global_batch=8 does not divide over 3 replicas"),
        (Spatial(dp=4, sp=1), 4, ("train.micro_batch=4",), "train.micro_batch=4 does not divide the 2 samples"),
        (Spatial(sp=4), 6, (), "framework.dp=1 x framework.sp=4 does not fill 6 ranks"),
    ],
)
def test_what_another_number_of_gpus_would_solve_is_a_row(
    framework: Spatial, gpus: int, words: tuple[str, ...], said: str
) -> None:
    inputs = Inputs(MACHINE, lambda _config: setting(model=RESNET).computation)
    row = predict(replace(config(*words), framework=framework), gpus, inputs)
    assert row.status == "unsupported"
    assert row.reason.startswith(said)
