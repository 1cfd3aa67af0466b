"""Pipelines of torch.distributed.pipelining: each rank holds some of the blocks, micro batches flow through all.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, with a flush), interleaved 1F1B (Narayanan et al. 2021), zero
bubble (Qi et al. 2023, ZB-1P), breadth-first (Lamy-Poirier 2023), ZBV (Qi et al. 2023, ZB-V) and DualPipeV (DeepSeek-AI
2024, Qi et al. 2025). With framework.dp > 1 there are several such pipelines: each stage averages its
gradients over its copies once, after the schedule has run. With framework.tp > 1 several ranks share the layers of each
stage: all together the hybrid of Narayanan et al. 2021 (docs/adr/0010).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddlbench.errors import check_values, refuse
from ddlbench.frameworks.pipeline.blocks import Blocks
from ddlbench.frameworks.pipeline.groups import Groups
from ddlbench.frameworks.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    SPLIT_BACKWARD,
    STAGES_OF_A_RANK,
    V_SHAPED,
    bubble,
    check_split_backward,
    check_stages,
    in_flight,
    micro_batch_count,
)
from ddlbench.frameworks.pipeline.stages import Plan, Staged, tied_names
from ddlbench.frameworks.pipeline.trainer import PipelineTrainer
from ddlbench.frameworks.shared.layout import Layout, fill
from ddlbench.frameworks.shared.meta import on_meta
from ddlbench.frameworks.shared.refusals import check_alike, check_shards
from ddlbench.frameworks.tensor.adapter import check_compile, check_parts
from ddlbench.job import Job


@dataclass
class Pipeline(Staged):
    """One pipeline over all ranks, or `dp` of them; conf/framework/gpipe.yaml says what each knob means."""

    name: str = "gpipe"
    schedule: str = field(default="gpipe", metadata={"defines": "hybrid"})
    tp: int = 1
    sharded: bool = False
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = 2 if self.schedule in V_SHAPED else 1
        valid = f"{stages} with framework.schedule={self.schedule}, or choose framework.schedule={' or '.join(LOOPED)}"
        fits = self.virtual_stages == stages or self.schedule in LOOPED
        check_values("framework.", self, least={"tp": 1, "virtual_stages": 1}, choices={"schedule": SCHEDULES})
        check_values("framework.", self, rules={"virtual_stages": (fits, valid)})

    def layout(self, world_size: int) -> Layout:
        shared = {"tp": self.tp} if self.tp > 1 else {}
        return Layout(**fill(world_size, dp=self.dp, **shared, pp=self.pp))

    def check(self, job: Job) -> None:
        layout = self.layout(job.world_size)
        ranks = layout.pp
        count = micro_batch_count(self.schedule, job, ranks, layout.dp)
        check_stages(ranks, self.virtual_stages, len(on_meta(job)), self.balance)
        reasons = {
            f"gradients are averaged in fp32, not {job.reduce_dtype}: set train.reduce_dtype=fp32":
                job.reduce_dtype != "fp32",
            f"{self.schedule} needs 2 ranks or more in a pipeline: use framework=gpipe":
                ranks == 1 and self.schedule in STAGES_OF_A_RANK,
            "shards cannot hold a weight that is tied between two stages of one rank: "
            "set framework.sharded=false or model.tie_weights=false":
                self.sharded and self.schedule in V_SHAPED and bool(tied_names(on_meta(job))),
        }  # fmt: skip
        refuse(self.name, reasons)
        if self.schedule in SPLIT_BACKWARD:
            check_split_backward(self.schedule, job)
        if self.tp > 1:
            check_parts(self.name, job, self.tp, ranks)
            check_compile(self.name, job)
        if self.sharded:
            check_shards(self.name, job)
        check_alike(job, layout.dp, stages=True)
        self.check_budget(job, layout, count)

    def in_flight(self, layout: Layout, count: int) -> list[int]:
        virtual = self.virtual_stages
        return virtual * [in_flight(self.schedule, rank, layout.pp, count, virtual) for rank in range(layout.pp)]

    def setup(self, job: Job) -> PipelineTrainer:
        layout = self.layout(job.world_size)
        count = micro_batch_count(self.schedule, job, layout.pp, layout.dp)
        groups = Groups(job, layout, self.sharded, self.schedule in V_SHAPED)
        groups.open_links(job.device, looped=self.virtual_stages > 1 and not groups.v_shaped)
        plan = self.plan(job, layout, count)
        blocks = Blocks(job, groups, plan, self.sharded)
        return PipelineTrainer(job, blocks, self.schedule, count, self._facts(job, layout, plan, count))

    def _facts(self, job: Job, layout: Layout, plan: Plan, count: int) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "shards": layout.dp if self.sharded else 1,
            "virtual_stages": self.virtual_stages,
            **plan.facts(),
            "micro_batches": count,
            "micro_batches_rule": "4 a rank" if job.micro_batch is None else "train.micro_batch",
            "bubble_theoretical": bubble(self.schedule, count, layout.pp, self.virtual_stages),
            "reduce_dtype": "fp32",
        }
