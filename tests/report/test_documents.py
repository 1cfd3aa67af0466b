"""The page, also at the width of a phone; the summary in Markdown and LaTeX."""

from __future__ import annotations

import shutil
import subprocess
from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ddlbench.figures.figures import ALL_BYTES, Drawing, pictures, save
from ddlbench.figures.panels import Plot
from ddlbench.report.__main__ import main
from ddlbench.report.documents import ROWS_SHOWN, latex, markdown, render, write_documents
from tests.support.records import tables_of, weak_scaling, write_run
from tests.support.waiting import WITHIN_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_no_part_is_wider_than_the_window(tmp_path, width):
    write_run(tmp_path, framework="a_framework_with_a_long_name_" * 4, knobs={"bucket": 1})
    write_run(tmp_path, gpus=2, status="error", reason="x" * 400)
    assert main([str(tmp_path)]) == 0
    page = tmp_path / "report" / "report.html"
    script = "e = f.contentDocument.documentElement; document.title = e.scrollWidth - e.clientWidth"
    frame = f'<iframe id="f" src="{page.as_uri()}" style="width:{width}px;height:800px;border:0" onload="{script}">'
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><title>none</title>{frame}</iframe>")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert "<title>0</title>" in done.stdout, done.stdout[:300] + done.stderr[-300:]


def test_long_reasons_and_many_machines_and_warnings_do_not_fill_it(tmp_path):
    """At any size of campaign; the files beside the page have all."""
    for number in range(ROWS_SHOWN + 2):
        commit = {"environment": {"git_commit": f"{number:040d}"}}
        folder = write_run(tmp_path, status="error", reason="&" * 9000, repeat=number, sections=commit)
        (folder / "steps.parquet").write_text("none")
    assert main([str(tmp_path)]) == 0
    page = tmp_path / "report" / "report.html"
    assert page.stat().st_size < 15 * 2**20 - ALL_BYTES * 4 / 3
    text = page.read_text()
    assert "And 2 more combinations" in text
    assert '<a href="tables/warnings.txt">' in text
    assert len((tmp_path / "report" / "tables" / "warnings.txt").read_text().splitlines()) == ROWS_SHOWN + 2


def test_images_stay_within_their_bytes(tmp_path: Path):
    from PIL import Image

    names = [f"figure_{n}" for n in range(1, 40)]
    png = BytesIO()
    Image.effect_noise((700, 700), 100).save(png, "PNG")
    for name in names:
        (tmp_path / f"{name}.svg").write_bytes(b"x" * 250_000)
        (tmp_path / f"{name}.png").write_bytes(png.getvalue())
    result = pictures(dict.fromkeys(names, Figure(figsize=(9.5, 4))), tmp_path)
    sizes = [len(picture.source) * 3 / 4 for picture in result if picture.source]
    assert sum(sizes) <= ALL_BYTES * 1.01
    kinds = [picture.source[:15] if picture.source else None for picture in result]
    assert kinds[0] == "data:image/svg+"
    assert "data:image/png;" in kinds
    assert kinds[-1] is None, "named, with its files, but not shown"


def test_a_further_file_of_a_plot_is_continued_and_a_figure_of_a_study_has_its_name(tmp_path: Path):
    def plot(name: str, study: str = "") -> Plot:
        return Plot(name, [], lambda axes, panel: None, study)

    plots = {"speedup": plot("speedup"), "speedup_2": plot("speedup"), "paper_1": plot("step_seconds", "paper_1")}
    figures = {name: Figure() for name in plots}
    for name, figure in figures.items():
        save(tmp_path, name, figure)
    write_run(tmp_path / "results")
    page = render(tables_of(tmp_path / "results"), Drawing(figures, plots), tmp_path)
    for title in ("Speedup", "Speedup, continued", "paper_1: Step seconds"):
        assert f"<h3>{title}</h3>" in page
    assert "reaches the target" not in page


def test_a_table_in_markdown_has_its_marks_escaped():
    text = markdown(["framework", "gpus"], [["a|b_c", "2"]], ["n < 6"])
    assert text == "| framework | gpus |\n| --- | ---: |\n| a\\|b\\_c | 2 |\n\n- n \\< 6\n"


def test_a_table_in_latex_has_its_commands_escaped():
    """No name is an argument of the command before it."""
    rows = [["x_{$\\", "70.0 %"], ["[x]", "resnet50*"], ["*x", "[y]"]]
    _, begin, *lines, end = latex(["framework", "efficiency"], rows, []).splitlines()
    assert (begin, end) == (r"\begin{tabular}{lr}", r"\end{tabular}")
    assert lines == [
        r"\toprule",
        r"framework & efficiency \\",
        r"\midrule",
        r"x\_\{\$\textbackslash{} & 70.0 \% \\",
        r"{}[x] & resnet50* \\",
        r"{}*x & {}[y] \\",
        r"\bottomrule",
    ]


def test_all_warnings_are_a_file_until_there_are_none(tmp_path):
    write_documents([], ["one", "two"], tmp_path)
    assert (tmp_path / "warnings.txt").read_text() == "one\ntwo\n"
    write_documents([], [], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"summary.md", "summary.tex"}


def test_every_measurement_has_a_line(tmp_path):
    weak_scaling(tmp_path / "results")
    scaling = tables_of(tmp_path / "results").measurements
    write_documents(scaling, [], tmp_path)
    assert (tmp_path / "summary.tex").read_text().count(r" \\") == 1 + len(scaling)
    assert "| ddp | resnet50 | native | 4 | weak | ok | 1 | 3.66 s | 280.0 |" in (tmp_path / "summary.md").read_text()
