"""The same work as one ddlbench run, in the fewest lines: what the harness itself must not cost.

torchrun --nproc-per-node=2 benchmarks/bare.py resnet50|gpt2_small BATCH_PER_RANK STEPS IMAGE_SIZE|SEQ_LEN
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

name, batch, steps, size = sys.argv[1], *map(int, sys.argv[2:5])
world = int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
torch.manual_seed(0)
if name == "resnet50":
    from torchvision.models import resnet50

    model = resnet50(num_classes=1000)
    inputs, targets = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
else:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=8192, n_positions=size))
    inputs, targets = torch.randint(8192, (batch, size)), torch.randint(8192, (batch, size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
if world > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
began, times = time.perf_counter(), []
for step in range(steps):
    output = model(inputs)
    output = output if name == "resnet50" else output.logits
    F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    now = time.perf_counter()
    times.append(now - began)
    began = now
    if step == 4 and os.environ.get("RANK", "0") == "0":  # warm: tell how long a step takes
        print("ready", min(times), flush=True)
if os.environ.get("RANK", "0") == "0":
    print("steps", *times)
if world > 1:
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()
