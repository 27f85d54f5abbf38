"""What is drawn is what was recorded: the numbers in the figures themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdecode_operator.capture.report.capture_reader import read_capture
from specdecode_operator.capture.report.charts import (
    budgets,
    by_context,
    by_load,
    by_temperature,
    cache_use,
    client_ttft,
    distributions,
    over_time,
    step_time,
)
from specdecode_operator.capture.report.drawing import LeftOut, Picture, Series, series_of
from specdecode_operator.capture.report.report import Measure, measures_of, page, timelines, write_perfetto
from specdecode_operator.capture.report.report import _cell as cell
from tests.support.drawn_captures import manifest, step
from tests.support.traces import record, write_steps, write_trace

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


def test_moments_are_seconds_since_the_first_arrival(drawn: list[Series]) -> None:
    for made in (over_time(drawn), cache_use(drawn)):
        seconds = np.asarray(picture(made).figure.axes[0].lines[0].get_xdata())
        assert (seconds.min(), seconds.max()) == pytest.approx((0.0, 0.9), abs=0.02)


def test_the_cache_has_its_mean_and_its_most_and_each_line_its_name(drawn: list[Series]) -> None:
    left, right = picture(cache_use(drawn)).figure.axes
    assert set(left.lines[0].get_ydata()) == {60.0}
    assert left.lines[0].get_label() == "KV cache in use, most"
    assert left.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(40.0)
    shown = {line.get_color(): line.get_label().split()[1] for line in left.lines if "(right)" in str(line.get_label())}
    requests = {shown[line.get_color()]: set(line.get_ydata()) for line in right.lines}
    assert requests == {"running": {2.0}, "waiting": {1.0}}


def test_a_step_has_its_quantiles_and_its_time_a_token(drawn: list[Series]) -> None:
    axes = picture(step_time(drawn)).figure.axes[0]
    sizes, middle = axes.lines[0].get_data()
    assert (list(sizes), list(middle)) == ([2, 3], pytest.approx([12.5, 50.5], rel=0.02))
    assert list(axes.lines[1].get_ydata()) == pytest.approx([6.25, 50.5 / 3], rel=0.02)
    (_, low), (_, high) = axes.collections[0].get_segments()[1]
    assert (low, high) == pytest.approx((10.5, 90.5), rel=0.05)


def test_what_a_step_got_accepted_is_without_the_targets_own_token(drawn: list[Series]) -> None:
    assert list(picture(by_context(drawn)).figure.axes[0].lines[0].get_ydata()) == pytest.approx([1.5])


def test_each_temperature_has_what_its_steps_got_accepted(tmp_path: Path, drawn: list[Series]) -> None:
    cold = record(temperature=0, output_tokens=14, itl_tokens=[5, 5, 3], itl_ms=[10.0, 10.0, 10.0])
    records = [cold, record(temperature=0.8), record(temperature=1e300), record()]
    write_trace(tmp_path / "trace.jsonl", records)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest()))
    made = picture(by_temperature(series_of([read_capture(tmp_path)])))
    temperatures, accepted = made.figure.axes[0].lines[0].get_data()
    # The last step of an answer may be cut short, and does not count.
    assert (list(temperatures), list(accepted)) == ([0, 0.8], [4, 2])
    assert made.sentences == ("4.00 drafted tokens accepted a step at temperature 0, 2.00 at 0.8.",)
    assert isinstance(by_temperature(drawn), LeftOut), "its requests say no temperature"


def test_quantiles_are_those_of_what_the_axis_says(drawn: list[Series]) -> None:
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
    assert found["output tokens a second"].value == pytest.approx(600 / 1.2025)


def test_warm_up_is_no_answer_of_a_client(drawn: list[Series]) -> None:
    [sentence] = picture(client_ttft(drawn)).sentences
    assert sentence == "The client's median is 33.0 ms, the engine's 50.5 ms; 3 completed."


def test_states_of_requests_are_milliseconds(drawn: list[Series]) -> None:
    [made] = timelines(drawn)
    assert "a request waited 0.500 ms, was prefilled in 50.0 ms and decoded for 63.0 ms" in picture(made).sentences[0]


def test_the_budget_is_drawn_in_gib_with_what_the_engine_has(drawn: list[Series]) -> None:
    words = {text.get_text() for text in picture(budgets(drawn)).figure.axes[0].texts}
    assert {"70.0", "8.00", "43.0", "42.6"} <= words


def test_counters_for_perfetto_are_means_of_their_steps(drawn: list[Series], tmp_path: Path) -> None:
    write_perfetto([drawn[0].capture], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = {each["name"]: set[float]() for each in events if each["ph"] == "C"}
    for each in events:
        if each["ph"] == "C":
            counters[each["name"]].add(each["args"]["value"])
    assert counters["KV cache in use (%)"] == {40.0}
    assert (counters["requests running"], counters["requests waiting"]) == ({2.0}, {1.0})
    waited_us = {each["dur"] for each in events if each["name"] == "waiting"}
    assert waited_us == {500.0}


def test_requests_of_one_lane_for_perfetto_follow_each_other_and_there_are_no_more_lanes_than_needed(
    tmp_path: Path,
) -> None:
    # Each lasts 30 + 22.5 ms: three at once at most, and the fourth comes when the first has just ended.
    arrivals_ms = (0.0, 10.0, 20.0, 52.5, 55.0, 200.0)
    write_trace(tmp_path / "trace.jsonl", [record(arrival_ms=each) for each in arrivals_ms])
    write_perfetto([read_capture(tmp_path)], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {each["ts"]: each["tid"] for each in events if each["name"].startswith("request ")}
    assert lanes == {0.0: 1, 10_000.0: 2, 20_000.0: 3, 52_500.0: 1, 55_000.0: 4, 200_000.0: 1}
    states = {(each["ts"], each["tid"]) for each in events if each["name"] == "prefill"}
    assert states == set(lanes.items())


def test_a_table_says_how_far_the_others_are_from_the_first() -> None:
    captures = [Measure(0.5, "share"), Measure(0.4, "share"), Measure(10.0, "ms"), Measure(15.0, "ms")]
    of_one, of_other, first_ms, second_ms = captures
    assert "(−10.0 points)" in cell(of_other, of_one)  # noqa: RUF001  a minus
    assert "(+50.0 %)" in cell(second_ms, first_ms)
    assert "(" not in cell(of_one, of_one)


def test_a_warning_runs_nothing(drawn: list[Series]) -> None:
    assert '<p class="warning">&lt;b&gt; &amp;</p>' in page(drawn, [], ["<b> &"])
