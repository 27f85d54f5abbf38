"""Reports of captures."""

import json
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from specdecode_operator.capture.report.capture_reader import read_capture
from specdecode_operator.capture.report.charts import (
    budgets,
    by_load,
    by_temperature,
    cache_use,
    client_ttft,
    distributions,
    over_time,
    step_time,
)
from specdecode_operator.capture.report.drawing import LeftOut, Picture, Series, series_of
from specdecode_operator.capture.report.report import Outputs, make_report, measures_of
from specdecode_operator.cli.main import app
from tests.support.browser import find, visit
from tests.support.compared_captures import PLAIN, SPECULATING, MadeCapture, rewrite
from tests.support.drawn_captures import META, manifest, step, write_capture
from tests.support.traces import record, write_steps, write_trace

Report = Callable[..., Result]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["capture", "report", *map(str, arguments)])


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a report of one capture with all that can be written of it."""
    folder = tmp_path_factory.mktemp("made")
    outputs = ("--out", folder / "page.html", "--svg", folder / "svg", "--png", folder / "png")
    result = run(write_capture(folder / "demo"), *outputs, "--perfetto", folder / "trace.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "page.html: 13 figures" in result.stdout
    return folder


def shown(page: Path) -> str:
    """Return the page's words."""
    return unescape(re.sub(r"<[^>]*>", "", page.read_text()))


def test_page_sentences_state_recorded_figures(made: Path) -> None:
    words = shown(made / "page.html")
    for sentence in (
        "100% of the drafts were accepted at the first position, 0% to the last of 4; 3.00 tokens per verification",
        "50% overall, between 50% and 50%",
        "Steps with 1 token took 10.0 ms (median), steps with 5 took 10.0 ms: 10.0 and 2.00 ms per token",
        "At most 50.0% of the KV cache was in use, up to 1 request waited, 1 preemption",
        "The plan has 1,000 tokens of KV cache, the engine reported 990 (-1.0%)",
        "The client's median is 33.0 ms, the engine's 30.0 ms; 60 completed",
        "team/demo · org/model · NVIDIA H200 · vLLM 0.32.0 · config 0123456789ab · 60 requests",
    ):
        assert sentence in words


def test_replay_is_shown_beside_its_capture(report: Report, tmp_path: Path) -> None:
    captured = write_capture(tmp_path / "a")
    replayed = write_capture(tmp_path / "b", gap_ms=11.0)
    assert report(captured, "--replayed", replayed).exit_code == 0
    words = shown(tmp_path / "report.html")
    assert re.search(
        r"demo: steps with 1 token took 10.0 ms .*demo \(replayed\): steps with 1 token took 11.0 ms", words
    )
    assert "(+10.0 %)" in words, "the replay's TPOT against the capture's"


def test_each_figure_is_also_written_as_svg_and_png(made: Path) -> None:
    names = {path.stem for path in (made / "svg").iterdir()}
    assert names == {path.stem for path in (made / "png").iterdir()}
    assert {"tokens-per-step", "step-time", "acceptance-by-position", "latency-by-load", "kv-cache", "budget"} <= names
    svg = (made / "svg" / "step-time.svg").read_text()
    for words in ("Step time against burst size", "step time (ms)", "team/demo · org/model"):
        assert words in svg


def test_report_is_deterministic(report: Report, made: Path, tmp_path: Path) -> None:
    assert report(made / "demo", "--svg", "svg").exit_code == 0
    assert (tmp_path / "report.html").read_bytes() == (made / "page.html").read_bytes()
    for svg in (made / "svg").iterdir():
        assert (tmp_path / "svg" / svg.name).read_bytes() == svg.read_bytes()


def left_out(report: Report, tmp_path: Path, records: list[Any], meta: Any = META) -> str:
    folder = tmp_path / "bare"
    folder.mkdir()
    write_trace(folder / "trace.jsonl", records, meta)
    made = report(folder)
    assert made.exit_code == 0, made.output
    for line in made.stdout.splitlines():
        if line.startswith("left out: "):
            assert f"{line.removeprefix('left out: ')}." in shown(tmp_path / "report.html")
    return made.stdout


def test_trace_alone_leaves_out_figures_with_reasons(report: Report, tmp_path: Path) -> None:
    said = left_out(report, tmp_path, [record(arrival_ms=10.0 * place) for place in range(3)])
    for title, why in (
        ("Acceptance by position", "step statistics (step-stats.jsonl)"),
        ("KV cache and preemptions", "there are no step statistics"),
        ("TTFT at the client and at the engine", "client.jsonl is missing"),
        ("Memory: the plan against the engine", "no manifest holds the plan"),
    ):
        assert f"left out: {title}: {why}" in said
    assert "report.html: 7 figures" in said


def test_single_request_without_decode_step_has_a_figure(report: Report, tmp_path: Path) -> None:
    alone = {"prompt_tokens": 5, "output_tokens": 1, "ttft_ms": 20.0, "arrival_ms": 0.0}
    said = left_out(report, tmp_path, [alone])
    assert "Tokens per decode step: no request has more than one chunk" in said
    assert "TTFT and TPOT: one request has no distribution" in said
    assert "report.html: 1 figure\n" in said


def test_engine_without_speculation_has_no_acceptance_figures(report: Report, tmp_path: Path) -> None:
    plain = [record(output_tokens=3, itl_tokens=None, arrival_ms=10.0 * place) for place in range(3)]
    said = left_out(report, tmp_path, plain, {"model": "m"})
    assert said.count("nothing was drafted") == 4
    assert "1.00 tokens per step on average; 100% of the steps produced one token" in shown(tmp_path / "report.html")


def test_back_to_back_requests_count_as_one_at_a_time(report: Report, tmp_path: Path) -> None:
    whole_ms = 30.0 + 10.0 + 12.5
    left_out(report, tmp_path, [record(arrival_ms=whole_ms * place) for place in range(9)])
    assert "9 requests in 0.472 s, at most 1 at a time" in shown(tmp_path / "report.html")


def test_requests_without_arrival_times_have_no_timeline(report: Report, tmp_path: Path) -> None:
    said = left_out(report, tmp_path, [record(arrival_ms=None), record(arrival_ms=None)])
    assert "Timeline of requests: the requests have no arrival times" in said


HOSTILE = "</title><script>alert(1)</script> $x^{$ & \"'\x00\x1b[31m\u202e]]>--><!-- 漢字"


def test_names_from_files_are_escaped(report: Report, tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "demo", capture=HOSTILE, model=HOSTILE, gpu=HOSTILE, vllm=HOSTILE)
    lines = (folder / "trace.jsonl").read_text().splitlines()
    hostile = [json.dumps(json.loads(line) | {"phase": HOSTILE}) for line in lines[1:]]
    (folder / "trace.jsonl").write_text("\n".join([lines[0], *hostile]) + "\n")
    made = report(folder, "--svg", "svg")
    assert (made.exit_code, made.stderr) == (0, "")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;/title&gt;&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_unreadable_lines_are_left_out_with_warning(report: Report, tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "demo")
    with (folder / "trace.jsonl").open("a") as trace:
        trace.write('{"prompt_tokens": 1}\nno json\n')
    (folder / "manifest.json").write_text("{")
    made = report(folder)
    assert made.exit_code == 0
    assert "2 lines that cannot be read left out, first" in made.stderr
    assert "demo/trace.jsonl: line 62: Object missing required field `output_tokens`\n" in made.stderr
    assert "manifest.json: is not valid JSON" in made.stderr
    assert "2 lines that cannot be read left out" in shown(tmp_path / "report.html")


def test_legend_includes_series_of_second_capture_only(report: Report, tmp_path: Path) -> None:
    folders = [write_capture(tmp_path / name, namespace=name) for name in ("idle", "queue")]
    lines = [step(20.0 * index, [2, 1, 1, 0], usage=0.0) for index in range(120)]
    for line in lines:
        line["scheduler"]["num_waiting_reqs"] = 0
    (folders[0] / "step-stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = report(*folders)
    assert made.exit_code == 0, made.output
    words = shown(tmp_path / "report.html")
    assert "requests waiting (right)" in words
    assert "how full the KV cache was is not known, no request waited after a step" in words


def test_extreme_times_and_sizes_are_drawn(report: Report, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    epoch = [record(arrival_ms=1.7e12 + 50 * place) for place in range(5)]
    huge = {"output_tokens": 2**27, "prompt_tokens": 2**27, "preemptions": 2**63, "concurrency": 2**63}
    odd = record(itl_tokens=[2**26, 5], arrival_ms=1.7e12, **huge)
    at_once = record(arrival_ms=1.7e12, scheduled_ms=-1e13, itl_ms=[0.0, 0.0], ttft_ms=0.0)
    write_trace(folder / "trace.jsonl", [*epoch, odd, at_once], META)
    steps = [step(ts_ms, [2, 1, 1, 0], usage=usage) for ts_ms, usage in ((1.7e12, 1e308), (1e300, -1e308))]
    (folder / "step-stats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    client = {"id": "r", "phase": "p", "index": 0, "outcome": "completed"}
    lines = [client | {"ttft_ms": ttft_ms} for ttft_ms in (1e308, 1e308, 30.0, 40.0)]
    (folder / "client.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    made = report(folder)
    assert made.exit_code == 0, made.output
    words = shown(tmp_path / "report.html")
    assert "7 requests in 0.2" in words, "since the first arrival"
    assert "At most 100.0% of the KV cache was in use" in words
    assert "The client's median is 35.0 ms" in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "nothing: holds no trace.jsonl: name a capture's folder or a trace"),
        (["demo"] * 8, "8 captures cannot be distinguished in a chart: name at most 7"),
        (["demo", "--out", "gone/report.html"], "gone/report.html: No such file or directory: name a path"),
        (["demo", "--svg", "demo/trace.jsonl"], "demo/trace.jsonl: is not a folder: name one"),
        (["empty"], "has no request: record some load"),
        (["demo/manifest.json"], "manifest.json: line 1: Object missing required field `prompt_tokens`"),
    ],
)
def test_report_error_is_one_line_and_leaves_no_page(
    report: Report, tmp_path: Path, arguments: list[str], says: str
) -> None:
    write_capture(tmp_path / "demo")
    (tmp_path / "empty").mkdir()
    write_trace(tmp_path / "empty" / "trace.jsonl", [], META)
    made = report(*arguments)
    assert made.exit_code == 2
    assert says in made.stderr
    assert len(made.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.html")) + list(tmp_path.glob(".*"))


def test_captures_with_different_settings_cause_a_warning(report: Report, tmp_path: Path) -> None:
    made = report(write_capture(tmp_path / "a"), write_capture(tmp_path / "b", model="other/model"))
    assert "warning: The captures have different settings: model is org/model and other/model." in made.stderr


def test_folder_of_captures_reports_each_capture(report: Report, tmp_path: Path) -> None:
    write_capture(tmp_path / "all" / "a", capture="one")
    write_capture(tmp_path / "all" / "b", capture="two")
    assert report(tmp_path / "all").exit_code == 0
    words = shown(tmp_path / "report.html")
    assert "one: 3." in words
    assert "two: 3." in words


def test_missing_matplotlib_is_reported_with_install_command(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("specdecode_operator.capture.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = report(write_capture(tmp_path / "demo"))
    assert made.exit_code == 2
    assert "pip install '.[plot]'" in made.stderr


def test_perfetto_trace_has_separate_lanes_and_acceptance_track(made: Path) -> None:
    events = json.loads((made / "trace.json").read_text())["traceEvents"]
    requests = [each for each in events if each["name"].startswith("request ") and each["ph"] == "X"]
    assert len(requests) == 60
    assert requests[0]["args"]["phase"] == "first"
    ends: dict[int, float] = {}
    for each in requests:
        assert each["ts"] >= ends.get(each["tid"], 0), "the lane is free"
        ends[each["tid"]] = each["ts"] + each["dur"]
    assert len(ends) < 6, "as many as ran at a time"
    waits = [each for each in events if each["name"] == "waiting"]
    assert {each["dur"] for each in waits} == {5000.0}
    acceptance = {each["args"]["value"] for each in events if each["name"] == "acceptance (%)"}
    assert acceptance == {50.0}


# `specdecode capture report` on the folder of a capture with arms.

Words = tuple[str, str, Path]


def report_arms(folder: Path, *options: str) -> Words:
    """Make a report, and return its words, what the command says of it on standard error, and where it is."""
    page = folder.parent / "page.html"
    done = CliRunner().invoke(app, ["capture", "report", str(folder), "--out", str(page), *options])
    assert done.exit_code == 0, done.stderr
    return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page.read_text(), flags=re.DOTALL)), done.stderr, page


@pytest.fixture(scope="module")
def made_arms(tmp_path_factory: pytest.TempPathFactory) -> Words:
    folder = tmp_path_factory.mktemp("made")
    capture = MadeCapture(arrivals="closed:2,closed:4", requests=32).make(folder / "capture")
    return report_arms(capture, "--png", str(folder / "png"))


def test_report_of_arms_contains_their_comparison(made_arms: Words) -> None:
    words, _, page = made_arms
    assert re.search(r"drafted\s+Pays\s+Equal\s+goodput \+\d+ %", words)
    for title in ("Verdict by load", "Goodput by load", "Latency of the arms by load", "Acceptance of the arms"):
        assert title in words
    assert "of the drafted tokens" in words
    assert re.search(r"plain: \d+ tokens/s in closed-2", words)
    names = {path.stem for path in (page.parent / "png").iterdir()}
    assert {"arms-verdict", "arms-goodput", "arms-latency", "arms-acceptance", "step-time"} <= names


def test_one_repetition_of_each_arm_is_drawn(made_arms: Words) -> None:
    words, _, _ = made_arms
    assert words.count("default/test/drafted · tiny · NVIDIA H100 80GB HBM3 · vLLM 0.33.0 · 64 requests") > 1
    assert "#2" not in words


def test_incomparable_arms_are_drawn_with_reason(tmp_path: Path) -> None:
    folder = MadeCapture(requests=8).make(tmp_path / "capture")
    rewrite(folder / "drafted" / "2" / "manifest.json", lambda each: each | {"seed": 99})
    words, errors, _ = report_arms(folder)
    assert "its arms are not compared: workloads differ: arms drafted and plain have a different seed" in words
    assert "workloads differ" in errors
    assert "Verdict by load" not in words
    assert "default/test/drafted · tiny" in words


def test_seven_of_eight_arms_are_drawn_and_all_are_in_the_table(
    tmp_path: Path,
) -> None:
    arms = {"plain": PLAIN} | {f"arm-{number}": SPECULATING for number in range(7)}
    folder = MadeCapture(arms=arms, requests=4).make(tmp_path / "capture")
    rewrite(folder / "arm-1" / "1" / "manifest.json", lambda each: each | {"node": "<b>other</b>"})
    words, _, page = report_arms(folder)
    assert "The capture has 8 arms: 7 are drawn, all are in the table." in words
    assert re.search(r"arm-6\s+Inconclusive", words)
    assert "node is <b>other</b>, in the baseline node" in words
    assert "<b>other" not in page.read_text()


# What is drawn is what was recorded: the numbers in the figures themselves.

ZERO_MS = 5000.0


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Series]:
    """Return a capture of 100 requests, of which each has a TTFT and a first gap of 1 ms more than the one before."""
    folder = tmp_path_factory.mktemp("drawn")
    records = []
    for place in range(100):
        arrival_ms, longer_ms = ZERO_MS + 10 * place, 1.0 + place
        records.append(
            record(
                prompt_tokens=100,
                arrival_ms=arrival_ms,
                scheduled_ms=arrival_ms + 0.5,
                ttft_ms=longer_ms,
                itl_ms=[longer_ms, 12.5],
            )
        )
    write_trace(folder / "trace.jsonl", records)
    moments = [ZERO_MS + 100 * place + within for place in range(10) for within in (0.0, 1.0)]
    usages = [0.2, 0.6] * 10
    write_steps(
        folder / "step-stats.jsonl",
        [step(ts_ms, [2, 1, 1, 0], usage=usage) for ts_ms, usage in zip(moments, usages, strict=True)],
    )
    client = [{"id": "r", "phase": "p", "index": 0, "outcome": "completed", "ttft_ms": 33.0}] * 3
    client += [client[0] | {"ttft_ms": 9000.0, "warmup": True}] * 4
    (folder / "client.jsonl").write_text("".join(json.dumps(each) + "\n" for each in client))
    (folder / "manifest.json").write_text(json.dumps(manifest()))
    return series_of([read_capture(folder)])


def picture(made: Any) -> Picture:
    assert isinstance(made, Picture), made
    return made


def test_time_axes_are_seconds_since_first_arrival(drawn: list[Series]) -> None:
    for made in (over_time(drawn), cache_use(drawn)):
        seconds = np.asarray(picture(made).figure.axes[0].lines[0].get_xdata())
        assert (seconds.min(), seconds.max()) == pytest.approx((0.0, 0.9), abs=0.02)


def test_cache_figure_has_labelled_mean_and_maximum(drawn: list[Series]) -> None:
    left, right = picture(cache_use(drawn)).figure.axes
    assert set(left.lines[0].get_ydata()) == {60.0}
    assert left.lines[0].get_label() == "KV cache in use, most"
    assert left.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(40.0)
    shown = {line.get_color(): line.get_label().split()[1] for line in left.lines if "(right)" in str(line.get_label())}
    requests = {shown[line.get_color()]: set(line.get_ydata()) for line in right.lines}
    assert requests == {"running": {2.0}, "waiting": {1.0}}


def test_step_time_figure_has_quantiles_and_time_per_token(drawn: list[Series]) -> None:
    axes = picture(step_time(drawn)).figure.axes[0]
    sizes, middle = axes.lines[0].get_data()
    assert (list(sizes), list(middle)) == ([2, 3], pytest.approx([12.5, 50.5], rel=0.02))
    assert list(axes.lines[1].get_ydata()) == pytest.approx([6.25, 50.5 / 3], rel=0.02)
    (_, low), (_, high) = axes.collections[0].get_segments()[1]
    assert (low, high) == pytest.approx((10.5, 90.5), rel=0.05)


def test_temperature_figure_has_accepted_tokens_per_step(tmp_path: Path, drawn: list[Series]) -> None:
    cold = record(temperature=0, output_tokens=14, itl_tokens=[5, 5, 3], itl_ms=[10.0, 10.0, 10.0])
    records = [cold, record(temperature=0.8), record(temperature=1e300), record()]
    write_trace(tmp_path / "trace.jsonl", records)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest()))
    made = picture(by_temperature(series_of([read_capture(tmp_path)])))
    temperatures, accepted = made.figure.axes[0].lines[0].get_data()
    # The last step of an answer may be cut short, and does not count.
    assert (list(temperatures), list(accepted)) == ([0, 0.8], [4, 2])
    assert made.sentences == ("4.00 drafted tokens accepted per step at temperature 0, 2.00 at 0.8.",)
    assert isinstance(by_temperature(drawn), LeftOut), "its requests say no temperature"


def test_latency_quantiles_match_recorded_values(drawn: list[Series]) -> None:
    assert "TTFT P50 50.5, P99 99.0 ms" in picture(distributions(drawn)).sentences[0]
    assert "By P99, first tokens were slowest" in picture(by_load(drawn)).sentences[0]
    left, right = picture(by_load(drawn)).figure.axes
    tpot_ms = [(first_ms + 12.5) / 5 for first_ms in range(1, 101)]
    for axes, name, values in ((left, "TTFT", range(1, 101)), (right, "TPOT", tpot_ms)):
        assert axes.get_ylabel().startswith(name)
        drawn_ms = [float(line.get_ydata()[0]) for line in axes.lines[:3]]
        assert drawn_ms == pytest.approx(np.percentile(list(values), (50, 90, 99)))
    found = measures_of(drawn[0].capture)
    for name, values in (("TTFT", range(1, 101)), ("TPOT", tpot_ms)):
        for share in (50, 90, 99):
            assert found[f"{name} P{share}"].value == pytest.approx(np.percentile(list(values), share))
    # From the first arrival to the last token: 990 ms, and 212.5 of the last request.
    assert found["output tokens per second"].value == pytest.approx(600 / 1.2025)


def test_client_ttft_excludes_warmup(drawn: list[Series]) -> None:
    [sentence] = picture(client_ttft(drawn)).sentences
    assert sentence == "The client's median is 33.0 ms, the engine's 50.5 ms; 3 completed."


def test_memory_budget_is_drawn_in_gib(drawn: list[Series]) -> None:
    words = {text.get_text() for text in picture(budgets(drawn)).figure.axes[0].texts}
    assert {"70.0", "8.00", "43.0", "42.6"} <= words


# Captures of a real vLLM: the figures are those that the capture's own summary has.

CAPTURES = sorted(path.parent for path in (Path(__file__).parents[3] / "data/captures").glob("*/manifest.json"))


@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_measures_match_manifest_summary(folder: Path) -> None:
    summary = json.loads((folder / "manifest.json").read_text())["summary"]
    capture = read_capture(folder)
    found = {name: measure.value for name, measure in measures_of(capture).items()}
    assert capture.warnings == []
    assert found["requests"] == summary["records"]
    assert found["output tokens"] == summary["output_tokens"]
    assert found["acceptance"] == pytest.approx(summary["speculation"]["acceptance"], abs=5e-5)
    assert found["output tokens per second"] == pytest.approx(summary["output_tokens_per_second"], abs=0.01)
    for share in (50, 90, 99):
        for name in ("ttft", "tpot"):
            assert found[f"{name.upper()} P{share}"] == pytest.approx(
                summary["engine"][f"{name}_ms"][f"p{share}"], abs=1e-3
            )
    assert capture.steps is not None
    assert capture.steps.per_position == pytest.approx(summary["speculation"]["per_position"], abs=5e-5)
    assert capture.client is not None
    assert capture.client.outcomes == {name: count for name, count in summary["requests"].items() if name != "sent"}


# The page in a browser: it opens from a file, without a network, and there is nothing to complain of.

_HOSTILE = "<img src=x onerror=alert(1)>"
_FIGURES = 13


@pytest.fixture(scope="module")
def browser() -> str:
    found = find()
    if found is None:
        pytest.skip("no browser: apt-get install chromium-headless-shell (./just parts unit does, where it may)")
    return found


@pytest.fixture(scope="module")
def page_of_browser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    captured = write_capture(folder / "captured", capture=_HOSTILE)
    replayed = write_capture(folder / "replayed", 50, gap_ms=11.0)
    make_report([captured], [replayed], Outputs(folder / "report.html"))
    return folder / "report.html"


def test_page_opens_without_console_messages(browser: str, page_of_browser: Path, tmp_path: Path) -> None:
    seen = visit(browser, page_of_browser, tmp_path / "profile")
    assert seen.console == []
    assert seen.document.count("<svg") == _FIGURES + 1, "all figures, and a timeline for each capture"
    assert "<img src" not in seen.document


def test_broken_page_has_console_messages(browser: str, page_of_browser: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        page_of_browser.read_text().replace("<main>", "<main><script>alert(1)</script><img src=http://x.invalid>")
    )
    assert len(visit(browser, broken, tmp_path / "profile").console) == 2


def test_bars_of_both_captures_are_drawn_in_their_colours(browser: str, page_of_browser: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    visit(browser, page_of_browser, tmp_path / "profile", picture=picture)
    colours = {colour for _, colour in Image.open(picture).convert("RGB").getcolors(2**24)}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours, "both captures have their bars"
