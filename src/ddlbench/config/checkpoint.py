"""The keys of `checkpoint.`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddlbench.errors import UserError


@dataclass
class Checkpoint:
    """`checkpoint.`: when a run saves what it needs to continue, and where; conf/config.yaml says what each means."""

    every: int | None = field(default=None, metadata={"before": None})
    dir: str | None = field(default=None, metadata={"before": None})
    keep: int = field(default=2, metadata={"before": 2})
    resume: bool | None = field(default=None, metadata={"before": None})

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name}={value} must be 1 or more")
        if self.resume and self.every is None:
            raise UserError("checkpoint.resume=true continues a run that saves: set checkpoint.every=1, say, too")

    @property
    def folder(self) -> Path | None:
        """`dir`, its variables and ~ expanded on this node."""
        return None if self.dir is None else Path(os.path.expandvars(self.dir)).expanduser()

    def resumes(self, env: Mapping[str, str]) -> bool:
        """Whether to begin where an earlier attempt saved; where it is not said, if Slurm has requeued the job."""
        restarted = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        return self.every is not None and (restarted if self.resume is None else self.resume)
