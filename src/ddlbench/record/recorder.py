"""Write the rows of the loop to the files of the record, and print them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlbench.config.schema import Config
from ddlbench.loop import Recorder, Run, Scenario
from ddlbench.measure.clock import EpochClock
from ddlbench.measure.formulas.flops import mfu
from ddlbench.measure.rows import EpochRow, RankEpoch
from ddlbench.measure.summary import own_columns, own_steps_of_window, summarize
from ddlbench.progress import Progress, tell
from ddlbench.record.record import Record, step_table
from ddlbench.record.run_json import advice, advice_on_waiting

ONE_GPU = (
    "each rank sees one GPU of its node, so that NCCL may use PCIe in place of NVLink: give every rank all GPUs "
    "(srun --gpus-per-node=N without --gpus-per-task)"
)
# Parts of the time to the first step that every start needs. Making a sample set, which happens once, and counting for
# the record are left out.
STARTUP = ("imports_s", "connecting_s", "setup_s")
TRACE = "trace-rank0.json.gz"
SHOWN = ("val_loss", "val_top1", "val_perplexity_token")


@dataclass
class FileRecorder(Recorder):
    """Keeps summary and ledger up to date after each epoch, so that a run that is cut short leaves what it reached."""

    record: Record
    config: Config
    model: dict[str, Any]  # the record's section of that name
    scenario: Scenario
    progress: Progress
    startup_s: float = 0.0
    one_gpu: bool = False
    recorded: EpochClock | None = None  # of the last epoch that was handed over
    bad_samples: set[str] = field(default_factory=set[str])

    def begin(self, run: Run, spans: Mapping[str, float], hosts: Sequence[str]) -> None:
        """spans: seconds of each part of the start, in their order; hosts: that of each rank."""
        self.startup_s = sum(spans[name] for name in STARTUP)
        launch: dict[str, Any] = {**self.record.content["launch"], "hosts": sorted(set(hosts))}
        self.record.add(
            model=self.model, framework=self.scenario.facts(), loader=run.feed.facts(), spans=dict(spans), launch=launch
        )
        self.record.add(advice=advice(self.config, run.job, run.feed.facts()))
        # NCCL must see all GPUs of a node to find NVLink, else it uses PCIe or the host's memory without a message
        # (NVIDIA/nccl#1066).
        visible = self.record.content["environment"].get("gpu_count")
        self.one_gpu = launch["backend"] == "nccl" and launch["ranks_per_node"] > 1 and visible == 1
        self._update(run)
        self.record.save()
        self.record.interrupted = lambda: self._interrupted(run)
        if self.one_gpu:
            tell(f"warning: {ONE_GPU}")
        for line in self.record.content["advice"]:
            self.progress.say(f"advice: {line}")
        size = f"{self.model['parameters']:,} parameters" if "parameters" in self.model else "no model"
        self.progress.say(
            f"{self.record.content['run_id']}: {size}, {run.job.world_size} x "
            f"{run.job.device.type}, {run.feed.steps_per_epoch} steps of {run.job.global_batch} samples an epoch"
        )

    def epoch(self, run: Run, row: EpochRow) -> None:
        self.recorded = run.clock
        bad = [name for rank in row.ranks for name in rank.bad_samples]
        self.record.epoch(row)
        self._update(run)
        self._add_bad_samples(run, bad)
        self.record.save()
        rate = row.measured_samples / row.measured_time_s
        parts = [f"epoch {row.epoch}: {row.epoch_time_s:.2f} s", f"{rate:.1f} samples/s"]
        parts += [f"loss {row.train_loss:.4f}"] if row.train_loss is not None else []
        parts += [f"{name} {row.metrics[name]:.4f}" for name in SHOWN if row.metrics.get(name) is not None]
        self.progress.say(", ".join(parts))

    def window(self, section: Mapping[str, Any], save_trace: Callable[[Path], None]) -> None:
        """Write the section `profile`, and the trace of rank 0 beside run.json if the configuration asks for it."""
        if self.config.profile_trace:
            with self.record.saving():
                save_trace(self.record.folder / TRACE)
        self.record.add(profile={**section, "trace": TRACE if self.config.profile_trace else None})
        self.record.save()
        if "comm_exposed_share" in section:
            names = {"compute": "computing", "comm_exposed": "exposed communication", "data": "waiting for data"}
            shares = ", ".join(f"{section[f'{name}_share']:.1%} {text}" for name, text in names.items())
            shares = f"{shares}, {section['idle_share']:.1%} idle"
            self.progress.say(f"profiled window of {section['steps']} steps: {shares}")
        elif section["status"] == "unknown":
            self.progress.say(section["reason"])

    def end(self, run: Run, feeds: Sequence[Mapping[str, Any]]) -> None:
        self._add_bad_samples(run, [name for facts in feeds for name in facts["bad_samples"]])
        window = own_steps_of_window(self.record.content.get("profile", {}))
        self.record.add(
            summary={**self.record.content["summary"], **own_columns(window, "window")},
            framework=self.scenario.facts(),
        )
        waiting = self.record.content["summary"].get("data_wait_share")
        late = advice_on_waiting(self.config, run.job.device.type, waiting)
        self.record.add(advice=[*self.record.content["advice"], *late])
        for line in late:
            self.progress.say(f"advice: {line}")

    def _add_bad_samples(self, run: Run, names: Sequence[str]) -> None:
        """names: those of samples that a rank could not read"""
        self.bad_samples.update(names, self.record.content["loader"].get("bad_samples", ()))
        self.record.add(
            loader={**run.feed.facts(), "bad_samples": sorted(self.bad_samples)},
            ledger={**self.record.content["ledger"], "bad_samples": len(self.bad_samples)},
        )

    def _interrupted(self, run: Run) -> tuple[int, Any] | None:
        """The number of an epoch that is not complete, and its steps that have ended on this rank. None without such an
        epoch, and in another thread on a GPU: if the driver hangs, the thread that ends the process must not."""
        clock, main = run.clock, threading.current_thread() is threading.main_thread()
        if clock is None or clock is self.recorded or not (main or run.job.device.type == "cpu"):
            return None
        epoch, times = run.first_epoch + len(self.record.rows), clock.so_far()
        rank = RankEpoch(run.job.rank, run.place.data_rank, times, [], [], {})
        # No other table has these steps, and none counts them.
        return (epoch, step_table(epoch, rank, warmup=True, complete=False)) if times.step_s else None

    def _update(self, run: Run) -> None:
        rows = self.record.rows
        steps = run.first_epoch * run.feed.steps_per_epoch + sum(row.steps for row in rows)
        # A mark is set if the loader may have read all batches of the measured steps before the measured time; in
        # mode=loader, where the rate is that of the loader, a tenth of them is enough.
        ahead = (10 if self.config.mode == "loader" else 1) * run.feed.facts().get("ahead", 0)
        doubts = {
            "one visible GPU": self.one_gpu,
            "read ahead": bool(rows) and rows[-1].measured_steps <= ahead,
            "cold epoch": run.first_epoch > 0 and len(rows) == 1,
        }
        summary = summarize(rows, run.job.world_size, self.model["tokens_per_sample"], doubts)
        summary["epochs_done"] += run.first_epoch
        summary["startup_s"] = self.startup_s
        rate, flops = summary.get("throughput_samples_per_s_per_gpu"), self.model.get("flops_per_sample")
        if rate is not None and flops is not None:
            # The model FLOP/s of one device, and their share of its peak if that is known (PaLM, appendix B).
            gpu = self.record.content["environment"].get("gpu_model") if run.job.device.type == "cuda" else None
            tf32 = self.config.train.tf32 and run.job.precision == "fp32"  # the peaks of fp32 are those without TF32
            computed = self.model.get("hardware_flops_per_sample")
            summary |= {
                "model_flops_per_s_per_gpu": rate * flops,
                "mfu": mfu(rate * flops, gpu, run.job.precision) if gpu and not tf32 else None,
                "hfu": mfu(rate * computed, gpu, run.job.precision) if gpu and not tf32 and computed else None,
            }
        self.record.add(summary=summary, ledger=self.scenario.ledger(run, steps))
