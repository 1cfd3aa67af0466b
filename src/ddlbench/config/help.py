"""python -m ddlbench --help: the command, the choices and every key, as the YAML files' own comments explain them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import ddlbench
from ddlbench.config.choices import choices, choose, defaults, keys, meanings, title
from ddlbench.config.schema import GROUPS

HEAD = """\
ddlbench {version}: one training loop, many frameworks for parallel training, one table.

  python -m ddlbench +framework=NAME +model=NAME [key=value ...]                   one process
  torchrun --nproc-per-node=4 -m ddlbench +framework=NAME +model=NAME [...]        one node
  srun -N2 --ntasks-per-node=4 --gpus-per-node=4 python -m ddlbench +framework=... Slurm, one task a GPU
  python -m ddlbench.report RESULTS                                                tables, figures, page
  python -m ddlbench.doctor                                                        what this machine can run
  python -m ddlbench.predict +model=NAME cluster=NAME gpus=[4,8,...,1024]          step time and memory elsewhere
  python -m ddlbench +framework=... mode=rehearsal rehearsal.gpus=1024             one rank of a job, without devices

  --help      this text; with +framework=NAME and other choices it shows their keys
  --version   the version of ddlbench
  --cfg job   print the whole configuration; dryrun=true checks it as well
  A value with spaces, commas, brackets or ~ needs both kinds of quotes: 'data.root="/a path/images"'
"""
WIDTH, COLUMN = 120, 34


def help_text(words: Sequence[str]) -> str:
    """`words`: the command line, whose choices decide which keys are shown."""
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    chosen = {group: given.get(group, defaults().get(group, "")) for group in GROUPS}
    lines = [HEAD.format(version=ddlbench.__version__)]
    for group in GROUPS:
        lines.append(choose(group, "NAME"))
        for choice in choices(group):
            default = " (default)" if defaults().get(group) == choice else ""
            lines.append(_row(f"{choice}{default}", title(group, choice)))
        lines.append("")
    lines += ["Keys, each with its default", *_keys("", ".", "config"), ""]
    for group, choice in chosen.items():
        if choice in choices(group):
            lines += [f"Keys of {group}={choice}", *_keys(f"{group}.", group, choice), ""]
        else:
            lines += [f"Keys of {group}: give --help +{group}=NAME", ""]
    return "\n".join(lines)


def _keys(prefix: str, group: str, choice: str) -> list[str]:
    comments = meanings(group)
    return [
        _row(f"{prefix}{key.name}={key.value}", key.comment or comments.get(key.name, ""))
        for key in keys(group, choice)
        if key.name != "_target_"
    ]


def _row(left: str, right: str) -> str:
    """Two columns; a long left one takes a line of its own."""
    first = f"  {left:{COLUMN - 2}}" if len(left) < COLUMN - 3 else f"  {left}\n{'':{COLUMN}}"
    return textwrap.fill(right, WIDTH, initial_indent=first, subsequent_indent=" " * COLUMN) if right else f"  {left}"
