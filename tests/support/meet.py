"""What every rank does in the launch tests: detect its launch, connect to the others, all-reduce, print it, end."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict

from ddlbench.errors import RunError
from ddlbench.ranks.launch import connect, disconnect, pick_device
from ddlbench.ranks.launchers import detect


def main(timeout_s: float = 30) -> int:
    """The exit code."""
    try:
        meet(timeout_s)
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def meet(timeout_s: float) -> None:
    launch = detect()
    device = pick_device(launch)
    connect(launch, device, timeout_s)

    import torch
    import torch.distributed as dist

    total = torch.tensor([launch.rank + 1])
    dist.all_reduce(total)
    said = asdict(launch) | {"sum": total.item(), "host": socket.gethostname(), "device": str(device)}
    said["of_torch"] = {name: value for name, value in os.environ.items() if name.startswith("TORCH")}
    print(json.dumps(said) + "\n", end="", flush=True)
    disconnect(clean=True)


if __name__ == "__main__":
    sys.exit(main())
