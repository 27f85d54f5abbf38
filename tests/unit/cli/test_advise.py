"""`specdecode advise`: the arithmetic of speculation for given numbers."""

import json
import re
from typing import Any

import pytest

from specdecode_operator.cli.advise.answer import AdviseOutput
from tests.unit.cli.conftest import Specdecode

MEASURED = ("--target-step-ms", "1:20,64:24,512:60", "--draft-step-ms", "1.5")


def _asked(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("advise", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    AdviseOutput.model_validate(found)
    return found


def test_acceptance_by_position_gives_tokens_a_step(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6,0.45")
    assert found["num_speculative_tokens"] == 3
    assert found["expected_tokens"] == pytest.approx(2.85)
    assert found["acceptance_rate"] == pytest.approx(1.85 / 3)
    assert [each["conditional"] for each in found["acceptance"]] == pytest.approx([0.8, 0.75, 0.75])
    assert found["loads"] == []
    assert found["assumptions"] == [], "step times are asked for where nothing can be answered without them"


def test_positions_that_nobody_gave_are_said_to_be_assumed(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6", "-K", 3)
    assert [each["known"] for each in found["acceptance"]] == [True, True, False]


def test_both_ways_of_counting_and_the_rate_say_the_same(specdecode: Specdecode) -> None:
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
    assert 64 < found["crossover_batch"] < 512


def test_a_full_kv_cache_is_a_load_of_its_own_for_each_context(specdecode: Specdecode) -> None:
    room = ("--kv-tokens", 238_896, "--kv-tokens-alone", 383_600, "--context", "2000,8000")
    found = _asked(specdecode, "-K", 3, "--target-step-ms", 20, *room)
    full = [each for each in found["loads"] if each["full_cache"]]
    assert [each["batch"] for each in full] == pytest.approx([119.448, 29.862])
    # A step that takes equally long: the share of the cache alone.
    assert full[0]["break_even_acceptance"] == pytest.approx((383_600 / 238_896 - 1) / 3)
    assert full[0]["speed_up"] is None


def test_a_verified_step_says_what_rows_cost(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "-K", 3, "--target-step-ms", 20, "--verify-step-ms", 26, "--batch", "8,64")
    assert [each["step_ms"] for each in found["loads"]] == pytest.approx([26, 20 + 6 * 31 * 8 / 24])


def test_context_that_is_read_makes_steps_longer(specdecode: Specdecode) -> None:
    given = ("-K", 2, "--target-step-ms", 20, "--draft-step-ms", 1, "--batch", 10, "--context", "1000,100000")
    short, long = _asked(specdecode, *given, "--target-context-ms", 0.01, "--draft-context-ms", 0.02)["loads"]
    assert (short["plain_step_ms"], long["plain_step_ms"]) == pytest.approx((20.1, 30))
    assert long["step_ms"] == pytest.approx(30 + 2 * (1 + 20))
    assert long["break_even_acceptance"] > short["break_even_acceptance"]


def test_steps_that_nobody_measured_are_said(specdecode: Specdecode) -> None:
    within = _asked(specdecode, "-K", 1, *MEASURED, "--batch", "1,256")
    beyond = _asked(specdecode, "-K", 1, *MEASURED, "--batch", "1,257")
    assert not any("were asked for" in each for each in within["assumptions"])
    assert any("steps of 514 tokens were asked for" in each for each in beyond["assumptions"])
    drafted = _asked(specdecode, "-K", 2, "--target-step-ms", 20, "--draft-step-ms", "7:1,8:1.2", "--batch", "8,40")
    assert any("passes of 40 tokens were asked for, the draft's times" in each for each in drafted["assumptions"])


def test_a_method_says_what_it_costs_of_the_prefix_cache(specdecode: Specdecode) -> None:
    asked = ("-K", 3, "--shared-prefix", 4000, "--method")
    dropped = _asked(specdecode, *asked, "eagle3", "--engine-version", "0.32", "--block-size", 32)["prefix_cache"]
    assert (dropped["mean_lost_tokens"], dropped["found_tokens"], dropped["lost_tokens"]) == (32, 3968, 32)
    ahead = _asked(specdecode, *asked, "eagle3", "--engine-version", "0.33")["prefix_cache"]
    assert (ahead["mean_lost_tokens"], ahead["found_tokens"], ahead["lost_tokens"]) == (1, 3984, 16)
    text = specdecode("advise", *asked, "eagle3", "--engine-version", "0.32").stdout
    assert "of 4,000 that prompts share 16 are computed again (0.4 %)" in text
    assert "0.33: each prefix loses 1 token on average" in specdecode("advise", *asked, "eagle3").stdout
    chained = _asked(specdecode, *asked, "mtp", "--engine-version", "0.33", "--mtp-layers", 2)["prefix_cache"]
    assert (chained["mean_lost_tokens"], chained["lost_tokens"]) == (3, 16)
    assert _asked(specdecode, *asked, "mtp", "--engine-version", "0.33")["prefix_cache"]["mean_lost_tokens"] == 1
    assert "prefix cache, ngram in vLLM" in specdecode("advise", *asked, "ngram").stdout


def test_mbsu_takes_the_ratio_of_sizes(specdecode: Specdecode) -> None:
    found = _asked(specdecode, "--acceptance", "0.8,0.6,0.45", "--size-ratio", 0.1)
    assert found["memory_bound_speed_up"] == pytest.approx(2.85 / 1.3)


@pytest.mark.parametrize("said", [("--parallel-drafting",), ("--method", "dflash")])
def test_a_draft_that_proposes_all_in_one_pass_is_read_and_waited_for_once(
    specdecode: Specdecode, said: tuple[str, ...]
) -> None:
    given = ("--acceptance", "0.8,0.6,0.45", "--size-ratio", 0.1, "--target-step-ms", 20, "--draft-step-ms", 2)
    found = _asked(specdecode, *given, *said)
    assert found["memory_bound_speed_up"] == pytest.approx(2.85 / 1.1)
    assert found["loads"][0]["step_ms"] == pytest.approx(22)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("-K", 2), "give --baseline, or --target-step-ms"),
        (("-K", 2, "--target-step-ms", 20, "--verify-step-ms", 10), "times of the target fall"),
        (("-K", 2, "--target-step-ms", 20, "--context", 4000), "give --target-context-ms"),
        (("-K", 2, "--method", "eagle3", "--engine-version", "0.34"), "vLLM 0.34 is newer than all that were read"),
    ],
)
def test_what_makes_figures_too_good_is_said(specdecode: Specdecode, arguments: tuple[object, ...], note: str) -> None:
    assert any(note in each for each in _asked(specdecode, *arguments)["assumptions"])
    usual = _asked(specdecode, "-K", 2, "--target-step-ms", 20, "--verify-step-ms", 21, "--method", "eagle3")
    assert not any(note in each for each in usual["assumptions"])


def test_the_load_from_which_it_no_longer_pays_is_told_with_its_context(specdecode: Specdecode) -> None:
    given = ("--acceptance", "0.8,0.6", *MEASURED, "--context", "1000,32000", "--kv-tokens", 90_000)
    text = specdecode("advise", *given, "--kv-tokens-alone", 90_000, "--target-context-ms", 0.01).stdout
    assert re.search(r"K 2 no longer pays from \d+ requests of 1,000 tokens on while the KV cache has room", text)
    never = specdecode("advise", "--acceptance", "0,0", "--target-step-ms", 20, "--draft-step-ms", 3).stdout
    assert "K 2 pays for no number of requests" in never
    dear = specdecode("advise", "-K", 2, "--target-step-ms", 20, "--draft-step-ms", 30).stdout
    assert "> 100 %" in dear, "no draft is good enough, which is not that none is needed"


def test_the_table_has_the_same_figures_and_says_what_it_takes_for_granted(specdecode: Specdecode) -> None:
    room = ("--context", 2000, "--kv-tokens", 238_896, "--kv-tokens-alone", 383_600)
    text = specdecode("advise", "--acceptance", "0.8,0.6", "-K", 3, *MEASURED, *room, "--size-ratio", 0.1).stdout
    assert "K 3: 2.85 tokens a step expected, acceptance 62 %" in text
    assert "(assumed)" in text
    assert "119.4 of 191.8 (full)" in text
    assert "MBSU: 2.19x" in text
    assert "no longer pays from" in text
    assert "note: acceptance is the same at every load" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--num-speculative-tokens"),
        (("--acceptance", "0.5,0.6"), "0.6 follows 0.5"),
        (("--acceptance", "0.5,x"), "x: is no number"),
        (("--acceptance", "0.5,nan"), "nan: is no number"),
        (("--acceptance", ",".join(["0"] * 65)), "65 numbers"),
        (("--acceptance", ",".join(["0"] * 33)), "33 positions"),
        (("--acceptance", "0.5", "--acceptance-rate", "0.5"), "give one of them"),
        (("--acceptance-rate", "1.5", "-K", 2), "from 0 to 1"),
        (("--acceptance-rate", "nan", "-K", 2), "from 0 to 1"),
        (("-K", 33), "33"),
        (("-K", 0), "0"),
        (("-K", 2, "--target-step-ms", "0"), "takes time"),
        (("-K", 2, "--target-step-ms", "5e-324", "--verify-step-ms", "1e7"), "takes time"),
        (("-K", 2, "--target-step-ms", "2:1,1:2"), "rising"),
        (("-K", 2, "--target-step-ms", "1:1,2"), "TOKENS:MS"),
        (("-K", 2, "--target-step-ms", "1:1,2:2", "--verify-step-ms", 1), "leave it out"),
        (("-K", 2, "--target-step-ms", "1", "--target-context-ms", "-1"), "milliseconds"),
        (("-K", 2, "--target-step-ms", "1", "--target-context-ms", "inf"), "milliseconds"),
        (("-K", 2, "--batch", "1.5"), "whole numbers"),
        (("-K", 2, "--batch", "1e300"), "whole numbers"),
        (("--acceptance", "0.5", "--size-ratio", "nan"), "from 0 to 100"),
        (("--acceptance", "0.5", "--size-ratio", "-1"), "from 0 to 100"),
        (("-K", 2, "--shared-prefix", 5), "--method"),
        (("-K", 2, "--method", "eagle3", "--mtp-layers", 3), "--mtp-layers"),
        (("-K", 2, "--engine-version", "0.33"), "--method"),
        (("-K", 2, "--block-size", 32), "--method"),
        (("-K", 2, "--verify-step-ms", 20), "--target-step-ms: is missing"),
        (("-K", 2, "--method", "magic"), "is no method"),
        (("-K", 2, "--method", "eagle", "--engine-version", "new"), "write it as"),
        (("-K", 2, "--method", "eagle", "--engine-version", "0.20"), "was not read for this"),
        (("-K", 2, "--kv-tokens", 5), "--kv-tokens-alone"),
        (("-K", 2, "--kv-tokens", 5, "--kv-tokens-alone", 6), "--context"),
        (("-K", 2, "--kv-tokens", 7, "--kv-tokens-alone", 6, "--context", 2), "no more with it"),
        (("-K", 2, "--kv-tokens", 5, "--kv-tokens-alone", 6, "--context", 9), "no more than the cache"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_option(
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


def test_a_draft_model_drafts_in_full_whatever_a_schedule_asks_for(specdecode: Specdecode) -> None:
    [told] = _scheduled(specdecode, "--method", "draft_model", "--engine-version", "0.33")
    # One request: drafting is paid for, and verifying all of it costs next to nothing.
    assert "still drafts 4 tokens" in told
    assert "4 of 1 requests" in told
    best = _asked(specdecode, *SLOW_DRAFT, "--batch", "1")["loads"][0]["best_k"]
    assert best < 4, "an engine that is started with fewer saves the drafting, too"


@pytest.mark.parametrize(
    "arguments",
    [("--method", "eagle3", "--engine-version", "0.33"), ("--method", "draft_model", "--engine-version", "0.30")],
    ids=["a head", "V1"],
)
def test_drafts_that_get_shorter_need_no_such_word(specdecode: Specdecode, arguments: tuple[str, ...]) -> None:
    assert _scheduled(specdecode, *arguments) == []
