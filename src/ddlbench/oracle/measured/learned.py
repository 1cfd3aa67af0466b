"""Terms of a cluster, learned from steps that were measured with several GPU counts.

Each of TERMS is multiplied by a factor. The logarithms of the factors have a normal distribution around 0 with the
standard deviations of TERMS, and a measured step differs from its prediction by NOISE: the most probable factors follow
by Gauss-Newton steps (Tarantola 2005, Inverse Problem Theory, section 3.2). The difference that remains at the largest
measured count is carried on to larger counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlbench.oracle.machine.machine import Machine

NOISE = 0.02  # standard deviation of the logarithm of a measured step
TERMS = {"link within a node": 0.3, "links between nodes": 0.3, "cost of hidden communication": 0.5, "spread": 0.5}
ROUNDS, DIFFERENCE, LARGEST = 8, 1e-3, 0.5  # of the logarithms: difference for a slope, and largest change in a round
LEARNED = 0.9  # of the standard deviation of TERMS: a factor that stays above it was not learned


@dataclass(frozen=True)
class Learned:
    """The machine with the learned terms.

    gpus: the largest measured GPU count; rest: measured over predicted seconds at this count, with the learned terms
    factors: of each term; None if the steps do not determine it
    """

    machine: Machine
    gpus: int
    rest: float
    factors: Mapping[str, float | None]

    def lines(self) -> list[str]:
        """What was learned and what was not, as text."""
        values = [f"{name} x{factor:.2f}" for name, factor in self.factors.items() if factor is not None]
        missing = [name for name, factor in self.factors.items() if factor is None]
        lines = [f"learned: {', '.join((*values, f'other differences x{self.rest:.3f}'))}"]
        return [*lines, f"not learned, because no run depends on it enough: {', '.join(missing)}"] if missing else lines


def learn(
    machine: Machine, predicted: Callable[[Machine], Sequence[float]], measured: Sequence[float], gpus: int
) -> Learned:
    """The terms that bring predicted and measured seconds together.

    predicted: seconds of the measured steps on a machine, in ascending order of their GPU counts, as `measured`
    gpus: the largest of these counts
    """
    deviations, logs = np.array(list(TERMS.values())), np.zeros(len(TERMS))
    precision = np.diag(deviations**-2)
    wanted, steps = np.log(measured), DIFFERENCE * np.eye(len(TERMS))

    def at(logs: np.ndarray) -> np.ndarray:
        return np.log(predicted(_with_factors(machine, np.exp(logs))))

    for _ in range(ROUNDS):
        now = at(logs)
        slopes = np.stack([(at(logs + step) - now) / DIFFERENCE for step in steps], axis=1)
        precision = slopes.T @ slopes / NOISE**2 + np.diag(deviations**-2)
        change = np.linalg.solve(precision, slopes.T @ (wanted - now) / NOISE**2 - logs / deviations**2)
        logs = logs + np.clip(change, -LARGEST, LARGEST)
        if np.abs(change).max() < DIFFERENCE:
            break
    left = np.sqrt(np.diag(np.linalg.inv(precision))) / deviations
    factors = np.exp(logs)
    learned = {name: float(factors[i]) if left[i] <= LEARNED else None for i, name in enumerate(TERMS)}
    return Learned(_with_factors(machine, factors), gpus, float(np.exp(wanted[-1] - at(logs)[-1])), learned)


def _with_factors(machine: Machine, factors: np.ndarray) -> Machine:
    """The machine with each of TERMS multiplied. A factor of a link multiplies its bandwidth."""
    inner, outer, hidden, spread = map(float, factors)
    rates = zip(machine.links, (inner, outer), strict=False)  # a machine may lack a link
    links = [replace(link, bytes_per_s=link.bytes_per_s * rate) for link, rate in rates]
    sweeps = {
        key: replace(sweep, seconds=tuple(seconds / inner for seconds in sweep.seconds))
        for key, sweep in machine.sweeps.items()
    }
    costs = {ranks: cost * hidden for ranks, cost in machine.hidden_cost.items()}
    return replace(machine, links=tuple(links), sweeps=sweeps, hidden_cost=costs, spread=machine.spread * spread)
