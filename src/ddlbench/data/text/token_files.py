"""Which token files a text needs, whether they are there, and whether they are of the configured tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddlbench.data.text.files import find_texts, find_tokenizer, is_current, is_made, token_path
from ddlbench.data.text.raw import has_line_table
from ddlbench.data.text.tokenfile import TokenFile
from ddlbench.data.text.tokenize import TextTokenizer, TokenizerFiles, tokenize_file
from ddlbench.errors import UserError


@dataclass(frozen=True)
class TokenFiles:
    """The token files of a text: one of training, one of validation. Fields as in `TokenText`."""

    root: str | None
    tokenizer: str | None
    cache_dir: str | None
    train: str | None
    valid: str | None

    def paths(self) -> dict[bool, tuple[Path, Path]]:
        """Text and its token file, of training (True) and validation (False)."""
        files = self.tokenizer_files()
        digest = files.hash() if files else ""
        return {
            train: (text, token_path(text, digest, self.cache_dir))
            for train, text in zip((True, False), self._texts(), strict=True)
        }

    def _texts(self) -> tuple[Path, Path]:
        return find_texts(self.root, self.train, self.valid)

    def tokenizer_files(self) -> TokenizerFiles | None:
        """None where there are two token files and no tokenizer to compare them with."""
        raw = any(text.suffix != ".bin" for text in self._texts())
        return find_tokenizer(self.tokenizer or str(self.root), needed=raw or self.tokenizer is not None)

    def make(self, line_tables: bool) -> None:
        """Tokenise texts without a current token file. Processes that do so at the same time write the same files.

        line_tables: the tables are needed with which a text is read line by line
        """
        stale = [pair for pair in self.paths().values() if not _is_ready(*pair, line_tables)]
        files = self.tokenizer_files()
        if stale and files:
            tokenizer = files.load()
            for text, target in stale:
                _make(text, tokenizer, target)

    def open(self, train: bool) -> TokenFile:
        """Raises UserError where the token file is not of the configured tokenizer, or of another than its pair."""
        files, paths = self.tokenizer_files(), self.paths()
        text, target = paths[train]
        if not is_made(text, target):
            raise UserError(
                f"there is no token file {target} of {text} on this node: "
                f"set data.cache_dir=FOLDER to one that all nodes share"
            )
        file = TokenFile.open(target)
        if files:
            configured, expected = f"the configured tokenizer is {files}", files.hash()
        else:
            pair = TokenFile.open(paths[True][1])
            configured, expected = f"{pair.path} with {pair.index.tokenizer}", pair.index.tokenizer_hash
        if file.index.tokenizer_hash != expected:
            raise UserError(
                f"token file {file.path} was made with tokenizer {file.index.tokenizer}, {configured} "
                f"(hash {expected[:8]}): give data.tokenizer= the same one, or data.train= and data.valid= the raw text"
            )
        return file


def _is_ready(text: Path, target: Path, line_tables: bool) -> bool:
    return is_current(text, target) and (not line_tables or has_line_table(target))


def _make(text: Path, tokenizer: TextTokenizer, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tokenize_file(text, tokenizer, target)
    except OSError as error:
        raise UserError(f"cannot make token file {target} ({error}): choose data.cache_dir=FOLDER") from error
