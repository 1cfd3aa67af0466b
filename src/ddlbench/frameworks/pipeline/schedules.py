"""Pipeline schedules: which there are, what they take and refuse, how long they wait. Plain arithmetic."""

from __future__ import annotations

from ddlbench.errors import Unsupported, WrongRankCount, refuse
from ddlbench.frameworks.shared.layout import divisors
from ddlbench.job import Job

# Names of torch.distributed.pipelining
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble"}
LOOPED = ("interleaved", "zero_bubble")  # may have several stages a rank

MICRO_BATCHES_PER_RANK = 4  # where the configuration gives no micro batch (Kim et al. 2020, "torchgpipe")


def accepts(schedule: str, count: int, ranks: int) -> bool:
    """Whether torch runs `count` micro batches over `ranks` ranks: 1F1B must fill the pipeline, the looped schedules go
    in count // ranks rounds of equal size."""
    if schedule in LOOPED:
        return count % max(1, count // ranks) == 0
    return schedule == "gpipe" or count >= ranks


def check_stages(ranks: int, virtual_stages: int, blocks: int, balance: list[int] | None) -> None:
    """Raise Unsupported for more stages than blocks, WrongRankCount for a balance that is not one."""
    stages = ranks * virtual_stages
    if stages > blocks:
        looped = f" x framework.virtual_stages={virtual_stages}" if virtual_stages > 1 else ""
        raise Unsupported(
            f"{stages} stages ({ranks} ranks in a pipeline{looped}) but the model "
            f"has {blocks} blocks: use at most {blocks // virtual_stages} ranks per pipeline, and more "
            "pipelines (framework.dp)"
        )
    if balance is not None and (len(balance) != stages or sum(balance) != blocks or min(balance) < 1):
        raise WrongRankCount(
            f"framework.balance={balance} gives {sum(balance)} blocks to {len(balance)} stages: the model has {blocks} "
            f"blocks and the pipeline {stages} stages, each needs 1 block or more; null balances by FLOPs"
        )


def check_split_backward(job: Job) -> None:
    """What does not go with a backward pass in two halves, gradients of inputs first and of weights later."""
    keys = {
        "train.checkpoint_activations": job.checkpoint_activations,  # each half would recompute the block
        "train.compile": job.compile,  # torch cannot split a compiled backward pass
        "train.channels_last": job.channels_last,  # inputs' gradients come in that layout, which cannot be sent
    }
    reason = "a backward pass in two halves does not support {}={}: set it to false, or use framework=interleaved"
    refuse("zero_bubble", {reason.format(key, str(value).lower()): value for key, value in keys.items()})


def micro_batch_count(schedule: str, job: Job, ranks: int, replicas: int) -> int:
    """Micro batches of an update: as `train.micro_batch` says, else 4 a rank or the nearest number below that divides a
    replica's samples. Raises WrongRankCount for what the schedule refuses."""
    samples = job.replica_batch(replicas)
    fits = [count for count in divisors(samples) if accepts(schedule, count, ranks)]
    if not fits:
        raise WrongRankCount(
            f"the {samples} samples of a replica (train.global_batch={job.global_batch} over {replicas}) cannot be "
            f"divided into micro batches for {schedule} over {ranks} ranks, which needs {ranks} or more: choose "
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
    """Micro batches whose activations this rank of a pipeline has in memory at once, those of each of its stages
    counted. count: micro batches of an update"""
    if schedule == "gpipe":
        return count
    if schedule not in LOOPED:  # PipeDream fills its pipeline with the next minibatches
        return ranks - rank if schedule == "pipedream" else min(ranks - rank, count)
    a_round = count // max(1, count // ranks)
    return min((virtual_stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1, virtual_stages * count)


def bubble(schedule: str, count: int, ranks: int, virtual_stages: int) -> float:
    """Share of the time a rank waits if all stages cost the same and sending costs nothing: (p - 1) / (m + p - 1) for m
    micro batches over p ranks (Huang et al. 2019).

    With v stages a rank the ramp is v times shorter (Narayanan et al. 2021, section 2.2). Where the gradients of
    weights, taken to be a third of the work, fill it, a third of it is left (Qi et al. 2023, ZB-H1).
    """
    ramp = ranks - 1
    return ramp / (count * virtual_stages * (3 if schedule == "zero_bubble" else 1) + ramp)
