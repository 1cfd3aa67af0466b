"""Published measurements of training steps, each with a base: the same series with another number of GPUs.

A CSV file with the columns of COLUMNS, one row a point. A row that cannot be predicted is left out with its reason, and
nothing is repaired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddlbench.errors import UserError
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.oracle.machine.machine import Machine
from ddlbench.predict.grading.machines import machine_of

Row = Mapping[str, str]

COLUMNS = (
    "source", "model", "framework", "strategy", "gpus", "gpus_per_node", "gpu_type", "network", "batch_per_gpu",
    "global_batch", "precision", "measured", "unit", "base_gpus", "base_value", "step_ms", "layout", "seq_len",
)  # fmt: skip
SERIES = ("source", "model", "framework", "strategy", "gpu_type", "network", "precision", "seq_len")
IMAGENET = 1_281_167  # training images, ILSVRC 2012
MIXED = 0.02  # relative difference of the step's two statements from which on a row contradicts itself
IMAGES = {r"resnet-?(50|101|152)": "resnet{}", r"vgg-?(16)": "vgg{}"}
TEXT = {  # pattern: layers, width, heads, vocabulary
    r"bert-?large": (24, 1024, 16, 30528),
    r"bert-?base": (12, 768, 12, 30528),
    r"gpt-?2[ _-]*small": (12, 768, 12, 50257),
    r"gpt-?2[ _-]*medium": (24, 1024, 16, 50257),
    r"gpt-?2[ _-]*large": (36, 1280, 20, 50257),
    r"gpt-?2[ _-]*xl": (48, 1600, 25, 50257),
}
# Layers, width, heads of decoders by their parameters: Brown et al. 2020, table 2.1; Touvron et al. 2023, table 2
SIZES = {
    0.125e9: (12, 768, 12),
    0.355e9: (24, 1024, 16),
    0.76e9: (24, 1536, 16),
    1.3e9: (24, 2048, 16),
    2.7e9: (32, 2560, 32),
    6.7e9: (32, 4096, 32),
    13e9: (40, 5120, 40),
    33e9: (60, 6656, 52),
    65e9: (80, 8192, 64),
    175e9: (96, 12288, 96),
}
DECODERS = re.compile(r"gpt|mpt|llama|opt|pythia|bloom|mistral|falcon|decoder", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """A measured step. samples: of the global batch; micro: of a micro batch of one GPU"""

    gpus: int
    samples: int
    micro: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """A measurement and its base. words: of the configuration, without those of the batch"""

    line: int
    source: str
    model: str
    strategy: str
    gpu: str
    network: str
    framework: str
    words: tuple[str, ...]
    machine: Machine
    measured: Step
    base: Step


def points(rows: Sequence[Row]) -> Iterator[Point | str]:
    """The points of a file, and the reason of each row that is left out. A row that is only the base of others is
    neither. Rows are counted from line 2 of the file."""
    seen: dict[tuple[str, ...], int] = {}
    for line, row in enumerate(rows, 2):
        content = tuple(row.get(column) or "" for column in COLUMNS)
        name = f"line {line}: {row.get('source')}, {row.get('model')}, {row.get('strategy')}, {row.get('gpus')} GPUs"
        if content in seen:
            yield f"{name}: the same as line {seen[content]}"
            continue
        seen[content] = line
        try:
            if _number(row, "base_gpus") is None or _number(row, "base_value") is None:
                if not any(_is_base(row, other) for other in rows):
                    yield f"{name}: no base in its series"
            elif _number(row, "base_gpus") != _number(row, "gpus"):
                yield _point(line, row, rows)
        except UserError as error:
            yield f"{name}: {error}"


def _is_base(row: Row, other: Row) -> bool:
    """Whether `row` is the base of `other`. A row with a broken number is not."""
    if any(row.get(key) != other.get(key) for key in SERIES):
        return False
    try:
        gpus, value = _number(other, "base_gpus"), _number(other, "base_value")
        return gpus == _number(row, "gpus") and value == _number(row, "measured")
    except UserError:
        return False


def _point(line: int, row: Row, rows: Sequence[Row]) -> Point:
    """UserError for a row that the oracle cannot predict."""
    gpus, per_node = int(_required(row, "gpus")), int(_required(row, "gpus_per_node"))
    measured = _step(row, gpus, _required(row, "measured"))
    base_row = next((other for other in rows if other is not row and _is_base(other, row)), None)
    if base_row is None:  # only its value is known: the batch of one GPU is that of the point, or in `layout`
        batch = re.search(r"base batch per gpu (\d+)", row.get("layout") or "", re.IGNORECASE)
        samples = int(batch[1]) if batch else measured.samples // gpus
        base_row = {**row, "step_ms": "", "batch_per_gpu": str(samples), "global_batch": ""}
    base = _step(base_row, int(_required(row, "base_gpus")), _required(row, "base_value"))
    framework, words = strategy_of(row)
    network, nodes = row.get("network") or "", math.ceil(max(gpus, base.gpus) / per_node)
    return Point(
        line,
        row.get("source") or "",
        row.get("model") or "",
        row.get("strategy") or "",
        row.get("gpu_type") or "",
        network,
        framework,
        (*model_words(row), *words, *precision_words(row)),
        machine_of(row.get("gpu_type") or "", network, per_node, nodes),
        measured,
        base,
    )


def _step(row: Row, gpus: int, measured: float) -> Step:
    """The seconds of a step, from `step_ms` and from the measured value. UserError if they disagree or no batch is
    stated."""
    samples, layout = _number(row, "global_batch"), row.get("layout") or ""
    if samples is None:
        samples = gpus * (_number(row, "batch_per_gpu") or 0)
    if not samples:
        raise UserError("it states no batch")
    stated_micro = re.search(r"\bmbs(\d+)", layout)
    one = max(1, int(samples) // gpus)
    wanted = min(int(stated_micro[1]), one) if stated_micro else one
    micro = min(divisors(one), key=lambda size: abs(size - wanted))  # the source may drop samples of a step
    stated, seconds = _number(row, "step_ms"), _seconds(row, gpus, samples, measured)
    if stated is not None and seconds is not None and abs(stated / 1e3 / seconds - 1) > MIXED:
        raise UserError(f"step_ms={stated:g} contradicts {measured:g} {row.get('unit')} ({seconds * 1e3:.4g} ms)")
    seconds = stated / 1e3 if stated is not None else seconds
    if seconds is None:
        raise UserError(f"the unit {row.get('unit')!r} is not known, and step_ms is empty")
    return Step(gpus, int(samples), micro, seconds)


def _seconds(row: Row, gpus: int, samples: float, measured: float) -> float | None:
    """Seconds of a step, from a measured value in the row's unit; None for another unit."""
    unit, length = (row.get("unit") or "").lower(), _number(row, "seq_len")
    if unit.startswith(("img/s", "images/s", "seq/s", "samples/s", "sequences/s")):
        return samples / measured / (gpus if unit.endswith("/gpu") else 1)
    if unit.startswith("tokens/s") and length:
        return samples * length / measured / (gpus if unit.endswith("/gpu") else 1)
    if unit.startswith("s/epoch") and re.search("resnet|vgg", row.get("model") or "", re.IGNORECASE):
        return measured * samples / IMAGENET
    if unit.startswith(("s/step", "s/iteration")):
        return measured
    return measured / 1e3 if unit.startswith(("ms", "milliseconds")) else None


def model_words(row: Row) -> list[str]:
    """The words of the model. UserError for a model that no model of ddlbench resembles in its sizes."""
    name = row.get("model") or ""
    for pattern, model in IMAGES.items():
        if match := re.search(pattern, name, re.IGNORECASE):
            return [f"+model={model.format(match[1])}"]
    sizes = next((sizes for pattern, sizes in TEXT.items() if re.search(pattern, name, re.IGNORECASE)), None)
    if sizes is None:
        exact, short = re.search(r"\((\d+) parameters\)", name), re.search(r"(\d+(?:\.\d+)?) ?([mb])\b", name.lower())
        if not DECODERS.search(name) or not (exact or short):
            raise UserError(f"the model {name!r} is not known")
        count = float(exact[1]) if exact else float(short[1]) * {"m": 1e6, "b": 1e9}[short[2]] if short else 0.0
        near = min(SIZES, key=lambda size: abs(math.log(size / count)))
        sizes = (*SIZES[near], 50368)
    length = _number(row, "seq_len")
    if length is None:
        raise UserError(f"{name}: it states no seq_len")
    layers, width, heads, vocabulary = sizes
    keys = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "seq_len": int(length)}
    model = "gpt2_small" if (layers, width, heads) == (12, 768, 12) else "gpt2_medium"
    return [f"+model={model}", *(f"model.{key}={value}" for key, value in keys.items())]


def strategy_of(row: Row) -> tuple[str, list[str]]:
    """The framework of ddlbench with that strategy, and its words. UserError if there is none."""
    text = f"{row.get('strategy')} {row.get('framework')}".lower()
    stage = re.search(r"zero[ -_]?([0-3])\b", text)
    if "parameter" in text and "server" in text:
        raise UserError("a parameter server has no equations")
    if stage:
        return f"zero{stage[1]}", []
    if "shard_grad_op" in text:
        return "fsdp", ["framework.reshard_after_forward=false"]
    if "fsdp" in text or "full_shard" in text:
        return "fsdp", []
    if re.search(r"tensor.parallel|pipeline|\btp\b|\bpp\b", text):
        raise UserError(f"the layout of {row.get('strategy')!r} is not stated")
    if "horovod" in text:
        return "horovod", []
    if re.search(r"\bdd?p\b|data.parallel|all-?reduce|nccl", text):
        return "ddp", []
    raise UserError(f"the strategy {row.get('strategy')!r} is not known")


def precision_words(row: Row) -> list[str]:
    """Gradients are sent in 16 bits where the source says so ("PURE" of llm-foundry, "fp16 gradients"), else in fp32,
    as under amp and in TensorFlow, whose weights are in fp32."""
    text, strategy = (row.get("precision") or "").lower(), (row.get("strategy") or "").lower()
    name = next((name for name in ("bf16", "fp16", "tf32", "fp32") if name in text), None)
    if name is None:
        raise UserError(f"the precision {row.get('precision')!r} is not known")
    if name in ("fp32", "tf32"):
        return ["train.precision=fp32", f"train.tf32={str(name == 'tf32').lower()}"]
    sent = name if "(pure)" in strategy or f"{name} gradients" in strategy else "fp32"
    checkpointed = ["train.checkpoint_activations=true"] if "ac=true" in (row.get("layout") or "").lower() else []
    return [f"train.precision={name}", f"train.reduce_dtype={sent}", *checkpointed]


def _number(row: Row, key: str) -> float | None:
    """A number above 0; None for an empty cell. UserError for anything else."""
    text = (row.get(key) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{key}={text[:40]!r} is no number above 0")
    return value


def _required(row: Row, key: str) -> float:
    value = _number(row, key)
    if value is None:
        raise UserError(f"{key} is empty")
    return value
