"""Which optional libraries are here. Tests of a missing one skip, with the reason and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import pytest

from ddlbench.data.loaders import dali
from ddlbench.errors import Unavailable
from ddlbench.frameworks.horovod import adapter as horovod


def why_not(library: Callable[[], object]) -> str | None:
    """Why a library cannot be used, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Horovod's, of 2023
            library()
    except Unavailable as missing:
        return str(missing)
    return None


@cache
def why_no_horovod() -> str | None:
    return why_not(horovod.horovod_torch)


@cache
def why_no_adasum() -> str | None:
    built = why_no_horovod() is None and horovod.horovod_torch().mpi_built()
    return None if built else "needs Horovod with MPI: scripts/install_horovod.sh mpi"


needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))


why_no_dali = why_not(dali.import_dali)
needs_dali = pytest.mark.skipif(why_no_dali is not None, reason=str(why_no_dali))
