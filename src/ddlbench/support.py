"""What runs and what does not, asked of each framework's own `check`: python -m ddlbench.support prints it as Markdown.

docs/frameworks.md is this module's output; nothing in it is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from hydra import compose, initialize_config_dir

from ddlbench.__main__ import choices, conf_dir
from ddlbench.attempt import make_job
from ddlbench.config import PRECISIONS, Config, resolve
from ddlbench.errors import RunError
from ddlbench.launch import Launch

RANKS = (4, 8, 2, 1)  # the first of these that the framework takes
KNOBS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "accumulation": ("train.micro_batch=2",),
    "clipping": ("train.clip_norm=1",),
    "checkpointing": ("train.checkpoint_activations=true",),
    "compile": ("train.compile=true",),
    "channels_last": ("train.channels_last=true",),
    "fp16 on the wire": ("train.reduce_dtype=fp16",),
    "LARS": ("recipe=lars",),
    "LAMB": ("recipe=lamb",),
}


@dataclass
class Notes:
    """Reasons, numbered as they come."""

    texts: list[str] = field(default_factory=list[str])

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def refusal(config: Config, ranks: int) -> str | None:
    """Why the framework does not run it on the CPU, None where it does."""
    launch = Launch("torchrun", world_size=ranks, local_world_size=ranks)
    try:
        config.framework.check(make_job(config, launch, torch.device("cpu")))
    except RunError as error:
        return str(error)
    return None


def configuration(framework: str, model: str, *overrides: str) -> Config:
    named = [f"+framework={framework}", f"+model={model}", "train.batch_per_gpu=16"]
    return resolve(compose("config", [*named, *overrides]))


def ranks_for(framework: str, model: str) -> int:
    config = configuration(framework, model)
    return next((ranks for ranks in RANKS if refusal(config, ranks) is None), RANKS[0])


def cell(framework: str, model: str, ranks: int, knob: Sequence[str], notes: Notes) -> str:
    """ "yes", or the precisions in which it runs, with the numbers of the reasons why it does not in the others."""
    reasons = {
        precision: refusal(configuration(framework, model, f"train.precision={precision}", *knob), ranks)
        for precision in PRECISIONS
    }
    runs = [precision for precision, reason in reasons.items() if reason is None]
    if len(runs) == len(PRECISIONS):
        return "yes"
    numbers = sorted({notes.number(reason) for reason in reasons.values() if reason is not None})
    return f"{', '.join(runs) or 'no'} {' '.join(f'[{number}]' for number in numbers)}"


def lines(framework: str, models: Iterable[str], notes: Notes) -> Mapping[tuple[str, ...], list[str]]:
    """Cells -> the models that have them alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        ranks = ranks_for(framework, model)
        cells = [str(ranks), *(cell(framework, model, ranks, knob, notes) for knob in KNOBS.values())]
        alike.setdefault(tuple(cells), []).append(model)
    return alike


def page() -> str:
    models, notes = choices("model"), Notes()
    head = ["model", "ranks", *KNOBS]
    parts = [HEAD]
    for framework in choices("framework"):
        rows = [[", ".join(names), *cells] for cells, names in lines(framework, models, notes).items()]
        table = [head, ["---"] * len(head), *rows]
        parts.append(f"## {framework}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in table))
    parts.append("## Reasons\n\n" + "\n".join(f"{number}. {text}" for number, text in enumerate(notes.texts, 1)))
    return "\n\n".join(parts) + "\n"


HEAD = """# What runs under which framework

Printed by `python -m ddlbench.support` (`make docs`), which asks each framework's own check, as every run does before
it starts; nothing is written by hand. The models have their full size, a rank 16 samples, the devices are CPUs. "yes":
in fp32, bf16 and fp16; else the precisions in which it runs, and the reasons why it does not in the others. That it
then trains what one plain process trains is shown by `tests/test_equal_training.py`, on shrunk models."""


def main() -> int:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
