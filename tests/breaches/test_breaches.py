"""Wrong ways to measure are noticed. All must fit the sources; the ten quick ones are planted here, all of them by
`make test-breaches`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.breaches.breach import LISTS, PACKAGE, ROOT, Breach, CannotApply, load
from tests.support.waiting import WITHIN_S

BREACHES = load()
QUICK = [breach for breach in BREACHES if breach.quick]
# What must not count as noticed.
WRONG = """
[[breach]]
name = "nothing is changed"
old = "epoch_time_s=max(rank.times.epoch_s for rank in ranks),"
new = "epoch_time_s=max(rank.times.epoch_s for rank in ranks),  # the same"

[[breach]]
name = "another version of the sources"
old = "epoch_time_s=max(seconds_of_an_epoch),"
new = ""

[[breach]]
name = "no Python"
old = "epoch_time_s=max(rank.times.epoch_s for rank in ranks),"
new = "epoch_time_s=max(epoch_s,"

[[breach]]
name = "an error in place of a number"
old = "epoch_time_s=max(rank.times.epoch_s for rank in ranks),"
new = "epoch_time_s=ranks[10**6].times.epoch_s,"
""".replace(
    'new = "',
    'fear = ""\nquick = true\nfile = "measure/rows.py"\n'
    'tests = ["tests/measure/test_rows.py::test_a_row_by_hand"]\nnew = "',
)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_breach_fits_the_sources_and_its_tests_exist(path: Path) -> None:
    for breach in load([path]):
        patched = breach.patched((PACKAGE / breach.file).read_text())
        assert patched != (PACKAGE / breach.file).read_text(), breach.name
        if breach.file.endswith(".py"):
            ast.parse(patched)
        assert breach.fear, breach.name
        assert breach.tests, breach.name
        for test in breach.tests:
            file, _, name = test.partition("[")[0].partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_the_methodology_names_each_once_under_its_rule() -> None:
    page = (ROOT / "docs" / "methodology.md").read_text(encoding="utf-8")
    caught = " ".join(re.findall(r"\*\*Caught\*\*(.*?)\.\n\n", page, re.DOTALL))
    named = [" ".join(name.split()) for name in re.findall(r"\*([^*]+)\*", caught)]
    assert sorted(named) == sorted(breach.name for breach in BREACHES)
    assert len(set(named)) == len(named)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one process that plants the quick breaches and the wrong ones."""
    wrong = tmp_path_factory.mktemp("breaches") / "wrong.toml"
    wrong.write_text(WRONG)
    lists = [word for path in (*LISTS, wrong) for word in ("--list", str(path))]
    command: Sequence[str] = [sys.executable, "-m", "tests.breaches", "--quick", "--jobs", "1", *lists]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def line(output: str, name: str) -> str:
    return next(text for text in output.splitlines() if text.startswith(f"{name}: "))


def test_ten_breaches_are_noticed(output: str) -> None:
    assert line(output, "(untouched sources)").startswith("(untouched sources): pass (")
    missed = [breach.name for breach in QUICK if not line(output, breach.name).startswith(f"{breach.name}: noticed (")]
    assert not missed, output


def test_what_does_not_count_as_noticed_is_listed_with_its_reason(output: str) -> None:
    test = "tests/measure/test_rows.py::test_a_row_by_hand"
    assert line(output, "nothing is changed").endswith(f"{test} passes")
    assert "its old text is not in measure/rows.py: write the patch anew" in line(
        output, "another version of the sources"
    )
    assert f"{test} did not run" in line(output, "no Python")
    assert "ends with an error, not with an assertion: IndexError" in line(output, "an error in place of a number")
    assert output.rstrip().endswith("14 breaches, 4 problems")


def test_an_old_text_that_is_there_twice_is_refused() -> None:
    twice = Breach("twice", "", "x.py", "a", "b", ())
    with pytest.raises(CannotApply, match=r"twice: its old text is 2 times in x\.py"):
        twice.patched("a a")
