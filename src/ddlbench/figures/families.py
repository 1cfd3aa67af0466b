"""Families of frameworks: where a panel has too many curves, each family gets a panel of its own."""

from __future__ import annotations

FAMILIES = {
    "data parallel": ("single", "ddp", "horovod", "local_sgd", "zero0"),
    "sharded": ("fsdp", "zero1", "zero2", "zero3", "deepspeed"),
    "tensor": ("tensor",),
    "pipeline": ("gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream", "pipedream_2bw"),
    "hybrid": ("hybrid",),
}
OTHER = "other frameworks"
_FAMILY = {framework: family for family, frameworks in FAMILIES.items() for framework in frameworks}


def family(framework: str) -> str:
    """The family of a framework; OTHER for names that this version does not know."""
    return _FAMILY.get(framework, OTHER)
