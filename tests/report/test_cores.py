"""Work over several processes gives the results of one, in order."""

from __future__ import annotations

import os

import pytest

from ddlbench.report import cores as module
from ddlbench.report.cores import MOST, cores, over_cores
from ddlbench.report.read import read_all
from ddlbench.report.tables import make_tables, records
from tests.support.records import weak_scaling


def process_of(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_few_items_stay_in_this_process():
    assert over_cores(process_of, range(3), 2) == [(number, os.getpid()) for number in range(3)]


def test_many_items_are_done_elsewhere_in_their_order(monkeypatch):
    monkeypatch.setattr(module, "FEW", 10)
    found = over_cores(process_of, range(40), 2)
    assert [number for number, _ in found] == list(range(40))
    assert os.getpid() not in {process for _, process in found}


def inverse_of(number: int) -> float:
    return 1 / number


def test_an_error_of_one_item_is_raised(monkeypatch):
    monkeypatch.setattr(module, "FEW", 1)
    with pytest.raises(ZeroDivisionError):
        over_cores(inverse_of, [1, 0, 3], 2)


def test_cores_are_bounded():
    assert 1 <= cores() <= MOST


def test_tables_of_several_processes_are_those_of_one(tmp_path, monkeypatch):
    weak_scaling(tmp_path, repeats=2)
    (tmp_path / "odd" / "attempt-1").mkdir(parents=True)
    alone = make_tables(read_all([tmp_path]))
    monkeypatch.setattr(module, "FEW", 1)
    found = make_tables(read_all([tmp_path]), processes=2)
    for name in ("runs", "epochs", "scaling", "learning"):
        assert records(getattr(found, name)) == records(getattr(alone, name)), name
    assert (found.warnings, found.left_out, found.drift) == (alone.warnings, alone.left_out, alone.drift)
