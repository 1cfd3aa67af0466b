"""English text from Python's own documentation, with a tokenizer trained on it: made at its first use, no download.

The text is the language reference as the interactive help has it (pydoc_data.topics, under Python's licence), about
half a megabyte that differs between Python versions, hence the version in the folder's name and the hash in records.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlbench.data.home import make_folder, sample_home
from ddlbench.data.staging import StagedFiles
from ddlbench.data.text.dataset import TokenText
from ddlbench.data.text.windows import TokenSplit
from ddlbench.errors import UserError, check_values
from ddlbench.job import Model

VERSION = "v1"  # of the way the set is made: another way, another number
BYTES = 256


@dataclass
class SampleText:
    """The sample set in `root`, null: the program's own folder.

    vocab_size: tokens of the byte-level BPE, 256 at least; a text has only so many merges, so it may come out smaller
    stage_to, tokenize, val_limit: as TokenText's
    """

    name: str
    root: str | None = None
    vocab_size: int = 2048
    stage_to: str | None = None
    tokenize: str = "ahead"
    val_limit: int | None = None

    kind = "text"

    def __post_init__(self) -> None:
        check_values("data.", self, least={"vocab_size": BYTES})
        self._text()

    @property
    def mapped(self) -> bool:
        return self._text().mapped

    @property
    def costly(self) -> bool:
        return self._text().costly

    def check(self, model: Model, validate: bool = True) -> None:
        if self.vocab_size > model.outputs():
            raise UserError(
                f"data.vocab_size={self.vocab_size} is more than the model's {model.outputs()}: "
                f"give model.vocab_size={self.vocab_size} or more, or data.vocab_size={model.outputs()} or less"
            )
        if self.folder().is_dir():
            self._text().check(model)
        else:
            topics()

    def prepare(self) -> None:
        """A few seconds, once for each Python version and vocabulary."""
        if not self.folder().is_dir():
            make_folder(self.folder(), self._make)
        self._text().prepare()  # for a token file that was deleted

    def split(self, train: bool, model: Model, seed: int) -> TokenSplit:
        return self._ready().split(train, model, seed)

    def describe(self) -> dict[str, Any]:
        return self._ready().describe()

    def files_to_stage(self) -> list[StagedFiles]:
        return self._ready().files_to_stage()

    def files_read(self) -> Iterator[Path]:
        return self._ready().files_read()

    def folder(self) -> Path:
        """Where the set is, e.g. ~/.cache/ddlbench/sample_text-v1-py3.11.7-bpe2048."""
        return sample_home(self.root) / f"sample_text-{VERSION}-py{platform.python_version()}-bpe{self.vocab_size}"

    def _ready(self) -> TokenText:
        self.prepare()  # on a node that does not share the folder with the one that called `prepare`
        return self._text()

    def _text(self, folder: Path | None = None) -> TokenText:
        where = str(folder or self.folder())
        return TokenText(
            self.name, where, cache_dir=where, stage_to=self.stage_to, tokenize=self.tokenize, val_limit=self.val_limit
        )

    def _make(self, folder: Path) -> None:
        train, valid = split_paragraphs(topics())
        (folder / "train.txt").write_bytes(train.encode())
        (folder / "valid.txt").write_bytes(valid.encode())
        train_bpe(train, self.vocab_size, folder)
        self._text(folder).prepare()


def topics() -> dict[str, str]:
    """Prose by topic. Raises UserError in a Python that was stripped of its help."""
    try:
        from pydoc_data import topics as module
    except ImportError as error:
        raise UserError(
            f"this Python ({platform.python_version()}) has no module pydoc_data, the text of data=sample_text: "
            f"use another Python, or text of your own with data=wikitext2 data.root=FOLDER"
        ) from error
    return module.topics


def split_paragraphs(prose: dict[str, str]) -> tuple[str, str]:
    """Training and validation text: the last tenth of the paragraphs, in the order of their topics, validates.

    The help repeats a fifth of its paragraphs under several topics. Each is kept once, where it comes first, so that
    no paragraph of the validation text was trained on.
    """
    parts = (part.strip("\n") for key in sorted(prose) for part in prose[key].split("\n\n"))
    paragraphs = list(dict.fromkeys(part for part in parts if part))
    cut = len(paragraphs) * 9 // 10
    train, valid = ("\n\n".join(part) + "\n" for part in (paragraphs[:cut], paragraphs[cut:]))
    return train, valid


def train_bpe(text: str, vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE as GPT-2's (Radford et al. 2019, section 2.2); vocab.json and merges.txt into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.model.save(str(folder))
