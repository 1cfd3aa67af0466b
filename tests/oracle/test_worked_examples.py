"""Each worked example of docs/oracle.md has the numbers that the equations give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.oracle.worked.computing import COMPUTING
from tests.oracle.worked.strategies import STRATEGIES

PAGE = Path(__file__).parents[2] / "docs" / "oracle.md"
EXAMPLES = COMPUTING | STRATEGIES
WHOLE_MODELS = ("tp", "sp", "pp", "spatial limit")  # models of full size are counted: 30 s
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in WHOLE_MODELS else name for name in EXAMPLES]


def rows() -> dict[str, str]:
    """The last cell of each row of the tables that have examples, by the first."""
    result: dict[str, str] = {}
    header = None
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif header[-1] == "example" and not set(line) <= set("|- "):
            assert cells[0] not in result
            result[cells[0]] = cells[-1]
    return result


def test_every_equation_has_an_example() -> None:
    assert sorted(rows()) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_the_page_are_those_of_the_code(name: str) -> None:
    text = rows()[name]
    for number in EXAMPLES[name]():
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), number
