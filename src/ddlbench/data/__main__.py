"""python -m ddlbench.data: make, choose, pack, tokenize, check and describe data sets."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ddlbench.command import ended, given_path
from ddlbench.data.images.index import Files, FolderLayout, prepare_index
from ddlbench.data.processes import usual_processes
from ddlbench.data.text.token_file import TokenFile, TokenizerFiles, is_current, token_files, token_path, tokenize_file
from ddlbench.data.tfrecord import MANIFEST, UNFINISHED, Pack, read_manifest
from ddlbench.data.tools import pack, verify_folders, verify_pack, verify_tokens
from ddlbench.errors import UserError, reporting
from ddlbench.texts import counted, first_few, printable, say

DAMAGED = 1  # exit code
KINDS = "image folders (train/<class>/*.JPEG, val/<class>/*.JPEG), a packed image set (pack.json), a token file (.bin)"


def make_sample(given: argparse.Namespace) -> int:
    """Make the sample images (or text) that data=sample_images (sample_text) uses, if they are not there."""
    from ddlbench.data.samples import SampleImages, SampleText  # brings torch, which no other command needs

    root = str(given.root) if given.root else None
    if given.text:
        data = SampleText("sample_text", root=root)
    else:
        data = SampleImages("sample_images", root=root, sample_train=given.train, sample_val=given.val)
    data.prepare()
    say(data.folder())
    return 0


def pack_folders(given: argparse.Namespace) -> int:
    """Copy image folders into a few large TFRecord files with DALI's indices; resume an earlier attempt."""
    splits = pack(_layout(given), given.target, given.shard_mb * 1_000_000, given.processes).splits
    parts = ", ".join(f"{split.samples} {name} images in {len(split.shards)}" for name, split in splits.items())
    say(f"{given.target}: {parts} shards, {sum(split.bytes for split in splits.values()) / 1e6:.1f} MB")
    return 0


def subset(given: argparse.Namespace) -> int:
    """Make image folders of some classes, with links to the folders of all; the classes are drawn from a seed."""
    layout, target = _layout(given), FolderLayout(given.target, given.train_dir, given.val_dir)
    classes = layout.classes()
    if given.classes > len(classes):
        raise UserError(f"--classes {given.classes}: {given.place} has {len(classes)}: give at most {len(classes)}")
    if given.target.exists():
        raise UserError(f"{given.target} exists: choose a new folder, or remove it")
    chosen = sorted(random.Random(given.seed).sample(classes, given.classes))
    with reporting(f"cannot write {given.target}", "choose another folder"):
        for source, split in zip(layout.splits, target.splits, strict=True):
            split.mkdir(parents=True)
            for name in chosen:
                (split / name).symlink_to((source / name).resolve(), target_is_directory=True)
    say(f"{given.target}: {len(chosen)} of {len(classes)} classes: {', '.join(first_few(chosen, 10))}")
    return 0


def verify(given: argparse.Namespace) -> int:
    """Check every checksum, decode every image, count the classes, list what is bad. Exit code 1 if anything is bad."""
    layout, counts, faults = _layout(given), Counter[tuple[str, str]](), 0
    match _kind(layout):
        case "packed":
            parts = verify_pack(given.place, given.processes)
        case "tokens":
            parts = verify_tokens(given.place)
        case _:
            parts = verify_folders(layout, given.processes)
    for part in parts:
        counts.update({(split, printable(label)): samples for (split, label), samples in part.counts.items()})
        faults += len(part.faults)
        say(*part.faults)
    width = max((len(label) for _, label in counts), default=0)
    for (split, label), samples in sorted(counts.items()):
        say(f"{split:5}  {label:{width}}  {samples:7}")
    verdict = counted(faults, "fault") if faults else "no faults"
    say(f"{given.place}: {verdict}" + (f", {counts.total()} samples" if counts else ""))
    return DAMAGED if faults else 0


def tokenize(given: argparse.Namespace) -> int:
    """Turn a text into a memory-mapped token file, on all cores; by default the one that a run would make of it."""
    text: Path = given.text
    files = TokenizerFiles.find(place := given.tokenizer or text.parent)
    if not text.is_file() or text.suffix == ".bin":
        raise UserError(f"{text} is not a text file: give the raw text")
    if files is None:
        raise UserError(f"no tokenizer in {place}: give --tokenizer a folder with vocab.json and merges.txt (GPT-2's)")
    target: Path = given.out or token_path(text, files.hash(), None)
    if target.suffix != ".bin":
        raise UserError(f"--out {target} does not end in .bin: its index is the same name with .json")
    for beside in (target.with_suffix(".json"), target.with_suffix(".lines")):
        if beside.exists() and not target.exists():
            raise UserError(
                f"--out {target}: {beside}, which would be a part of it, is another file: choose another name"
            )
    if given.out or not is_current(text, target):
        with reporting(f"cannot write {target}", "choose another --out"):
            tokenize_file(text, files.load(), target)
    say(f"{target}: {TokenFile.open(target).index.tokens} tokens")
    return 0


def describe(given: argparse.Namespace) -> int:
    """Print what a folder or file is, its contents and its hash."""
    layout, place, lines = _layout(given), given.place, list[tuple[str, str]]()
    if (what := _kind(layout)) == "tokens":
        for path in token_files(place):
            index = TokenFile.open(path).index
            lines += [
                ("kind", f"token file {path.name}, format {index.format}"),
                ("tokens", f"{index.tokens} of {index.dtype}, {_size(path.stat().st_size)}"),
                ("text", f"{index.source}: {index.words} words, {index.lines} lines, {_size(index.source_bytes)}"),
                ("tokenizer", index.tokenizer),
                ("hash", index.sha256),
            ]
    else:
        images = read_manifest(place) if what == "packed" else prepare_index(layout, None)
        kind = f"packed image set, format {images.format}" if isinstance(images, Pack) else "image folders"
        lines += [("kind", kind), ("classes", f"{len(images.classes)}: {', '.join(first_few(images.classes, 10))}")]
        for split, part in images.splits.items():
            if isinstance(part, Files):
                lines.append((split, f"{len(part)} images, {_size(int(part.sizes.sum()))}"))
            else:
                lines.append((split, f"{part.samples} images in {len(part.shards)} shards, {_size(part.bytes)}"))
        lines.append(("hash", images.hash))
        if what == "packed" and (place / UNFINISHED).is_file():
            lines.append(("warning", "packing it again was started and not finished: pack it again"))
    say(*(f"{name:9}  {value}" for name, value in lines))
    return 0


def _size(count: int) -> str:
    return f"{count} bytes ({count / 1e6:.1f} MB)"


def _kind(layout: FolderLayout) -> str:
    """packed | tokens | folders. Raises UserError where the place is none of them."""
    place = layout.root
    if (place / MANIFEST).is_file() or (place / UNFINISHED).is_file():
        return "packed"
    if token_files(place):
        return "tokens"
    if any(split.is_dir() for split in layout.splits):
        return "folders"
    raise UserError(f"{place} {'is not' if place.exists() else 'does not exist: give'} one of: {KINDS}")


def _layout(given: argparse.Namespace) -> FolderLayout:
    return FolderLayout(given.place, given.train_dir, given.val_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for errors of the user, 1 for damaged data."""
    given = _parser().parse_args(arguments)
    return ended("ddlbench.data", lambda: given.run(given), "interrupted; run the same command again to resume")


@cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddlbench.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object) -> argparse.ArgumentParser:
        text = (run.__doc__ or "").strip()
        subparser = commands.add_parser(name, help=text, description=text)
        subparser.set_defaults(run=run)
        return subparser

    sample = command("make-sample", make_sample)
    sample.add_argument(
        "--root", type=given_path, metavar="DIR", help="folder (default: $DDLBENCH_HOME, ~/.cache/ddlbench)"
    )
    sample.add_argument("--train", type=int, default=3000, metavar="N", help="training images (default: 3000)")
    sample.add_argument("--val", type=int, default=1000, metavar="N", help="validation images (default: 1000)")
    sample.add_argument("--text", action="store_true", help="text and a tokenizer instead of images")

    images = "folder with train/<class>/*.JPEG and val/<class>/*.JPEG"
    every = "packed set, image folders, or token file"
    packing, choosing = command("pack", pack_folders), command("subset", subset)
    checking, describing = command("verify", verify), command("info", describe)
    for subparser, text in ((packing, images), (choosing, images), (checking, every), (describing, every)):
        subparser.add_argument("place", type=given_path, metavar="IMAGES" if text is images else "PLACE", help=text)
        for split in ("train", "val"):
            text = f"name of the folder of {split} images (default: {split})"
            subparser.add_argument(f"--{split}-dir", default=split, metavar="NAME", help=text)
    packing.add_argument("target", type=given_path, metavar="TARGET", help="folder of the packed set")
    packing.add_argument("--shard-mb", type=positive, default=128, metavar="MB", help="size of a shard (default: 128)")
    choosing.add_argument("target", type=given_path, metavar="TARGET", help="new folder of the subset")
    choosing.add_argument("--classes", type=positive, default=100, metavar="N", help="number (default: 100)")
    choosing.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice (default: 0)")
    usual = usual_processes()
    for subparser in (packing, checking):
        text = f"number of processes (default here: {usual})"
        subparser.add_argument("--processes", type=positive, default=usual, metavar="N", help=text)

    tokenizing = command("tokenize", tokenize)
    tokenizing.add_argument("text", type=given_path, metavar="TEXT", help="text file, UTF-8")
    tokenizing.add_argument(
        "--tokenizer", type=given_path, metavar="DIR",
        help="folder of vocab.json and merges.txt, or a tokenizer.json (default: the text's folder)",
    )  # fmt: skip
    tokenizing.add_argument(
        "--out", type=given_path, metavar="FILE", help="token file, NAME.bin (default: beside the text)"
    )

    return parser


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not greater than 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
