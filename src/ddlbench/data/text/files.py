"""Where a user's text is, and where the token files made of them go."""

from __future__ import annotations

import os
from pathlib import Path

from ddlbench.data.foreign_data import sha256_of
from ddlbench.data.home import home
from ddlbench.data.text.token_file import TokenFile
from ddlbench.errors import UserError

# Training and validation text as WikiText and others name them; the first complete pair counts.
PAIRS = (("wiki.train.raw", "wiki.valid.raw"), ("wiki.train.tokens", "wiki.valid.tokens"), ("train.txt", "valid.txt"))


def find_texts(root: str | None, train: str | None, valid: str | None) -> tuple[Path, Path]:
    """Training and validation text in `root`, under the names given or else a pair of PAIRS.

    Raises UserError with the expected files where something is missing.
    """
    pairs = [(train, valid)] if train and valid else list(PAIRS)
    layout = "; or ".join(" and ".join(pair) for pair in pairs)
    if root is None:
        raise UserError(f"data.root is not set: give data.root=FOLDER, a folder that holds {layout}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.root={root} is not a folder: it must hold {layout}")
    for pair in pairs:
        first, second = (folder / name for name in pair)
        if first.is_file() and second.is_file():
            return first, second
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise UserError(f"data.root={root} holds {present}: it must hold {layout} (other names: data.train=, data.valid=)")


def token_path(text: Path, tokenizer_hash: str, cache_dir: str | None) -> Path:
    """The token file of a text: the text itself if that is one, else a name for this text and tokenizer in
    `cache_dir`, or beside the text, or in the program's own folder where the text's cannot be written."""
    if text.suffix == ".bin":
        return text
    # The size keeps texts of the same name apart in one cache.
    name = f"{text.name}-{text.stat().st_size}-{tokenizer_hash[:8]}.bin"
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / name
    beside = text.with_name(name)
    return beside if beside.exists() or os.access(text.parent, os.W_OK) else home() / "tokens" / name


def is_made(text: Path, target: Path) -> bool:
    """Whether there is a token file to open. One without an index is incomplete and does not count."""
    return text == target or target.with_suffix(".json").exists()


def is_current(text: Path, target: Path) -> bool:
    """Whether the token file is of this very text. The text is read only if its modification time has changed."""
    if text == target or not is_made(text, target):
        return text == target
    index = TokenFile.open(target).index
    return index.source_modified_ns == text.stat().st_mtime_ns or index.source_sha256 == sha256_of(text)
