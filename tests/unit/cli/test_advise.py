"""`specdecode advise`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.cli.advise import AdviseOutput, Measured, measured_batches, prefix_cache
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.synthetic_load import Lengths
from specdecode_operator.replay.virtual_run import spread
from tests.support.synthetic import RATES, Truth
from tests.unit.cli.conftest import Specdecode

CONSTANT = ("--target-step-ms", 20, "--draft-step-ms", 0)
MEASURED = ("--target-step-ms", "1:20,64:24,512:60", "--draft-step-ms", "1.5")


def _asked(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("advise", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    AdviseOutput.model_validate(found)
    return found


def test_acceptance_by_position_gives_tokens_per_step(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6,0.45")
    assert found["num_speculative_tokens"] == 3
    assert found["expected_tokens"] == pytest.approx(2.85)
    assert found["acceptance_rate"] == pytest.approx(1.85 / 3)
    assert [each["conditional"] for each in found["acceptance"]] == pytest.approx([0.8, 0.75, 0.75])
    assert found["loads"] == []
    assert found["assumptions"] == [], "step times are asked for where nothing can be answered without them"


def test_all_forms_of_acceptance_give_the_same_result(specdecode: Specdecode) -> None:
    counted = _asked(specdecode, "--acceptance", "0.8,0.64", *MEASURED)
    conditional = _asked(specdecode, "--conditional-acceptance", "0.8,0.8", *MEASURED)
    rate = _asked(specdecode, "--acceptance-rate", "0.72", "-K", 2, *MEASURED)
    assert counted["expected_tokens"] == pytest.approx(conditional["expected_tokens"])
    assert rate["expected_tokens"] == pytest.approx(conditional["expected_tokens"])
    assert rate["loads"][0]["speed_up"] == pytest.approx(counted["loads"][0]["speed_up"])


def test_each_load_has_its_break_even_speed_up_and_best_k(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6,0.45", *MEASURED, "--batch", "1,512")
    few, many = found["loads"]
    assert few["plain_step_ms"] == pytest.approx(20)
    assert few["step_ms"] == pytest.approx(20 + 3 * 4 / 63 + 4.5)
    assert few["break_even_acceptance"] == pytest.approx((few["step_ms"] / 20 - 1) / 3)
    assert few["speed_up"] == pytest.approx(2.85 / few["step_ms"] * 20)
    assert few["best_k"] > 3
    assert many["speed_up"] < 1
    assert many["best_k"] < 3


def test_full_kv_cache_adds_a_load_per_context(specdecode: Specdecode) -> None:
    room = ("--kv-tokens", 238_896, "--kv-tokens-alone", 383_600, "--context", "2000,8000")
    found = _asked(specdecode, "-K", 3, "--target-step-ms", 20, "--draft-step-ms", 0, *room)
    full = [each for each in found["loads"] if each["full_cache"]]
    assert [each["batch"] for each in full] == pytest.approx([119.448, 29.862])
    # A step that takes equally long: the share of the cache alone.
    assert full[0]["break_even_acceptance"] == pytest.approx((383_600 / 238_896 - 1) / 3)
    assert full[0]["speed_up"] is None


def test_verify_step_time_gives_the_cost_per_token_of_a_step(specdecode: Specdecode) -> None:
    times = ("--target-step-ms", 20, "--verify-step-ms", 26, "--draft-step-ms", 0)
    found = _asked(specdecode, "-K", 3, *times, "--batch", "8,64")
    assert [each["step_ms"] for each in found["loads"]] == pytest.approx([26, 20 + 6 * 31 * 8 / 24])


def _column(text: str, name: str) -> list[str]:
    """Return the cells of a column of the table of loads."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    head = next(index for index, cells in enumerate(lines) if cells[0] == "REQUESTS")
    return [cells[lines[head].index(name)] for cells in lines[head + 1 :]]


def _extrapolations(found: dict[str, Any]) -> list[str]:
    return [each for each in found["assumptions"] if each.startswith("extrapolated (*)")]


def test_loads_beyond_the_measured_times_are_marked(specdecode: Specdecode) -> None:
    asked = ("-K", 1, *MEASURED, "--batch", "1,256,257")
    found = _asked(specdecode, *asked)
    assert [each["extrapolated"] for each in found["loads"]] == [False, False, True]
    assert found["measured_batches"] == [1, 256]
    (told,) = _extrapolations(found)
    assert "1 to 512 tokens" in told
    assert _column(specdecode("advise", *asked).stdout, "REQUESTS") == ["1", "256", "257*"]
    times = ("--target-step-ms", "1:20,512:60", "--draft-step-ms", "7:1,8:1.2", "--batch", "6,7,8,9")
    drafted = _asked(specdecode, "-K", 2, *times)
    assert [each["extrapolated"] for each in drafted["loads"]] == [True, False, False, True]
    (told,) = _extrapolations(drafted)
    assert "draft passes have 7 to 8 tokens" in told


def test_single_target_time_is_extrapolated_for_larger_steps(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6", "--target-step-ms", 20, "--draft-step-ms", 1)
    assert found["loads"][0]["extrapolated"]
    assert (found["measured_batches"], found["crossover_batch"]) == (None, None)


def test_best_k_is_at_most_one_beyond_the_measured_positions(specdecode: Specdecode) -> None:
    asked = ("--acceptance", "0.8,0.6", "--method", "ngram", "--target-step-ms", "1:20,64:24", "--batch", "1,16,32")
    found = _asked(specdecode, *asked)
    assert [each["best_k"] for each in found["loads"]] == [3, 3, 3]
    assert [each["extrapolated"] for each in found["loads"]] == [False, False, True]
    assert all(each["best_k_extrapolated"] for each in found["loads"])
    text = specdecode("advise", *asked).stdout
    assert _column(text, "BEST K") == ["3*"] * 3
    assert [cell.endswith("*") for cell in _column(text, "SPEED-UP")] == [False, False, True]
    assert any("acceptance of position 2" in each for each in _extrapolations(found))
    dear = _asked(specdecode, "--acceptance", "0.8,0.1", *MEASURED, "--batch", "128")
    assert dear["loads"][0]["best_k"] == 1
    assert not dear["loads"][0]["best_k_extrapolated"]
    assert _extrapolations(dear) == []


def test_first_line_marks_k_beyond_the_measured_positions(specdecode: Specdecode) -> None:
    asked = ("--acceptance", "0.8,0.6", *MEASURED, "--size-ratio", 0.1)
    within, beyond = (specdecode("advise", *asked, "-K", k).stdout for k in (2, 3))
    assert "extrapolated" not in within.splitlines()[0]
    assert "extrapolated (*) beyond position 2" in beyond.splitlines()[0]
    assert re.search(r"MBSU: \d+\.\d+x\*", beyond)
    assert _asked(specdecode, *asked, "-K", 3)["loads"][0]["extrapolated"]


@pytest.mark.parametrize(
    ("acceptance", "target", "crossing", "text"),
    [
        ("0.7,0.5,0.35", "1:20,64:24,512:60,1024:101", 221, r"K 3 no longer pays from 221 requests"),
        ("0.7,0.5,0.35", "1:20,64:24,512:60", None, r"no crossover within the measured loads.* 128 requests"),
        ("0,0,0", "2:20,512:60", 2, r"K 3 does not pay within the measured loads, 2 to 128 requests"),
        ("0.7,0.5,0.35", "64:24,128:30", None, r"crossover of K 3 unknown"),
    ],
)
def test_crossover_is_searched_within_the_measured_loads(
    specdecode: Specdecode, acceptance: str, target: str, crossing: int | None, text: str
) -> None:
    asked = ("--acceptance", acceptance, "--target-step-ms", target, "--draft-step-ms", 1.2)
    assert _asked(specdecode, *asked)["crossover_batch"] == crossing
    assert re.search(text, specdecode("advise", *asked).stdout)


@pytest.mark.parametrize("method", ["eagle3", "ngram", "ngram_gpu", "suffix"])
def test_only_lookup_methods_need_no_draft_step_time(specdecode: Specdecode, method: str) -> None:
    result = specdecode("advise", "-K", 2, "--target-step-ms", "1:20,64:24", "--method", method)
    assert result.exit_code == (2 if method == "eagle3" else 0)
    assert ("--draft-step-ms: is missing" in result.stderr) == (method == "eagle3")


def test_prefix_cache_loss_of_each_method_is_shown(specdecode: Specdecode) -> None:
    asked = ("-K", 3, "--shared-prefix", 4000, "--method")
    dropped = _asked(specdecode, *asked, "eagle3", "--engine-version", "0.32", "--block-size", 32)["prefix_cache"]
    assert (dropped["mean_lost_tokens"], dropped["found_tokens"], dropped["lost_tokens"]) == (32, 3968, 32)
    ahead = _asked(specdecode, *asked, "eagle3", "--engine-version", "0.33")["prefix_cache"]
    assert (ahead["mean_lost_tokens"], ahead["found_tokens"], ahead["lost_tokens"]) == (1, 3984, 16)
    text = specdecode("advise", *asked, "eagle3", "--engine-version", "0.32").stdout
    assert "16 of 4,000 shared tokens are computed again (0.4 %)" in text
    assert "0.33: each prefix loses 1 token on average" in specdecode("advise", *asked, "eagle3").stdout
    chained = _asked(specdecode, *asked, "mtp", "--engine-version", "0.33", "--mtp-layers", 2)["prefix_cache"]
    assert (chained["mean_lost_tokens"], chained["lost_tokens"]) == (3, 16)
    assert _asked(specdecode, *asked, "mtp", "--engine-version", "0.33")["prefix_cache"]["mean_lost_tokens"] == 1
    assert "prefix cache, ngram in vLLM" in specdecode("advise", *asked, "ngram").stdout


def test_size_ratio_gives_the_memory_bound_speed_up(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6,0.45", "--size-ratio", 0.1)
    assert found["memory_bound_speed_up"] == pytest.approx(2.85 / 1.3)


@pytest.mark.parametrize("said", [("--parallel-drafting",), ("--method", "dflash")])
def test_parallel_drafting_counts_one_draft_pass_per_step(specdecode: Specdecode, said: tuple[str, ...]) -> None:
    given = ("--acceptance", "0.8,0.6,0.45", "--size-ratio", 0.1, "--target-step-ms", 20, "--draft-step-ms", 2)
    found = _asked(specdecode, *given, *said)
    assert found["memory_bound_speed_up"] == pytest.approx(2.85 / 1.1)
    assert found["loads"][0]["step_ms"] == pytest.approx(22)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("-K", 2), "give --baseline or --target-step-ms"),
        (("-K", 2, *CONSTANT, "--verify-step-ms", 10), "target step times fall"),
        (("-K", 2, *CONSTANT, "--context", 4000), "give --target-context-ms"),
        (("-K", 2, "--target-step-ms", 20, "--draft-step-ms", 1), "give --draft-step-ms by tokens"),
        (("-K", 2, "--acceptance-rate", 0.5), "the same at every position"),
        (("-K", 2, "--method", "eagle3", "--engine-version", "0.34"), "vLLM 0.34 is newer than"),
    ],
)
def test_optimistic_assumptions_are_noted(specdecode: Specdecode, arguments: tuple[object, ...], note: str) -> None:
    assert any(note in each for each in _asked(specdecode, *arguments)["assumptions"])
    usual = _asked(specdecode, "-K", 2, *CONSTANT, "--verify-step-ms", 21, "--method", "eagle3")
    assert not any(note in each for each in usual["assumptions"])


def test_crossover_load_is_shown_with_its_context_length(specdecode: Specdecode) -> None:
    times = ("--target-step-ms", "1:20,64:24,4096:320", "--draft-step-ms", 1.5)
    given = ("--acceptance", "0.8,0.6", *times, "--context", "1000,32000", "--kv-tokens", 90_000)
    text = specdecode("advise", *given, "--kv-tokens-alone", 90_000, "--target-context-ms", 0.01).stdout
    assert re.search(r"K 2 no longer pays from \d+ requests of 1,000 tokens on while the KV cache has room", text)
    dear = specdecode("advise", "-K", 2, "--target-step-ms", 20, "--draft-step-ms", 30).stdout
    assert "> 100 %" in dear, "no draft is good enough, which is not that none is needed"


def test_table_shows_the_figures_and_assumptions(specdecode: Specdecode) -> None:
    room = ("--context", 2000, "--kv-tokens", 238_896, "--kv-tokens-alone", 383_600)
    text = specdecode("advise", "--acceptance", "0.8,0.6", "-K", 3, *MEASURED, *room, "--size-ratio", 0.1).stdout
    assert "K 3: 2.85 tokens per step, acceptance 62 %" in text
    assert "119.4 of 191.8 (full)*" in text
    assert "MBSU: 2.19x*" in text
    assert "note: acceptance is the same at every load" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--num-speculative-tokens"),
        (("--acceptance", "0.5,0.6"), "0.6 follows 0.5"),
        (("--acceptance", "0.5,x"), "x: is not a number"),
        (("--acceptance", ",".join(["0"] * 65)), "65 numbers"),
        (("--acceptance", "0.5", "--acceptance-rate", "0.5"), "give one of them"),
        (("--acceptance-rate", "1.5", "-K", 2), "from 0 to 1"),
        (("-K", 33), "33"),
        (("-K", 2, "--target-step-ms", "5e-324", "--verify-step-ms", "1e7", "--draft-step-ms", 0), "takes time"),
        (("-K", 2, "--target-step-ms", "2:1,1:2"), "rising"),
        (("-K", 2, "--target-step-ms", "1:1,2:2", "--verify-step-ms", 1), "leave it out"),
        (("-K", 2, *CONSTANT, "--target-context-ms", "-1"), "milliseconds are from"),
        (("-K", 2, "--batch", "1.5"), "is not a whole number"),
        (("--acceptance", "0.5", "--size-ratio", "nan"), "from 0 to 100"),
        (("-K", 2, "--shared-prefix", 5), "--method"),
        (("-K", 2, "--method", "eagle3", "--mtp-layers", 3), "--mtp-layers"),
        (("-K", 2, "--verify-step-ms", 20), "--target-step-ms: is missing"),
        (("-K", 2, "--method", "magic"), "is not a method"),
        (("-K", 2, "--method", "eagle", "--engine-version", "new"), "write it as"),
        (("-K", 2, "--method", "eagle", "--engine-version", "0.20"), "prefix cache unknown"),
        (("-K", 2, "--kv-tokens", 5), "--kv-tokens-alone"),
        (("-K", 2, "--kv-tokens", 5, "--kv-tokens-alone", 6), "--context"),
        (("-K", 2, "--kv-tokens", 5, "--kv-tokens-alone", 6, "--context", 9), "no more than the cache"),
    ],
)
def test_invalid_numbers_are_refused_with_the_option(
    specdecode: Specdecode, arguments: tuple[object, ...], said: str
) -> None:
    result = specdecode("advise", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


SLOW_DRAFT = ("--target-step-ms", "1:20,64:24,512:90", "--draft-step-ms", "6", "--acceptance", "0.8,0.5,0.3,0.2")


def _scheduled(specdecode: Specdecode, *arguments: str) -> list[str]:
    found = _asked(specdecode, *SLOW_DRAFT, "--batch", "1,256", "--shared-prefix", 1, *arguments)
    return [each for each in found["assumptions"] if "numSpeculativeTokensByBatchSize" in each]


def test_draft_model_always_drafts_k_tokens_under_a_schedule(specdecode: Specdecode) -> None:
    [told] = _scheduled(specdecode, "--method", "draft_model", "--engine-version", "0.33")
    # One request: drafting is paid for, and verifying all of it costs next to nothing.
    assert "always drafts 4 tokens" in told
    assert "4 at 1 request" in told
    best = _asked(specdecode, *SLOW_DRAFT, "--batch", "1")["loads"][0]["best_k"]
    assert best < 4, "an engine that is started with fewer saves the drafting, too"


# `specdecode advise` on captures of engines of which everything is known, and on a saved page of metrics.

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


def _asked_captures(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("advise", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_two_captures_give_step_times_and_acceptance(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    speculating, plain = captures
    found = _asked_captures(specdecode, speculating, "--baseline", plain, "--batch", 8)
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


def test_other_k_is_computed_from_the_time_of_a_draft_pass(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    (load,) = _asked_captures(specdecode, captures[0], "--baseline", captures[1], "--batch", 8, "-K", 1)["loads"]
    assert load["step_ms"] == pytest.approx(_target_ms(16) + DRAFT_MS, rel=0.05)
    assert not load["extrapolated"]


def test_arms_of_equal_load_measure_only_the_recorded_k(
    specdecode: Specdecode, captures: tuple[Path, Path], tmp_path: Path
) -> None:
    plain = Truth(None, StepTime(TARGET)).make(tmp_path / "plain", "closed:1,closed:8", 60).folder
    recorded, other = (
        _asked_captures(specdecode, captures[0], "--baseline", plain, "--batch", "8,9", *more)["loads"]
        for more in ((), ("-K", 1))
    )
    assert [each["extrapolated"] for each in recorded] == [False, True]
    assert [each["extrapolated"] for each in other] == [True, True]
    assert all(each["best_k_extrapolated"] for each in recorded if each["best_k"] != len(RATES))


def test_capture_without_a_baseline_gives_only_acceptance(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    found = _asked_captures(specdecode, captures[0])
    assert [each["of_all_drafts"] for each in found["acceptance"]] == pytest.approx(RATES, abs=0.04)
    assert found["loads"] == []
    # vLLM's version is not in these captures' headers.
    assert found["prefix_cache"]["method"] == "eagle3"
    assert found["prefix_cache"]["block_tokens"] == 16
    assert any("--baseline" in each for each in found["assumptions"])


def test_default_loads_are_the_recorded_ones(specdecode: Specdecode, captures: tuple[Path, Path]) -> None:
    batches = [each["batch"] for each in _asked_captures(specdecode, captures[0], "--baseline", captures[1])["loads"]]
    assert batches == sorted(batches)
    assert 8 in batches
    assert max(batches) <= 8


def test_many_recorded_loads_are_thinned_out_between_the_ends() -> None:
    batches = measured_batches(Measured(0, None, shortened=False, step_ms=dict.fromkeys(range(1, 21), 1.0)))
    assert {1, 20} < set(batches)
    assert len(batches) < 12


def test_parallel_drafting_of_a_capture_keeps_the_recorded_step_time(specdecode: Specdecode, tmp_path: Path) -> None:
    engine = Truth(from_rates(RATES), StepTime(TARGET, draft_ms=DRAFT_MS, residuals=NOISE))
    folder = engine.make(tmp_path / "two", "closed:2,closed:8", 60).folder
    asked = (folder, "--target-step-ms", 5, "--batch", "2,8")
    passes, at_once = (_asked_captures(specdecode, *asked, *more)["loads"] for more in ((), ("--parallel-drafting",)))
    # With the K that was recorded a step is the one that was recorded.
    assert [each["step_ms"] for each in at_once] == pytest.approx([each["step_ms"] for each in passes])
    assert at_once[0]["step_ms"] < at_once[1]["step_ms"]
    trace = folder / "trace.jsonl"
    trace.write_text(trace.read_text().replace("eagle3", "dflash", 1))
    assert (
        _asked_captures(specdecode, *asked, "-K", 2)["loads"]
        == _asked_captures(specdecode, *asked, "-K", 2, "--parallel-drafting")["loads"]
    )


def test_prefix_cache_uses_version_and_block_size_of_the_capture() -> None:
    recorded = Measured(3, None, shortened=False, step_ms={}, method="eagle3", version="0.32.0", block_tokens=32)
    found = prefix_cache(None, None, None, 100, recorded)
    assert found is not None
    assert (found.engine_version, found.block_tokens, found.lost_tokens) == ("0.32.0", 32, 32)


def test_saved_metrics_page_gives_the_acceptance(specdecode: Specdecode) -> None:
    drafts, accepted = (
        float(re.findall(rf"^vllm:spec_decode_num_{name}_total\{{.*?\}} (\S+)$", PAGE.read_text(), re.MULTILINE)[0])
        for name in ("drafts", "accepted_tokens")
    )
    found = _asked_captures(specdecode, "--metrics", PAGE, *CONSTANT)
    assert found["expected_tokens"] == pytest.approx(1 + accepted / drafts)
    assert found["loads"][0]["speed_up"] == pytest.approx(1 + accepted / drafts)


def test_metrics_page_with_short_drafts_gives_a_note(specdecode: Specdecode, tmp_path: Path) -> None:
    note = "some drafts were shorter than K: the missing tokens count as rejected"
    assert note not in _asked_captures(specdecode, "--metrics", PAGE)["assumptions"]
    shorter = re.sub(r"(num_draft_tokens_total\{.*\}) \S+", r"\1 2000.0", PAGE.read_text())
    (tmp_path / "page").write_text(shorter)
    assert note in _asked_captures(specdecode, "--metrics", tmp_path / "page")["assumptions"]


def test_unusable_input_is_refused_with_a_fix(
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
        ((speculating, "--baseline", speculating), "speculates with K 4"),
        ((plain, "--baseline", plain, "-K", 3), "does not speculate"),
        ((plain,), "give K"),
        ((speculating, "--baseline", short.folder), "record a steadier load"),
        ((speculating, "--acceptance", "0.5"), "give one of them"),
        ((speculating, "--draft-step-ms", "5"), "give one of them"),
        (("-K", 2, "--baseline", plain, "--target-step-ms", "5"), "give one of them"),
        (("-K", 2, "--baseline", plain), "--draft-step-ms: is missing"),
        (("--metrics", tmp_path / "page"), "--metrics"),
        (("--metrics", tmp_path / "gone"), "gone"),
    ):
        result = specdecode("advise", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert said in " ".join(result.stderr.replace("│", " ").split()), (arguments, result.stderr)
        assert "Traceback" not in result.output
