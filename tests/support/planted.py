"""The program with classes of tests/support/broken.py in place of its own, which the command line cannot name:

python -m tests.support.planted framework=Broken framework.how=raise -- +framework=ddp +model=resnet50 ...
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

import ddlbench.__main__ as program
from ddlbench.config import schema as config

own_section = config.section


def plant(words: list[str]) -> None:
    """GROUP=CLASS, and GROUP.KEY=VALUE for keys that only this class has."""
    planted: dict[str, dict[str, Any]] = {}
    for word in words:
        place, value = word.split("=", 1)
        group, _, key = place.partition(".")
        planted.setdefault(group, {})[key or "_target_"] = (
            yaml.safe_load(value) if key else f"tests.support.broken.{value}"
        )

    def section(name: str, raw: dict[str, Any]) -> Any:
        return own_section(name, raw | planted.get(name, {}))

    config.section = section


if __name__ == "__main__":
    cut = sys.argv.index("--")
    plant(sys.argv[1:cut])
    sys.argv[1 : cut + 1] = []
    sys.exit(program.main())
