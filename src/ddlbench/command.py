"""How a command ends: an exit code, and one line where it could not do what it was asked."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from ddlbench.errors import RunError, UserError, why
from ddlbench.texts import discard, say

INTERRUPTED, NO_READER = 130, 141  # exit codes after Ctrl-C, and of what printed to a closed pipe: 128 + the signal


def open_streams() -> None:
    """Give Python a stdout and a stderr that nobody reads where the shell or a daemon has closed them."""
    sys.stdout, sys.stderr = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


def given_path(text: str) -> Path:
    """A path of the command line. ArgumentTypeError for an empty one, which would be the current folder."""
    if not text:
        raise ArgumentTypeError("the path is empty (a shell variable that is not set?): give one, . for this folder")
    return Path(text)


def ended(name: str, work: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """The exit code of `work`, or of the error that ended it.

    name: of the command, for its messages; interrupted: the message after Ctrl-C
    """
    open_streams()
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except RunError as error:
        reason, code = str(error), error.exit_code
    except BrokenPipeError:
        discard(sys.stdout)  # Python flushes once more at its end
        return NO_READER
    except OSError as error:  # a folder that may not be read, a full disk
        reason = f"{error.filename or 'a file'} cannot be read or written ({why(error)})"
        code = UserError.exit_code
    except KeyboardInterrupt:
        reason, code = interrupted, INTERRUPTED
    say(f"{name}: {reason}", stream=sys.stderr)
    return code
