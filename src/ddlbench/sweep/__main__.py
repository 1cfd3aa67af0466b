"""`python -m ddlbench.sweep STUDY`: plan the cells of a study, run what is missing, show how far it is."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlbench.errors import RunError
from ddlbench.report.texts import printable
from ddlbench.sweep.lock import holder
from ddlbench.sweep.plan import INVALID, Cell, plan
from ddlbench.sweep.state import MISSING, RETRIES, RUNNING, State
from ddlbench.sweep.status import Asked, plan_lines, status_lines
from ddlbench.sweep.study import Study, load, names

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where nothing is left to do or to repair, 1 where cells failed, 2 for errors of the user, 130 after
    Ctrl-C."""
    given = _parser().parse_intermixed_args(arguments)
    try:
        if given.study is None:
            _say("\n".join(f"{name:24} {title}" for name, title in names().items()))
            return 0
        return _run(given, load(given.study, given.words))
    except RunError as error:
        print(f"ddlbench.sweep: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        again = f"python -m ddlbench.sweep {shlex.join([str(given.study), *given.words])} --local"
        print(f"ddlbench.sweep: interrupted; what has ended is kept, to go on: {again}", file=sys.stderr)
        return INTERRUPTED


def _run(given: argparse.Namespace, study: Study) -> int:
    import torch  # after the study is read: a mistake in it is reported at once

    from ddlbench.sweep import local

    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cells = plan(study, here)
    state = State(Path(study.results_dir)).refresh()
    if given.local:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        left_out = [cell for cell in cells if cell.gpus > local.most_ranks() or _invalid(cell)]
        failed = local.run_cells(cells, state, given.retry, _say)
        _say("\n".join(status_lines(cells, state, _asked(state))))
        if left_out:
            _say(f"{len(left_out)} cells cannot run on this machine: --dry-run shows which")
        _say(f"report: python -m ddlbench.report {shlex.quote(study.results_dir)}")
        return 1 if failed else 0
    lines = status_lines if given.status else plan_lines
    _say("\n".join(lines(cells, state, _asked(state))))
    return 0


def _asked(state: State) -> Asked:
    """The status of a cell: `running` only where somebody holds its claim."""

    def status(cell: Cell) -> str:
        if _invalid(cell):
            return INVALID
        found = state.status(cell)
        if found not in (MISSING, RUNNING):
            return found
        return RUNNING if holder(state.results, cell.key) else MISSING

    return status


def _invalid(cell: Cell) -> bool:
    return cell.refused is not None and cell.refused[0] == INVALID


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddlbench.sweep", description=__doc__)
    parser.add_argument("study", nargs="?", metavar="STUDY", help="name or YAML file; without one: lists the studies")
    parser.add_argument("words", nargs="*", metavar="key=value", help="values of an axis, keys of a study or of a run")
    parser.add_argument("--dry-run", action="store_true", help="show the cells and start nothing (the default)")
    parser.add_argument("--local", action="store_true", help="run what is missing on this machine, one after another")
    parser.add_argument("--status", action="store_true", help="how many cells are done, failed, running, missing")
    parser.add_argument("--resume", action="store_true", help="run only what is missing: always so")
    parser.add_argument("--retry", choices=list(RETRIES), help="run cells again that failed; those that are ok never")
    return parser


if __name__ == "__main__":
    sys.exit(main())
