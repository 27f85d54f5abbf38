"""`specdecode advise` on captures of engines of which everything is known, and on a saved page of metrics."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from specdecode_operator.cli.advise.answer import prefix_cache
from specdecode_operator.cli.advise.measured import Measured, draft_curve, measured_batches, plain_curve
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.synthetic_load import Lengths
from specdecode_operator.replay.virtual_run import spread
from specdecode_operator.stats.payoff import Curve
from tests.support.synthetic import RATES, Truth
from tests.unit.cli.conftest import Specdecode

TARGET = ((1.0, 10.0), (64.0, 31.5))
DRAFT_MS = 1.5
NOISE = spread(0.02)
EXPECTED = 1 + sum(RATES)
PAGE = Path(__file__).parents[1] / "vllm/data/metrics-draft-model.txt"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a capture with speculation, and one without that ran more requests at once."""
    folder = tmp_path_factory.mktemp("captures")
    speculating = Truth(from_rates(RATES), StepTime(TARGET, draft_ms=DRAFT_MS, residuals=NOISE))
    plain = Truth(None, StepTime(TARGET, residuals=NOISE))
    return (
        speculating.make(folder / "speculating", "closed:8", 120).folder,
        plain.make(folder / "plain", "closed:1,closed:8,closed:16,closed:40", 60).folder,
    )


def _target_ms(tokens: int) -> float:
    return 10 + 21.5 * (tokens - 1) / 63


def _asked(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("advise", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_two_captures_give_what_their_engines_are(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    speculating, plain = captures
    found = _asked(specdecode, speculating, "--baseline", plain, "--batch", 8)
    k = len(RATES)
    assert found["num_speculative_tokens"] == k
    assert found["expected_tokens"] == pytest.approx(EXPECTED, rel=0.05)
    (load,) = found["loads"]
    plain_ms, step_ms = _target_ms(8), _target_ms(8 * (k + 1)) + k * DRAFT_MS
    assert load["plain_step_ms"] == pytest.approx(plain_ms, rel=0.05)
    assert load["step_ms"] == pytest.approx(step_ms, rel=0.05)
    assert load["speed_up"] == pytest.approx(EXPECTED * plain_ms / step_ms, rel=0.1)
    assert load["break_even_acceptance"] == pytest.approx((step_ms / plain_ms - 1) / k, abs=0.03)
    assert not any("shorter than K" in each for each in found["assumptions"])


def test_another_k_is_answered_from_what_a_pass_of_the_draft_takes(
    specdecode: Specdecode, captures: tuple[Path, Path]
) -> None:
    (load,) = _asked(specdecode, captures[0], "--baseline", captures[1], "--batch", 8, "-K", 1)["loads"]
    assert load["step_ms"] == pytest.approx(_target_ms(16) + DRAFT_MS, rel=0.05)


def test_without_times_of_the_target_a_capture_gives_acceptance_alone(
    specdecode: Specdecode, captures: tuple[Path, Path]
) -> None:
    found = _asked(specdecode, captures[0])
    assert [each["of_all_drafts"] for each in found["acceptance"]] == pytest.approx(RATES, abs=0.04)
    assert found["loads"] == []
    # vLLM's version is not in these captures' headers.
    assert found["prefix_cache"]["method"] == "eagle3"
    assert found["prefix_cache"]["block_tokens"] == 16
    assert any("--baseline" in each for each in found["assumptions"])


def test_requests_that_were_recorded_are_answered_for(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    batches = [each["batch"] for each in _asked(specdecode, captures[0], "--baseline", captures[1])["loads"]]
    assert batches == sorted(batches)
    assert 8 in batches
    assert max(batches) <= 8


def test_of_many_loads_the_ends_and_some_between_are_answered_for() -> None:
    batches = measured_batches(Measured(0, None, shortened=False, step_ms=dict.fromkeys(range(1, 21), 1.0)))
    assert {1, 20} < set(batches)
    assert len(batches) < 12


def test_steps_that_prefill_are_no_plain_steps_though_they_have_a_token_a_request(
    specdecode: Specdecode, tmp_path: Path
) -> None:
    slow = Truth(None, StepTime(((1.0, 10.0),), prefill_token_us=50_000.0, residuals=NOISE))
    tiny = {"prompt_tokens": Lengths(1, 1), "output_tokens": Lengths(2, 2)}
    plain = slow.make(tmp_path / "plain", "closed:1", 60, **tiny).folder
    (load,) = _asked(specdecode, "-K", 1, "--baseline", plain)["loads"]
    assert load["plain_step_ms"] == pytest.approx(10, rel=0.05)


def test_a_draft_of_one_pass_is_answered_by_all_its_tokens(specdecode: Specdecode, tmp_path: Path) -> None:
    engine = Truth(from_rates(RATES), StepTime(TARGET, draft_ms=DRAFT_MS, residuals=NOISE))
    folder = engine.make(tmp_path / "two", "closed:2,closed:8", 60).folder
    asked = (folder, "--target-step-ms", 5, "--batch", "2,8")
    passes, at_once = (_asked(specdecode, *asked, *more)["loads"] for more in ((), ("--parallel-drafting",)))
    # With the K that was recorded a step is the one that was recorded.
    assert [each["step_ms"] for each in at_once] == pytest.approx([each["step_ms"] for each in passes])
    assert at_once[0]["step_ms"] < at_once[1]["step_ms"]
    trace = folder / "trace.jsonl"
    trace.write_text(trace.read_text().replace("eagle3", "dflash", 1))
    assert (
        _asked(specdecode, *asked, "-K", 2)["loads"]
        == _asked(specdecode, *asked, "-K", 2, "--parallel-drafting")["loads"]
    )


def test_the_prefix_cache_is_that_of_the_recorded_engine() -> None:
    recorded = Measured(3, None, shortened=False, step_ms={}, method="eagle3", version="0.32.0", block_tokens=32)
    found = prefix_cache(None, None, None, 100, recorded)
    assert found is not None
    assert (found.engine_version, found.block_tokens, found.lost_tokens) == ("0.32.0", 32, 32)


def test_a_saved_page_of_metrics_gives_acceptance(specdecode: Specdecode) -> None:
    drafts, accepted = (
        float(re.findall(rf"^vllm:spec_decode_num_{name}_total\{{.*?\}} (\S+)$", PAGE.read_text(), re.MULTILINE)[0])
        for name in ("drafts", "accepted_tokens")
    )
    found = _asked(specdecode, "--metrics", PAGE, "--target-step-ms", 20)
    assert found["expected_tokens"] == pytest.approx(1 + accepted / drafts)
    assert found["loads"][0]["speed_up"] == pytest.approx(1 + accepted / drafts)


def test_a_page_of_an_engine_whose_drafts_were_shorter_at_times_says_so(specdecode: Specdecode, tmp_path: Path) -> None:
    note = "drafts were shorter than K at times: the tokens that they lack count as refused"
    assert note not in _asked(specdecode, "--metrics", PAGE)["assumptions"]
    shorter = re.sub(r"(num_draft_tokens_total\{.*\}) \S+", r"\1 2000.0", PAGE.read_text())
    (tmp_path / "page").write_text(shorter)
    assert note in _asked(specdecode, "--metrics", tmp_path / "page")["assumptions"]


def test_what_says_nothing_is_refused_with_what_to_do(
    specdecode: Specdecode, captures: tuple[Path, Path], tmp_path: Path
) -> None:
    speculating, plain = captures
    (tmp_path / "empty").mkdir()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/trace.jsonl").write_bytes((speculating / "trace.jsonl").read_bytes())
    (tmp_path / "page").write_text("hello\n")
    short = Truth(None, StepTime(TARGET)).make(tmp_path / "short", "closed:1", 1, output_tokens=Lengths(5, 5))
    for arguments, said in (
        ((tmp_path / "none",), "holds no trace.jsonl"),
        ((tmp_path / "empty",), "holds no trace.jsonl"),
        ((tmp_path / "alone",), "has no step-stats.jsonl"),
        ((speculating, "--baseline", speculating), "it speculates, with K 4"),
        ((plain, "--baseline", plain, "-K", 3), "does not speculate"),
        ((plain,), "give K"),
        ((speculating, "--baseline", short.folder), "record a steadier load"),
        ((speculating, "--acceptance", "0.5"), "give one of them"),
        ((speculating, "--draft-step-ms", "5"), "give one of them"),
        (("-K", 2, "--baseline", plain, "--target-step-ms", "5"), "give one of them"),
        (("--metrics", tmp_path / "page"), "--metrics"),
        (("--metrics", tmp_path / "gone"), "gone"),
    ):
        result = specdecode("advise", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert said in " ".join(result.stderr.replace("│", " ").split()), (arguments, result.stderr)
        assert "Traceback" not in result.output


def test_steps_that_take_hours_are_told_of_the_capture() -> None:
    slow = Measured(k=0, acceptance=None, shortened=False, step_ms={8: 2e7})
    with pytest.raises(typer.BadParameter, match="milliseconds from 0") as caught:
        plain_curve(slow, "--baseline")
    assert caught.value.param_hint == "--baseline"
    with pytest.raises(typer.BadParameter, match="milliseconds from 0") as caught:
        draft_curve(replace(slow, k=1), Curve(((1, 1.0),)), "CAPTURE", one_pass=True)
    assert caught.value.param_hint == "CAPTURE"
