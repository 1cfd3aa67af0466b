"""DALI's pipeline and its iterator for PyTorch, on the CPU: docs.nvidia.com/deeplearning/dali, "ImageNet training".

Crops, interpolation and the upsampling of colors are those of ddlbench's run.
"""

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

from benchmarks.bare.reading import timed


@pipeline_def
def training(folder: Path, size: int):
    encoded, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="reader")
    images = fn.decoders.image_random_crop(
        encoded,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
        num_attempts=10,
        output_type=types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
    )
    images = fn.resize(images, size=(size, size), interp_type=types.INTERP_TRIANGULAR)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mirror=fn.random.coin_flip(probability=0.5),
        mean=[0.485 * 255, 0.456 * 255, 0.406 * 255],
        std=[0.229 * 255, 0.224 * 255, 0.225 * 255],
    )
    return images, labels


def epochs(folder: str, batch: int, size: int, threads: int) -> Iterator[DALIClassificationIterator]:
    pipeline = training(
        Path(folder) / "train", size, batch_size=batch, num_threads=threads, device_id=None, prefetch_queue_depth=2
    )
    drop = LastBatchPolicy.DROP
    return repeat(DALIClassificationIterator(pipeline, reader_name="reader", last_batch_policy=drop, auto_reset=True))


if __name__ == "__main__":
    timed(epochs)
