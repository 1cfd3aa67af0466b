"""Make a folder that Horovod's build accepts as HOROVOD_NCCL_HOME: python scripts/nccl_home.py FOLDER

torch's NCCL wheel has libnccl.so.2 only; the linker's -lnccl looks for libnccl.so. The folder gets two links:
include/ -> the wheel's headers, lib/libnccl.so -> the wheel's library. Where there is no wheel it exits with 1 and one
line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path


def wheel_library(installed: Iterable[Distribution]) -> Path | None:
    """libnccl.so.2 of the installed nvidia-nccl-cuNN wheel, or None."""
    for wheel in installed:
        if (wheel.metadata["Name"] or "").lower().replace("_", "-").startswith("nvidia-nccl-cu"):
            for file in wheel.files or ():
                if file.name == "libnccl.so.2":
                    return Path(str(wheel.locate_file(file))).resolve()
    return None


def make_home(folder: Path, library: Path) -> None:
    """`library` is <NCCL>/lib/libnccl.so.2; its headers are in <NCCL>/include."""
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    for link, target in (("include", library.parents[1] / "include"), ("lib/libnccl.so", library)):
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(target)


def main(folder: str) -> None:
    library = wheel_library(distributions())
    if library is None:
        raise SystemExit(f"no nvidia-nccl wheel beside {sys.executable}: set HOROVOD_NCCL_HOME to your NCCL's folder")
    make_home(Path(folder), library)


if __name__ == "__main__":
    main(sys.argv[1])
