"""English text from Python's own documentation, with a tokenizer trained on it: made at its first use, no download.

The text is the language reference as the interactive help has it (pydoc_data.topics, under Python's licence), about
half a megabyte. It differs between Python versions: so the folder has the version in its name, and records the hash.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ddlbench.data.home import make_folder, sample_home
from ddlbench.data.text.dataset import TokenText
from ddlbench.data.text.token_file import TokenizerFiles
from ddlbench.errors import UserError, check_values
from ddlbench.job import Model

VERSION = "v1"  # raised when the set is made in another way


@dataclass
class SampleText(TokenText):
    """TokenText that the program makes itself: tokenizer, cache_dir, train and valid are no keys of its YAML.

    root: folder of the set, made if it is missing; None: the program's own
    vocab_size: tokens of the byte-level BPE, 256 at least; fewer where the text has fewer merges
    """

    vocab_size: int = 2048

    def __post_init__(self) -> None:
        check_values("data.", self, least={"vocab_size": 256})
        self.folder()  # raises for a root that is no folder
        super().__post_init__()

    def check(self, model: Model, validate: bool = True) -> None:
        if self.vocab_size > model.outputs():
            raise UserError(
                f"data.vocab_size={self.vocab_size} is more than the model's {model.outputs()}: "
                f"give model.vocab_size={self.vocab_size} or more, or data.vocab_size={model.outputs()} or less"
            )
        if self.folder().is_dir():
            super().check(model)
        else:
            topics()

    def texts(self) -> tuple[Path, Path]:
        """Made at the first use, in a few seconds, once for each Python version and vocabulary; also on a node that
        does not share the folder with the one that called `prepare`."""
        make_folder(self.folder(), self._make)
        return self.folder() / "train.txt", self.folder() / "valid.txt"

    def tokenizer_files(self) -> TokenizerFiles | None:
        return TokenizerFiles.find(self.texts()[0].parent)

    def folder(self) -> Path:
        """Where the set is, e.g. ~/.cache/ddlbench/sample_text-v1-py3.11.7-bpe2048."""
        return sample_home(self.root) / f"sample_text-{VERSION}-py{platform.python_version()}-bpe{self.vocab_size}"

    def _make(self, folder: Path) -> None:
        train, valid = split_paragraphs(topics())
        (folder / "train.txt").write_bytes(train.encode())
        (folder / "valid.txt").write_bytes(valid.encode())
        train_bpe(train, self.vocab_size, folder)
        TokenText(self.name, str(folder)).prepare()


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
