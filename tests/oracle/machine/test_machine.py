from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddlbench.errors import UserError
from ddlbench.oracle.machine.machine import CLUSTERS, FOLDER, GPU_HOST_S, GPU_KERNEL_S, load, parse
from ddlbench.oracle.timing.computation import Speeds


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "local"])
def test_every_cluster_is_complete_and_each_number_has_its_source(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert Speeds.of(machine.device, "fp32", tf32=False)
    assert machine.device.memory_bytes
    assert machine.device.bytes_per_s
    assert machine.device.host_bytes_per_s
    assert len(machine.links) == 2
    assert machine.links[0].bytes_per_s > machine.links[1].bytes_per_s / (machine.devices_per_node or 1)
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        key, _, rest = line.strip().partition(":")
        if key in ("alpha_s", "bytes_per_s", "memory_bytes", "devices_per_node", "tf32_flops_per_s", "kernel_s"):
            assert "#" in rest, line


def test_contention_is_a_line_between_what_was_measured() -> None:
    """1.2 with two ranks, 3 with four; beyond them shared cores go on, devices of their own do not."""
    shared = replace(load("local"), cores=2, contention={2: 1.2, 4: 3.0})
    assert [shared.shared_cores(busy) for busy in (1, 2, 3, 4, 8)] == pytest.approx([1, 1.2, 2.1, 3, 6])
    assert replace(shared, cores=None).shared_cores(8) == 3
    assert [replace(shared, contention={}).shared_cores(busy) for busy in (1, 2, 3)] == [1, 1, 1.5]


def test_ranks_that_were_not_measured_slow_each_other_only_where_they_share_cores() -> None:
    """1.2 with two ranks of 64 cores: also with 64 ranks, and twice that with 128."""
    many = replace(load("local"), cores=64, contention={2: 1.2})
    assert [many.shared_cores(busy) for busy in (2, 8, 64, 128)] == pytest.approx([1.2, 1.2, 1.2, 2.4])


def test_tf32_has_its_own_peak() -> None:
    plain, rounded = (Speeds.of(load("juwels_booster").device, "fp32", tf32=tf32) for tf32 in (False, True))
    assert plain is not None
    assert rounded is not None
    assert (plain.flops_per_s, rounded.flops_per_s) == (19.5e12, 156e12)


H100 = (FOLDER / "h100.yaml").read_text()


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(H100.replace("name: h100", "name: mine"))
    assert load(str(path)).name == "mine"


def test_a_gpu_has_its_own_seconds_where_the_file_has_none(tmp_path: Path) -> None:
    """A 0 is a value: kernels that cost nothing beside their work."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        H100.replace("kernel_s: 8.0e-6", "kernel_s: 0.0\n  host_s: null").replace("cores:", "spread: 0\ncores:")
    )
    mine = load(str(path))
    assert (mine.device.kernel_s, mine.device.host_s, mine.spread) == (0.0, GPU_HOST_S, 0)
    assert load("gh200").device.kernel_s == GPU_KERNEL_S


def test_both_of_two_links_with_one_name_are_checked() -> None:
    links = [{"name": "Ethernet", "alpha_s": 1e-5, "bytes_per_s": rate} for rate in (-1e9, 1e9)]
    device = {"name": "NVIDIA H200", "type": "cuda"}
    with pytest.raises(UserError, match=r"Ethernet\.bytes_per_s=-1000000000\.0 must be a number above 0"):
        parse({"name": "mine", "device": device, "devices_per_node": 4, "links": links}, "mine.yaml")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("devices_per_node: 8", "devices_per_node: 0", "devices_per_node=0 must be a whole number above 0"),
        ("devices_per_node: 8", "devices_per_node: 2.5", "devices_per_node=2.5 must be a whole number above 0"),
        ("alpha_s: 3.4e-6", "alpha_s: fast", "NVLink.alpha_s=fast must be a number above 0"),
        ("alpha_s: 3.4e-6", "alpha_s: .nan", "NVLink.alpha_s=nan must be a number above 0"),
        ("tf32_flops_per_s: 494.7e+12", "tf32_flops_per_s: fast", "device.tf32_flops_per_s=fast must be a number"),
        ("alpha_s: 3.4e-6", "alpha_s: null", "NVLink.alpha_s=None must be a number above 0"),
        ("name: h100", "name: null", "name=None must be a text"),
        ("type: cuda", "type: gpu", "device.type=gpu must be cuda or cpu"),
        ("overlap: true", "overlap: perhaps", "overlap=perhaps must be true or false"),
        ("overlap: true", "overlaps: true", "is no description of a cluster"),
        ("overlap: true", "contention: 3", r"is no description of a cluster \(it has no key contention\)"),
        (
            "kernel_s: 8.0e-6",
            "kernel: 8.0e-6",
            r"mine\.yaml is no description of a cluster \(it has no key device\.kernel\): give device\.name, dev",
        ),
        (
            "alpha_s: 3.4e-6",
            "alpha: 3.4e-6",
            r"it has no key links\.alpha\): give links\.name, links\.alpha_s, links\.bytes_per_s",
        ),
        ("gpu: A100", "device: A100", r"\(it has no key nccl\.device\): give nccl\.gpu, nccl\.scale$"),
        ("devices_per_node: 8", "", "is no description of a cluster"),
        ("kernel_s: 8.0e-6", "kernel_s: fast", "device.kernel_s=fast must be a number of 0 or more"),
        ("overlap: true", "overlap: true\nspread: -0.02", "spread=-0.02 must be a number of 0 or more"),
        ("name: h100", "name: [", "cannot be read"),
        ("name: h100", "name: \udcff", "cannot be read"),  # the byte FF, which is no UTF-8
        (H100, "- a list", "is no description of a cluster"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, before: str, after: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    assert before in H100
    path.write_bytes(H100.replace(before, after).encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=said):
        load(str(path))
