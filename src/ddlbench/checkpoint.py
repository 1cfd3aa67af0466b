"""The tensors that a rank must save between two epochs to continue exactly, and the folder that has them.

`Checkpointable` is an optional protocol beside `Trainer` (docs/adr/0019): a trainer without it trains as before, and
`checkpoint.every` is refused for it. A framework that cannot save in every configuration has the method
`check_checkpoint`.

The folder has the tensors of all ranks, written once by torch.distributed.checkpoint, and a file that describes them,
with checksums. It is read safely: torch unpickles the folder's metadata, which could run any code, and so could a value
that is no tensor. `MetadataUnpickler` makes objects of the few classes that describe tensors only; values that are no
tensors do not exist here. The tensors themselves are read by torch.load with weights_only=True.
"""

from __future__ import annotations

import contextlib
import pickle  # noqa: TID251 - its unpickler makes objects of a list of allowed classes alone
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddlbench.errors import RunError
from ddlbench.files import replace_json
from ddlbench.foreign import read_format, sha256_of
from ddlbench.ranks.control import all_gather, single_process
from ddlbench.texts import first_line

OFF = "set checkpoint.every=null"
METADATA = ".metadata"
ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}  # fmt: skip

Files = dict[str, tuple[int, str]]  # name -> size in bytes, SHA-256
FORMAT = 1
ABOUT = "checkpoint.json"
RATES = {"step", "first", "last"}  # what is kept of recipe.recipe.Rates
RENAMED = {"synchronised": "synchronized"}  # of `numbers`, as earlier versions of this format wrote them
NAME = re.compile(r"epoch-(\d{6,})")


@dataclass(frozen=True)
class Live:
    """The tensors of a rank that training changes, in place and not copied, and the optimizer that changes them.

    parameters: what the optimizer updates, by name; a DTensor where ranks have shards of one
    rank_tensors: other tensors, whose values differ between ranks (BatchNorm's statistics), by name
    part: ranks of the same part have equal parameters and optimizer states, or shards of the same: saved once
    """

    parameters: Mapping[str, Tensor]
    optimizer: Optimizer
    rank_tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    part: str = "model"


class Kept:
    """What a trainer keeps from step to step beside its model and its optimizer: nothing here."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that training changes, by name and not copied."""
        return {}

    def numbers(self) -> dict[str, Any]:
        """What is not in tensors, equal on all ranks."""
        return {}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """The tensors have been overwritten; take the numbers back, which are among all of the trainer."""


@runtime_checkable
class Checkpointable(Protocol):
    """A `Trainer` that can be saved between two epochs and restored in another process of the same rank."""

    def live(self) -> Live:
        """Its tensors, the same names in every process."""
        ...

    def numbers(self) -> dict[str, Any]:
        """Its state that is not in tensors: numbers and flags, equal on all ranks."""
        ...

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """The live tensors have been overwritten; take the numbers back. Called on all ranks."""
        ...


def named_tensors(live: Live, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Parameters, optimizer states and buffers of a rank, not copied, and its random number generators' states."""
    saved = {f"{live.part}/parameters/{name}": tensor.detach() for name, tensor in live.parameters.items()}
    for name, parameter in live.parameters.items():
        for key, value in live.optimizer.state.get(parameter, {}).items():
            if value is not None:
                saved[f"{live.part}/optimizer/{name}/{key}"] = value
    for index, group in enumerate(live.optimizer.param_groups):
        if "step" in group:  # timm's LAMB counts the updates here, and not in the states of its parameters
            group["step"] = torch.as_tensor(group["step"])  # an int in older versions
            saved[f"{live.part}/groups/{index}/step"] = group["step"]
    saved |= {f"rank{rank}/own/{name}": tensor for name, tensor in live.rank_tensors.items()}
    saved[f"rank{rank}/random/cpu"] = torch.get_rng_state()  # of torch's generators: a step draws from no other
    if device.type == "cuda":
        saved[f"rank{rank}/random/cuda"] = torch.cuda.get_rng_state(device)
    return saved


def make_optimizer_states(live: Live, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Give the optimizer of a new process the states that a saved one had, still without their values.

    shapes: of every saved tensor, by its name
    """
    groups = live.optimizer.param_groups  # not the defaults, which Horovod's optimizer takes from the class
    on_device = any(group.get(name) for group in groups for name in ("capturable", "fused"))
    for index, group in enumerate(groups):
        if saved_step := shapes.get(f"{live.part}/groups/{index}/step"):
            shape, dtype = saved_step
            group["step"] = torch.zeros(shape, dtype=dtype)
    new_state = getattr(live.optimizer, "new_state", None)  # of an optimizer whose states have shapes of their own
    # Looked for once: a thousand ranks have also saved tensors of their own.
    states = {key: kind for key, kind in shapes.items() if key.startswith(f"{live.part}/optimizer/")}
    for name, parameter in live.parameters.items():
        prefix = f"{live.part}/optimizer/{name}/"
        saved = {key.removeprefix(prefix): kind for key, kind in states.items() if key.startswith(prefix)}
        if new_state and saved:
            live.optimizer.state[parameter] = new_state(parameter)
            continue
        for key, (shape, dtype) in saved.items():
            if shape == parameter.shape:
                state = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:  # torch keeps the number of steps on the CPU
                state = torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
            live.optimizer.state[parameter][key] = state


def set_random_states(saved: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """saved: the tensors that `named_tensors` named"""
    torch.set_rng_state(saved[f"rank{rank}/random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved[f"rank{rank}/random/cuda"], device)


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint. attempt: the one that saved it; epoch: the next; lineage: the attempts behind it."""

    folder: Path
    run_id: str
    attempt: int
    lineage: Sequence[int]
    epoch: int
    updates: int
    elapsed_s: float
    rates: Mapping[str, Any]
    numbers: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]]  # lines of epochs.jsonl
    files: Files

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """ValueError for what is no checkpoint of this version."""
        content = read_format(folder / ABOUT, FORMAT, "remove the folder")
        del content["format"]
        if set(content) != {field.name for field in fields(cls)} - {"folder"}:
            raise ValueError(f"{ABOUT} lacks keys or has others")
        if not _sound(content):
            raise ValueError(f"{ABOUT} has values that no run writes")
        content["numbers"] = {RENAMED.get(name, name): value for name, value in content["numbers"].items()}
        return cls(folder, **content)

    def write(self) -> None:
        content = {name: value for name, value in vars(self).items() if name != "folder"}
        replace_json(self.folder / ABOUT, {"format": FORMAT, **content})


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of one attempt, the newest first."""
    with contextlib.suppress(OSError):
        return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), reverse=True)
    return []


def _sound(content: Mapping[str, Any]) -> bool:
    """Whether the values have their types. A run removes folders whose names contain an attempt, and reads the files:
    all of them must lie beside this one."""
    lineage, epochs, files = content["lineage"], content["epochs"], content["files"]
    if not (isinstance(lineage, list) and isinstance(epochs, list) and isinstance(files, dict)):
        return False
    counts = (content["attempt"], content["epoch"], content["updates"], *lineage)
    numbers = all(type(count) is int and count >= 0 for count in counts) and type(content["elapsed_s"]) in (int, float)
    plain = all(isinstance(section, dict) for section in (content["rates"], content["numbers"], *epochs))
    named = isinstance(content["run_id"], str) and all(Path(name).name == name for name in files)
    sized = all(isinstance(file, list) and len(cast(list[Any], file)) == 2 for file in files.values())
    return numbers and plain and named and sized and set(content["rates"]) == RATES


class MetadataUnpickler(pickle.Unpickler):
    """Makes only objects of the classes that describe tensors, and the types of their numbers."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not (dtype or global_name in ALLOWED.get(module_name, ())):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a checkpoint's metadata")
        return super().find_class(module_name, global_name)


def read_metadata(folder: Path) -> Any:
    """torch's `Metadata`. RunError for anything else."""
    try:
        with (folder / METADATA).open("rb") as file:
            return MetadataUnpickler(file).load()
    except Exception as error:  # the file may hold anything
        raise RunError(f"{folder / METADATA} is no metadata of a checkpoint ({error}): remove {folder}") from error


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The size and dtype of every tensor in the folder, without sharding."""
    tensors = read_metadata(folder).state_dict_metadata
    return {name: (tensor.size, tensor.properties.dtype) for name, tensor in tensors.items()}


def write(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> Files:
    """Write the tensors of all ranks into a new folder; returns the files of all ranks. One rank writes a tensor whose
    name several ranks have; each rank writes its shard of a DTensor. Collective. RunError, on every rank, if one of
    them cannot write."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(str(folder))
    writer.storage_meta = StorageMeta  # without the folder's name, which changes
    with _as_run_error(f"the checkpoint in {folder} cannot be written", "free space or choose another checkpoint.dir="):
        save(dict(tensors), storage_writer=writer, no_dist=single_process())
    written = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
    files: Files = {}
    for of_rank in all_gather({path.name: (path.stat().st_size, sha256_of(path)) for path in written}):
        files |= of_rank
    return files


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors in place with what the folder has under their names. Collective, as `write`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, metadata = FileSystemReader(str(folder)), read_metadata(folder)
    reader.read_metadata = lambda *_, **__: metadata  # torch's own unpickles any class
    with _as_run_error(f"the checkpoint in {folder} cannot be read", "remove it to continue from an earlier one"):
        load(dict(tensors), storage_reader=reader, no_dist=single_process())


def damage(folder: Path, files: Files, rank: int, world_size: int) -> str | None:
    """What is wrong with the files, the same on every rank; None: nothing. Each rank reads its share. Collective."""
    wrong: list[str] = []
    for name in sorted(files)[rank::world_size]:
        path, (written, checksum) = folder / name, files[name]
        try:
            if (size := path.stat().st_size) != written:
                wrong.append(f"{name} has {size} bytes instead of {written}")
            elif sha256_of(path) != checksum:
                wrong.append(f"the checksum of {name} differs")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
    return next((problem for of_rank in all_gather(wrong[:1]) for problem in of_rank), None)


@contextmanager
def _as_run_error(what: str, remedy: str) -> Generator[None]:
    """torch raises its own BaseException with every rank's traceback."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # of a single process
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RunError(f"{what} (rank {rank}: {type(cause).__name__}: {first_line(cause)}): {remedy}") from cause
