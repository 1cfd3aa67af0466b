"""--blocks: the counts of each block, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ddlbench.counts.counting import count
from ddlbench.counts.counts import Line, Work
from ddlbench.models.gpt2 import GPT2
from ddlbench.oracle.timing.computation import ANY, Computation
from ddlbench.predict.__main__ import main
from ddlbench.predict.blocks import flops_and_bytes, lines
from ddlbench.recipe.optimizers import optimizers

GPT2_TINY = GPT2("gpt2_small", n_layer=2, n_embd=16, n_head=2, vocab_size=64, seq_len=8)


def test_the_flops_grow_with_the_samples_and_a_part_of_the_bytes_does() -> None:
    work = Work(np.array([10.0, 4.0]), Line(np.array([100.0, 0.0]), np.array([2.0, 3.0])), np.array([True, False]))
    assert flops_and_bytes(work, 3) == (42.0, 115.0)


def test_equal_blocks_are_one_line_for_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 64 numbers for 128 tokens move far more bytes than an A100 can read while it computes."""
    words = [
        "+model=gpt2_small", "+framework=ddp", "model.n_layer=4", "model.n_embd=64", "model.n_head=4",
        "model.seq_len=64", "model.vocab_size=512", "cluster=juwels_booster", "gpus=2", "train.batch_per_gpu=2",
    ]  # fmt: skip
    assert main([*words, "--blocks"]) == 0
    said = capsys.readouterr().out.splitlines()
    table = [
        line.split("  ")
        for line in said[said.index("work of each block for 2 samples, from the operations of the model:") :]
    ]
    names = [row[0] for row in table if row[-1] in ("memory", "computing")]
    assert len(names) == 2 * len(set(names))
    assert any(" to " in name for name in names)
    assert {row[-1] for row in table[3:-1] if len(row) > 3} >= {"memory"}


def test_without_peaks_of_the_device_nothing_is_said_to_limit() -> None:
    counts = count(GPT2_TINY, "fp32", "cpu")
    *table, last = lines(Computation(counts, ANY, optimizers["adamw"].costs, "none"), 2)
    assert not any(line.endswith(("memory", "computing")) for line in table)
    assert last.startswith("the peaks of the device are not known")


def test_json_has_rows_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=gpt2_small", "+framework=ddp", "cluster=h100", "gpus=2", "--blocks", "--json"]) == 2
    assert "--blocks adds lines to the table" in capsys.readouterr().err
