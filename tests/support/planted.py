"""The program with a framework that fails, or with data that one rank cannot read (failing.py):

python -m tests.support.planted framework.how=raise framework.on=0 -- +framework=ddp +model=resnet50 ...
python -m tests.support.planted data=Stopping -- +framework=ddp +model=resnet50 ...
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import yaml

import ddlbench.__main__ as program
from ddlbench.config import schema as config

FAILING = "tests.support.failing"
own_section = config.section


def plant(words: list[str]) -> None:
    planted: dict[str, dict[str, Any]] = {}
    for word in words:
        place, value = word.split("=", 1)
        group, _, key = place.partition(".")
        planted.setdefault(group, {})[key or "_target_"] = yaml.safe_load(value) if key else f"{FAILING}.{value}"

    def section(name: str, raw: dict[str, Any]) -> Any:
        if name == "framework" and name in planted:
            module, _, framework = raw["_target_"].rpartition(".")
            failing: Any = import_module(FAILING)
            failing.Broken = failing.failing(getattr(import_module(module), framework))
            raw = {**raw, "_target_": f"{FAILING}.Broken"}
        return own_section(name, raw | planted.get(name, {}))

    config.section = section


def main() -> int:
    cut = sys.argv.index("--")
    plant(sys.argv[1:cut])
    sys.argv[1 : cut + 1] = []
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
