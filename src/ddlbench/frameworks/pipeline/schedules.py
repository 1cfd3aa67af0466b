"""Pipeline schedules: which there are, what they take and refuse, how long they wait. Plain arithmetic."""

from __future__ import annotations

from ddlbench.errors import Unsupported, WrongRankCount, refuse
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.job import Job

# Names of torch.distributed.pipelining
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "looped_bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LOOPED = ("interleaved", "zero_bubble", "looped_bfs")  # may have several stages a rank
V_SHAPED = ("zbv", "dualpipev")  # have two stages a rank: rank r has stages r and 2 p - 1 - r
STAGES_OF_A_RANK = (*LOOPED, *V_SHAPED)  # take a list of stages, and two ranks or more
SPLIT_BACKWARD = ("zero_bubble", *V_SHAPED)  # compute gradients of weights after those of inputs

MICRO_BATCHES_PER_RANK = 4  # where the configuration gives no micro batch (Kim et al. 2020, "torchgpipe")


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """The rank of a pipeline that has this stage. After the last rank the stages continue with rank 0, or go back from
    rank to rank (v_shaped), so that rank 0 has the first and the last stage."""
    turn, position = divmod(stage, ranks)
    return ranks - 1 - position if v_shaped and turn % 2 else position


def least_count(schedule: str, ranks: int) -> int:
    """The least number of micro batches that torch, or the schedule's bubble (`bubble`), needs."""
    least = {"gpipe": 1, "interleaved": 1, "zero_bubble": 1, "zbv": 2 * ranks - 1, "dualpipev": 2 * ranks}
    return least.get(schedule, ranks)


def accepts(schedule: str, count: int, ranks: int) -> bool:
    """Whether `count` micro batches can run over `ranks` ranks: interleaved and zero_bubble go in count // ranks rounds
    of equal size."""
    rounds = max(1, count // ranks) if schedule in ("interleaved", "zero_bubble") else 1
    return count >= least_count(schedule, ranks) and count % rounds == 0


def check_stages(ranks: int, virtual_stages: int, blocks: int, balance: list[int] | None) -> None:
    """Raise Unsupported for more stages than blocks, WrongRankCount for a balance that is not one."""
    stages = ranks * virtual_stages
    if stages > blocks:
        looped = f" x framework.virtual_stages={virtual_stages}" if virtual_stages > 1 else ""
        fewer = f"use at most {blocks // virtual_stages} ranks per pipeline, and more pipelines (framework.dp)"
        if virtual_stages > 2:  # on a V a rank always has 2
            fewer = f"set framework.virtual_stages={max(1, blocks // ranks)}"
        raise Unsupported(
            f"{stages} stages ({ranks} ranks in a pipeline{looped}) but the model has {blocks} blocks: {fewer}"
        )
    if balance is not None and (len(balance) != stages or sum(balance) != blocks or min(balance) < 1):
        raise WrongRankCount(
            f"framework.balance={balance} gives {sum(balance)} blocks to {len(balance)} stages: the model has {blocks} "
            f"blocks and the pipeline {stages} stages, each needs 1 block or more; null balances by FLOPs"
        )


def check_split_backward(schedule: str, job: Job) -> None:
    """Raise Unsupported for what does not go with a backward pass in two halves, gradients of inputs first and of
    weights later."""
    if schedule not in SPLIT_BACKWARD:
        return
    keys = {
        "train.checkpoint_activations": job.checkpoint_activations,  # each half would recompute the block
        "train.compile": job.compile,  # torch cannot split a compiled backward pass
        "train.channels_last": job.channels_last,  # inputs' gradients come in that layout, which cannot be sent
    }
    reason = "a backward pass in two halves does not support {}={}: set it to false, or use framework=interleaved"
    refuse(schedule, {reason.format(key, str(value).lower()): value for key, value in keys.items()})


def micro_batch_count(schedule: str, job: Job, ranks: int, replicas: int) -> int:
    """Micro batches of an update: as `train.micro_batch` says, else 4 a rank or the nearest number below that divides a
    replica's samples. Raises WrongRankCount for what the schedule refuses."""
    samples = job.replica_batch(replicas)
    fits = [count for count in divisors(samples) if accepts(schedule, count, ranks)]
    if not fits:
        raise WrongRankCount(
            f"the {samples} samples of a replica (train.global_batch={job.global_batch} over {replicas}) cannot be "
            f"divided into micro batches for {schedule} over {ranks} ranks, which needs "
            f"{least_count(schedule, ranks)} or more: choose "
            f"train.global_batch={MICRO_BATCHES_PER_RANK * ranks * replicas} or more"
        )
    if job.micro_batch is None:
        return max((count for count in fits if count <= MICRO_BATCHES_PER_RANK * ranks), default=fits[0])
    count = job.micro_batches(replicas)
    if count not in fits:
        nearest = min(fits, key=lambda fit: abs(fit - count))
        raise WrongRankCount(
            f"{schedule} over {ranks} ranks cannot run {count} micro batches (train.micro_batch={job.micro_batch} of "
            f"the {samples} samples of a replica): choose train.micro_batch={samples // nearest}"
        )
    return count


def in_flight(schedule: str, rank: int, ranks: int, count: int, virtual_stages: int) -> int:
    """Micro batches whose activations this rank of a pipeline has in memory at once, counted for each of its stages. It
    is not called for V-shaped schedules, in which no block runs again. count: micro batches of an update"""
    if schedule in ("gpipe", "looped_bfs"):
        return virtual_stages * count
    if schedule not in LOOPED:  # PipeDream fills its pipeline with the next minibatches
        return ranks - rank if schedule == "pipedream" else min(ranks - rank, count)
    a_round = count // max(1, count // ranks)
    return min((virtual_stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1, virtual_stages * count)


def bubble(schedule: str, count: int, ranks: int, virtual_stages: int) -> float:
    """Share of the time a rank waits if all stages cost the same and sending costs nothing: (p - 1) / (m + p - 1) for m
    micro batches over p ranks (Huang et al. 2019).

    With v stages a rank the ramp is v times shorter (Narayanan et al. 2021, section 2.2; breadth-first: Lamy-Poirier
    2023). Where the gradients of weights, taken to be a third of the work, fill it, a third of it is left (Qi et al.
    2023, ZB-H1). DualPipeV waits (p - 1) (F&B + B - 3 W) of 2 m (F + B) (DeepSeek-AI 2024, cut in half by Qi et al.
    2025); torch runs the overlapped pass F&B as F + B. A rank of ZBV does not wait between its first and its last pass
    (Qi et al. 2023, section 6).
    """
    ramp = 0 if schedule == "zbv" else ranks - 1
    passes = {"zero_bubble": 3 * virtual_stages, "dualpipev": 3}.get(schedule, virtual_stages)
    return ramp / (count * passes + ramp)
