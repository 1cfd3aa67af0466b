"""DeepSpeed's engine, ZeRO stage 1: deepspeed.ai, "Getting started". The configuration is that of ddlbench's run."""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist

from benchmarks.bare.work import batch, build, loss_of, make_optimizer, samples, timed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference only, compiled at the first start
config = {
    "train_micro_batch_size_per_gpu": batch,
    "gradient_clipping": 0.0,
    "communication_data_type": "fp32",
    "steps_per_print": sys.maxsize,
    "timers": {"throughput": {"enabled": False}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 25 * 2**20 // 4, "compute_grad_norm": False},
}


def main() -> None:
    model = build()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config=config, dist_init_required=False
    )
    inputs, targets = samples()

    def step() -> None:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()

    timed(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
