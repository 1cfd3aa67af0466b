"""What the figures draw, read back from their axes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from ddlbench.figures import curves, plotting
from ddlbench.figures import figures as module
from ddlbench.figures.curves import places
from ddlbench.figures.figures import drawing_of, make_figures, plots_of, save
from ddlbench.figures.plotting import PALETTE
from ddlbench.results.tables.measurement import Measurement
from tests.support.figures import figures_of, names_of
from tests.support.records import strong_scaling, tables_of, weak_scaling, write_repeats, write_run

ALWAYS = {"throughput", "speedup", "efficiency", "epoch_time", "memory"}


def drawn(results, *names):
    return figures_of(tables_of(results), *names)


def lines(axes, label):
    return [line.get_xydata().tolist() for line in axes.lines if line.get_label() == label]


def theory(axes):
    """The points of the dotted lines."""
    return [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == ":"]


def labels(axes):
    return set(axes.get_legend_handles_labels()[1]) - {"ideal"}


def texts_of(axes):
    """The small lines below a panel's title."""
    (text,) = (text.get_text() for text in axes.texts if text.get_fontsize() == plotting.SMALL)
    return text.splitlines()


def test_figures_for_images_and_text(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    learning = {f"{metric}_by_{axis}" for metric in ("accuracy", "perplexity") for axis in ("epoch", "time")}
    learning |= {"accuracy_by_batch"}  # weak scaling has several batches
    assert names_of(tables_of(tmp_path)) == ALWAYS | {"speedup_own_base", "efficiency_own_base"} | learning


@pytest.mark.parametrize(
    ("counts", "labelled"),
    [
        ([1, 16, 64, 512, 768], ["1", "16", "64", "512"]),
        ([1, 512, 768, 1024, 3456], ["1", "512", "3456"]),
        ([2**n for n in range(11)], [str(2**n) for n in range(11)]),
    ],
)
def test_labels_of_gpu_counts_do_not_touch(counts, labelled):
    with plotting.style():
        figure = plotting.grid([("resnet50", [])])
        (axes,) = figure.axes
        axes.plot(counts, counts)
        plotting.gpu_axis(axes, counts, "cuda", log=True)
        plotting.arrange(figure)
        pixels = FigureCanvasAgg(figure).get_renderer()
        figure.draw(pixels)
    texts = axes.get_xticklabels()
    assert [text.get_text() for text in texts] == labelled
    boxes = [text.get_window_extent(pixels) for text in texts]
    digit = boxes[0].width  # of "1" or "8"
    assert all(later.x0 - box.x1 > 0.3 * digit for box, later in pairwise(boxes))


@pytest.mark.parametrize("counts", [(1, 2, 4, 8), (1, 8, 1024, 65536), (4, 16, 64, 512, 2048, 16384)])
def test_curves_beside_each_other_are_inside_the_axis(tmp_path, counts):
    for framework in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "horovod", "deepspeed"):
        for gpus in counts:
            write_run(tmp_path, framework=framework, gpus=gpus, rate=100.0 * gpus)
    (axes,) = make_figures(tables_of(tmp_path)).figures["throughput"].axes
    curves = [line for line in axes.lines if line.get_marker() in plotting.MARKERS]
    places = [line.get_transform().transform((gpus, 100.0 * gpus))[0] for line in curves for gpus in counts]
    assert len(curves) == 8
    assert axes.bbox.x0 < min(places) < max(places) < axes.bbox.x1


def test_large_numbers_leave_room_for_the_name_of_the_axis():
    assert [plotting.plain(value) for value in (0.002, 9_000_000, 50_000_000)] == ["0.002", "9,000,000", "5e+07"]


@pytest.mark.parametrize("values", [(30.0, 55.0), (21.0, 48.0), (6.0, 9.0), (1.0, 5000.0)])
def test_a_logarithmic_axis_of_values_has_two_ticks_or_more(values):
    with plotting.style():
        (axes,) = plotting.grid([("resnet50", [])]).axes
        plotting.value_axis(axes, values, "samples/s", percents=False, log=True)
        low, high = axes.get_ylim()
        assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 2


def test_a_long_name_is_whole_in_a_legend_of_several_lines():
    name = "ddp (" + " ".join(f"knob_{number}={number}" for number in range(20)) + ")"
    figure = plotting.grid([("resnet50", [])])
    figure.axes[0].plot([], [], label=plotting.label(name))
    plotting.arrange(figure)
    (text,) = (text.get_text() for text in figure.legends[0].get_texts())
    assert text.replace("\n", "") == name
    assert max(map(len, text.splitlines())) <= plotting.LABEL_LINE


def test_no_line_joins_the_points_of_two_clusters(tmp_path):
    rates = {("east", 1): 100.0, ("east", 4): 300.0, ("west", 2): 50.0, ("west", 8): 150.0}
    for (cluster, gpus), rate in rates.items():
        write_run(tmp_path, cluster=cluster, gpus=gpus, rate=rate)
    (axes,) = drawn(tmp_path, "throughput")["throughput"].axes
    for cluster in ("east", "west"):
        points = [[gpus, pytest.approx(rate)] for (where, gpus), rate in rates.items() if where == cluster]
        assert lines(axes, f"ddp at {cluster}") == [points]


def test_ideal_lines_start_at_the_base(tmp_path):
    """Images from one GPU on, on a logarithmic axis, where an ideal line stays straight; text from two on."""
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    names = ("throughput", "speedup", "speedup_own_base")
    figures = drawn(tmp_path, *names)
    (throughput, _), (text, images), (own,) = (figures[name].axes for name in names)
    assert lines(images, "single") == [[[1, pytest.approx(1.0)]]]
    assert lines(images, "ideal") == [[[1, 1], [8, 8]]]
    assert lines(text, "ideal") == [[[2, 1], [8, 4]]]
    assert lines(throughput, "ideal") == [[[2, pytest.approx(10)], [8, pytest.approx(40)]]]
    for axes in (throughput, text):
        assert "base: ddp on 2 GPUs, 100 ms a sample" in axes.texts[0].get_text()
    assert (images.get_xscale(), images.get_yscale(), images.get_xlabel()) == ("log", "log", "GPUs")
    assert [axes.get_ylabel() for axes in (images, text, own)] == ["speedup", *["speedup over own base"] * 2]
    assert lines(own, "ddp") == [[[1, pytest.approx(1.0)], [2, pytest.approx(1.875)], [4, pytest.approx(3.5)]]]


def test_one_gpu_count_has_no_ideal_line_in_plot_or_legend(tmp_path):
    write_run(tmp_path, framework="fsdp", gpus=2)
    (axes,) = drawn(tmp_path, "throughput")["throughput"].axes
    assert axes.get_legend_handles_labels()[1] == ["fsdp"]


def test_bars_of_ratios_count_the_interval_of_the_base_too(tmp_path):
    """Seconds a sample of ddp on two GPUs: 10 to 15 ms (median 12); on eight: 4 to 8 ms (median 5)."""
    times = {2: (10.0, 11.0, 11.5, 12.5, 14.0, 15.0), 8: (4.0, 4.5, 4.8, 5.2, 7.0, 8.0)}
    for gpus, own in times.items():
        write_repeats(tmp_path, *(1e3 / ms for ms in own), gpus=gpus)
    expected = {
        "throughput": {2: (1e3 / 15, 1e3 / 12, 100.0), 8: (125.0, 200.0, 250.0)},
        "speedup": {2: (None, 1.0, None), 8: (10 / 8, 12 / 5, 15 / 4)},
        "efficiency": {2: (None, 1.0, None), 8: (10 / 32, 12 / 20, 15 / 16)},
        "epoch_time": {2: (10.24, 12.288, 15.36), 8: (4.096, 5.12, 8.192)},
    }
    dots = {
        "throughput": {gpus: [1e3 / ms for ms in own] for gpus, own in times.items()},
        "speedup": {gpus: [12 / ms for ms in own] for gpus, own in times.items()},
        "efficiency": {gpus: [12 * 2 / (ms * gpus) for ms in own] for gpus, own in times.items()},
        "epoch_time": {gpus: [1.024 * ms for ms in own] for gpus, own in times.items()},
    }
    figures = drawn(tmp_path, *expected)
    for name, by_gpus in expected.items():
        (axes,) = figures[name].axes
        assert lines(axes, "ddp") == [[[gpus, pytest.approx(own[1])] for gpus, own in by_gpus.items()]], name
        (bars,) = [line for line in axes.lines if line.get_linewidth() == 3.5]
        ends = [(x, y) for x, y in bars.get_xydata().tolist() if y == y]
        drawn_ends = [(gpus, own[n]) for gpus, own in by_gpus.items() for n in (0, 2) if own[n] is not None]
        assert ends == [(gpus, pytest.approx(end)) for gpus, end in drawn_ends], name
        (points,) = [line for line in axes.lines if line.get_marker() == "."]
        result = {gpus: sorted(y for x, y in points.get_xydata() if x == gpus) for gpus in by_gpus}
        assert result == {gpus: pytest.approx(sorted(own)) for gpus, own in dots[name].items()}, name


def test_failures_are_crosses_on_the_axis(tmp_path):
    weak_scaling(tmp_path)
    figures = drawn(tmp_path, *ALWAYS)
    for name in ALWAYS:
        (axes,) = figures[name].axes
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert [line.get_xdata()[0] for line in crosses] == [8]
        assert "oom" in [text.get_text() for text in axes.texts]
        assert crosses[0].get_ydata()[0] > 1 - curves.LINE - 0.02, "in the band above the data, as a share of the axis"
        top = max(value for line in axes.lines if line.get_marker() != "x" for value in line.get_ydata())
        assert axes.transAxes.inverted().transform(axes.transData.transform((1, top)))[1] < 1 - curves.LINE - 0.02


def test_a_color_belongs_to_a_framework_in_all_figures(tmp_path):
    weak_scaling(tmp_path)
    figures = drawn(tmp_path, "throughput", "speedup_own_base", "memory", "accuracy_by_time", "accuracy_by_batch")
    panels = [axes for figure in figures.values() for axes in figure.axes]
    colors = {(line.get_label(), line.get_color()) for axes in panels for line in axes.lines}
    assert len(panels) == 5
    assert len([name for name, _ in colors if name in ("ddp", "single")]) == 2


def test_images_and_text_share_no_axis(tmp_path):
    weak_scaling(tmp_path)
    strong_scaling(tmp_path)
    figures = drawn(tmp_path, "accuracy_by_epoch", "perplexity_by_time")
    (accuracy,), (perplexity,) = figures["accuracy_by_epoch"].axes, figures["perplexity_by_time"].axes
    assert accuracy.get_ylabel() == "top-1 (% of validation samples)"
    assert perplexity.get_ylabel() == "validation perplexity per token"
    assert [[1, 0.3], [2, 0.55], [3, pytest.approx(0.8 - 0.5 / 3)]] in [
        [[x, pytest.approx(y)] for x, y in line.get_xydata()] for line in accuracy.lines
    ]


def test_time_has_a_unit_and_starts_at_the_first_step(tmp_path):
    write_run(tmp_path, rate=1.0)  # epochs of 1024 s and 2 s of validation
    (axes,) = drawn(tmp_path, "accuracy_by_time")["accuracy_by_time"].axes
    assert axes.get_xlabel().endswith("(min)")
    longest = max(np.max(line.get_xdata(), initial=0) for line in axes.lines)
    assert longest == pytest.approx(3 * 1026 / 60)


@pytest.mark.parametrize(
    ("counts", "log_counts", "log_values"),
    [
        ((1, 2, 3, 4), ALWAYS, {"throughput", "speedup"}),
        ((1, 4, 64), {"efficiency", "epoch_time", "memory"}, set()),  # what is proportional stays linear
    ],
    ids=["four", "distant"],
)
def test_four_or_distant_gpu_counts_are_on_a_log2_axis(tmp_path, counts, log_counts, log_values):
    for gpus in counts:
        write_run(tmp_path, gpus=gpus, rate=100.0 * gpus)
    axes = {name: figure.axes[0] for name, figure in drawn(tmp_path, *ALWAYS).items()}
    assert {name for name in ALWAYS if axes[name].get_xscale() == "log"} == log_counts
    assert {name for name in ALWAYS if axes[name].get_yscale() == "log"} == log_values
    assert all(axes[name].xaxis.get_transform().base == 2 for name in log_counts)


def test_a_reference_has_no_ratio_and_still_its_throughput(tmp_path):
    without = {"sections": {"framework": {"reference": "gradients are not sent"}}, "knobs": {"comm_hook": "noop"}}
    for gpus in (1, 2):
        write_run(tmp_path, gpus=gpus, rate=100.0 * gpus, **without)
    tables = tables_of(tmp_path)
    assert not {"speedup", "efficiency"} & names_of(tables)
    (axes,) = figures_of(tables, "throughput")["throughput"].axes
    ((points,),) = [lines(axes, label) for label in axes.get_legend_handles_labels()[1] if label.startswith("ddp")]
    assert points == [[1, pytest.approx(100)], [2, pytest.approx(200)]]


def test_nothing_measured_is_still_a_figure(tmp_path):
    write_run(tmp_path, status="error", reason="boom")
    figures = make_figures(tables_of(tmp_path)).figures
    assert set(figures) == ALWAYS - {"speedup", "efficiency"}
    assert "nothing measured" in [text.get_text() for text in figures["memory"].axes[0].texts]


def test_saved_files_are_the_same_each_time(tmp_path):
    write_run(tmp_path / "results")
    for folder in ("one", "two"):
        save(tmp_path / folder, "memory", drawn(tmp_path / "results", "memory")["memory"], pdf=folder == "one")
    assert (tmp_path / "one" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one" / "memory.pdf").read_bytes().startswith(b"%PDF")
    for kind in ("png", "svg"):
        assert (tmp_path / "one" / f"memory.{kind}").read_bytes() == (tmp_path / "two" / f"memory.{kind}").read_bytes()
    assert len(list((tmp_path / "two").iterdir())) == 2, "PDF on request alone"


def test_names_are_no_mathematics_and_none_is_hidden(tmp_path):
    for framework in ("$x_{$", "_ddp", "你好"):
        write_run(tmp_path, framework=framework, model="$y^{$")
    figure = drawn(tmp_path, "memory")["memory"]
    save(tmp_path / "out", "memory", figure)
    names = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert {"$x_{$", "_ddp", "你好"} <= set(names)
    assert figure.axes[0].get_title(loc="left") == "$y^{$"


@pytest.mark.parametrize("device", ["tpu", "", None])
def test_a_device_that_is_not_known_is_drawn_with_the_hosts_memory(tmp_path, device):
    write_run(tmp_path, device=device, summary={"memory_allocated_peak_bytes": None})
    (axes,) = drawn(tmp_path, "memory")["memory"].axes
    assert axes.get_ylabel() == "peak host memory (GiB)"
    assert [1, 2.0] in [line.get_xydata().tolist()[0] for line in axes.lines if np.size(line.get_xdata())]


def test_memory_of_gpus_and_of_a_cpu_in_one_panel(tmp_path):
    write_run(tmp_path, device="cuda")
    write_run(tmp_path, device="cpu", repeat=1)
    (axes,) = figures_of(tables_of(tmp_path, across=["device"]), "memory")["memory"].axes
    assert axes.get_ylabel() == "peak allocated or host memory (GiB)"
    assert {y for line in axes.lines for y in line.get_ydata()} == {2.0, 3.125}


def test_too_many_panels_labels_and_failures_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_FILES", 1)
    monkeypatch.setattr(module, "PANELS_OF_A_FILE", 2)
    monkeypatch.setattr(plotting, "MOST_LABELS", 4)
    monkeypatch.setattr(curves, "CROSSES_SHOWN", 4)
    for number in range(4):
        write_run(tmp_path, model=f"model{number}")
    for number in range(7):
        write_run(tmp_path, model="model0", framework="ddp", status="oom", knobs={"number": number})
    drawing = drawing_of([plot for plot in plots_of(tables_of(tmp_path)) if plot.name == "memory"])
    figure = drawing.figures["memory"]
    assert len(figure.axes) == 2
    assert "memory: 2 of 4 panels are drawn; --only model=NAME or framework=A,B draws others" in drawing.notes
    assert "+3" in [text.get_text() for text in figure.axes[0].texts]
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "and 4 more"


def test_many_panels_are_several_files(tmp_path):
    for number in range(7):
        write_run(tmp_path, model=f"model{number}")
    figures = drawn(tmp_path, "memory")
    assert [len(figures[name].axes) for name in ("memory", "memory_2")] == [6, 1]


def test_curves_stand_beside_each_other_where_they_share_a_gpu_count():
    one, two, four = ([Measurement({"gpus": count}) for count in counts] for counts in ((1,), (2,), (2, 4)))
    assert places([one, two, four]) == [0.0, -0.5, 0.5]
    assert places([four, four, two]) == [-1.0, 0.0, 1.0]
    assert places([one]) == [0.0]


def test_titles_of_a_row_stand_at_one_height_and_long_lines_are_several():
    figure = plotting.grid([("a", ["x" * 50 + " " + "y" * 50, "z"]), ("b", ["one line"])])
    plotting.arrange(figure)
    assert texts_of(figure.axes[0]) == ["x" * 50, "y" * 50, "z"]
    first, second = (axes.title.get_window_extent().y0 for axes in figure.axes)
    assert first == second


@pytest.mark.parametrize(("of_images", "of_text"), [("abc", "abc"), ("abcdefg", "hijklmn")])
def test_nothing_is_cut_or_covered_and_panels_have_one_size(tmp_path, of_images, of_text):
    """Legends below all panels and, of many curves, below each one."""
    for model, frameworks in (("resnet50", of_images), ("gpt2_small", of_text)):
        for number, framework in enumerate(frameworks):
            knobs = {"a_long_name_of_a_knob": "x" * 20 * number}
            write_run(tmp_path, framework=framework, model=model, knobs=knobs)
    write_run(tmp_path, framework="a", gpus=8, status="error", reason="boom")
    for name, figure in make_figures(tables_of(tmp_path)).figures.items():
        legends = [legend.get_window_extent() for legend in figure.legends]
        assert bool(legends) == (len(figure.axes) == 1 or of_images == of_text)
        boxes = [box for axes in figure.axes if (box := axes.get_tightbbox())] + legends
        for box in boxes:
            assert figure.bbox.count_contains(box.corners()) == 4, name
            assert not box.count_overlaps([other for other in boxes if other is not box]), name
        for axes in figure.axes:
            assert tuple(axes.get_window_extent().size / figure.dpi) == pytest.approx(plotting.PANEL, abs=0.05), name


def test_nine_curves_become_a_panel_for_each_family(tmp_path):
    names = ("single", "ddp", "horovod", "fsdp", "zero1", "zero2", "gpipe", "tensor", "unheard_of")
    for name in names:
        write_run(tmp_path, framework=name)
    figures = drawn(tmp_path, "epoch_time")
    panels = {texts_of(axes)[-1]: labels(axes) for axes in figures["epoch_time"].axes}
    assert panels == {
        "data parallel": {"single", "ddp", "horovod"},
        "sharded": {"fsdp", "zero1", "zero2"},
        "pipeline": {"gpipe"},
        "tensor": {"tensor"},
        "other frameworks": {"unheard_of"},
    }


def test_a_family_of_nine_curves_becomes_a_panel_for_each_framework_and_the_slowest_curve_is_named(tmp_path):
    write_run(tmp_path, framework="ddp")
    for number in range(9):
        write_run(tmp_path, framework="horovod", rate=100.0 + number, knobs={"bucket": number})
    drawing = drawing_of([plot for plot in plots_of(tables_of(tmp_path)) if plot.name == "epoch_time"])
    panels = {texts_of(axes)[-1]: labels(axes) for axes in drawing.figures["epoch_time"].axes}
    assert panels == {"ddp": {"ddp"}, "horovod": {f"horovod (bucket={n})" for n in range(1, 9)}}
    assert drawing.notes[0].endswith("horovod: 1 curves are not drawn: horovod (bucket=0)")


@pytest.mark.parametrize("curves", [[(f"f{n}", "") for n in range(8)], [("ddp", f"bucket={n}") for n in range(8)]])
def test_no_two_curves_of_a_panel_have_one_color_and_marker(curves):
    looks = plotting.looks_of(curves).values()
    assert len({(look.color, look.marker, look.filled) for look in looks}) == len(curves)


def test_energy_is_drawn_of_the_runs_that_have_it(tmp_path):
    write_run(tmp_path, framework="ddp", summary={"energy_sample_j": 2.5})
    write_run(tmp_path, framework="gpipe", gpus=2)
    (axes,) = drawn(tmp_path, "energy")["energy"].axes
    assert labels(axes) == {"ddp"}
    assert [[1, 2.5]] in lines(axes, "ddp")


def test_bubble_and_staleness_are_drawn_of_pipelines_beside_their_theory(tmp_path):
    staged = {"bubble": 0.3, "bubble_theoretical": 0.2, "staleness": [2, 1, 0], "staleness_theoretical": [3, 1, 0]}
    write_run(tmp_path, framework="pipedream", gpus=3, sections={"framework": staged})
    write_run(tmp_path, framework="ddp", gpus=3, sections={"framework": {"staleness": 0}})
    figures = drawn(tmp_path, "bubble", "staleness")
    for name, measured, expected in (("bubble", 0.3, 0.2), ("staleness", 2, 3)):
        (axes,) = figures[name].axes
        assert labels(axes) == {"pipedream", "theory"}
        assert [[3, measured]] in lines(axes, "pipedream")
        assert [[3, expected]] in theory(axes)
    assert [tick for tick in axes.get_yticks() if tick % 1] == [], "updates are counted"


def test_theory_is_seen_where_it_is_equal_to_what_was_measured(tmp_path):
    write_run(tmp_path, framework="gpipe", gpus=2, sections={"framework": {"bubble": 0.2, "bubble_theoretical": 0.2}})
    (axes,) = drawn(tmp_path, "bubble")["bubble"].axes
    at_value = [line for line in axes.lines if line.get_xydata().tolist() == [[2, 0.2]] and line.get_marker() != "."]
    (dotted,) = (line for line in at_value if line.get_linestyle() == ":")
    others = [line for line in at_value if line is not dotted]
    assert dotted.get_fillstyle() == "none"
    assert dotted.get_markersize() > 1.5 * max(line.get_markersize() for line in others)


def test_the_line_of_a_theory_joins_the_fastest_layouts_as_that_of_the_measured_values_does(tmp_path):
    """Four GPUs of two layouts: the one with the smaller bubble is faster."""
    for dp, pp, gpus, bubble in ((1, 2, 2, 0.2), (2, 2, 4, 0.2), (1, 4, 4, 0.43)):
        sections = {"framework": {"bubble": bubble + 0.05, "bubble_theoretical": bubble}}
        knobs = {"dp": dp, "pp": pp}
        write_run(
            tmp_path, framework="gpipe", gpus=gpus, rate=100 * gpus * (1 - bubble), knobs=knobs, sections=sections
        )
    (axes,) = drawn(tmp_path, "bubble")["bubble"].axes
    theory = [line for line in axes.lines if line.get_fillstyle() == "none" and np.size(line.get_xydata())]
    drawn_lines = {line.get_linestyle(): line.get_xydata().tolist() for line in theory}
    assert drawn_lines == {":": [[2, 0.2], [4, 0.2]], "None": [[4, 0.43]]}


@pytest.mark.parametrize(("values", "top"), [([98.0, 100.0], 108), ([0.0], 1)])
def test_a_linear_axis_begins_at_zero_however_small_the_differences(values, top):
    axes = Figure().add_subplot()
    plotting.value_axis(axes, values, "samples/s", percents=False, log=False)
    assert axes.get_ylim() == (0, pytest.approx(top))


def test_a_png_has_the_color_of_each_curve_also_of_a_rare_one(tmp_path):
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    for n in range(40):
        axes.plot(range(9), np.sin(np.arange(9) + n) + n / 8, color=PALETTE[0], linewidth=3)
    for n, color in enumerate(PALETTE):
        axes.plot([n], [n / 2], "o", color=color, markersize=5)
    save(tmp_path, "colors", figure)
    with Image.open(tmp_path / "colors.png") as image:
        pixels = np.asarray(image.convert("RGB"), dtype=int).reshape(-1, 3)
    for color in PALETTE:
        exact = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
        assert np.abs(pixels - exact).max(axis=1).min() <= 4, color
