"""The cores of a process are those that the system lets it run on."""

from __future__ import annotations

import os

import pytest

from ddlbench.cores import allowed_cores


def test_they_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    assert allowed_cores() == [3, 5]


def test_without_an_affinity_they_are_all_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_cores() == [0, 1, 2]
