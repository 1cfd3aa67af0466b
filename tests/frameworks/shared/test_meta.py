"""Models without weights."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.frameworks.shared.meta import on_meta
from tests.support.jobs import MODEL, job


def test_a_model_without_weights_is_built_once() -> None:
    first = on_meta(job())
    assert all(parameter.is_meta for parameter in first.parameters())
    assert on_meta(replace(job(), model=replace(MODEL))) is first
    assert on_meta(replace(job(), model=replace(MODEL, num_classes=6))) is not first
