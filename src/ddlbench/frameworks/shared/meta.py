"""What a model is made of, without its weights."""

from __future__ import annotations

import torch
from torch import nn

from ddlbench.frameworks.shared.batchnorm import batch_norms
from ddlbench.job import Job

_on_meta: dict[tuple[type, str], nn.Sequential] = {}


def has_batch_norm(job: Job) -> bool:
    return bool(batch_norms(on_meta(job)))


def on_meta(job: Job) -> nn.Sequential:
    """The model without its weights. It is built once and shared: do not change it."""
    key = type(job.model), repr(job.model)  # a dataclass, so this says all of it
    if key not in _on_meta:
        with torch.device("meta"):
            _on_meta[key] = job.model.build()
    return _on_meta[key]
