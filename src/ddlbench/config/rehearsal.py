"""`rehearsal.`: the rank and the job of mode=rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

from ddlbench.errors import UserError

DEVICES = ("cpu", "cuda")


@dataclass
class RehearsalKeys:
    """conf/config.yaml says what each means."""

    gpus: int = 1
    device: str = "cpu"
    rank: int = 0
    gpus_per_node: int = 8
    json: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"rehearsal.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.rank < self.gpus:
            raise UserError(f"rehearsal.rank={self.rank} must be a number from 0 to {self.gpus - 1}")
        if self.device not in DEVICES:
            raise UserError(f"rehearsal.device={self.device} must be {' or '.join(DEVICES)}")
