"""The six models as users run them, one update each, and every precision: part of `make test-all`."""

from __future__ import annotations

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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", [RESNET, [*GPT2, "model.seq_len=32"]], ids=["resnet", "gpt2"])
def test_every_precision_trains_with_micro_batches_and_recomputation(
    ddlbench, tmp_path: Path, model: list[str], precision: str
) -> None:
    code, said = ddlbench(
        *model[1:], "+framework=ddp", "train.global_batch=4", f"train.precision={precision}", "loader=synthetic",
        "train.micro_batch=2", "train.checkpoint_activations=true", "data.val_limit=3",
    )  # fmt: skip
    assert code == 0, said
    assert record(tmp_path)["ledger"]["micro_batches"] == 2
