"""What a part of the program leaves to be imported until it is needed: libraries that take seconds."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import PYTHON, run

# One process makes these steps in this order.
STEPS = {
    "a launch is detected": ("from ddlbench.ranks.launchers import detect; detect()", {"torch"}),
    "a sweep refuses its study": ("from ddlbench.sweep.__main__ import main; main(['x'])", {"torch"}),
    "optimizers, and none of timm's is chosen": ("import ddlbench.recipe.recipe", {"timm", "torchvision"}),
    "models that are not built": (
        "import ddlbench.measure.formulas.flops, ddlbench.models.gpt2, ddlbench.models.resnet, ddlbench.models.vgg",
        {"transformers", "torchvision"},
    ),
    "the program and one framework": (
        "import ddlbench.run.attempt, ddlbench.frameworks.ddp",
        {"deepspeed", "horovod", "megatron", "transformers", "timm", "pandas", "nvidia.dali",
         "torch.distributed.tensor"},
    ),
    "frameworks that a rehearsal gives answers": (
        "import ddlbench.frameworks.deepspeed.adapter, ddlbench.frameworks.horovod.adapter",
        {"ddlbench.ranks.fake.cuda", "ddlbench.ranks.fake.kernels"},
    ),
    "predictions without measured runs": ("import ddlbench.predict.__main__", {"pandas", "transformers"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """For each step the modules that are imported after it."""
    lines = [f"{step}; found[{name!r}] = list(sys.modules)" for name, (step, _) in STEPS.items()]
    code = "\n".join(["import json, sys; found = {}", *lines, "print(json.dumps(found))"])
    done = run(PYTHON, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("step", STEPS)
def test_slow_libraries_are_not_imported(imported: dict[str, list[str]], step: str) -> None:
    assert not STEPS[step][1] & set(imported[step])


def test_a_report_needs_no_torch() -> None:
    done = run(PYTHON, "-c", "import sys, ddlbench.report.__main__; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
