"""The bytes of a pipeline's rank, by hand."""

from __future__ import annotations

from dataclasses import replace

from ddlbench.measure.formulas.memory_formula import Bytes
from ddlbench.oracle.memory.replicas import Moment
from ddlbench.oracle.memory.stages import Cut, Stage, pipedream_peak, schedule_peak, stage
from ddlbench.oracle.setting import Memory
from ddlbench.oracle.timing.schedule import order
from tests.oracle.made import AGAIN, KEPT, A, B, block, made

# A micro batch saves 10 and has 15 in memory at most while it runs; the stage has gradients of 7, of which 3 are there
# at the peak of the first backward pass.
STAGE = Stage(saved=10, running=15, first=Moment(3, 11), gradients=7)


def test_gpipe_keeps_all_micro_batches_and_1f1b_one_for_each_later_stage() -> None:
    """Four micro batches: GPipe's last forward pass has 3 x 10 + 15, its first backward pass 3 x 10 + 3 + 11."""
    assert schedule_peak(order("gpipe", 0, 2, 2, 4), {0: STAGE}) == Moment(0, 45)
    assert schedule_peak(order("1f1b", 0, 2, 2, 4), {0: STAGE}) == Moment(7, 25)
    assert schedule_peak(order("1f1b", 1, 2, 2, 4), {1: STAGE}) == Moment(7, 15)


def test_zero_bubble_keeps_a_micro_batch_until_the_gradients_of_its_weights() -> None:
    """Rank 1 of 2, three micro batches: F0 I0 F1 I1 W0 F2 I2 W1 W2. At I1 those of 0 and 1 are there: 10 + 15."""
    passes = order("zero_bubble", 1, 2, 2, 3)
    assert "".join(f"{kind}{micro}" for kind, _, micro in passes) == "F0I0F1I1W0F2I2W1W2"
    assert schedule_peak(passes, {1: STAGE}) == Moment(7, 25)


def test_a_rank_has_the_micro_batches_of_all_its_stages() -> None:
    """Two stages a rank, two ranks, two micro batches: stage 3 runs beside both micro batches of stage 1."""
    passes = order("interleaved", 1, 2, 4, 2)
    assert [(kind, index) for kind, index, _ in passes][:4] == [("F", 1), ("F", 1), ("F", 3), ("B", 3)]
    assert schedule_peak(passes, {1: STAGE, 3: replace(STAGE, saved=20, running=30)}).activations >= 2 * 10 + 30


def test_a_stage_keeps_an_output_that_autograd_does_not_save() -> None:
    """10 + 20 + 1; the backward pass of B has 10 + 26 + 1, the first time 10 + 30 + 1."""
    made = stage([A, replace(B, unsaved_output=1)], 1, KEPT, [8, 4], last=False)
    assert made == Stage(31, 37, Moment(0, 41), 12)


def test_a_checkpointed_stage_keeps_the_outputs_of_its_blocks() -> None:
    assert stage([A, B], 1, AGAIN, [8, 4], last=False).saved == 3 + 1


def cut(count: int, buffered: bool = False) -> Cut:
    """Four stages; each sends 2 bytes to the next one. Rank 1 has two later stages."""
    setting = made(4, [block(name, 1, 2, output=2) for name in "abcd"], 4)
    return Cut(setting, "pipedream", 1, 1, 4, (1, 1, 1, 1), count, 1.0, buffered=buffered)


def peak(count: int, rank: int, buffered: bool = False) -> Memory:
    states = Bytes(100, 7, 200)
    return pipedream_peak(cut(count, buffered), rank, states, STAGE, messages=3, permanent=1, update=6)


def test_each_minibatch_of_pipedream_has_its_weights() -> None:
    """Two later stages: 2 x (10 + 2) wait, beside 3 of messages. A backward pass has two versions more (2 x 100) and 3
    + 11; the update three (3 x 100), all gradients and 6."""
    memory = peak(1, 1)
    assert memory.buffers == 1 + 300
    assert memory.total == 100 + 200 + 301 + 7 + (24 + 3 + 6)


def test_micro_batches_of_one_minibatch_share_weights_and_2bw_has_gradients_of_two() -> None:
    """Four in a minibatch: the two that wait are of one other minibatch at most."""
    assert (peak(4, 1).buffers, peak(4, 3).buffers) == (1 + 200, 1)
    assert peak(4, 1, buffered=True).gradients == 14
