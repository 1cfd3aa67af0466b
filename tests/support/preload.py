"""What most ranks import, imported once: tests/support/ranks.py forks its processes from one that has done it.

Nothing here computes or connects, so there is one thread and no state to share.
"""

import contextlib
import gc
import os
import warnings
from importlib import import_module

MODULES = (
    "torch.distributed.pipelining", "transformers.models.gpt2.modeling_gpt2", "tests.support.equal",
    "tests.support.strategies", "tests.support.faults", "tests.support.failing", "ddlbench.run.attempt",
    "ddlbench.models.resnet", "torchvision.transforms.v2", "pandas", "deepspeed",
    "megatron.core.models.gpt.gpt_layer_specs",
)  # fmt: skip

# DeepSpeed asks whether there is a GPU while it is imported. After an answer of CUDA's own no fork may use a GPU, so
# NVML answers. DeepSpeed 0.19.8 sets this too.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # libraries' own
    for name in MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
gc.freeze()  # a collection in a rank does not go through what is imported here
