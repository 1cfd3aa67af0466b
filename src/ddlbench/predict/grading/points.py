"""Published measurements of training steps, each with a base: the same series with another number of GPUs.

A CSV file with at least the columns of COLUMNS, one row a point. A row that cannot be predicted is left out with its
reason, and nothing is repaired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddlbench.errors import UserError
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.oracle import bands
from ddlbench.oracle.machine.machine import Machine, with_overlap
from ddlbench.oracle.measured.inputs import OneStep
from ddlbench.predict.grading.machines import machine_of
from ddlbench.results.reading.published import CsvRow
from ddlbench.results.rows import Row

COLUMNS = (
    "source", "model", "framework", "strategy", "gpus", "gpus_per_node", "gpu_type", "network", "batch_per_gpu",
    "global_batch", "precision", "measured", "unit", "base_gpus", "base_value", "step_ms", "layout", "seq_len",
)  # fmt: skip
SERIES = ("source", "model", "framework", "strategy", "gpu_type", "network", "precision", "seq_len")
IMAGES = {  # not WideResNet
    r"(?<![a-z])(?<!wide[-_ ])(?:resnet|rn)[-_ ]?(50|101|152)(?!\d)": "resnet{}",
    r"(?<![a-z])vgg[-_ ]?(16)(?!\d)": "vgg{}",
}
TEXT = {  # pattern: layers, width, heads, vocabulary
    r"(?<![a-z])bert[-_ ]?large": (24, 1024, 16, 30528),
    r"(?<![a-z])bert[-_ ]?base": (12, 768, 12, 30528),
    r"gpt[-_ ]?2[-_ ]*small": (12, 768, 12, 50257),
    r"gpt[-_ ]?2[-_ ]*medium": (24, 1024, 16, 50257),
    r"gpt[-_ ]?2[-_ ]*large": (36, 1280, 20, 50257),
    r"gpt[-_ ]?2[-_ (]*(?:xl|1\.5 ?b)": (48, 1600, 25, 50257),
}
# Layers, width, heads of decoders by their parameters: Brown et al. 2020, table 2.1; Touvron et al. 2023, table 2;
# Black et al. 2022 (20 B); Narayanan et al. 2021, table 1 (530 B, 1 T)
SIZES = {
    0.125e9: (12, 768, 12),
    0.355e9: (24, 1024, 16),
    0.76e9: (24, 1536, 16),
    1.3e9: (24, 2048, 16),
    2.7e9: (32, 2560, 32),
    6.7e9: (32, 4096, 32),
    13e9: (40, 5120, 40),
    20e9: (44, 6144, 64),
    33e9: (60, 6656, 52),
    65e9: (80, 8192, 64),
    175e9: (96, 12288, 96),
    530e9: (105, 20480, 128),
    1e12: (128, 25600, 160),
}
DECODERS = re.compile(
    "gpt|(?<![a-z])[mo]pt|llama|pythia|bloom|mistral|falcon|qwen|gemma|deepseek|megatron|decoder|nemotron|olmo|internlm|t-nlg",
    re.IGNORECASE,
)
EXPERTS = re.compile(  # "Qwen3-30B-A3B"
    r"(?<![a-z])moe(?![a-z])|mixtral|-a[0-9.]+b\b|deepseek[-_ ]?v[23]|llama[-_ ]?4|dbrx|grok", re.IGNORECASE
)
# Models with a classifier of images as one part, and other models with its name.
NO_CLASSIFIER = re.compile(r"r-?cnn|(?<![a-z])ssd|retina|deeplab|u-?net|fpn|(?<![a-z])se[-_ ]?res", re.IGNORECASE)
MILLIONS = {"m": 1, "b": 1e3, "t": 1e6}
PRECISIONS = {
    "bf16": "bf(loat)?16", "fp16": r"fp16|float16|\bhalf\b|\bamp\b|mixed|\bo[12]\b", "tf32": "tf32",
    "fp32": r"fp32|float32|\bsingle\b",
}  # fmt: skip
# Libraries that reduce gradients after the backward pass unless they are told otherwise; DeepSpeed overlaps at stage 3.
WAITING = re.compile("deepspeed|megatron|chainer", re.IGNORECASE)
# Software of 2020 and before has NCCL 2.7 or older. Its all-reduces between two nodes take nearly as long as a ring's
# (DLPerf's BERT), and not as long as a tree's.
RINGS = re.compile(
    r"pytorch 1\.[0-7]\b|tensorflow (?:1|2\.[0-3])\b|mxnet 1|paddlepaddle 1|oneflow 0|deepspeed 0\.3|chainer",
    re.IGNORECASE,
)
COPIED = "framework.gradient_as_bucket_view=false"  # the default of torch, where ddlbench has true
# MiB of gradients in a message, by patterns of framework, model and strategy: 250 million numbers (`message_size` of
# apex's DDP in NVIDIA's BERT for PyTorch), or all (`num_packs=1`, the default of tf.distribute.NcclAllReduce, and
# ChainerMN's pure_nccl communicator).
MESSAGES = (
    (re.compile(r"pytorch.*(?:deeplearningexamples|\bdle\b).*bert", re.IGNORECASE), 954),
    (re.compile(r"tf\.distribute.*mirrored|chainer", re.IGNORECASE), 1_000_000),
)
# Ways of sharing images or convolutions over all GPUs, or over those of a node (Kahira et al. 2021).
SHARED = {"spatial": ("spatial", "sp"), "filter": ("tensor", "tp"), "channel": ("channel", "tp")}
# Parts of a strategy that ddlbench's equations do not have.
OTHERWISE = {
    "power.?sgd|top-?k|1-?bit|8-?bit|onebit|quantiz": "compressed gradients",
    "local.?sgd|model averaging|adasum": "updates of another kind",
    "double.?buffer": "gradients of the step before",  # ChainerMN
    "offload|infinity": "weights or states on the host",
}


class Words(NamedTuple):
    """The words of a source about one measurement, and the line of its file."""

    line: int
    source: str
    model: str
    strategy: str
    gpu: str
    network: str

    def graded(self, gpus: int, base: str, measured: float, predicted: float, band: Mapping[str, float]) -> Row:
        """The measurement, its base, its prediction in seconds and the ends of its bands, by the keys of the JSON."""
        error = predicted / measured - 1
        values = {"gpus": gpus, "base": base, "measured_s": measured, "predicted_s": predicted, "error": error}
        return {**self._asdict(), **values, **band}


@dataclass(frozen=True)
class Point:
    """A measurement and its base. words: of the configuration, without those of the batch"""

    stated: Words
    framework: str
    words: tuple[str, ...]
    machine: Machine
    measured: OneStep
    base: OneStep

    def graded(self, base: str, predicted: float, learned: bool = False) -> Row:
        """`Words.graded`. learned: whether the prediction uses several GPU counts"""
        gpus = self.measured.gpus
        band = bands.band(predicted, self.framework, self.machine.nodes(gpus), learned=learned)
        return self.stated.graded(gpus, base, self.measured.seconds, predicted, band)


def points(rows: Sequence[CsvRow], left_out: list[str]) -> Iterator[Point]:
    """The points of a file. `left_out` gets the reason of each row that is left out. A row that is only the base of
    others is no point and is not left out."""
    seen: dict[tuple[str, ...], int] = {}
    for row in rows:
        try:
            first = seen.setdefault(tuple(row[column] for column in (*COLUMNS, "loader")), row.line)
            if first != row.line:
                raise UserError(f"the same as line {first}")
            stated = row["base_gpus"] and row["base_value"]
            if stated and row.number("base_gpus") == row.number("gpus"):
                _step(row)  # the first of a series: UserError where its numbers are broken
                if row.number("base_value") != row.number("measured"):
                    raise UserError("its base has as many GPUs")
            elif stated or not any(_is_base(row, other) for other in rows):
                yield point(row, rows)
        except UserError as error:
            name = f"{row['source']}, {row['model']}, {row['strategy']}, {row['gpus']} GPUs"
            left_out.append(f"line {row.line}: {name}: {error}")


def _is_base(row: CsvRow, other: CsvRow) -> bool:
    """Whether `row` is the base of `other`. A row with a broken number is not."""
    if any(row[key] != other[key] for key in SERIES) or not (other["base_gpus"] and other["base_value"]):
        return False
    try:
        gpus, value = other.number("base_gpus"), other.number("base_value")
        return gpus == row.number("gpus") and value == row.number("measured")
    except UserError:
        return False


def point(row: CsvRow, rows: Sequence[CsvRow]) -> Point:
    """A row with its base. rows: those among which the base may be. UserError for a row that the oracle cannot
    predict."""
    if not (row["base_gpus"] and row["base_value"]):
        raise UserError("no base in its series")
    measured = _step(row)
    stated = next((other for other in rows if other is not row and _is_base(other, row)), None)
    if stated is None:  # only its value is known; its batch of one GPU is in `layout`, or that of the row
        batch = re.search(r"base batch per gpu (\d+)", row["layout"], re.IGNORECASE)
        samples = int(batch[1]) if batch else (measured.samples or 0) // measured.gpus
        cells = {"gpus": row["base_gpus"], "measured": row["base_value"], "batch_per_gpu": str(samples)}
        stated = CsvRow(row.line, {**row.cells, **cells, "step_ms": "", "global_batch": ""})
    base = _step(stated)
    framework, words = strategy_of(row)
    model = model_words(row)
    words += [COPIED] if framework == "ddp" else []
    per_node = row.count("gpus_per_node")
    nodes = math.ceil(max(measured.gpus, base.gpus) / per_node)
    machine = machine_of(row["gpu_type"], row["network"], per_node, nodes)
    if WAITING.search(row["framework"]) and framework not in ("fsdp", "zero3"):
        machine = with_overlap(machine, False)
    if RINGS.search(row["framework"]):
        machine = replace(machine, algorithm="ring")
    return Point(
        Words(row.line, *(row[column] for column in ("source", "model", "strategy", "gpu_type", "network"))),
        framework,
        (*model, *words, *precision_words(row, framework, model[0])),
        machine,
        measured,
        base,
    )


def _step(row: CsvRow) -> OneStep:
    """The measured step. UserError if its batch or its seconds are not known."""
    gpus = row.count("gpus")
    samples = row.batch(gpus)
    if samples is None:
        raise UserError("it states no batch")
    one = max(1, samples // gpus)
    wanted = min(row.micro_batch or one, one)
    micro = min(divisors(one), key=lambda size: abs(size - wanted))  # the source may drop samples of a step
    seconds = row.step_s(gpus, samples)
    if seconds is None:
        raise UserError(f"the unit {row['unit']!r} is not known, and step_ms is empty")
    return OneStep(seconds, samples, micro, gpus)


def model_words(row: CsvRow) -> list[str]:
    """The words of the model. UserError for a model that no model of ddlbench resembles in its sizes."""
    name = row["model"]
    if re.fullmatch("bert", name, re.IGNORECASE) and "mlperf" in row["source"].lower():
        name = "BERT-large"  # the model of MLPerf Training's rules
    for pattern, model in IMAGES.items():
        if (match := re.search(pattern, name, re.IGNORECASE)) and not NO_CLASSIFIER.search(name):
            return [f"+model={model.format(match[1])}"]
    sizes = next((sizes for pattern, sizes in TEXT.items() if re.search(pattern, name, re.IGNORECASE)), _sizes(name))
    if sizes is None:
        exact, short = re.search(r"\((\d+) parameters\)", name), re.search(r"(\d+(?:\.\d+)?) ?([mbt])\b", name.lower())
        if EXPERTS.search(name):
            raise UserError(f"the model {name!r} has experts, and no model of ddlbench has")
        count = float(exact[1]) if exact else 1e6 * float(short[1]) * MILLIONS[short[2]] if short else 0.0
        if not (DECODERS.search(name) and count):
            raise UserError(f"the model {name!r} is not known")
        near = min(SIZES, key=lambda size: abs(math.log(size / count)))
        sizes = (*SIZES[near], 50368)
    if not row["seq_len"]:
        raise UserError(f"{name}: it states no seq_len")
    names = ("n_layer", "n_embd", "n_head", "vocab_size", "seq_len")
    keys = zip(names, (*sizes, row.count("seq_len")), strict=True)
    model = "gpt2_small" if sizes[:3] == (12, 768, 12) else "gpt2_medium"
    return [f"+model={model}", *(f"model.{key}={value}" for key, value in keys)]


def _sizes(name: str) -> tuple[int, ...] | None:
    """Layers, width, heads and vocabulary of a decoder whose name states them: "GPT (16 layers, hidden 1536)". Heads
    have 64 features, and the vocabulary is that of GPT-2 in a multiple of 128, if they are not stated."""
    stated = list[int]()
    for word in ("layers?", "hidden(?: size)?|width|d_model", "(?:attention )?heads?", "vocab(?:ulary)?(?: size)?"):
        match = re.search(rf"(?:\b(?:{word})[ =:]*(\d+))|(\d+)[ -]?(?:{word})", name, re.IGNORECASE)
        stated.append(int(match[1] or match[2]) if match else 0)
    layers, width, heads, vocabulary = stated
    if not (DECODERS.search(name) and layers and width):
        return None
    return layers, width, heads or max(1, width // 64), vocabulary or 50368


def strategy_of(row: CsvRow) -> tuple[str, list[str]]:
    """The framework of ddlbench with that strategy, and its words. UserError if there is none."""
    strategy = re.sub(r"\b[cept]p[ =]?1\b", "", row["strategy"].lower())  # "DP (TP1 PP1)"
    text = f"{strategy} {row['framework'].lower()}"
    if "parameter" in text and "server" in text:
        raise UserError("a parameter server has no equations for GPUs")
    if re.search(r"\basync(?!hronous all|[- ]all)", text):
        raise UserError("asynchronous updates have no equations")
    if other := next((what for pattern, what in OTHERWISE.items() if re.search(pattern, text)), None):
        raise UserError(f"{row['framework']}, {row['strategy']!r} has {other}, without equations")
    if shared := next((name for name in SHARED if re.search(rf"\b{name}", strategy)), None):
        replicated = re.search(r"\bdata\b|\bd[sfc]\b", strategy)  # between nodes
        degree = row.count("gpus_per_node" if replicated else "gpus")
        framework, key = SHARED[shared]
        return framework, [f"framework.dp={row.count('gpus') // degree}", f"framework.{key}={degree}"]
    if re.search(r"(tensor|model).parallel|pipeline|gpipe|\b[cept]p[-_ =]?[0-9]*\b", text):
        raise UserError(f"a row of this form does not state the layout of {row['strategy']!r}")
    if re.search(r"hybrid.?shard|hsdp|fsdp ?\+ ?dp", text):
        raise UserError(f"{row['strategy']!r} does not state how many replicas the shards have")
    sharded = r"fsdp|fully?[-_ ]shard"
    if "no_shard" in text:
        return "ddp", []
    stage = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])\b", text)
    if "shard_grad_op" in text or re.search(sharded, strategy):
        kept = "shard_grad_op" in text or (stage and stage[1] == "2")  # weights stay gathered until the backward pass
        return "fsdp", ["framework.reshard_after_forward=false"] if kept else []
    if stage and re.search("within (?:groups|a node|nodes)", strategy):
        if stage[1] != "1":
            raise UserError(f"{row['strategy']!r} shards gradients or weights within groups, without equations")
        return "ddp", []  # all ranks reduce the gradients; the gather of weights within a node is left out
    if stage:
        return f"zero{stage[1]}", []
    if "horovod" in text:
        return "horovod", []
    replicas = r"\bdd?p\b|^data$|data.?parallel|all[- ]?reduce|nccl|distributed|replicated|mirrored|\bsync"
    if re.search(replicas, strategy):
        names = " ".join((row["framework"], row["model"], row["strategy"]))
        size = next((mib for pattern, mib in MESSAGES if pattern.search(names)), None)
        return "ddp", [f"framework.bucket_cap_mb={size}"] if size else []
    if re.search(sharded, text):
        return "fsdp", []
    raise UserError(f"the strategy {row['strategy']!r} is not known")


def precision_words(row: CsvRow, framework: str, model: str) -> list[str]:
    """Gradients are sent in 16 bits where the source says so ("PURE" of llm-foundry, "fp16 gradients", "fp16
    all-reduce"), in ChainerMN, and where the weights have 16 bits, too: MXNet's fp16, and of a model without BatchNorm
    the fp16 and bf16 of ZeRO and DeepSpeed and the fp16 of Megatron-LM. Else they are sent in fp32, as under amp and in
    TensorFlow, whose weights are in fp32."""
    text, strategy, library = (row[column].lower() for column in ("precision", "strategy", "framework"))
    name = next((name for name, pattern in PRECISIONS.items() if re.search(pattern, text)), None)
    if name is None or "fp8" in text:
        raise UserError(f"the precision {row['precision']!r} is not known")
    checkpointed = ["train.checkpoint_activations=true"] if "ac=true" in row["layout"].lower() else []
    sent = re.search(
        r"\b(fp16|bf16)\b.{0,12}(?:gradients|all-?reduce|compress|comm)|gradients in (fp16|bf16)", strategy
    )
    reduced = [f"train.reduce_dtype={sent[1] or sent[2]}"] if sent else []
    if name in ("fp32", "tf32"):
        return ["train.precision=fp32", f"train.tf32={str(name == 'tf32').lower()}", *reduced, *checkpointed]
    sharded = framework in ("zero1", "zero2", "zero3")
    zero = sharded or (framework == "ddp" and "zero" in strategy)  # ZeRO-1 within a node is predicted as DDP
    casts = zero or "deepspeed" in library or ("megatron" in library and name == "fp16")
    casts = (casts and model.startswith("+model=gpt2")) or ("mxnet" in library and "amp" not in text)
    if casts or "chainer" in library or "(pure)" in strategy:
        reduced = [f"train.reduce_dtype={name}"]
    cast = ["framework.mixed_precision=weights"] if casts and sharded else []
    return [f"train.precision={name}", *(reduced or ["train.reduce_dtype=fp32"]), *cast, *checkpointed]
