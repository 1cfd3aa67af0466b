"""A ReFrame check (version 4) that runs one cell of ddlbench and reads its record.

    reframe -C SITE_SETTINGS.py -c scripts/reframe/ddlbench_cell.py -r -S words='+framework=ddp +model=resnet50' \
        -S num_tasks=8 -S num_tasks_per_node=4

Without settings it runs one process on this machine. `-S python=PATH` names the Python that has ddlbench.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_before, sanity_function, variable

SMALL = (
    "+framework=single +model=resnet50 model.layers=[1,1,1,1] model.width_per_group=8 model.image_size=32 "
    "loader=synthetic train.global_batch=4 train.steps=4 train.epochs=1 train.validate=false"
)


@rfm.simple_test
class DDLBenchCell(rfm.RunOnlyRegressionTest):
    """Passes where the record says `ok`. Its figures are those of the record's summary, as it has them."""

    descr = "one cell of ddlbench"
    valid_systems = ["*"]  # noqa: RUF012  (ReFrame makes variables of these)
    valid_prog_environs = ["*"]  # noqa: RUF012
    words = variable(str, value=SMALL)
    python = variable(str, value="python3")
    time_limit = "30m"

    @run_before("run")
    def set_command(self) -> None:
        self.executable = self.python
        self.executable_opts = ["-m", "ddlbench", *self.words.split(), "results_dir=results", "progress=false"]

    @sanity_function
    def record_is_ok(self) -> Any:
        record = self.record()
        status = record.get("status", "no record")
        return sn.assert_eq(status, "ok", msg=f"{status}: {record.get('reason')}")

    @performance_function("samples/s")
    def throughput(self) -> float:
        return self.record()["summary"]["throughput_samples_per_s"]

    @performance_function("s")
    def startup(self) -> float:
        return self.record()["summary"]["startup_s"]

    def record(self) -> dict[str, Any]:
        """run.json of the only attempt; empty where the run has left none."""
        records = list(Path(self.stagedir).glob("results/*/attempt-1/run.json"))
        return json.loads(records[0].read_text()) if records else {}
