"""Whether an arm answers what the baseline answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode_operator.capture.comparison.compare_arms import CLOSE, compare_capture, compare_outputs
from specdecode_operator.capture.files.formats import Checks, GreedyAnswer, GreedyCheck, ParsingCheck
from tests.support.compared_captures import PLAIN, SPECULATING, MadeCapture


def answer(tokens: Sequence[int], margin: float | None = 2.0, prompt: str = "a") -> GreedyAnswer:
    return GreedyAnswer(
        prompt_sha256=prompt * 64, prompt_tokens=3, tokens=list(tokens), top2_margin=[margin] * len(tokens)
    )


def checks(*answers: GreedyAnswer, structured: tuple[int, int] = (8, 8), tools: tuple[int, int] = (0, 0)) -> Checks:
    return Checks(
        greedy=GreedyCheck(answers=list(answers)),
        structured=ParsingCheck(asked=structured[0], parsed=structured[1]),
        tool_calls=ParsingCheck(asked=tools[0], parsed=tools[1]),
    )


class TestGreedy:
    def test_the_same_tokens_are_equal(self) -> None:
        found = compare_outputs(checks(answer([1, 2])), checks(answer([1, 2], margin=0.0)), None)
        assert (found.outputs, found.prompts, found.equal, found.first_difference) == ("Equal", 1, 1, None)

    @pytest.mark.parametrize(
        ("margin", "outputs"), [(CLOSE, "Explained"), (CLOSE * 1.01, "Different"), (None, "Different")]
    )
    def test_another_token_is_explained_where_two_were_about_as_likely(self, margin: float, outputs: str) -> None:
        found = compare_outputs(checks(answer([1, 2, 3], margin)), checks(answer([1, 9, 3], margin)), None)
        assert found.outputs == outputs
        assert found.first_difference is not None
        assert (found.first_difference.position, found.first_difference.baseline_margin) == (1, margin)

    def test_an_answer_that_ends_earlier_differs_where_it_ends(self) -> None:
        found = compare_outputs(checks(answer([1, 2, 3])), checks(answer([1, 2])), None)
        assert found.outputs == "Different"
        assert found.first_difference is not None
        assert found.first_difference.position == 2

    def test_one_that_is_not_explained_outweighs_those_that_are(self) -> None:
        baseline = checks(answer([1, 2], 0.1), answer([1, 2], 5.0, "b"))
        found = compare_outputs(baseline, checks(answer([1, 3]), answer([1, 3], prompt="b")), None)
        assert (found.outputs, found.explained, found.different) == ("Different", 1, 1)
        assert found.first_difference is not None
        assert found.first_difference.prompt_sha256 == "b" * 64

    def test_prompts_that_only_one_arm_answered_say_nothing(self) -> None:
        found = compare_outputs(checks(answer([1])), checks(answer([1], prompt="b")), None)
        assert (found.outputs, found.prompts) == ("NotChecked", 0)

    def test_answers_without_a_token_show_nothing_and_one_without_a_token_differs(self) -> None:
        silent = checks(answer([]), answer([], prompt="b"))
        found = compare_outputs(silent, silent, None)
        assert (found.outputs, found.prompts) == ("NotChecked", 0)
        assert found.not_measured[0].startswith("greedy outputs were not checked: no prompt has an answer with a token")
        assert compare_outputs(checks(answer([1, 2])), silent, None).outputs == "Different"

    def test_what_may_answer_otherwise_is_never_called_equal(self) -> None:
        assert compare_outputs(checks(answer([1])), checks(answer([1])), "fly").outputs == "Lossy"

    def test_without_checks_that_is_said(self) -> None:
        found = compare_outputs(checks(answer([1])), None, None)
        assert found.outputs == "NotChecked"
        assert found.not_measured == ["outputs were not checked: it has no checks.json"]


class TestParsing:
    @pytest.mark.parametrize(
        ("arm", "baseline", "less"),
        # Fisher's exact test, one-sided: 0.10, 0.038, 0.5, 1
        [((8, 5), (8, 8), False), ((8, 4), (8, 8), True), ((8, 7), (8, 8), False), ((8, 8), (8, 2), False)],
    )
    def test_fails_where_chance_explains_it_no_more(
        self, arm: tuple[int, int], baseline: tuple[int, int], less: bool
    ) -> None:
        for name in ("structured", "tools"):
            found = compare_outputs(checks(**{name: baseline}), checks(**{name: arm}), None)
            assert found.parses_less is less

    def test_shares_are_of_the_arm_and_the_baseline(self) -> None:
        found = compare_outputs(checks(structured=(8, 8)), checks(structured=(8, 2)), None)
        assert (found.structured, found.tool_calls) == ((0.25, 1.0), None)

    def test_more_parsed_than_asked_counts_as_all(self) -> None:
        assert compare_outputs(checks(structured=(8, 8)), checks(structured=(8, 99)), None).structured == (1.0, 1.0)


class TestVerdict:
    def test_an_arm_that_answers_otherwise_is_incorrect_however_fast(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": replace(SPECULATING, greedy=(0, 1, 7))})
        arm = compare_capture(made.make(tmp_path)).arm("drafted")
        assert arm.verdict == "Incorrect"
        assert arm.message.startswith(
            "1 of 1 greedy answers differ from the baseline's, one at token 3, where its two likeliest were "
            "1.5 apart; goodput +"
        )

    def test_an_arm_whose_answers_parse_less_is_incorrect(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": replace(SPECULATING, parsed=2)})
        arm = compare_capture(made.make(tmp_path)).arm("drafted")
        assert arm.verdict == "Incorrect"
        assert arm.message.startswith(
            "25 % of its structured answers can be parsed, 100 % of the baseline's; goodput +"
        )

    def test_a_lossy_arm_is_flagged_and_has_its_verdict(self, tmp_path: Path) -> None:
        lossy = replace(SPECULATING, lossy="rejection_sample_method fly", greedy=(5,))
        found = compare_capture(MadeCapture(arms={"plain": PLAIN, "fly": lossy}).make(tmp_path))
        arm = found.arm("fly")
        assert (arm.verdict, arm.outputs.outputs if arm.outputs else "") == ("Pays", "Lossy")
        assert arm.message.endswith("it may answer otherwise by its settings")
        assert any("rejection_sample_method fly" in note for note in found.notes)
