"""python -m ddlbench.doctor: what this machine can run, and the reason for what it cannot run.

Every framework and loader is composed from its YAML, and its own `check` runs, as in a run. A framework or loader that
needs a library besides torch names the module in a class attribute, `library: ClassVar[str] = "deepspeed"`, from which
its version is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ddlbench import OLDEST_TORCH, __version__, too_old
from ddlbench.command import ended
from ddlbench.config.choices import choices
from ddlbench.config.compose import configuration, make_job, quiet, refusal
from ddlbench.doctor.machine import Line, launchers, limits, links
from ddlbench.errors import RunError, Unavailable
from ddlbench.measure.devices.environment import environment
from ddlbench.measure.devices.nvml import gpu
from ddlbench.measure.devices.unknown import or_none
from ddlbench.ranks.launch import pick_device
from ddlbench.ranks.launchers import Launch, detect
from ddlbench.texts import bytes_text, first_line, say

# Models that most degrees of parallelism divide: this checks the machine, not whether a model can be divided.
TEXT = ("+model=gpt2_small", "model.n_layer=8", "model.n_embd=64", "model.n_head=8", "model.vocab_size=512",
        "model.seq_len=32")  # fmt: skip
PROBES = (TEXT, ("+model=resnet50",))
RANKS = (1, 2, 4)  # tried one after another in a single process
MODELS = {"images": "resnet50", "text": "gpt2_small"}  # one of each kind, for loaders


def report(launch: Launch) -> str:
    """Sections of lines, names and values in columns, a remark below its line; a section that fails has the reason."""
    device = or_none(lambda: pick_device(launch)) or torch.device("cpu")
    facts = environment(device)
    sections: dict[str, Callable[[], list[Line]]] = {
        "Frameworks": lambda: [framework(name, launch, device) for name in choices("framework")],
        "Loaders": lambda: [loader(name, device) for name in choices("loader")],
        "Devices": lambda: devices(facts),
        "Links": links,
        "Communication": lambda: communication(facts),
        "Launchers": launchers,
        "Limits": limits,
        "Software": lambda: software(facts),
    }
    texts: list[str] = []
    for name, section in sections.items():
        try:
            with quiet():
                rows = section()
        except Exception as error:
            rows = [("", "not available", _line(error))]
        lines, width = [name], max((len(label) for label, _, _ in rows), default=0)
        for label, value, remark in rows:
            lines.append(f"  {label:{width}}  {value}".rstrip())
            lines += [f"  {'':{width}}  ! {remark}"] if remark else []
        texts += ["\n".join(lines)] if rows else []
    return "\n\n".join(texts)


def framework(name: str, launch: Launch, device: torch.device) -> Line:
    """Whether its check accepts a probe at the ranks of this launch, or in a single process at one of RANKS."""
    try:
        configs = [configuration(f"+framework={name}", *probe) for probe in PROBES]
        refusals = list[list[str | None]]()  # of all probes, for each number of ranks
        for ranks in RANKS if launch.world_size == 1 else (launch.world_size,):
            here = replace(launch, world_size=ranks)
            checks = [partial(config.framework.check, make_job(config, here, device)) for config in configs]
            refusals.append([refusal(check) for check in checks])
        if not any(None in of_probes for of_probes in refusals):
            return name, "unsupported here", str(refusals[0][0])
        several = "" if None in refusals[0] else ", on more ranks than one"
        return name, f"runs, {version(configs[0].framework)}{several}", ""
    except Unavailable as error:
        return name, "unavailable", str(error)
    except Exception as error:
        return name, "broken", _line(error)


def loader(name: str, device: torch.device) -> Line:
    """The kinds of data it reads, and why it does not read the others."""
    try:
        configs = [configuration("+framework=single", f"+model={model}", f"loader={name}") for model in MODELS.values()]
        refusals = [refusal(partial(one.loader.check, one.data, one.model, device)) for one in configs]
        reads = [kind for kind, reason in zip(MODELS, refusals, strict=True) if reason is None]
        value = f"reads {' and '.join(reads)}, {version(configs[0].loader)}"
        return name, value, "; ".join(filter(None, refusals))
    except Unavailable as error:
        return name, "unavailable", str(error)
    except Exception as error:
        return name, "broken", _line(error)


def version(made: object) -> str:
    """The library behind a framework or loader, with its version."""
    library: str = getattr(type(made), "library", "torch")
    return f"{library} {or_none(lambda: import_module(library).__version__) or 'version unknown'}"


def devices(facts: Mapping[str, Any]) -> list[Line]:
    cpus, total = facts["cpu_count"], facts["cpu_count_total"]
    bound = f" of {total}: this process may not use the rest" if cpus != total else ""
    rows: list[Line] = [
        ("cpu", f"{facts['cpu_model'] or 'unknown model'}, {cpus} cores{bound}", ""),
        ("memory", bytes_text(facts["memory_total_bytes"]), ""),
    ]
    for index in range(facts["gpu_count"] or 0):
        device = gpu(torch.device("cuda", index))
        model, total = device["gpu_model"] or "unknown model", bytes_text(device["gpu_memory_total_bytes"] or 0)
        parts = [model, total, f"driver {device['driver']}", f"{device['gpu_power_limit_w']} W at most"]
        rows.append((f"gpu {index}", ", ".join(text for text in parts if "None" not in text), ""))
    if not facts["gpu_count"]:
        why = "" if torch.version.cuda else "this torch is built without CUDA and cannot use a GPU"
        rows.append(("gpu", "none visible: ranks compute on the CPU and communicate over gloo", why))
    return rows


def communication(facts: Mapping[str, Any]) -> list[Line]:
    nccl = f"NCCL {facts['nccl']}" + ("" if facts["gpu_count"] else ", for GPUs only")
    return [
        ("gloo", "in torch" if dist.is_gloo_available() else "not in this torch", ""),
        ("nccl", nccl if dist.is_nccl_available() else "not in this torch", ""),
        ("mpi", "in torch" if dist.is_mpi_available() else "not in this torch: gloo and NCCL replace it", ""),
    ]


def software(facts: Mapping[str, Any]) -> list[Line]:
    commit = facts["git_commit"]
    source = f"commit {commit[:12]}{', changed' if facts['git_dirty'] else ''}" if commit else "installed"
    old = f"too old: ddlbench needs {OLDEST_TORCH} or newer" if too_old(facts["torch"]) else ""
    return [
        ("ddlbench", f"{__version__}, {source}", ""),
        ("python", f"{facts['python']}, {sys.executable}", ""),
        ("torch", f"{facts['torch']}, {'CUDA ' + facts['cuda'] if facts['cuda'] else 'without CUDA'}", old),
        *((name, text, "") for name, text in facts["packages"].items() if name not in ("ddlbench", "torch")),
    ]


def _line(error: Exception) -> str:
    text = first_line(str(error))
    return text if isinstance(error, RunError) else f"{type(error).__name__}: {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, on rank 0 only. The exit code is 0 also for a machine that can run little."""
    about = (__doc__ or "").split("\n")[0]
    argparse.ArgumentParser(prog="python -m ddlbench.doctor", description=about).parse_args(arguments)
    launch = or_none(detect) or Launch("alone")
    return 0 if launch.rank else ended("ddlbench.doctor", lambda: say(*report(launch).splitlines()))


if __name__ == "__main__":
    sys.exit(main())
