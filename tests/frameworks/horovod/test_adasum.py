"""Adasum against its rule, simulated. It needs Horovod's mpi flavour and ranks that mpirun started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddlbench.frameworks.horovod.adapter import Horovod
from tests.equality.distances import TOLERANCES, distance
from tests.support.equal import train_case
from tests.support.jobs import CASE
from tests.support.libraries import why_no_adasum
from tests.support.processes import AS_ROOT, PYTHON, need, run
from tests.support.reference import Outcome, apart, begin, reference
from tests.support.runs import GPT2, record


def adasum(updates: list[Tensor]) -> Tensor:
    """Maleki et al. 2020, section 3: neighbours first, then pairs of pairs. Of orthogonal updates it is the sum, of
    parallel ones the mean."""
    if len(updates) == 1:
        return updates[0]
    half = len(updates) // 2
    a, b = adasum(updates[:half]), adasum(updates[half:])
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def simulated(world: int) -> Outcome:
    """Each rank makes an update of its own, momentum included; the updates are combined tensor by tensor."""
    before, _ = begin(CASE)

    @torch.no_grad()
    def combine(models: list[nn.Module], step: int) -> None:
        for weight, *theirs in zip(before.parameters(), *(each.parameters() for each in models), strict=True):
            weight += adasum([(their - weight).double() for their in theirs]).float()
            for their in theirs:
                their.copy_(weight)

    return apart(CASE, world, combine)


def test_the_rule_by_hand() -> None:
    x, y = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum([x, y]).tolist() == [2.0, 3.0]
    assert adasum([x, 2 * x]).tolist() == [3.0, 0.0]
    assert adasum([x, x, y, y]).tolist() == [2.0, 3.0]


needs_adasum = pytest.mark.skipif(why_no_adasum() is not None, reason=str(why_no_adasum()))


@pytest.mark.mpi
@needs_adasum
@pytest.mark.parametrize("world", [2, 4])
def test_adasum_trains_by_its_rule(tmp_path: Path, world: int) -> None:
    need({"mpirun": "openmpi-bin"})
    path = tmp_path / "outcome.pt"
    command = ("mpirun", "-n", world, PYTHON, "-m", "tests.frameworks.horovod.test_adasum", path)
    done = run(*command, cwd=Path(__file__).parents[3], **AS_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result, expected = torch.load(path, weights_only=False), simulated(world)
    assert result.updates == expected.updates
    assert result.losses == pytest.approx(expected.losses, abs=TOLERANCES["gpt2", "fp32"].loss)
    assert distance(result.weights, expected) <= TOLERANCES["gpt2", "fp32"].weights
    assert distance(result.weights, reference(CASE, world)) > 0.1  # not the mean


@pytest.mark.mpi
@needs_adasum
def test_the_program_trains_with_it(tmp_path: Path) -> None:
    need({"mpirun": "openmpi-bin"})
    command = ("mpirun", "-n", 2, PYTHON, "-m", "ddlbench", "+framework=horovod", "framework.adasum=true", *GPT2[1:])
    done = run(*command, f"results_dir={tmp_path / 'results'}", cwd=tmp_path, **AS_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    content = record(tmp_path)
    assert (content["status"], content["launch"]["launcher"]) == ("ok", "mpirun")
    assert (content["framework"]["adasum"], content["framework"]["controller"]) == (True, "mpi")


def as_rank(path: str) -> None:
    from ddlbench.ranks.launch import connect, disconnect
    from ddlbench.ranks.launchers import detect

    launch = detect()
    torch.set_num_threads(1)
    connect(launch, torch.device("cpu"), 60.0)
    outcome = train_case(CASE, Horovod(adasum=True))
    if launch.rank == 0:
        torch.save(outcome, path)
    disconnect(clean=True)


if __name__ == "__main__":
    as_rank(sys.argv[1])
