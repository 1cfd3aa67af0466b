"""What is saved of a rank, by name; and what a framework must say before it is. Tensors in a folder: complete, with
checksums, and nothing in it is run. What is beside them, and which folders are complete."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ddlbench import checkpoint
from ddlbench.checkpoint import ABOUT, Live, Saved, make_optimizer_states, named_tensors
from ddlbench.errors import RunError
from tests.support.jobs import CPU
from tests.support.ranks import run_ranks


def made() -> dict[str, torch.Tensor]:
    """Tensors of every type that is saved."""
    return {
        "model/parameters/weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "model/parameters/half": torch.ones(5, dtype=torch.bfloat16),
        "model/optimizer/weight/step": torch.tensor(7.0),
        "rank0/own/counted": torch.tensor(3),
        "rank0/random/cpu": torch.get_rng_state(),
    }


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    checkpoint.write(tmp_path / "checkpoint", made(), rank=0)
    return tmp_path / "checkpoint"


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    result = {name: torch.zeros_like(tensor) for name, tensor in made().items()}
    checkpoint.read(folder, result)
    assert all(torch.equal(tensor, made()[name]) for name, tensor in result.items())
    assert checkpoint.shapes(folder) == shapes(made())


def test_a_byte_that_changed_and_a_file_that_is_short_or_missing_are_seen(tmp_path: Path) -> None:
    files = checkpoint.write(tmp_path, made(), rank=0)
    assert set(files) == {".metadata", "__0_0.distcp"} == {path.name for path in tmp_path.iterdir()}
    assert checkpoint.damage(tmp_path, files, 0, 1) is None
    path = tmp_path / "__0_0.distcp"
    content = path.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    path.write_bytes(changed)
    assert checkpoint.damage(tmp_path, files, 0, 1) == "the checksum of __0_0.distcp differs"
    path.write_bytes(content[:-1])
    size = f"{len(content) - 1} bytes instead of {len(content)}"
    assert checkpoint.damage(tmp_path, files, 0, 1) == f"__0_0.distcp has {size}"
    path.unlink()
    assert checkpoint.damage(tmp_path, files, 0, 1) == "__0_0.distcp: No such file or directory"


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("content", [Attack(), Metadata({"x": Attack()}, storage_data={})])  # pyright: ignore
def test_metadata_cannot_run_anything(
    content: object, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / checkpoint.METADATA).write_bytes(pickle.dumps(content))
    for read in (checkpoint.shapes, lambda folder: checkpoint.read(folder, made())):
        with pytest.raises(RunError, match=r"mkdir has no place in a checkpoint's metadata\): remove "):
            read(folder)
    assert not Path("attacked").exists()


def test_a_value_that_is_no_tensor_is_refused(folder: Path) -> None:
    """torch would unpickle it."""
    metadata = checkpoint.read_metadata(folder)
    metadata.state_dict_metadata["model/parameters/weight"] = BytesStorageMetadata()
    (folder / checkpoint.METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(RunError, match="BytesStorageMetadata has no place"):
        checkpoint.shapes(folder)


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"^the checkpoint in .* cannot be written \(rank 0: .*\): free space") as raised:
        checkpoint.write(tmp_path / "file" / "below", made(), rank=0)
    assert "\n" not in str(raised.value)


def on_two_ranks(folder: str) -> dict[str, Any]:
    rank, place = dist.get_rank(), Path(folder)
    shared, own = torch.arange(6.0), torch.full((4,), float(rank))
    files = checkpoint.write(place, {"shared": shared, f"rank{rank}/own": own}, rank)
    result = {"shared": torch.zeros(6), f"rank{rank}/own": torch.zeros(4)}
    checkpoint.read(place, result)
    if rank == 0:
        (place / "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    return {"files": files, "found": result, "damage": checkpoint.damage(place, files, rank, 2)}


def test_each_rank_writes_its_own_and_one_what_all_have(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(2, on_two_ranks, str(tmp_path))):
        assert torch.equal(result["found"]["shared"], torch.arange(6.0))
        assert torch.equal(result["found"][f"rank{rank}/own"], torch.full((4,), float(rank)))
        assert set(result["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        assert result["damage"].startswith("__1_0.distcp has 0 bytes")  # the same on both
    metadata = checkpoint.read_metadata(tmp_path)
    assert len([index for index in metadata.storage_data if index.fqn == "shared"]) == 1


def saved(folder: Path) -> Saved:
    return Saved(
        folder, "run", 2, [1, 2], 4, 12, 1.5, {"step": 12, "first": 0.1, "last": 0.30000000000000004},
        {"updates": 12, "scaler": {}}, [{"epoch": 0}], {"__0_0.distcp": (7, "abc")},
    )  # fmt: skip


def test_it_has_its_keys_alone_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    saved(tmp_path).write()
    assert set(json.loads((tmp_path / ABOUT).read_text())) == {
        "format", "run_id", "attempt", "lineage", "epoch", "updates", "elapsed_s", "rates", "numbers", "epochs",
        "files",
    }  # fmt: skip
    result = Saved.read(tmp_path)
    assert vars(result) == vars(saved(tmp_path)) | {"files": {"__0_0.distcp": [7, "abc"]}}  # floats to the last bit


def test_numbers_that_have_another_name_since_are_read(tmp_path: Path) -> None:
    replace(saved(tmp_path), numbers={"synchronised": True, "steps": 3}).write()
    assert Saved.read(tmp_path).numbers == {"synchronized": True, "steps": 3}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", r"is not JSON \(Expecting value"),
        ("[]", "has format None, this version reads 1"),
        ("[" * 100_000, "is not JSON"),
        ('{"format": 2}', "has format 2, this version reads 1"),
        ('{"format": 1, "attempt": 3}', "lacks keys or has others"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / ABOUT).write_text(content)
    with pytest.raises(ValueError, match=reason):
        Saved.read(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lineage": ["../../../home"]}, {"lineage": [-1]}, {"lineage": "12"}, {"lineage": [True]}, {"attempt": "1/.."},
        {"epoch": 1.5}, {"updates": None}, {"elapsed_s": "1"}, {"run_id": 3},
        {"rates": {"of_step": 1}}, {"rates": {"step": 1}}, {"rates": []},
        {"numbers": 1}, {"epochs": [1]}, {"epochs": {}}, {"files": {"../other": [1, "a"]}},
        {"files": {"/dev/zero": [1, "a"]}}, {"files": {"a": "b"}}, {"files": {"a": [1]}}, {"files": ["a"]},
    ],
)  # fmt: skip
def test_values_that_no_run_writes_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A run that ends well removes the folders of its lineage: a name with .. would be another folder."""
    saved(tmp_path).write()
    content = json.loads((tmp_path / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps(content | wrong))
    with pytest.raises(ValueError, match="has values that no run writes"):
        Saved.read(tmp_path)


def test_folders_that_are_being_written_do_not_count(tmp_path: Path) -> None:
    for name in ("epoch-000002", "epoch-000010", ".epoch-000011", "epoch-1", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["epoch-000010", "epoch-000002"]
    assert checkpoint.complete(tmp_path / "absent") == []


def new(part: str = "model") -> tuple[nn.Sequential, Live]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, Live(dict(model.named_parameters()), optimizer, dict(model.named_buffers()), part)


def trained(part: str = "model") -> tuple[nn.Sequential, Live]:
    """One update made by AdamW."""
    model, live = new(part)
    model(torch.randn(4, 3)).sum().backward()
    live.optimizer.step()
    return model, live


def test_everything_that_training_changes_has_a_name() -> None:
    model, live = trained("tensor1")
    weight = model.get_parameter("0.weight")
    result = named_tensors(live, rank=5, device=CPU)
    own = {f"rank5/own/{name}" for name, _ in model.named_buffers()}
    parameters = {f"tensor1/parameters/{name}" for name, _ in model.named_parameters()}
    keys = ("step", "exp_avg", "exp_avg_sq")
    states = {f"tensor1/optimizer/{name}/{key}" for name, _ in model.named_parameters() for key in keys}
    assert result.keys() == own | parameters | states | {"rank5/random/cpu"}
    assert result["tensor1/parameters/0.weight"].data_ptr() == weight.data_ptr()  # in place
    assert not result["tensor1/parameters/0.weight"].requires_grad


@pytest.mark.parametrize("count", [torch.tensor(7.0), 7])
def test_a_new_optimizer_gets_the_states_of_the_saved_one(count: torch.Tensor | int) -> None:
    """Also the updates that a group counts, as timm's LAMB does: in a tensor, or in a number in older versions."""
    _, before = trained("tensor1")
    before.optimizer.param_groups[0]["step"] = count
    saved = {name: tensor.clone() for name, tensor in named_tensors(before, 0, CPU).items()}
    _, live = new("tensor1")
    make_optimizer_states(live, shapes(saved))
    restored = named_tensors(live, 0, CPU)
    assert shapes(restored) == shapes(saved)
    for name, tensor in restored.items():
        tensor.copy_(saved[name])  # in place, as a checkpoint is read
    assert live.optimizer.param_groups[0]["step"] == 7


def test_the_tensors_of_all_ranks_are_looked_through_once() -> None:
    """Not for each parameter: a ResNet-152 has 467, and 1,024 of its ranks have saved 478,118 tensors."""

    class Counted(dict[str, tuple[torch.Size, torch.dtype]]):
        asked = 0

        def items(self) -> Any:
            self.asked += 1
            return super().items()

    _, before = trained()
    saved = Counted(shapes(named_tensors(before, 0, CPU)))
    make_optimizer_states(new()[1], saved)
    assert saved.asked == 1


@pytest.mark.parametrize("fused", [True, False])
def test_the_states_of_a_fused_optimizer_are_on_its_device(fused: bool) -> None:
    """Also where the groups alone know that it is fused, as in the optimizer that Horovod makes."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [weight], "fused": fused}])
    make_optimizer_states(
        Live({"weight": weight}, optimizer), {"model/optimizer/weight/step": (torch.Size(), torch.float32)}
    )
    assert optimizer.state[weight]["step"].device.type == ("meta" if fused else "cpu")


def test_random_numbers_go_on_where_they_were() -> None:
    _, live = trained()
    torch.manual_seed(7)
    torch.rand(5)
    saved = {name: tensor.clone() for name, tensor in named_tensors(live, 2, CPU).items()}
    expected, seed = torch.rand(3), torch.initial_seed()
    torch.manual_seed(8)
    checkpoint.set_random_states(saved, 2, CPU)
    assert torch.initial_seed() == seed  # frameworks count from it
    assert torch.equal(torch.rand(3), expected)
