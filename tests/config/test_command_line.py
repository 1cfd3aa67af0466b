"""--help and --version, and the comments of the YAML files that --help shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ddlbench
from ddlbench.config.choices import LINE, choices, keys, targets, title
from ddlbench.config.command_line import help_text
from ddlbench.config.schema import GROUPS
from tests.config.test_compose import ALL
from tests.support.waiting import WITHIN_S


def asked(*words: str) -> str:
    """What the program prints, in a process that cannot import torch: that takes seconds."""
    code = "import sys; sys.modules['torch'] = None; import ddlbench.__main__ as m; sys.exit(m.main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_version_is_ddlbenchs() -> None:
    assert asked("--version") == f"ddlbench {ddlbench.__version__}\n"


@pytest.mark.parametrize("words", [("--help",), ("+framework=fsdp", "-h")])
def test_help_shows_command_choices_and_keys(words: tuple[str, ...]) -> None:
    text = asked(*words)
    assert "python -m ddlbench +framework=NAME +model=NAME" in text
    for _, choice in ALL:
        assert f"\n  {choice}" in text
    some = "mode train.epochs train.timeout_s loader.workers recipe.optimizer.lr recipe.schedule.gamma"
    for key in some.split():
        assert f"\n  {key}=" in text
    assert ("\n  framework.replicate=1 " in text) == ("+framework=fsdp" in words)
    assert "_target_" not in text
    assert "hydra" not in text.lower()
    assert max(map(len, text.splitlines())) <= 120


def test_every_key_and_every_choice_is_explained() -> None:
    explained = {
        group: {key.name for choice in choices(group) for key in keys(group, choice) if key.comment} for group in GROUPS
    }
    unexplained = [
        f"{group}/{choice}.yaml: {key.name}"
        for group, choice in ALL
        for key in keys(group, choice)
        if key.name != "_target_" and key.name not in explained[group]
    ]
    assert unexplained == []
    assert [key.name for key in keys(".", "config") if not key.comment] == []
    assert [f"{group}/{choice}.yaml" for group, choice in ALL if not title(group, choice)] == []


def test_a_key_is_read_with_value_and_comment() -> None:
    result = {key.name: key for key in keys("recipe", "sgd")}
    assert result["optimizer.lr"].value == "0.1"
    assert result["schedule.name"].comment == "constant | step | cosine | exponential"
    assert result["label_smoothing"].value == "0.0"
    whole = LINE.fullmatch("  a: '#1' # what: # it is")
    assert whole is not None
    assert whole.groups() == ("  ", "a", "'#1'", "what: # it is")


def test_help_without_a_choice_names_the_option_to_give() -> None:
    assert "Keys of framework: give --help +framework=NAME" in help_text(["--help"])
    assert "Keys of framework: give --help +framework=NAME" in help_text(["--help", "+framework=nothing"])


def test_the_classes_of_a_group_are_those_of_its_files() -> None:
    assert targets("cluster") == {"ddlbench.ranks.launch.Cluster"}
    assert "ddlbench.frameworks.fsdp.FSDP" in targets("framework")
    assert all(target.startswith("ddlbench.") for group in GROUPS for target in targets(group))
