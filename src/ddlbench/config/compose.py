"""What a framework would do, asked without a command line and without starting anything."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Protocol, runtime_checkable

from hydra import compose, initialize_config_dir

from ddlbench.config.choices import conf_dir
from ddlbench.config.schema import Config, resolve
from ddlbench.errors import RunError, Unavailable
from ddlbench.job import Framework, Job


@runtime_checkable
class OfLibrary(Protocol):
    """A framework made of a library besides torch, which says apart what it refuses wherever that is installed."""

    def supports(self, job: Job) -> None:
        """As `check`, without a look at the library."""
        ...


@contextmanager
def configurations() -> Generator[None]:
    """Within it `configuration` finds the program's own YAMLs."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield


def configuration(*overrides: str) -> Config:
    """What a command line of these words would run."""
    return resolve(compose("config", list(overrides)))


def supports(framework: Framework, job: Job) -> None:
    """Raise Unsupported or UserError for what cannot be run whatever is installed: the same on every machine."""
    (framework.supports if isinstance(framework, OfLibrary) else framework.check)(job)


def refusal(ask: Callable[[], object]) -> str | None:
    """What speaks against it, None if nothing does. A missing library (Unavailable) is no answer: it is raised."""
    try:
        ask()
    except Unavailable:
        raise
    except RunError as error:
        return str(error)
    return None


@contextmanager
def quiet() -> Generator[None]:
    """Some libraries talk while they are imported."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
