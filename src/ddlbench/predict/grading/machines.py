"""The machine of a published measurement, from the words of its source: the type of its GPUs, and its network."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ddlbench.errors import UserError
from ddlbench.oracle.machine import machine as machines
from ddlbench.oracle.machine.machine import Machine, Sweep
from ddlbench.results.reading.published import gpu_family

NETWORK_SHARE = 0.9  # of the nominal bandwidth between nodes; with 0.8 and 0.7 the error of published points is larger
NETWORK_ALPHA_S = 14e-6  # NCCL 2.x, its tuning table: latency of a step of a ring with the Simple protocol, network
NAMES = {  # Gbit/s of an adapter
    "qdr": 40, "fdr": 56, "edr": 100, "hdr[- ]?100": 100, "hdr(200)?": 200, "ndr[- ]?200": 200, "ndr(400)?": 400,
    "omni[- ]?path|opa": 100, "slingshot[- ]?10": 100, "slingshot[- ]?11": 200,
    "connectx[- ]?[45](?![- ]?lx)": 100, "connectx[- ]?6(?![- ]?lx)": 200, "connectx[- ]?7": 400,
}  # fmt: skip
NODES = {  # Gbit/s of a node for its GPUs, from the guides of NVIDIA (DGX), AWS, Azure and Google Cloud
    r"dgx[- ]?1\b": 400, r"dgx[- ]?2\b": 800, r"dgx[- ]?a100\b": 1600, r"dgx[- ]?h[12]00\b": 3200,
    r"\bp3\.16xlarge": 25, r"\bp3dn\.": 100, r"\bp4de?\.": 400, r"\bp5(?:e|en)?\.48xlarge": 3200,
    "nd40rs": 100, "nd96[a-z]+_(?:a100_)?v4": 1600, "nd96[a-z]+_h[12]00_v5": 3200,
    r"\ba2-[a-z]+gpu": 100, r"\ba3-highgpu-8g": 800, r"\ba3-megagpu": 1600,
}  # fmt: skip
BITS = (40, 56, 100, 200, 400, 800)  # speeds of InfiniBand in Gbit/s, also where a source writes GB/s
SPEED = re.compile(r"(\d+(?:\.\d+)?) ?(g|t)(?:ig)?(?:b|e|bit|be|abit)?(?:ps|/s(?:ec)?)?\b", re.IGNORECASE)
# Names of machines and buses, and the parts or lanes of a stated sum, whose numbers are neither speeds nor numbers of
# adapters: p4d.24xlarge, PCIe 3 x16, "100 Gb/sec (4X EDR)".
OTHER_NUMBERS = re.compile(
    r"\b\S*\d*xlarge\b|\b\w+-\w*gpu\S*|pci-?e(?:xpress)?(?: ?gen)? ?\d?(?:\.0)?(?: ?x ?\d+)?"
    r"|(?:(?<=b/s)|(?<=b/sec)|(?<=bps)) \(\d+ ?x [^)]*\)",
    re.IGNORECASE,
)
NUMBERS = {"dual": 2, "two": 2, "quad": 4, "four": 4, "eight": 8}
ADAPTERS = (  # "8x HDR", "4 * 100Gb", "4 InfiniBand HDR adapters", "dual-rail", "HDR x 4"
    re.compile(r"(?<![\w.-])(\d+) ?[x\u00d7*] ?(?=\w)", re.IGNORECASE),
    re.compile(
        rf"\b(\d+|{'|'.join(NUMBERS)})(?:[ -]\w+(?:-\w+)?){{0,3}}?[ -](?:adapter|rail|nic|hca|port)s?\b", re.IGNORECASE
    ),
    re.compile(r"\b(dual|quad)\b", re.IGNORECASE),
    re.compile(r"(?<=[\w ])[x\u00d7] ?(\d+)\b", re.IGNORECASE),
)
GPUS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text())
PEAKS = ("bytes_per_s", "tf32_flops_per_s")  # of a GPU
WITHIN_NODE = re.compile("nvlink|nvswitch|pcie", re.IGNORECASE)
BETWEEN_NODES = re.compile(
    r"infiniband|\bib\b|ethernet|roce|connectx|\befa\b|omni|slingshot|\b[qfehn]dr", re.IGNORECASE
)


def machine_of(gpu: str, network: str, per_node: int, nodes: int) -> Machine:
    """The machine of a source's words. UserError for an unknown GPU, or an unknown network if there are several nodes.

    per_node: GPUs of a node; nodes: nodes of the measurement
    """
    same = [entry for entry in GPUS if gpu_family(gpu) in entry["families"]]
    entry = next((entry for entry in same if re.search(entry.get("form", ""), gpu, re.IGNORECASE)), None)
    if entry is None:
        raise UserError(f"GPU type {gpu!r} is not one of {', '.join(dict.fromkeys(entry['name'] for entry in GPUS))}")
    device = {"name": entry["name"], "type": "cuda", **{key: entry.get(key) for key in PEAKS}}
    links = [entry["link"]]
    if nodes > 1:
        rate = NETWORK_SHARE * node_bytes_per_s(network, per_node)
        links.append({"name": network, "alpha_s": NETWORK_ALPHA_S, "bytes_per_s": rate})
    plain = {"name": gpu, "device": device, "devices_per_node": per_node, "links": links, "nccl": entry.get("nccl")}
    machine = machines.parse(plain, gpu)
    if not entry.get("shared"):
        return machine
    # Devices that share one path through the host: with p of them each has 2/p of the bandwidth.
    sweeps, link = dict[tuple[str, int], Sweep](), machine.links[0]
    for ranks in range(2, per_node + 1):
        seconds = {m: 2 * (ranks - 1) * (link.alpha_s + m / 2 / link.bytes_per_s) for m in (1e3, 1e9)}
        sweeps |= machines.all_reduce_sweeps(ranks, seconds)
    return replace(machine, sweeps=sweeps, hidden_cost={1: 1.0})


def node_bytes_per_s(network: str, per_node: int) -> float:
    """Nominal bytes per second of a node in one direction. UserError if the text has no speed.

    Several networks of one text have names ("Storage: ..., Management: ..., Compute: ..."): the one for computing
    counts, and a network for management does not. Links within a node do not count. The largest of several speeds
    ("400 Gb/s (4x HDR-100)") counts. GB/s of Ethernet are bits; those of InfiniBand are bits if InfiniBand has
    such a speed. Without a stated speed, that of a named node counts ("AWS p4d.24xlarge").
    """
    network = re.sub(r"(?<=\d),(?=\d{3}\b)", "", network)  # "3,200 Gbps"
    network = re.sub(r"\brate: (\d+)(?!\.?\d| ?[a-z])", r"\1 Gb/s", network, flags=re.IGNORECASE)  # as ibstat writes it
    parts = re.split(r"[,;] ?(?=[A-Z][a-z]+:)", network)
    named = {part.partition(":")[0].lower(): part for part in parts if ":" in part}
    text = named.get("compute", "" if "management" in named else network)
    clauses = [
        part
        for clause in re.split(r"[,;+&]| and | / ", OTHER_NUMBERS.sub(" ", text))
        if BETWEEN_NODES.search(clause) or not WITHIN_NODE.search(clause)
        for part in re.split("[()]", clause)
    ]
    rates = [(gbit, _adapters(clause)) for clause in clauses if (gbit := _gbit(clause, text))]
    node = next((gbit for name, gbit in NODES.items() if re.search(name, text, re.IGNORECASE)), None)
    if not (rates or node) or re.search(r"\bsockets?\b.*infiniband", text, re.IGNORECASE):
        raise UserError(f"network {network!r} has no speed of the links between nodes")
    if node and not rates:
        return node / 8 * 1e9
    total = max(gbit * count for gbit, count in rates)
    if all(count == 1 for _, count in rates):  # a clause may have the number alone: "100 Gb/s (4 adapters)"
        total *= max(_adapters(clause) for clause in clauses)
        if re.search(r"\b(?:a|per|each) (?:gpu|device)\b|/gpu", text, re.IGNORECASE):
            total *= per_node
    return total / 8 * 1e9


def _gbit(clause: str, text: str) -> float:
    """Gbit/s of one adapter, or of all; 0 if the clause has no speed. text: all clauses"""
    if not (match := SPEED.search(clause)):
        name = next((name for name in NAMES if re.search(rf"\b(?:{name})\b", clause, re.IGNORECASE)), None)
        return float(NAMES[name]) if name else 0.0
    speed = float(match[1]) * (1000 if match[2] in "tT" else 1)
    in_bytes = re.search("[GT]B/s", match[0]) and not re.search("ethernet|roce|gbe", text, re.IGNORECASE)
    return 8 * speed if in_bytes and not (BETWEEN_NODES.search(text) and speed in BITS) else speed


def _adapters(clause: str) -> int:
    """The number of adapters that a clause states; 1 if it states none, a number of GPUs, or the speed of all."""
    if re.search(r"\b(?:aggregated?|in total)\b", clause, re.IGNORECASE):
        return 1
    for pattern in ADAPTERS:
        if (match := pattern.search(clause)) and gpu_family(clause[match.end() :].split(" ")[0]) is None:
            return NUMBERS.get(match[1].lower()) or int(match[1])
    return 1
