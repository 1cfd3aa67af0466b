"""Packed image sets (data/tfrecord/packed.py) as training data, with the crops and flips of data/images/folders.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddlbench.data.home import kept_folder
from ddlbench.data.images.folders import ImageFolders
from ddlbench.data.images.source import PackedSource
from ddlbench.data.tfrecord.index import open_source, prepare_source
from ddlbench.data.tfrecord.packed import MANIFEST, read_manifest
from ddlbench.errors import UserError
from ddlbench.job import Model


@dataclass
class PackedImages(ImageFolders):
    """ImageFolders whose files are in TFRecord shards. Checksums of records are not computed while training."""

    mapped = True

    def check(self, model: Model, validate: bool = True) -> None:
        pack = read_manifest(self.folder())
        for key in ("train_dir", "val_dir"):
            if (name := getattr(self, key)) not in pack.splits:
                raise UserError(f"data.{key}={name} is no split of {self.folder()}: choose {' or '.join(pack.splits)}")
        self.check_fits(len(pack.classes), model)

    def folder(self) -> Path:
        if self.root is None:
            raise UserError(f"data={self.name} needs data.root=...: the folder of a packed image set, with {MANIFEST}")
        return Path(self.root).expanduser()

    def prepare(self) -> None:
        """Reads every record once."""
        for split in (self.train_dir, self.val_dir):
            prepare_source(self.folder(), split, self._cache())

    def digest(self) -> str:
        """The hash of the image folders that were packed: packing does not change the data."""
        return read_manifest(self.folder()).hash

    def original(self, train: bool) -> PackedSource:
        return open_source(self.folder(), self.train_dir if train else self.val_dir, self._cache())

    def _cache(self) -> Path:
        return kept_folder(self.folder(), self.cache_dir)
