"""One table of statuses, and all that must agree with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import ddlbench.ranks.launch  # noqa: F401  (one more class of errors)
from ddlbench.errors import STATUSES, PeerFailed, RunError, UserError
from ddlbench.sweep.state import MISSING, QUEUED, RETRIES, RUNNING

ROOT = Path(__file__).parents[1]


def kinds(kind: type[RunError] = RunError) -> list[type[RunError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in kinds(child))]


def test_every_error_has_a_status_of_the_table_with_its_exit_code() -> None:
    """But for a UserError, which ends the program and makes no row, and the consequence of another rank's failure."""
    for kind in kinds():
        assert kind.status in STATUSES, kind
        if not issubclass(kind, UserError | PeerFailed):
            assert kind.exit_code == STATUSES[kind.status].exit_code, kind


def test_exit_codes_tell_statuses_apart() -> None:
    codes = [status.exit_code for status in STATUSES.values()] + [UserError.exit_code, PeerFailed.exit_code]
    assert len(set(codes)) == len(codes)


def test_every_failure_can_be_retried() -> None:
    assert set(RETRIES["all"]) == STATUSES.keys() - {"ok"}
    assert not {MISSING, QUEUED, RUNNING} & STATUSES.keys()


def test_the_documents_name_every_status_and_no_other() -> None:
    columns = tomllib.loads((ROOT / "src/ddlbench/record/columns.toml").read_text())
    meaning = next(table["status"]["meaning"] for table in columns.values() if "reason" in table)
    named, _, _ = meaning.replace(" or ", ", ").partition(";")
    assert set(named.split(", ")) == STATUSES.keys()
    for page in ("README.md", "docs/glossary.md", "docs/studies.md"):
        text = (ROOT / page).read_text()
        assert [status for status in STATUSES if status != "ok" and f"`{status}`" not in text] == [], page
