"""`mode` chooses what an attempt does, in one table."""

from __future__ import annotations

import ast
from pathlib import Path

import ddlbench
from ddlbench.config.schema import MODES
from ddlbench.run.scenarios import SCENARIOS

SOURCE = Path(ddlbench.__file__).parent


def test_every_mode_that_measures_has_a_scenario() -> None:
    assert (*SCENARIOS, "rehearsal") == MODES


def test_no_other_file_reads_the_mode() -> None:
    for name in ("loop.py", "run/attempt.py", "run/context.py", "record/recorder.py", "record/run_json.py"):
        tree = ast.parse((SOURCE / name).read_text())
        asked = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "mode"]
        assert not asked, (name, asked)
