"""`specdecode capture report`: what the pictures say, what is left out, and what files from others do."""

import json
import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.drawn_captures import META, step, write_capture
from tests.support.traces import record, write_trace

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
    outputs = ("-o", folder / "page.html", "--svg", folder / "svg", "--png", folder / "png")
    result = run(write_capture(folder / "demo"), *outputs, "--perfetto", folder / "trace.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "page.html: 12 figures" in result.stdout
    return folder


def shown(page: Path) -> str:
    """Return the page's words."""
    return unescape(re.sub(r"<[^>]*>", "", page.read_text()))


def test_sentences_have_the_figures_of_the_files(made: Path) -> None:
    words = shown(made / "page.html")
    for sentence in (
        "100% of the drafts were accepted at the first position, 0% to the last of 4; 3.00 tokens a verification",
        "50% overall, between 50% and 50%",
        "A step took 10.0 ms (median) where it gave 1 and 10.0 ms where it gave 5: 10.0 against 2.00 ms a token",
        "At most 50.0% of the KV cache was in use, up to 1 request waited, 1 preemption",
        "Planned were 1,000 tokens of KV cache, the engine reported 990 (-1.0%)",
        "The client's median is 33.0 ms, the engine's 30.0 ms; 60 completed",
        "team/demo · org/model · NVIDIA H200 · vLLM 0.32.0 · config 0123456789ab · 60 requests",
    ):
        assert sentence in words


def test_a_replay_stands_beside_its_capture(report: Report, tmp_path: Path) -> None:
    captured = write_capture(tmp_path / "a")
    replayed = write_capture(tmp_path / "b", gap_ms=11.0)
    assert report(captured, "--replayed", replayed).exit_code == 0
    words = shown(tmp_path / "report.html")
    assert re.search(r"demo: a step took 10.0 ms .*demo \(replayed\): a step took 11.0 ms", words)
    assert "(+10.0 %)" in words, "the replay's TPOT against the capture's"


def test_each_figure_is_written_alone_with_its_title_and_its_capture(made: Path) -> None:
    names = {path.stem for path in (made / "svg").iterdir()}
    assert names == {path.stem for path in (made / "png").iterdir()}
    assert {"tokens-per-step", "step-time", "acceptance-by-position", "latency-by-load", "kv-cache", "budget"} <= names
    svg = (made / "svg" / "step-time.svg").read_text()
    for words in ("Step time against burst size", "time of the step (ms)", "team/demo · org/model"):
        assert words in svg


def test_the_same_files_give_the_same_bytes(report: Report, made: Path, tmp_path: Path) -> None:
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


def test_a_trace_alone_has_the_figures_of_a_trace(report: Report, tmp_path: Path) -> None:
    said = left_out(report, tmp_path, [record(arrival_ms=10.0 * place) for place in range(3)])
    for title, why in (
        ("Acceptance by position", "there are no step statistics"),
        ("KV cache and preemptions", "there are no step statistics"),
        ("TTFT at the client and at the engine", "no client.jsonl is there"),
        ("Memory: the plan against the engine", "no manifest holds the plan"),
    ):
        assert f"left out: {title}: {why}" in said
    assert "report.html: 6 figures" in said


def test_one_request_without_a_step_has_a_timeline(report: Report, tmp_path: Path) -> None:
    alone = {"prompt_tokens": 5, "output_tokens": 1, "ttft_ms": 20.0, "arrival_ms": 0.0}
    said = left_out(report, tmp_path, [alone])
    assert "Tokens per decode step: no request has more than one chunk" in said
    assert "TTFT and TPOT: one request has no distribution" in said
    assert "report.html: 1 figure\n" in said


def test_an_engine_that_does_not_speculate_has_no_acceptance(report: Report, tmp_path: Path) -> None:
    plain = [record(output_tokens=3, itl_tokens=None, arrival_ms=10.0 * place) for place in range(3)]
    said = left_out(report, tmp_path, plain, {"model": "m"})
    assert said.count("nothing was drafted") == 4
    assert "1.00 tokens a step on average, 100% of the steps gave one" in shown(tmp_path / "report.html")


def test_a_client_that_asks_again_at_once_is_one_at_a_time(report: Report, tmp_path: Path) -> None:
    whole_ms = 30.0 + 10.0 + 12.5
    left_out(report, tmp_path, [record(arrival_ms=whole_ms * place) for place in range(9)])
    assert "9 requests in 0.472 s, at most 1 at a time" in shown(tmp_path / "report.html")


def test_requests_that_never_arrived_have_no_timeline(report: Report, tmp_path: Path) -> None:
    said = left_out(report, tmp_path, [record(arrival_ms=None), record(arrival_ms=None)])
    assert "Timeline of requests: no request has its moment of arrival" in said


HOSTILE = "</title><script>alert(1)</script> $x^{$ & \"'\x00\x1b[31m\u202e]]>--><!-- 漢字"


def test_names_from_files_are_shown_and_do_nothing(report: Report, tmp_path: Path) -> None:
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


def test_what_cannot_be_read_is_left_out_and_said(report: Report, tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "demo")
    with (folder / "trace.jsonl").open("a") as trace:
        trace.write('{"prompt_tokens": 1}\nno json\n')
    (folder / "manifest.json").write_text("{")
    made = report(folder)
    assert made.exit_code == 0
    assert "2 lines that cannot be read left out, first" in made.stderr
    assert "demo/trace.jsonl: line 62: Object missing required field `output_tokens`\n" in made.stderr
    assert "manifest.json: is no JSON" in made.stderr
    assert "2 lines that cannot be read left out" in shown(tmp_path / "report.html")


def test_what_only_the_second_capture_has_is_in_the_legend_too(report: Report, tmp_path: Path) -> None:
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


def test_figures_of_a_plan_that_cannot_be_are_not_drawn(report: Report, tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "demo", context={"plan": {"perGpu": {"requestedBytes": "much"}}})
    assert "left out: Memory: the plan against the engine" in report(folder).stdout


def test_moments_of_another_era_and_sizes_beyond_all_are_drawn(report: Report, tmp_path: Path) -> None:
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
        (["demo"] * 8, "8 captures cannot be told apart in a picture: name 7 at most"),
        (["demo", "-o", "gone/report.html"], "gone/report.html: No such file or directory: name a place"),
        (["demo", "--svg", "demo/trace.jsonl"], "demo/trace.jsonl: is no folder: name one"),
        (["empty"], "has no request: record some load"),
        (["demo/manifest.json"], "manifest.json: line 1: Object missing required field `prompt_tokens`"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_leaves_nothing(
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


def test_captures_of_different_settings_are_said_to_be(report: Report, tmp_path: Path) -> None:
    made = report(write_capture(tmp_path / "a"), write_capture(tmp_path / "b", model="other/model"))
    assert "warning: The captures have different settings: model is org/model and other/model." in made.stderr


def test_a_folder_of_captures_is_each_of_them(report: Report, tmp_path: Path) -> None:
    write_capture(tmp_path / "all" / "a", capture="one")
    write_capture(tmp_path / "all" / "b", capture="two")
    assert report(tmp_path / "all").exit_code == 0
    words = shown(tmp_path / "report.html")
    assert "one: 3." in words
    assert "two: 3." in words


def test_without_matplotlib_it_says_what_to_install(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("specdecode_operator.capture.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = report(write_capture(tmp_path / "demo"))
    assert made.exit_code == 2
    assert "pip install '.[plot]'" in made.stderr


def test_the_trace_for_perfetto_has_lanes_without_overlap_and_a_track_of_acceptance(made: Path) -> None:
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
