"""benchmarks/overhead.py: both sides do the same work with the same settings. Speed is not measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks import overhead
from benchmarks.cores import LOCAL_RANKS
from benchmarks.overhead import FREED, LR, SHAPES, WORKS, Work
from benchmarks.turns import ROOT, Pairs
from ddlbench.config.compose import configuration
from ddlbench.measure.devices.memory import keep_freed_memory
from ddlbench.models import gpt2
from ddlbench.recipe.optimizers import make_optimizer
from tests.support import processes
from tests.support.waiting import WITHIN_S

BLOCK = 9 * 2**20  # bytes; as in tests/measure/devices/test_memory.py: more than glibc keeps by itself
BARE = f"""
import json, resource
from benchmarks.bare import work

class Enough(Exception): ...

def faults():
    counts = []
    def step():
        blocks = [bytearray({BLOCK}) for _ in range(6)]
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        if len(counts) == 13:
            raise Enough
    try:
        work.timed(step)
    except Enough:
        return counts[-1] - counts[2]

def settings():
    config, model = work.gpt2().config, work.build()
    return {{
        "cache": config.use_cache,
        "activation": config.activation_function,
        "attention": config._attn_implementation,
        "threads": work.torch.get_num_threads(),
        "lr": work.make_optimizer(model).param_groups[0]["lr"],
        "groups": [(len(group["params"]), group["weight_decay"]) for group in work.make_optimizer(model).param_groups],
        "parameters": sum(each.numel() for each in model.parameters()),
    }}

freed = faults()
work.settings["heap"] = "kept"
kept, own = faults(), settings()
work.settings.update(cache="on", activation="eager")
print(json.dumps([freed, kept, own, settings()]))
"""


@pytest.fixture(scope="module")
def bare() -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """What a process of the bare GPT-2 says: page faults of ten steps with a heap that is freed and with one that is
    kept, and its settings: as in ddlbench, and with the library's cache and activation."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", BARE, "gpt2_small", "2", "16", "heap=freed"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_bare_gpt2_has_the_settings_of_ddlbench(bare):
    sizes: dict[str, Any] = dict(each.removeprefix("model.").split("=") for each in SHAPES["gpt2_small"])
    dropout = float(sizes.pop("dropout"))
    model = gpt2.GPT2("gpt2", **{name: json.loads(size) for name, size in sizes.items()}, seq_len=16, dropout=dropout)
    built = model.build()
    config = built.h0.attn.config
    _, _, own, library = bare
    assert own["cache"] is False  # ddlbench calls the blocks without a cache
    assert (own["activation"], own["attention"]) == (config.activation_function, config._attn_implementation)
    recipe = configuration("+framework=ddp", "+model=gpt2_small").recipe.optimizer
    groups = make_optimizer(recipe, built.named_parameters()).param_groups
    assert own["groups"] == [[len(group["params"]), group["weight_decay"]] for group in groups]
    assert own["parameters"] == sum(each.numel() for each in built.parameters())
    assert (own["threads"], own["lr"]) == (1, LR)
    assert (library["cache"], library["activation"]) == (True, "gelu_new")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_heap_of_the_bare_script_is_kept_or_freed_as_configured(bare):
    freed, kept, *_ = bare
    assert freed > 10 * BLOCK / 4096 > 100 * kept


def test_variable_for_a_freed_heap_is_one_that_ddlbench_leaves_alone(monkeypatch: pytest.MonkeyPatch):
    for name, value in FREED.items():
        monkeypatch.setenv(name, value)
    assert keep_freed_memory() is False


def test_every_comparison_has_its_own_name_and_both_sides_are_scripts_that_take_their_cores():
    assert len({work.name for work in WORKS}) == len(WORKS)
    for work in WORKS:
        for command in (work.bare(), work.ddlbench(Path("records"))):
            module = command[command.index("benchmarks.cores") + 1]
            assert module.startswith(("benchmarks.bare.", "benchmarks.harness"))
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_every_second_start_has_the_sides_in_the_other_order(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """On this machine the side that is started second takes half the time, whatever it is."""
    started: list[str] = []

    class Noted:
        def __init__(self, folder: Path, command: list[str], environment: object) -> None:
            started.append(command[0])

        def wait_until_warm(self) -> None: ...

        def kill(self) -> None: ...

        def step_s(self) -> float:
            return 1.0

    def later_is_faster(programs: object, pairs: int, seconds: float) -> Pairs:
        return Pairs([(2.0, 1.0)] * pairs, [])

    monkeypatch.setattr(overhead, "Program", Noted)
    monkeypatch.setattr(overhead, "take_turns", later_is_faster)
    monkeypatch.setattr(overhead, "commands", lambda work, folder: (["own"], ["bare"]))  # pyright: ignore
    overhead.compare(WORKS[0], 2, 1)
    assert started == ["own", "bare", "bare", "own"]
    assert capsys.readouterr().err.split() == ["0.500", "2.000"], "the bias is on both sides of 1"


@pytest.mark.slow
def test_harness_prints_the_end_of_every_step(tmp_path: Path):
    command = [part for part in Work("single", "resnet50", 2, 32).ddlbench(tmp_path) if "steps=1000000" not in part]
    command += ["model.layers=[1,1,1,1]", "train.steps=4"]
    done = processes.run(*command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ends = [float(line) for line in done.stdout.split()]
    assert len(ends) == 4
    steps = pq.read_table(next(tmp_path.glob("*/attempt-1/steps.parquet"))).column("step_time_s").to_pylist()
    assert [after - before for before, after in pairwise(ends)] == pytest.approx(steps[1:], abs=0.05)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="another system than Linux")
@pytest.mark.parametrize("variable", LOCAL_RANKS)
def test_each_rank_has_a_core_of_its_own(variable: str):
    cores = sorted(os.sched_getaffinity(0))
    start = (sys.executable, "-m", "benchmarks.cores", "timeit", "-n1", "-r1")
    for rank in range(2):
        done = processes.run(*start, "import os; print(os.sched_getaffinity(0))", cwd=ROOT, **{variable: str(rank)})
        assert done.stdout.startswith(f"{{{cores[rank % len(cores)]}}}\n")
