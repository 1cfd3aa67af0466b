"""What the numbers leave out is counted in one line, in the terminal and on the page."""

from __future__ import annotations

import os
import shutil

import pytest

from ddlbench.foreign import LARGEST_BYTES
from ddlbench.report.__main__ import main
from ddlbench.results.reading.attempts import left_out_line
from tests.support.records import tables_of, write_run


def test_nothing_left_out_is_no_line(tmp_path):
    write_run(tmp_path)
    assert tables_of(tmp_path).left_out is None
    assert left_out_line([]) is None


def test_one_and_several():
    assert left_out_line(["copy", "unreadable", "copy"]) == "left out: 1 unreadable, 2 copies"


def replaced(results, number, content):
    """An attempt with another run.json."""
    file = write_run(results, gpus=2, repeat=number) / "run.json"
    file.unlink()
    content(file)


def large(file):
    with file.open("wb") as opened:
        opened.truncate(LARGEST_BYTES + 1)


@pytest.fixture
def results(tmp_path):
    """A good run beside one of each kind, two of some."""
    write_run(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "backup")
    contents = (
        os.mkfifo,
        os.mkfifo,
        large,
        lambda file: file.symlink_to(file.name),
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text('{"schema_version": 2}'),
        lambda file: file.write_text('{"schema_version": "a"}'),
        lambda file: file.write_text('{"schema_version": 99}'),
        lambda file: file.write_text('{"schema_version": 0}'),
    )
    for number, content in enumerate(contents):
        replaced(tmp_path, number, content)
    write_run(tmp_path, gpus=4, status="running")
    write_run(tmp_path, gpus=8, sections={"launch": {"world_size": 8, "backend": "nccl (shared GPU)"}})
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "gone").symlink_to("nowhere")
    (write_run(tmp_path, gpus=16) / "epochs.jsonl").write_text('{"epoch": 0}\n{"epoch"')
    return tmp_path


def test_what_is_in_no_measurement_or_in_no_time_is_counted(tmp_path):
    write_run(tmp_path)
    bare = write_run(tmp_path, gpus=2, sections={"config": None})
    write_run(tmp_path, gpus=4, sections={"summary": {}})
    write_run(tmp_path, gpus=8, status="oom")
    tables = tables_of(tmp_path)
    assert tables.left_out == "left out: 1 without a configuration, 1 ended ok without a rate"
    assert tables.warnings == [f"{bare}: run.json has no configuration: the attempt is in no measurement"]
    assert list(tables.scaling["gpus"].unique()) == [1, 4, 8]


TOLD = (
    "left out: 1 unreadable, 3 not JSON of a run, 2 no regular files, 1 too large, 2 links in circles, "
    "1 of a newer schema, 1 of an older schema, 1 folder or link that cannot be followed, 1 copy, "
    "1 ended ok without a rate, 1 still running or killed, 1 epochs.jsonl that cannot be read whole, "
    "1 of ranks that shared a GPU"
)


def test_every_kind_is_counted(results):
    tables = tables_of(results)
    assert tables.left_out == TOLD
    assert len(tables.runs) == 14, "all but the copy are rows"


def test_terminal_and_page_have_the_line(tmp_path, capsys):
    write_run(tmp_path, status="error", reason="boom")
    replaced(tmp_path, 1, lambda file: file.write_text("{"))
    assert main([str(tmp_path)]) == 0
    assert "\nleft out: 1 unreadable\n" in capsys.readouterr().out
    assert "<p>left out: 1 unreadable." in (tmp_path / "report" / "report.html").read_text()
