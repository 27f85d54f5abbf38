"""`specdecode plan --plot`: the memory of each candidate as a picture."""

import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_a_picture(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, suffix: str, beginning: bytes
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plan.{suffix}"
    assert specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith(beginning)


def test_bars_are_as_high_as_the_memory_and_say_what_is_over_the_budget(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure_class, "savefig", lambda self, *_, **__: figures.append(self))
    path = write("a.yaml", manifest("a"))
    assert specdecode("plan", "-f", path, "--plot", tmp_path / "plan.png").exit_code == 0
    axes, _ = figures[0].axes
    memory = [139.80, 79.19]
    # The margin is hatched over the KV cache.
    stacked = [part for part in axes.containers if part.get_label() != "margin"]
    heights = [sum(part[bar].get_height() for part in stacked) for bar in range(2)]
    assert heights == pytest.approx(memory, abs=0.01)
    assert any(text.get_text().endswith("over the budget") for text in axes.texts), "H100 has not enough"
    shown = {text.get_text() for text in figures[0].legends[0].get_texts()}
    assert {"memory", "budget", "target weights", "draft weights", "KV cache", "outside the budget"} <= shown
    assert {"needed", "margin"} <= shown
    assert [label.get_text().splitlines()[0] for label in axes.get_xticklabels()] == [
        "2 x H200, TP 2",
        "2 x H100, TP 2",
    ]
    assert axes.get_ylabel() == "GiB per GPU"
    # The margin is the end of the KV cache, below the budget; what is needed is drawn where it is missing.
    [margin] = [part for part in axes.containers if part.get_label() == "margin"]
    lines = {line.get_label(): line for line in axes.collections}
    tops = [segment[0][1] for segment in lines["budget"].get_segments()]
    assert margin[0].get_height() > 0
    assert margin[0].get_y() + margin[0].get_height() == pytest.approx(tops[0])
    assert [round(float(segment[:, 0].mean())) for segment in lines["needed"].get_segments()] == [1]


def drawn(specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: object) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    assert specdecode("plan", *arguments, "--plot", tmp_path / "plan.png").exit_code == 0
    return figures[0]


def test_lines_show_the_tokens_that_each_length_leaves_and_ring_the_one_asked_for(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.yaml", manifest("a"))
    _, axes = drawn(specdecode, monkeypatch, tmp_path, "-f", path).axes
    fits, ring = axes.lines[:2]
    assert fits.get_label() == "2 x H200, TP 2", "H100 holds nothing and has no line"
    best = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["candidates"][0]
    assert list(ring.get_ydata()) == [best["kv_cache_tokens"]]
    assert list(ring.get_xdata()) == [8192]
    assert list(fits.get_xdata()) == [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    guides = {text.get_text(): text.xy for text in axes.texts}
    assert {words: y / x for words, (x, y) in guides.items()} == {"1 request": 1, "8 requests": 8, "64 requests": 64}
    slopes = {round(float(y / x)) for line in axes.lines[2:] for x, y in zip(*line.get_data(), strict=True)}
    assert slopes == {1, 8, 64}
    assert (axes.get_xlabel().split()[0], axes.get_ylabel()) == ("maxModelLen", "KV cache (tokens)")


def test_a_matrix_is_a_map_of_requests_with_what_does_not_fit_hatched(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.yaml", manifest("a"))
    axes, scale = drawn(specdecode, monkeypatch, tmp_path, "-f", path, "--matrix").axes
    rows = json.loads(specdecode("plan", "-f", path, "-o", "json").stdout)["objects"][0]["precisions"]
    shown = [row for row in rows if {row["target"], row["draft"]} <= {"BF16", "FP8", "INT8", "INT4"}]
    assert len(axes.patches) == len(shown)
    assert sum(patch.get_hatch() is not None for patch in axes.patches) == sum(
        row["verdict"] == "DoesNotFit" for row in shown
    )
    marks = {True: "", False: "*"}
    numbers = {
        f"{'~' * (row['verdict'] == 'Tight')}{row['max_concurrency']:,.1f}{marks[row['launchable']]}"
        for row in shown
        if row["verdict"] != "DoesNotFit"
    }
    assert {text.get_text() for text in axes.texts} == numbers
    assert any(text.get_text().endswith("*") for text in axes.texts), "INT8 needs a checkpoint"
    lines = [label.get_text() for label in axes.get_yticklabels()]
    for row in shown:
        if row["verdict"] != "DoesNotFit":
            at = [
                lines[text.get_position()[1]]
                for text in axes.texts
                if f"{row['max_concurrency']:,.1f}" in text.get_text()
            ]
            assert any(line.startswith(f"{row['target']} / {row['draft']}, ") for line in at)
    assert scale.get_ylabel() == "requests of 8,192 tokens at once"


def test_a_matrix_on_cpu_is_bars(specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(specdecode, monkeypatch, tmp_path, "-f", EXAMPLES / "tiny-cpu.yaml", "--matrix")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "GiB"


@pytest.mark.parametrize(("option", "named"), [([], True), (["--matrix"], False)])
def test_the_title_names_precisions_where_all_bars_have_the_same(  # noqa: PLR0913, PLR0917 (fixtures)
    specdecode: Specdecode,
    write: WriteObject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    named: bool,
) -> None:
    figures = []
    monkeypatch.setattr(
        pytest.importorskip("matplotlib.figure").Figure, "savefig", lambda self, *_, **__: figures.append(self)
    )
    path = write("a.yaml", manifest("a"))
    assert specdecode("plan", "-f", path, *option, "--plot", tmp_path / "plan.png").exit_code == 0
    assert ("BF16" in figures[0].axes[0].get_title()) is named


def test_a_plot_of_no_known_format_is_refused(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    result = specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", tmp_path / "plan.pdf")
    assert result.exit_code == 2
    assert ".png or .svg" in result.stderr


def test_a_plot_without_matplotlib_says_what_to_install(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = specdecode("plan", "-f", write("a.yaml", manifest("a")), "--plot", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "pip install '.[plot]'" in result.stderr
