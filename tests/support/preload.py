"""What most ranks import, imported once: tests/support/ranks.py forks its processes from one that has done it.

Nothing here computes or connects, so there is one thread and no state to share.
"""

import contextlib
import warnings
from importlib import import_module

MODULES = (
    "torch.distributed.pipelining",
    "transformers.models.gpt2.modeling_gpt2",
    "tests.support.equal",
    "tests.support.strategies",
    "deepspeed",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # libraries' own
    for name in MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
