"""When a run saves itself, and how another attempt continues it (docs/adr/0019).

    RESULTS/RUN/checkpoints-1/epoch-000004/      of attempt 1: the run may continue with epoch 4
        checkpoint.json                          position, numbers, epochs so far, checksum of every file
        .metadata, __0_0.distcp, ...             torch.distributed.checkpoint: tensors of all ranks

A folder has its name only when it is complete. No clock of training or validation runs meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from functools import partial
from pathlib import Path
from statistics import median

from ddlbench import checkpoint
from ddlbench.checkpoint import Checkpointable, Saved, complete, make_optimizer_states, named_tensors, set_random_states
from ddlbench.config.schema import Config
from ddlbench.errors import RunError, Unsupported, UserError, reporting
from ddlbench.heartbeat import has_ended
from ddlbench.job import Job, Trainer
from ddlbench.loop import Run
from ddlbench.progress import tell
from ddlbench.ranks.control import all_gather, barrier, from_rank_0
from ddlbench.recipe.recipe import Rates
from ddlbench.record.files import HEARTBEAT
from ddlbench.run.context import Attempt
from ddlbench.run.supervisor import Supervisor


def check_checkpoints(config: Config, job: Job) -> None:
    """Raise Unsupported if a run that continues would not train as one that was not interrupted."""
    if config.checkpoint.every is not None:
        getattr(config.framework, "check_checkpoint", lambda _: None)(job)


def open_checkpoints(attempt: Attempt, supervisor: Supervisor, run: Run, trainer: Trainer, rates: Rates) -> None:
    """Continue an earlier attempt if that is asked for, and save this one if that is configured. Collective.
    Unsupported if the framework cannot save what it trains; UserError, on every rank, for an attempt that continues
    nothing and whose folder has checkpoints of another one with its number."""
    options = attempt.config.checkpoint
    if options.every is None:
        return
    checkpoints = Checkpoints(attempt, supervisor, trainer, rates)
    if options.resumes(os.environ):
        checkpoints.resume(run)
    elif from_rank_0(checkpoints.rank == 0 and bool(complete(checkpoints.folder))):
        raise UserError(
            f"{checkpoints.folder} has checkpoints of an attempt whose record is elsewhere: continue it with "
            "checkpoint.resume=true, remove the folder or choose another checkpoint.dir="
        )
    run.after_epoch = partial(checkpoints.save, run)


def place_of(attempt: Attempt) -> Path:
    """The folder with the checkpoints of all attempts of this run."""
    assert attempt.folder is not None, "the attempt has its folder"
    folder = attempt.config.checkpoint.folder
    return attempt.folder.parent if folder is None else folder / attempt.run_id


def how_to_continue(attempt: Attempt) -> str | None:
    """What a user can do after an interruption; None if the run has nothing to continue."""
    if attempt.config.mode != "train" or attempt.folder is None:
        return None
    if attempt.config.checkpoint.every is None:
        return "nothing was saved: with checkpoint.every=1 a run saves itself after each epoch"
    names = [path.name for saved in place_of(attempt).glob("checkpoints-*") for path in complete(saved)]
    if not names:
        return "no epoch was saved before the interruption: the same command begins at epoch 0"
    epoch = int(max(names).removeprefix("epoch-"))
    return f"to continue with epoch {epoch}: the same command with checkpoint.resume=true"


class Checkpoints:
    """The checkpoints of one run, on every rank; rank 0 makes and removes folders."""

    def __init__(self, attempt: Attempt, supervisor: Supervisor, trainer: Trainer, rates: Rates) -> None:
        options = attempt.config.checkpoint
        assert options.every is not None, "else there is nothing to do"
        if not isinstance(trainer, Checkpointable):
            raise Unsupported(f"{attempt.config.framework.name} does not save checkpoints: {checkpoint.OFF}")
        assert attempt.folder is not None, "the attempt has its folder"
        self.every, self.keep = options.every, options.keep
        self.attempt, self.supervisor, self.trainer, self.rates = attempt, supervisor, trainer, rates
        self.number = int(attempt.folder.name.removeprefix("attempt-"))
        self.place = place_of(attempt)
        self.folder = self.place / f"checkpoints-{self.number}"
        self.attempts = attempt.folder.parent
        self.rank = attempt.launch.rank
        self.lineage: list[int] = [self.number]
        self.seconds: list[float] = []
        attempt.on_success = self._remove_all

    def resume(self, run: Run) -> None:
        """Continue from the newest checkpoint that is not damaged, or from the beginning if there is none. Collective.
        UserError, on every rank, if all are damaged."""
        with self.supervisor.unlimited():
            began = time.perf_counter()
            saved = self._newest_sound()
            if saved is None:
                run.progress.say(
                    f"begins at epoch 0: {self.place} has no checkpoint (a run that ends well removes its own; other "
                    "ranks, data or configuration are another run)"
                )
                return
            position = f"epoch {saved.epoch} of {run.epochs}"
            run.progress.say(f"continues attempt {saved.attempt} of {saved.run_id} with {position}")
            live, device = self.trainer.live(), run.job.device
            make_optimizer_states(live, checkpoint.shapes(saved.folder))
            tensors = named_tensors(live, self.rank, device)
            checkpoint.read(saved.folder, tensors)
            self.trainer.restore(saved.numbers)
            self.rates.load(saved.rates)
            set_random_states(tensors, self.rank, device)
            run.first_epoch, run.elapsed_s = saved.epoch, saved.elapsed_s
            self.lineage = [*saved.lineage, self.number]
            if self.attempt.record:
                resumed = {"attempt": saved.attempt, "epoch": saved.epoch, "updates": saved.updates}
                resumed |= {"seconds": time.perf_counter() - began}
                self.attempt.record.resume(resumed, saved.epochs)

    def save(self, run: Run, epoch: int) -> None:
        """Save the run after the row of an epoch is recorded, if it is time; never after the last one. The folder gets
        its name once it is complete; then rank 0 removes the checkpoints that are too many. Collective."""
        done, record = epoch + 1, self.attempt.record
        if done % self.every or done == run.epochs:
            return
        with self.supervisor.unlimited():
            barrier()
            began = time.perf_counter()
            growing = self.folder / f".epoch-{done:06}"
            remedy = "free space or choose another checkpoint.dir="
            if self.rank == 0:
                shutil.rmtree(growing, ignore_errors=True)
                with reporting(f"{growing} cannot be made", remedy, RunError):
                    growing.mkdir(parents=True)
            barrier()
            files = checkpoint.write(growing, named_tensors(self.trainer.live(), self.rank, run.job.device), self.rank)
            if self.rank == 0:
                epochs = record.lines() if record else []
                saved = Saved(
                    growing, self.attempt.run_id, self.number, self.lineage, done, self.trainer.updates,
                    run.elapsed_s, self.rates.state(), self.trainer.numbers(), epochs, files,
                )  # fmt: skip
                with reporting(f"the checkpoint in {growing} cannot be written", remedy, RunError):
                    saved.write()
                    target = self.folder / f"epoch-{done:06}"
                    shutil.rmtree(target, ignore_errors=True)  # a damaged one, where the record before is elsewhere
                    growing.rename(target)
                kept = complete(self.folder)
                earlier = [self.place / f"checkpoints-{attempt}" for attempt in self.lineage if attempt != self.number]
                for folder in [*kept[self.keep :], *(earlier if len(kept) >= self.keep else [])]:
                    shutil.rmtree(folder, ignore_errors=True)
            barrier()
            self.seconds.append(time.perf_counter() - began)
            if record:
                sizes = [size for size, _ in files.values()]
                facts = {"count": len(self.seconds), "median_s": median(self.seconds), "bytes": sum(sizes)}
                record.add(checkpoints={**facts, "seconds": self.seconds})
                record.save()

    def _remove_all(self) -> None:
        """Remove the checkpoints of a run that has ended well: there is nothing to continue, and a repeat must begin
        at epoch 0. Files that other attempts were writing when they ended are removed too."""
        for attempt in self.lineage:
            shutil.rmtree(self.place / f"checkpoints-{attempt}", ignore_errors=True)
        for growing in self.place.glob("checkpoints-*/.epoch-*"):
            attempt = growing.parent.name.removeprefix("checkpoints-")
            if has_ended(self.attempts / f"attempt-{attempt}" / HEARTBEAT):
                shutil.rmtree(growing, ignore_errors=True)
                with contextlib.suppress(OSError):  # there are complete checkpoints beside it
                    growing.parent.rmdir()

    def _newest_sound(self) -> Saved | None:
        newest: list[Path] = []
        if self.rank == 0:  # a file system may show other ranks less
            newest = [folder for attempts in self.place.glob("checkpoints-*") for folder in complete(attempts)]
            newest.sort(key=lambda folder: (folder.name, folder.stat().st_mtime), reverse=True)
        candidates = from_rank_0(newest)
        for folder in candidates:
            try:
                saved, wrong = Saved.read(folder), None
            except (OSError, ValueError) as error:
                saved, wrong = None, str(error)
            if saved is not None and saved.run_id != self.attempt.run_id:
                wrong = f"it is of the run {saved.run_id}"
            wrong = next((said for said in all_gather(wrong) if said), None)
            if wrong is None and saved is not None:
                wrong = checkpoint.damage(folder, saved.files, self.rank, self.attempt.launch.world_size)
            if wrong is None:  # on every rank
                return saved
            if self.rank == 0:
                tell(f"warning: {folder} is damaged ({wrong}) and not used")
        if candidates:
            raise UserError(
                f"all checkpoints of {self.attempt.run_id} in {self.place} are damaged: remove them to begin at epoch 0"
            )
        return None
