"""What the groups of a pipeline refuse; what they do is tested with the frameworks that use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddlbench.errors import Unsupported
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.shared.layout import Layout
from tests.support.jobs import job


def test_a_pipeline_cannot_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(job(), world_size=2, device=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    with pytest.raises(Unsupported, match="backend=cuda:gloo: gloo cannot send tensors of a GPU, and a pipeline sends"):
        Groups.connect(given, Layout(pp=2))
