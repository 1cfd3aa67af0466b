"""A configuration as the command line makes it."""

from __future__ import annotations

from hydra import compose, initialize_config_dir

from ddlbench.config.choices import conf_dir
from ddlbench.config.schema import Config, resolve


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(compose("config", list(overrides)))
