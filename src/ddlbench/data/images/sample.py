"""The image set that the program makes itself on first use: thousands of JPEGs of ImageNet's size in ten classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from numpy.random import RandomState
from PIL import Image

from ddlbench.data.home import make_folder, sample_home
from ddlbench.data.images.drawing import CLASSES, draw
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.images.index import FolderLayout, Index, open_index
from ddlbench.data.processes import in_threads, usual_processes
from ddlbench.errors import check_values
from ddlbench.job import Model
from ddlbench.progress import Progress

VERSION = 1  # of the pictures: part of the seed and of the folder's name
QUALITY = 87  # gives 30 to 155 KB, 89 on average


@dataclass
class SampleImages(ImageFolders):
    """ImageFolders that the program makes itself.

    root: folder of the set, made if it is missing; None: the program's own
    sample_train, sample_val: images in each split, the classes taking turns
    """

    # Of the folder that this class draws: no keys of its YAML, and not in older records.
    train_dir: str = field(default="train", metadata={"before": "train"})
    val_dir: str = field(default="val", metadata={"before": "val"})
    sample_train: int = 3000
    sample_val: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values("data.", self, least=dict.fromkeys(("sample_train", "sample_val"), len(CLASSES)))

    def layout(self) -> FolderLayout:
        folder = f"sample_images-v{VERSION}-{self.sample_train}-{self.sample_val}"
        return FolderLayout(sample_home(self.root) / folder, "train", "val")

    def check(self, model: Model, validate: bool = True) -> None:
        self.layout()  # raises for a root that is no folder
        self.check_fits(len(CLASSES), model)

    def _index(self, read: Callable[[FolderLayout, str | None], Index] = open_index) -> Index:
        """Makes the set where it is missing, in half a minute on two cores; also on a node that does not share the
        folder with the one that called `prepare`."""
        make_folder(self.layout().root, lambda temporary: make_images(temporary, self.sample_train, self.sample_val))
        return super()._index(read)


def make_images(folder: Path, train: int, val: int) -> None:
    """Draw folder/train/<class>/*.JPEG and folder/val/<class>/*.JPEG.

    In threads, not processes: numpy and Pillow release Python's lock while they work, and nothing must be importable.
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
    pixels = draw(label, RandomState([VERSION, split == "train", index]))
    Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0", optimize=False, progressive=False)
