"""An engine is judged by the record of an earlier one: what is worse is caught, and what is the same is let through."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.comparison import golden_records
from specdecode_operator.capture.comparison.golden_records import NotComparableError, read_record, repetitions_of
from specdecode_operator.capture.comparison.regression import ALARM_LEVEL, Regression, RegressionVerdict, judge
from specdecode_operator.cli.main import app
from specdecode_operator.stats.verdict import Estimate
from tests.support.synthetic import RATES
from tests.support.unchanged_pairs import ServedEngine, with_acceptance, with_step_time

HOLDS, REGRESSED, INCONCLUSIVE = RegressionVerdict


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ServedEngine().serve(tmp_path_factory.mktemp("captures") / "golden", 1)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ServedEngine().serve(tmp_path_factory.mktemp("captures") / "same", 2)


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_step_time(1.05).serve(tmp_path_factory.mktemp("captures") / "slower", 2)


def _edited(folder: Path, out: Path, edit: Any) -> Path:
    """Copy a record with each of its lines, the header first, as `edit` leaves it."""
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    out.mkdir(parents=True)
    kept = [edit(number, line) for number, line in enumerate(lines)]
    (out / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept if line is not None))
    return out


def test_record_stops_keeping_answers_at_token_limit(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_tokens(_: int, line: dict[str, Any]) -> dict[str, Any]:
        return line if "meta" in line else line | {"output_token_ids": [7] * line["output_tokens"]}

    folder = _edited(golden, tmp_path / "tokens", with_tokens)
    whole = read_record([folder])
    tokens = [len(each.token_ids or ()) for each in whole.answers.values()]
    assert not whole.is_cut
    monkeypatch.setattr(golden_records, "_MOST_TOKENS", sum(tokens[:5]))
    cut = read_record([folder])
    assert cut.is_cut
    assert len(cut.answers) == 5


def _verdicts(regression: Regression) -> dict[str, RegressionVerdict | None]:
    return {each.name: each.verdict for each in regression.figures}


def test_unchanged_engine_holds(golden: Path, same: Path) -> None:
    regression = judge([golden], [same])
    assert regression.verdict is HOLDS, regression.message
    assert regression.message.startswith("holds: goodput in phase closed-1 28")
    assert set(_verdicts(regression).values()) == {HOLDS}


def test_ten_percent_lower_acceptance_is_regressed(golden: Path, tmp_path: Path) -> None:
    regression = judge([golden], [with_acceptance(0.9).serve(tmp_path / "new", 2)])
    verdicts = _verdicts(regression)
    assert regression.verdict is REGRESSED
    assert verdicts["accepted tokens a step"] is REGRESSED
    assert [verdicts[f"acceptance at position {place}"] for place in (1, 2, 3, 4)] == [REGRESSED] * 4
    assert verdicts["step time with 1 running"] is HOLDS
    assert "accepted tokens a step 1.8" in regression.message


def test_near_zero_acceptance_is_regressed(golden: Path, tmp_path: Path) -> None:
    """What is accepted is in one block alone: without it there is nothing left that has a logarithm."""
    hardly = with_acceptance(1e-5).serve(tmp_path / "hardly", 2)
    regression = judge([golden], [hardly])
    position = next(each for each in regression.figures if each.name == "acceptance at position 1")
    assert position.found
    assert position.verdict is REGRESSED
    assert _verdicts(regression)["accepted tokens a step"] is REGRESSED
    assert "accepted tokens a step" in regression.message


def test_five_percent_slower_steps_are_regressed(golden: Path, slower: Path) -> None:
    regression = judge([golden], [slower])
    verdicts = _verdicts(regression)
    assert regression.verdict is REGRESSED
    assert verdicts["step time with 1 running"] is verdicts["step time with 8 to 15 running"] is REGRESSED
    assert verdicts["goodput in phase closed-8"] is REGRESSED
    assert verdicts["accepted tokens a step"] is HOLDS


def test_improved_engine_holds(golden: Path, tmp_path: Path) -> None:
    new = ServedEngine(with_acceptance(1.1).rates, with_step_time(0.9).step_time).serve(tmp_path / "new", 2)
    assert judge([golden], [new]).verdict is HOLDS


def test_alarm_level_is_split_over_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, interval = [], Estimate.interval

    def heard(self: Estimate, alpha: float) -> tuple[float, float]:
        asked.append(alpha)
        return interval(self, alpha)

    monkeypatch.setattr(Estimate, "interval", heard)
    one, other = (ServedEngine().serve(tmp_path / str(seed), seed, requests=96) for seed in (1, 2))
    judged = [each for each in judge([one], [other]).figures if each.low_percent is not None]
    assert len(judged) > 1
    assert len(judged) * min(asked) <= 1 - ALARM_LEVEL + 1e-9


def test_short_record_is_inconclusive(tmp_path: Path) -> None:
    one, other = (ServedEngine().serve(tmp_path / str(seed), seed, requests=24) for seed in (1, 2))
    regression = judge([one], [other])
    assert regression.verdict is INCONCLUSIVE
    assert "too short, or too uneven, to tell: goodput in phase closed-8" in regression.message
    assert regression.message.endswith("send more requests in both")


def test_lost_speculation_is_regressed_and_noted(golden: Path, tmp_path: Path) -> None:
    regression = judge([golden], [ServedEngine(rates=()).serve(tmp_path / "new", 2)])
    assert regression.verdict is REGRESSED
    assert not [name for name in _verdicts(regression) if name.startswith("accept")]
    assert any("no longer speculates" in note for note in regression.notes)


def test_step_times_with_different_k_are_not_compared(golden: Path, tmp_path: Path) -> None:
    regression = judge([golden], [ServedEngine(rates=RATES[:3]).serve(tmp_path / "new", 2)])
    verdicts = _verdicts(regression)
    assert not [name for name in verdicts if name.startswith(("step time", "accepted"))]
    assert verdicts["acceptance at position 3"] is HOLDS
    assert regression.notes == ["K is 4 in the golden record and 3 now: step times cannot be compared"]


def test_unanswered_requests_are_regressed(golden: Path, same: Path, tmp_path: Path) -> None:
    left = _edited(same, tmp_path / "new", lambda number, line: None if number % 20 == 7 else line)
    regression = judge([golden], [left])
    assert regression.verdict is REGRESSED
    assert _verdicts(regression)["requests answered whole"] is REGRESSED


@pytest.mark.parametrize(("wrong", "verdict"), [(0, HOLDS), (1, REGRESSED)])
def test_early_divergence_of_greedy_answers_is_regressed(
    golden: Path, same: Path, tmp_path: Path, wrong: int, verdict: RegressionVerdict
) -> None:
    def greedy(shift: int) -> Any:
        def edit(number: int, line: dict[str, Any]) -> dict[str, Any]:
            # One answer in a hundred parts anyway, as in batches of BF16.
            tokens = [7 + (shift or number == 100)] * line.get("output_tokens", 0)
            return line | {"temperature": 0.0, "output_token_ids": tokens} if tokens else line

        return edit

    one = _edited(golden, tmp_path / "golden", greedy(0))
    other = _edited(same, tmp_path / "new", greedy(wrong))
    regression = judge([one], [other])
    assert _verdicts(regression)["greedy answers that part, of 960"] is verdict
    assert regression.verdict is verdict


def _not_comparable(golden: Path, tmp_path: Path) -> Iterator[tuple[list[Path], str]]:
    def header(**values: Any) -> Any:
        return lambda number, line: {"meta": line["meta"] | values} if number == 0 else line

    def longer(number: int, line: dict[str, Any]) -> dict[str, Any]:
        return line | {"prompt_tokens": line["prompt_tokens"] + 1} if number else line

    yield (
        [_edited(golden, tmp_path / "a", header(model="other"))],
        "model is model in the first and other in the second",
    )
    yield [_edited(golden, tmp_path / "b", header(gpu="H200"))], "GPU is H100 in the first and H200"
    yield [_edited(golden, tmp_path / "c", header(tp=2))], "tensor-parallel size is 1 in the first and 2"
    yield [_edited(golden, tmp_path / "d", longer)], "960 of 960 prompts have another length"
    yield [ServedEngine().serve(tmp_path / "e", 2, 8, "closed:2")], "have no request in common"
    broken = tmp_path / "f"
    broken.mkdir()
    (broken / "trace.jsonl").write_text('{"meta": {}}\n{"prompt_tokens": -1}\n')
    yield [broken], "trace.jsonl: line 2: "
    yield (
        [_edited(golden, tmp_path / "g", lambda number, line: line if number != 5 else line | {"ttft_ms": 1e300})],
        ("line 6: has a time beyond 1e[+]13 ms"),
    )
    yield [_edited(golden, tmp_path / "h", lambda number, line: line if not number else None)], "has no request of a"
    yield [tmp_path / "nothing"], "holds no trace.jsonl"


def test_incomparable_records_are_refused(golden: Path, tmp_path: Path) -> None:
    for found, message in _not_comparable(golden, tmp_path):
        with pytest.raises(NotComparableError, match=message):
            judge([golden], found)


def test_repetitions_of_one_arm_are_judged_together(golden: Path, tmp_path: Path) -> None:
    def repeated(name: str, seeds: tuple[int, int]) -> list[Path]:
        for number, seed in enumerate(seeds, start=1):
            folder = ServedEngine().serve(tmp_path / name / "as-deployed" / str(number), seed, requests=240)
            (folder / "manifest.json").write_text("{}")
        killed = tmp_path / name / "as-deployed" / "1.part-uid"
        killed.mkdir()
        for file in ("manifest.json", "trace.jsonl"):
            (killed / file).write_text("{}")
        return repetitions_of(tmp_path / name)

    found = repeated("golden", (1, 2)), repeated("new", (3, 4))
    assert [[each.name for each in one] for one in found] == [["1", "2"]] * 2
    regression = judge(*found)
    assert (regression.verdict, regression.requests) == (HOLDS, 960)
    (tmp_path / "golden" / "as-deployed").rename(tmp_path / "golden" / "one")
    (tmp_path / "new" / "as-deployed").rename(tmp_path / "golden" / "other")
    with pytest.raises(NotComparableError, match=r"holds several arms \(one, other\): name the folder of one"):
        repetitions_of(tmp_path / "golden")
    assert repetitions_of(golden) == [golden]


def test_gate_command_exit_status_follows_verdict(golden: Path, same: Path, slower: Path, tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["capture", "gate", str(golden), str(same)])
    assert good.exit_code == 0
    assert "\nholds: goodput" in good.output
    bad = CliRunner().invoke(app, ["capture", "gate", str(golden), str(slower), "-o", "json"])
    assert bad.exit_code == 1
    found = json.loads(bad.output)
    assert found["verdict"] == "Regressed"
    assert {"name", "golden", "found", "low_percent", "loss_limit_percent"} <= found["figures"][0].keys()
    wide = ["--goodput", "15", "--step-time", "15", "--latency", "30", "--acceptance", "20"]
    assert CliRunner().invoke(app, ["capture", "gate", str(golden), str(slower), *wide]).exit_code == 0
    refused = CliRunner().invoke(app, ["capture", "gate", str(golden), str(tmp_path / "none")])
    assert refused.exit_code == 2
    assert "name the folder of a published one" in refused.output
