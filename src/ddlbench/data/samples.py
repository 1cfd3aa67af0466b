"""The data sets that the program makes itself on first use, without a download.

Images: thousands of JPEGs of ImageNet's size in ten classes. A class is a kind of figure on cluttered ground. Pixels
are drawn in integer arithmetic only, so that a seed gives the same bytes on every machine.

Text: English, from Python's own documentation, with a tokenizer trained on it. It is the language reference as the
interactive help has it (pydoc_data.topics, under Python's licence), about half a megabyte. It differs between Python
versions: so the folder has the version in its name, and records the hash.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

from ddlbench.data.home import home, make_folder
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.images.index import FolderLayout
from ddlbench.data.processes import in_threads, usual_processes
from ddlbench.data.text.dataset import PAIRS, TokenText
from ddlbench.data.text.token_file import TokenizerFiles
from ddlbench.data.tfrecord import MANIFEST
from ddlbench.errors import UserError, added, check_values
from ddlbench.job import Model
from ddlbench.progress import Progress

IMAGES_VERSION = 1  # of the pictures: part of the seed and of the folder's name
TEXT_VERSION = "v1"  # raised when the set is made in another way
OTHER_IMAGES = {"train": "imagenet", MANIFEST: "imagenet_tfrecord"}
OTHER_TEXTS = {train: "wikitext2 or wikitext103" for train, _ in PAIRS}
QUALITY = 87  # gives 30 to 155 KB, 89 on average
Plane = NDArray[np.int32]  # [height, width]
# [3, height, width], not yet clipped to 0 ... 255; channels first, because they are drawn one by one
Canvas = NDArray[np.int16]
Figure = Callable[[Plane, Plane], NDArray[Any]]  # (u, v), 256 = its radius -> 0 outside, 1 first ink, 2 second ink

# (width, height): ImageNet's usual ones.
SIZES = ((500, 375), (500, 375), (500, 333), (375, 500), (333, 500), (500, 500), (400, 300), (640, 480))


def sample_home(root: str | None, others: Mapping[str, str]) -> Path:
    """Where a sample set is made: data.root, else the program's own folder. UserError if that is not a folder, or if it
    holds a data set of the user: the run would not read it.

    others: a file or folder of such a set -> the option that reads it
    """
    place = Path(root).expanduser() if root else home()
    if place.exists() and not place.is_dir():
        raise UserError(f"data.root={place} is not a folder: give one, which may be missing, or leave data.root out")
    for name, option in others.items():
        if root and (place / name).exists():
            raise UserError(
                f"data.root={place} holds {name}, which a sample set does not read: choose data={option}, or another "
                "data.root for the sample set"
            )
    return place


def square(u: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """The squared distance from the centre."""
    return u * u + v * v


def longer(u: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    return np.maximum(abs(u), abs(v))


# In the order of their names, as an index of folders has them.
FIGURES: dict[str, Figure] = {
    "checkers": lambda u, v: (longer(u, v) < 220) * (1 + ((u >> 6) + (v >> 6) & 1)),
    "crescent": lambda u, v: (square(u, v) < 256**2) & (square(u - 110, v) > 220**2),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 70) & (longer(u, v) < 250),
    "dots": lambda u, v: (longer(u, v) < 256) & (square((u & 127) - 64, (v & 127) - 64) < 42**2),
    "ring": lambda u, v: (square(u, v) < 256**2) & (square(u, v) > 150**2),
    # four concave points around a heart
    "star": lambda u, v: ((abs(u * v) < 64**2) & (longer(u, v) < 256)) * (1 + (abs(u) + abs(v) < 110)),
    "stripes": lambda u, v: (square(u, v) < 256**2) * (1 + (u >> 6 & 1)),
    # rings of two inks inside one another
    "target": lambda u, v: (square(u, v) < 256**2) * (1 + sum(square(u, v) > (51 * n) ** 2 for n in (1, 2, 3, 4)) % 2),
    "triangle": lambda u, v: (v > -160) & (v + 2 * abs(u) < 250),
    # a diamond of bent stripes
    "zigzag": lambda u, v: (abs(u) + abs(v) < 300) * (1 + (abs((u & 127) - 64) + v >> 5 & 1)),
}
CLASSES = tuple(FIGURES)


@dataclass
class SampleImages(ImageFolders):
    """ImageFolders that the program makes itself.

    root: folder of the set, made if it is missing; None: the program's own
    sample_train, sample_val: images in each split, the classes taking turns
    """

    # Of the folder that this class draws: no keys of its YAML, and not in older records.
    train_dir: str = added("train")
    val_dir: str = added("val")
    sample_train: int = 3000
    sample_val: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values("data.", self, least=dict.fromkeys(("sample_train", "sample_val"), len(CLASSES)))

    def folder(self) -> Path:
        """Where the set is."""
        place = sample_home(self.root, OTHER_IMAGES)
        return place / f"sample_images-v{IMAGES_VERSION}-{self.sample_train}-{self.sample_val}"

    def layout(self) -> FolderLayout:
        """The set is made at the first use, in half a minute on two cores, also on a node that does not share the
        folder with the one that called `prepare`."""
        make_folder(self.folder(), lambda temporary: make_images(temporary, self.sample_train, self.sample_val))
        return FolderLayout(self.folder(), "train", "val")

    def check(self, model: Model, validate: bool = True) -> None:
        self.folder()  # raises for a root that is no folder
        self.check_fits(len(CLASSES), model)


def make_images(folder: Path, train: int, val: int) -> None:
    """Draw folder/train/<class>/*.JPEG and folder/val/<class>/*.JPEG.

    Threads do it, because numpy and Pillow release Python's lock while they work, and nothing must be importable.
    """
    jobs = [(folder, split, index) for split, count in (("train", train), ("val", val)) for index in range(count)]
    progress = Progress(enabled=True)
    progress.say(f"making {len(jobs)} sample images in {folder.parent}, once")
    made = in_threads(lambda job: write_image(*job), jobs, usual_processes())
    for _ in progress.steps(made, len(jobs), "sample images"):
        pass


def write_image(folder: Path, split: str, index: int) -> None:
    label = index % len(CLASSES)
    file = folder / split / CLASSES[label] / f"{CLASSES[label]}_{index:05d}.JPEG"
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = draw(label, RandomState([IMAGES_VERSION, split == "train", index]))
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0", optimize=False, progressive=False)


def draw(label: int, random: RandomState) -> NDArray[np.uint8]:
    """One image [height, width, 3] of class `label`: one to three figures of its kind, of any color, place, size and
    turn, on smooth random ground among plain distractors, under uneven light and noise."""
    width, height = SIZES[random.randint(len(SIZES))]
    # Coarse patches of color with a finer texture over them.
    cells, span = random.randint(8, 60), random.randint(20, 120)
    texture = random.randint(0, span, (3, cells, cells)).astype(np.int16) - span // 2
    patches = random.randint(0, 256, (3, 6, 6)).astype(np.int16)
    canvas = stretched(stretched(patches, cells, cells) + texture, height, width)
    for _ in range(random.randint(0, 5)):
        place(canvas, lambda u, v: (abs(u) < 200) & (abs(v) < 90), random, smallest=6, largest=18)
    for _ in range(random.randint(0, 3)):
        place(canvas, FIGURES[CLASSES[label]], random, smallest=12, largest=20)
    place(canvas, FIGURES[CLASSES[label]], random, smallest=24, largest=44)
    canvas += stretched(random.randint(-48, 48, (1, 4, 4)).astype(np.int16), height, width)  # slow changes of light
    # Grain, the same in every channel; its strength varies from image to image.
    grain = np.frombuffer(random.bytes(height * width), np.uint8).astype(np.int16).reshape(1, height, width) - 128
    grain *= random.randint(2, 12)
    canvas += grain >> 5
    return np.stack(list(canvas.clip(0, 255, out=canvas).astype(np.uint8)), axis=-1)


def place(canvas: Canvas, figure: Figure, random: RandomState, smallest: int, largest: int) -> None:
    """Draw a figure into the canvas; its radius lies between percentages of the canvas' shorter side."""
    height, width = canvas.shape[1:]
    radius = min(height, width) * random.randint(smallest, largest + 1) // 100
    x, y = random.randint(width // 5, width * 4 // 5), random.randint(height // 5, height * 4 // 5)
    reach = radius * 3 // 2  # a turned square's corner
    top, left = max(0, y - reach), max(0, x - reach)
    window = canvas[:, top : y + reach, left : x + reach]
    down, right = np.ogrid[top - y : top - y + window.shape[1], left - x : left - x + window.shape[2]]
    inks = figure(*turned(right.astype(np.int32), down.astype(np.int32), random.randint(32), radius))
    # Any color, and one that differs from it by at least 80 of 255 in every channel.
    first = random.randint(0, 256, 3)
    for ink, color in enumerate((first, (first + random.randint(80, 177, 3)) % 256), start=1):
        covered = inks == ink
        for channel, value in zip(window, color, strict=True):
            np.copyto(channel, value, where=covered)


def turned(x: Plane, y: Plane, turn: int, radius: int) -> tuple[Plane, Plane]:
    """Coordinates of a figure turned by `turn` 32nds of a full turn, 256 = its radius."""
    # Rounded to 4096ths, where none lies near a half, because a machine's own sine may differ in the last bit.
    sine, cosine = (round(4096 * math.sin(math.pi / 16 * part)) for part in (turn, turn + 8))
    u, v = x * cosine + y * sine, y * cosine - x * sine
    u //= 16 * radius
    v //= 16 * radius
    return u, v


def stretched(grid: Canvas, height: int, width: int) -> Canvas:
    """Bilinear interpolation between the points of a grid, in 64ths: differences below 512 stay within int16. It works
    in place, because fresh memory costs more than the arithmetic."""
    for axis, length in ((2, width), (1, height)):
        at = np.arange(length) * (grid.shape[axis] - 1) * 64 // length  # in 64ths of the way from point to point
        part = (at & 63).astype(np.int16)
        grid, end = grid.take(at >> 6, axis), grid.take((at >> 6) + 1, axis)
        end -= grid
        end *= part if axis == 2 else part[:, None]
        end >>= 6
        grid += end
    return grid


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
        """The set is made at the first use, in a few seconds, once for each Python version and vocabulary, also on a
        node that does not share the folder with the one that called `prepare`."""
        make_folder(self.folder(), self._make)
        return self.folder() / "train.txt", self.folder() / "valid.txt"

    def tokenizer_files(self) -> TokenizerFiles | None:
        return TokenizerFiles.find(self.texts()[0].parent)

    def folder(self) -> Path:
        """Where the set is, e.g. ~/.cache/ddlbench/sample_text-v1-py3.11.7-bpe2048."""
        place = sample_home(self.root, OTHER_TEXTS)
        return place / f"sample_text-{TEXT_VERSION}-py{platform.python_version()}-bpe{self.vocab_size}"

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

    The help repeats a fifth of its paragraphs under several topics. Only the first occurrence is kept, so that no
    paragraph of the validation text was trained on.
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
