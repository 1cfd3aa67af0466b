"""The six models as users run them, one update each, and every precision with every knob: part of `make test-all`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support.originals import PARAMETERS
from tests.support.runs import GPT2, RESNET, record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", PARAMETERS)
def test_full_size_models_train_and_validate(ddlbench, tmp_path: Path, model: str) -> None:
    size = ["model.seq_len=64"] if model.startswith("gpt2") else ["model.image_size=64"]
    code, said = ddlbench(
        "+framework=ddp", f"+model={model}", *size, "train.global_batch=2", "train.epochs=1", "train.steps=2",
        "data.val_limit=2",
    )  # fmt: skip
    assert code == 0, said
    content = record(tmp_path)
    # Positions are fewer at a shorter context.
    fewer = (1024 - 64) * {"gpt2_small": 768, "gpt2_medium": 1024}.get(model, 0)
    assert content["model"]["parameters"] == PARAMETERS[model] - fewer
    assert content["ledger"]["updates"] == 2
    assert content["summary"]["val_loss"] > 0


KNOBS = list(itertools.product(("resnet", "gpt2"), ("fp32", "bf16", "fp16"), (None, 2), (False, True)))


@pytest.mark.parametrize(("family", "precision", "micro", "checkpointed"), KNOBS)
def test_precision_and_knobs(
    ddlbench, tmp_path: Path, family: str, precision: str, micro: int | None, checkpointed: bool
) -> None:
    model = RESNET if family == "resnet" else [*GPT2, "model.seq_len=32"]
    code, said = ddlbench(
        *model[1:], "+framework=ddp", "train.global_batch=4", f"train.precision={precision}", "loader=synthetic",
        f"train.micro_batch={json.dumps(micro)}", f"train.checkpoint_activations={checkpointed}", "data.val_limit=3",
    )  # fmt: skip
    assert code == 0, said
    assert record(tmp_path)["ledger"]["micro_batches"] == (2 if micro else 1)
