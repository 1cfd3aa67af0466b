from __future__ import annotations

from typing import Any

import pytest

from ddlbench.errors import UserError
from ddlbench.measure.formulas.flops import peak_flops
from ddlbench.oracle.machine.machine import Machine, load, parse
from ddlbench.predict.grading.machines import GPUS, machine_of, node_bytes_per_s

# Gigabytes a second of a node of eight.
NETWORKS = {
    "8x HDR 200 Gb/s a node": 200, "1600 Gbps a node RoCE": 200, "1,600 Gbps RoCE": 200, "400 Gb/s a GPU RDMA": 400,
    "1x ConnectX-5 IB EDR 100Gb/Sec": 12.5,
    "Storage: 2x ConnectX-6 IB HDR 200Gb/sec, Management: 1x Ethernet 100Gb/Sec, Compute: 8x IB HDR 200Gb/Sec": 200,
    "InfiniBand, Rate: 100": 12.5, "InfiniBand, Rate: 200 Gb/s": 25,
    "InfiniBand EDR": 12.5, "4 x HDR": 100, "3.2 Tb/s": 400, "8x200Gb/s": 200, "4 HDR adapters": 100,
    "dual-rail EDR": 25, "HDR-100": 12.5, "10 GbE": 1.25, "40 gigabit Ethernet": 5, "100G": 12.5, "Slingshot 11": 25,
    "Cray Aries 10 GB/s": 10, "Ethernet 10GB/Sec": 1.25, "NVLink 300 GB/s, InfiniBand EDR 100 Gb/s": 12.5,
    "NVSwitch 600 GB/s; 8x HDR": 200, "AWS p3.16xlarge, 25 Gb/s": 3.125, "p5.48xlarge, 3200 Gbps EFA": 400,
    "a3-highgpu-8g, 1600 Gbps": 200, "1.6 Tb/s (8x HDR)": 200, "400 Gbps (4x100 Gbps EFA)": 50,
    "8x 200 Gb/s HDR, one per GPU": 200, "8x HDR200 (1 NIC per GPU)": 200, "8x V100, 4x EDR": 50,
    "InfiniBand HDR x 4": 100, "200 Gb/s x4": 100, "4 InfiniBand HDR adapters": 100, "quad-rail HDR": 100,
    "four HDR adapters": 100, "100 Gb/s (4 adapters)": 50, "ConnectX-6 x8 HDR": 200,
    "ConnectX-5 EDR (PCIe 3 x16)": 12.5, "InfiniBand EDR 12.5 GB/s": 12.5, "dual-rail EDR InfiniBand (25 GB/s)": 25,
    "NVLink 600 GB/s within a node and 200 Gb/s HDR InfiniBand": 25,
    "NVLink (600 GB/s) / HDR InfiniBand (200 Gb/s)": 25, "Omni Path": 12.5, "10GigE": 1.25, "Slingshot-10": 12.5,
    "Dual rail HDR100 with 200Gbps aggregate bandwidth": 25,
    "InfiniBand 100 Gb/sec (4X EDR), Mellanox MT27700": 12.5, "4 * 100Gb RoCE": 50,
    "Infiniband, Mellanox Technologies MT27700 Family [ConnectX-4]": 12.5, "8x ConnectX-7": 400,
    "2x DGX A100": 200, "DGX-1, NVLink 300 GB/s": 50, "DGX-1, 100 Gb/s InfiniBand": 12.5,
    "AWS p3dn.24xlarge": 12.5, "EFA (p4d.24xlarge)": 50, "Azure ND96asr_v4": 200, "Standard_ND96isr_H100_v5": 400,
}  # fmt: skip


@pytest.mark.parametrize(("network", "gigabytes"), NETWORKS.items())
def test_a_network_s_words_give_bytes_per_second_of_a_node(network: str, gigabytes: float) -> None:
    assert node_bytes_per_s(network, per_node=8) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    "network",
    [
        "",
        "fast",
        "Ethernet, ConnectX-4 Lx",
        "Management: 1x Ethernet 10GB/Sec",
        "NVLink 300 GB/s",
        "TCP sockets on InfiniBand 100 Gb/s",
    ],
)
def test_a_network_for_management_or_within_a_node_or_with_another_or_no_speed_is_refused(network: str) -> None:
    with pytest.raises(UserError, match="has no speed"):
        node_bytes_per_s(network, per_node=8)


def seconds(machine: Machine, kind: str, ranks: int, bytes_: float) -> float:
    """What a measured collective of these bytes takes."""
    sweep = machine.sweep(kind, ranks)
    assert sweep is not None
    return sweep.at(bytes_)


def test_a_node_of_a100_has_nccl_s_measured_all_reduce() -> None:
    """Bang et al. 2024: 1,162 us for 128 MiB between eight A100; an all-gather takes half of it."""
    machine = machine_of("a100_80gb", "", 8, 1)
    assert seconds(machine, "all_reduce", 8, 134_217_728) == pytest.approx(1162e-6)
    assert seconds(machine, "all_gather", 8, 134_217_728) == pytest.approx(581e-6)


def test_an_unknown_gpu_is_refused_with_the_names_of_the_others() -> None:
    """Each once, although two entries can be of one device."""
    with pytest.raises(UserError, match="GPU type 'TPU v3' is not one of ") as caught:
        machine_of("TPU v3", "", 8, 1)
    names = str(caught.value).partition(" is not one of ")[2].split(", ")
    assert sorted(names) == sorted({entry["name"] for entry in GPUS})


def test_devices_have_the_names_of_the_table_of_peaks() -> None:
    """The peak of one device of a K80 is not known."""
    without = [entry["name"] for entry in GPUS if peak_flops(entry["name"], "fp16") is None]
    assert without == ["Tesla K80"]


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA L40S"])
def test_l40_and_l40s_differ(name: str) -> None:
    assert machine_of(name, "PCIe", 8, 1).device.name == name


def test_devices_without_peer_access_share_one_path() -> None:
    """1 GB: two take 2 (10 us + 0.5 GB / 8 GB/s); eight at a quarter of that speed 14 (10 us + 0.125 GB / 2 GB/s)."""
    machine = machine_of("RTX 3090", "PCIe", 8, 1)
    eight = 14 * (1e-5 + 1e9 / 8 * 4 / 8e9)
    assert seconds(machine, "all_reduce", 2, 1e9) == pytest.approx(2 * (1e-5 + 1e9 / 2 / 8e9))
    assert seconds(machine, "all_reduce", 8, 1e9) == pytest.approx(eight)
    assert seconds(machine, "all_gather", 8, 1e9) == pytest.approx(eight / 2)
    assert machine.hidden_cost_with(8) == 1.0


@pytest.mark.parametrize(
    ("cluster", "gpu", "network", "per_node"),
    [
        ("thetagpu", "A100-SXM4-40GB", "8x HDR 200 Gb/s a node", 8),
        ("juwels_booster", "A100-SXM4-40GB", "4x HDR 200 Gb/s a node", 4),
        ("h100", "H100-SXM5-80GB", "8x NDR 400 Gb/s a node", 8),
        ("gh200", "GH200 96GB", "4x NDR 200 Gb/s a node", 4),
    ],
)
def test_the_clusters_of_the_program_have_the_links_of_the_graded_machines(
    cluster: str, gpu: str, network: str, per_node: int
) -> None:
    graded, named = machine_of(gpu, network, per_node, nodes=2), load(cluster)
    assert named.sweeps == graded.sweeps
    for link, other in zip(named.links, graded.links, strict=True):
        assert (link.alpha_s, link.bytes_per_s) == pytest.approx((other.alpha_s, other.bytes_per_s), rel=0.01)


@pytest.mark.parametrize(
    "nccl", [{"gpu": "K80"}, {"gpu": "A100", "scale": 0}, {"gpu": "A100", "scale": "fast"}, {"speed": 1}]
)
def test_an_unknown_table_of_collectives_is_refused(nccl: dict[str, Any]) -> None:
    plain = {"name": "a", "device": {"name": "b", "type": "cuda"}, "devices_per_node": 8, "links": [], "nccl": nccl}
    with pytest.raises(UserError, match="is no description of a cluster"):
        parse(plain, "file.yaml")
