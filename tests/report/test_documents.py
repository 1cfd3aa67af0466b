"""The summary in Markdown and LaTeX."""

from __future__ import annotations

from ddlbench.report.documents import latex, markdown, write_documents
from tests.support.records import tables_of, weak_scaling


def test_markdown():
    text = markdown(["framework", "gpus"], [["a|b_c", "2"]], ["n < 6"])
    assert text == "| framework | gpus |\n| --- | ---: |\n| a\\|b\\_c | 2 |\n\n- n \\< 6\n"


def test_latex():
    text = latex(["framework", "efficiency"], [["x_{$\\", "70.0 %"]], [])
    assert text.splitlines()[1:] == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"framework & efficiency \\",
        r"\midrule",
        r"x\_\{\$\textbackslash{} & 70.0 \% \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_no_name_is_an_argument_of_the_command_before_it():
    text = latex(["framework", "model"], [["[x]", "resnet50*"], ["*x", "[y]"]], [])
    assert text.splitlines()[4:7] == [r"\midrule", r"{}[x] & resnet50* \\", r"{}*x & {}[y] \\"]


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
