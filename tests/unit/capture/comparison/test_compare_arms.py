"""Comparison of arms: verdicts, sentences and the comparison file."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from typer.testing import CliRunner

from specdecode_operator.api.capture_status import ArmVerdict, ComparisonStatus
from specdecode_operator.capture.comparison import comparison_file
from specdecode_operator.capture.comparison.arm_verdict import (
    arm_verdict,
    comparison_status,
    crossover,
    sentence,
)
from specdecode_operator.capture.comparison.client_requests import MOST_REQUESTS
from specdecode_operator.capture.comparison.compare_arms import compare_capture, compare_outputs
from specdecode_operator.capture.comparison.comparison_file import Comparison, Load, LoadVerdict
from specdecode_operator.capture.files.formats import CaptureError, Checks, GreedyAnswer, GreedyCheck, ParsingCheck
from specdecode_operator.capture.trace_reader import RecordingError, find_trace
from specdecode_operator.cli.main import app
from specdecode_operator.cli.schema import Printed, schema_text
from specdecode_operator.deployment.canaries import CLOSE_NATS
from tests.support.compared_captures import (
    PLAIN,
    RATES,
    SPECULATING,
    MadeArm,
    MadeCapture,
    of_equal_arms,
    renew,
    rewrite,
)

LOADS = MadeCapture(arrivals="closed:2,closed:24", requests=320, curve=((1, 10.0), (16, 11.0), (128, 60.0)))
"""Few requests, where drafts are cheap, and as many as make each token cost."""

DEAR = replace(SPECULATING, rates=(0.5, 0.2, 0.1, 0.05), draft_ms=1.0)


@pytest.fixture(scope="module")
def pays(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare_capture(MadeCapture(requests=64).make(tmp_path_factory.mktemp("pays")), price_per_gpu_hour=3.6)


class TestVerdict:
    def test_faster_arm_pays_and_message_has_its_interval(self, pays: Comparison) -> None:
        arm = pays.arm("drafted")
        assert arm.verdict == "Pays"
        compared = arm.loads[0].compared
        assert compared is not None
        assert compared.low is not None
        assert compared.ratio is not None
        assert 1 < compared.low < compared.ratio < (compared.high or 0)
        assert f"{100 * (compared.low - 1):+.3g} % to" in arm.message
        assert "(95 %:" in arm.message

    def test_slower_arm_does_not_pay(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "dear": MadeArm(rates=(0.1, 0.01), draft_ms=2.0)})
        assert compare_capture(made.make(tmp_path)).arm("dear").verdict == "DoesNotPay"

    def test_equal_arms_are_inconclusive(self, tmp_path: Path) -> None:
        found = compare_capture(of_equal_arms().make(tmp_path))
        assert found.arm("other").verdict == "Inconclusive"
        assert any("A/A" in note for note in found.notes)

    def test_message_names_load_up_to_which_arm_pays(self, tmp_path: Path) -> None:
        made = replace(LOADS, arms={"plain": PLAIN, "dear": DEAR})
        found = compare_capture(made.make(tmp_path)).arm("dear")
        assert found.verdict == "DependsOnLoad"
        assert found.crossover_running is not None
        few, many = (each.running or 0 for each in compare_capture(tmp_path).arms[0].loads)
        assert few < found.crossover_running < many
        assert f"pays off up to about {found.crossover_running:g} running requests" in found.message

    def test_difference_within_start_effect_is_inconclusive(self, tmp_path: Path) -> None:
        """Each arm's two starts lie 4 % apart; the blocks of either would swear that the arms differ."""
        made = of_equal_arms(start_effect=0.03, seed=11, noise=0.02)
        compared = compare_capture(made.make(tmp_path)).arm("other").loads[0].compared
        assert compared is not None
        assert compared.verdict == "Inconclusive"
        assert (compared.blocks_low or 0) > 1 or (compared.blocks_high or 2) < 1
        assert compared.low == min(compared.blocks_low or 0, compared.starts_low or 0)
        assert compared.high == max(compared.blocks_high or 0, compared.starts_high or 0)

    def test_missing_repetition_makes_arm_inconclusive(self, tmp_path: Path) -> None:
        made = MadeCapture(repetitions=3)
        for name in made.arms:
            for repetition in (1, 2):
                made.make_one(tmp_path, name, repetition)
        found = compare_capture(tmp_path)
        assert found.arm("drafted").verdict == "Inconclusive"
        assert "1 of 3 repetitions are missing" in found.arm("drafted").message
        assert "arm drafted: 1 of 3 repetitions are missing: no verdict on it" in found.notes

    def test_single_repetition_is_inconclusive_even_if_blocks_differ(self, tmp_path: Path) -> None:
        arm = compare_capture(MadeCapture(repetitions=1).make(tmp_path)).arm("drafted")
        assert arm.verdict == "Inconclusive"
        assert arm.message.startswith("no verdict with one repetition")
        assert "(one start of each engine gives no interval)" in arm.message
        assert "too few blocks" not in arm.message
        compared = arm.loads[0].compared
        assert compared is not None
        assert (compared.blocks_low or 0) > 1

    def test_arm_without_files_is_reported_and_others_are_compared(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": SPECULATING, "lost": SPECULATING})
        for name in ("plain", "drafted"):
            for repetition in (1, 2):
                made.make_one(tmp_path, name, repetition)
        found = compare_capture(tmp_path)
        assert found.arm("drafted").verdict == "Pays"
        assert found.arm("lost").verdict == "Inconclusive"
        assert "all of its repetitions are missing" in found.arm("lost").message

    def test_poisson_load_without_slo_has_latencies_but_no_verdict(self, tmp_path: Path) -> None:
        found = compare_capture(MadeCapture(arrivals="poisson:20").make(tmp_path)).arm("drafted")
        (load,) = found.loads
        assert found.verdict == "Inconclusive"
        assert load.compared is None
        assert load.tpot_ms is not None
        assert "slo" in (load.not_compared or "")

    def test_poisson_load_with_slo_is_compared_by_goodput(self, tmp_path: Path) -> None:
        made = MadeCapture(arrivals="poisson:20", requests=160, slo={"tpotMs": 8})
        plain, drafted = compare_capture(made.make(tmp_path)).arms
        assert plain.loads[0].within_slo == 0
        assert plain.loads[0].goodput == 0
        assert drafted.loads[0].within_slo > 0
        assert drafted.loads[0].throughput == pytest.approx(plain.loads[0].throughput or 0, rel=0.1)
        assert drafted.verdict == "Pays"


class TestFigures:
    def test_warmup_requests_are_excluded(self, tmp_path: Path) -> None:
        without = compare_capture(MadeCapture().make(tmp_path))
        for place in tmp_path.glob("*/*"):
            path = place / "client.jsonl"
            first = json.loads(path.read_text().splitlines()[0])
            with path.open("a") as stream:
                stream.write(f"{json.dumps({**first, 'warmup': True, 'sent_ms': 0.0, 'finished_ms': 1e6})}\n")
            renew(place)
        assert compare_capture(tmp_path).arms == without.arms

    def test_acceptance_matches_engine_rates(self, pays: Comparison) -> None:
        drafting = pays.arm("drafted").drafting
        assert drafting is not None
        assert drafting.per_position == pytest.approx(SPECULATING.rates, abs=0.03)
        assert drafting.block_efficiency == pytest.approx(1 + sum(SPECULATING.rates), abs=0.08)
        assert drafting.largest_block_efficiency == 5
        assert drafting.memory_bound_speed_up == pytest.approx(drafting.block_efficiency / (4 * 0.05 + 1), rel=1e-3)
        assert sum(drafting.per_request.histogram if drafting.per_request else []) == 2 * 64
        assert pays.arm("plain").drafting is None

    def test_acceptance_by_chunks_agrees_with_the_counters(self, pays: Comparison) -> None:
        drafting = pays.arm("drafted").drafting
        assert drafting is not None
        (of_all,) = drafting.by_context.values()
        assert of_all.acceptance == pytest.approx(drafting.acceptance, abs=0.03)
        assert drafting.by_temperature.keys() == {"not given"}

    def test_tokens_per_step_of_two_drafts_are_compared_on_the_same_prompts(self, tmp_path: Path) -> None:
        before, after = (0.4, 0.2, 0.1, 0.05), RATES
        made = MadeCapture(arms={"old": MadeArm(rates=before), "new": MadeArm(rates=after, slower=3.0)})
        found = compare_capture(made.make(tmp_path)).arm("new")
        steps = found.tokens_per_step
        assert steps is not None
        assert found.verdict == "DoesNotPay", "because its steps are made slow, which tokens per step do not see"
        assert steps.baseline == pytest.approx(1 + sum(before), abs=0.1)
        assert steps.arm == pytest.approx(1 + sum(after), abs=0.15)
        true_ratio = (1 + sum(after)) / (1 + sum(before))
        assert (steps.low or 0) < true_ratio < (steps.high or 0)
        assert (steps.high or 0) - (steps.low or 0) < 0.4
        assert (steps.requests, steps.step_cost) == (2 * 64, "Equal")

    @pytest.mark.parametrize(
        ("other", "cost"),
        [
            (replace(SPECULATING, rates=RATES[:3]), "Unknown"),
            (replace(SPECULATING, plan={"perGpu": {"draftWeightsBytes": 900}}), "Higher"),
            (replace(SPECULATING, plan={"perGpu": {"draftWeightsBytes": 700}}), "Lower"),
            (replace(SPECULATING, plan={"perGpu": {}}), "Unknown"),
            (replace(SPECULATING, plan={"perGpu": {"draftWeightsBytes": True}}), "Unknown"),
            (replace(SPECULATING, plan={"kvCacheDtype": "fp8"}), "Unknown"),
        ],
        ids=["another K", "larger", "smaller", "unknown size", "invalid size", "another precision"],
    )
    def test_cost_of_a_step_goes_by_the_size_of_the_draft(self, tmp_path: Path, other: MadeArm, cost: str) -> None:
        baseline = replace(SPECULATING, plan={"kvCacheDtype": "auto"} if "kvCacheDtype" in other.plan else {})
        made = MadeCapture(arms={"old": baseline, "new": other}, requests=16, repetitions=1)
        steps = compare_capture(made.make(tmp_path)).arm("new").tokens_per_step
        assert steps is not None
        assert steps.step_cost == cost

    def test_tokens_per_step_have_no_interval_with_few_prompts_and_need_two_drafts(self, tmp_path: Path) -> None:
        made = MadeCapture(
            arms={"old": SPECULATING, "new": SPECULATING, "none": PLAIN}, requests=5, repetitions=2, arrivals="closed:1"
        )
        found = compare_capture(made.make(tmp_path))
        steps = found.arm("new").tokens_per_step
        assert steps is not None
        assert (steps.low, steps.high) == (None, None)
        assert found.arm("none").tokens_per_step is None
        assert found.arm("old").tokens_per_step is None

    def test_tokens_per_step_leave_out_prompts_that_one_arm_lacks(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"old": SPECULATING, "new": SPECULATING}, requests=66, repetitions=1).make(tmp_path)
        trace = made / "new/1/trace.jsonl"
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        (lost,) = (line for line in lines[1:] if line["request_id"].endswith("-0"))
        lost["request_id"] = "unknown"
        trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        renew(trace.parent)
        steps = compare_capture(made).arm("new").tokens_per_step
        assert steps is not None
        assert steps.requests == 64, "requests 0 and 64 are in one group"

    def test_interval_of_tokens_per_step_holds_equal_drafts_in_nineteen_of_twenty(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"old": SPECULATING, "new": SPECULATING}, requests=64, repetitions=1)
        found = [
            compare_capture(replace(made, seed=seed).make(tmp_path / str(seed))).arm("new").tokens_per_step
            for seed in range(40)
        ]
        held = sum((each.low or 2) <= 1 <= (each.high or 0) for each in found if each)
        assert 35 <= held <= 39

    def test_speculation_overhead_is_extra_step_time_of_drafts(self, pays: Comparison) -> None:
        load = pays.arm("drafted").loads[0]
        # Four drafts of 0.3 ms, and some tokens more to verify, on 10 ms.
        assert load.speculation_overhead == pytest.approx(0.13, abs=0.03)
        assert load.tokens_per_step == pytest.approx(1 + sum(SPECULATING.rates), abs=0.1)

    def test_predicted_ratio_follows_tokens_per_step_and_overhead(self, pays: Comparison) -> None:
        load = pays.arm("drafted").loads[0]
        assert load.compared is not None
        plain = pays.arms[0].loads[0]
        decoding = (load.tokens_per_step or 0) / (1 + (load.speculation_overhead or 0))
        assert load.compared.predicted_ratio == pytest.approx(
            decoding * (load.running or 0) / (plain.running or 1), rel=0.1
        )

    def test_cost_is_derived_from_gpu_seconds_and_price(self, pays: Comparison) -> None:
        load = pays.arm("plain").loads[0]
        assert load.gpu_seconds_per_1000_tokens == pytest.approx(1000 / (load.goodput or 1), rel=1e-3)
        assert load.cost_per_1000_tokens == pytest.approx(load.gpu_seconds_per_1000_tokens / 1000, rel=1e-3)

    def test_prefix_cache_tax_is_cached_tokens_missing_in_arm(self, tmp_path: Path) -> None:
        MadeCapture().make(tmp_path)
        for repetition in ("1", "2"):
            place = tmp_path / "drafted" / repetition
            trace = place / "trace.jsonl"
            lines = [json.loads(line) for line in trace.read_text().splitlines()]
            for line in lines[1:]:
                line["cached_tokens"] = max(0, line["cached_tokens"] - 16)
            trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        plain, drafted = (each.prefix_cache for each in compare_capture(tmp_path).arms)
        assert plain is not None
        assert drafted is not None
        assert drafted.tax_tokens == plain.cached_tokens - drafted.cached_tokens > 1000
        assert drafted.tax_percent == pytest.approx(100 * drafted.tax_tokens / drafted.prompt_tokens, rel=1e-2)


class TestStatus:
    def test_comparison_status_matches_api_schema(self, pays: Comparison) -> None:
        status = ComparisonStatus.model_validate(comparison_status(pays))
        (arm,) = status.arms
        assert (status.baseline, status.level_percent, arm.name, arm.verdict, arm.outputs) == (
            "plain",
            95,
            "drafted",
            "Pays",
            "Equal",
        )
        assert float(arm.loads[0].ratio or 0) > 1
        assert float(arm.loads[0].running) == pytest.approx(3.7, abs=0.3)

    def test_status_has_the_acceptance_of_baseline_and_arm(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"poor": MadeArm(rates=(0.1, 0.01)), "good": MadeArm(rates=(0.9, 0.8))})
        comparison = compare_capture(made.make(tmp_path))
        status = ComparisonStatus.model_validate(comparison_status(comparison))
        found = [status.baseline_acceptance_percent, status.arms[0].acceptance_percent]
        drafting = [each.drafting for each in comparison.arms]
        assert found == [round(100 * each.acceptance) for each in drafting if each is not None]
        assert found[0] < found[1]

    @pytest.mark.parametrize("most_bytes", [3072, 2000, 1200])
    def test_comparison_status_is_cut_to_termination_message_size(self, pays: Comparison, most_bytes: int) -> None:
        baseline, arm = pays.arms
        loads = [msgspec.structs.replace(arm.loads[0], phase=f"load-{number}") for number in range(32)]
        of_baseline = [msgspec.structs.replace(baseline.loads[0], phase=each.phase) for each in loads]
        arms = [
            msgspec.structs.replace(arm, name=f"arm-{number}", loads=loads, message="x" * 1024) for number in range(7)
        ]
        many = msgspec.structs.replace(pays, arms=[msgspec.structs.replace(baseline, loads=of_baseline), *arms])
        status = comparison_status(many, most_bytes)
        assert len(json.dumps(status, separators=(",", ":"))) <= most_bytes
        assert [each["name"] for each in status["arms"]] == [each.name for each in arms]
        ComparisonStatus.model_validate(status)


# Whether an arm answers what the baseline answers.


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
        ("margin", "outputs"), [(CLOSE_NATS, "Explained"), (CLOSE_NATS * 1.01, "Different"), (None, "Different")]
    )
    def test_differing_token_is_explained_by_small_margin(self, margin: float, outputs: str) -> None:
        found = compare_outputs(checks(answer([1, 2, 3], margin)), checks(answer([1, 9, 3], margin)), None)
        assert found.outputs == outputs
        assert found.first_difference is not None
        assert (found.first_difference.position, found.first_difference.baseline_margin) == (1, margin)

    def test_shorter_answer_differs_at_its_end(self) -> None:
        found = compare_outputs(checks(answer([1, 2, 3])), checks(answer([1, 2])), None)
        assert found.outputs == "Different"
        assert found.first_difference is not None
        assert found.first_difference.position == 2

    def test_unexplained_difference_outweighs_explained_ones(self) -> None:
        baseline = checks(answer([1, 2], 0.1), answer([1, 2], 5.0, "b"))
        found = compare_outputs(baseline, checks(answer([1, 3]), answer([1, 3], prompt="b")), None)
        assert (found.outputs, found.explained, found.different) == ("Different", 1, 1)
        assert found.first_difference is not None
        assert found.first_difference.prompt_sha256 == "b" * 64

    def test_prompts_answered_by_one_arm_only_are_not_checked(self) -> None:
        found = compare_outputs(checks(answer([1])), checks(answer([1], prompt="b")), None)
        assert (found.outputs, found.prompts) == ("NotChecked", 0)

    def test_empty_answers_are_not_checked_unless_only_one_arm_is_empty(self) -> None:
        silent = checks(answer([]), answer([], prompt="b"))
        found = compare_outputs(silent, silent, None)
        assert (found.outputs, found.prompts) == ("NotChecked", 0)
        assert found.not_measured[0].startswith("greedy outputs were not checked: no prompt has an answer with a token")
        assert compare_outputs(checks(answer([1, 2])), silent, None).outputs == "Different"

    def test_lossy_arm_is_never_equal(self) -> None:
        assert compare_outputs(checks(answer([1])), checks(answer([1])), "fly").outputs == "Lossy"

    def test_missing_checks_file_is_reported(self) -> None:
        found = compare_outputs(checks(answer([1])), None, None)
        assert found.outputs == "NotChecked"
        assert found.not_measured == ["outputs were not checked: it has no checks.json"]


class TestParsing:
    @pytest.mark.parametrize(
        ("arm", "baseline", "less"),
        # Fisher's exact test, one-sided: 0.10, 0.038, 0.5, 1
        [((8, 5), (8, 8), False), ((8, 4), (8, 8), True), ((8, 7), (8, 8), False), ((8, 8), (8, 2), False)],
    )
    def test_arm_parses_less_if_difference_is_significant(
        self, arm: tuple[int, int], baseline: tuple[int, int], less: bool
    ) -> None:
        for name in ("structured", "tools"):
            found = compare_outputs(checks(**{name: baseline}), checks(**{name: arm}), None)
            assert found.parses_less is less

    def test_parsed_shares_are_those_of_arm_and_baseline(self) -> None:
        found = compare_outputs(checks(structured=(8, 8)), checks(structured=(8, 2)), None)
        assert (found.structured, found.tool_calls) == ((0.25, 1.0), None)


class TestVerdictOfAnswers:
    def test_arm_with_different_greedy_answers_is_incorrect(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": replace(SPECULATING, greedy=(0, 1, 7))})
        arm = compare_capture(made.make(tmp_path)).arm("drafted")
        assert arm.verdict == "Incorrect"
        assert arm.message.startswith(
            "1 of 1 greedy answers differ from the baseline's, one at token 3, where the baseline's "
            "two likeliest tokens were 1.5 apart; goodput +"
        )

    def test_arm_with_fewer_parsable_answers_is_incorrect(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": replace(SPECULATING, parsed=2)})
        arm = compare_capture(made.make(tmp_path)).arm("drafted")
        assert arm.verdict == "Incorrect"
        assert arm.message.startswith(
            "25 % of its structured answers can be parsed, 100 % of the baseline's; goodput +"
        )

    def test_lossy_arm_is_flagged_and_still_gets_its_verdict(self, tmp_path: Path) -> None:
        lossy = replace(SPECULATING, lossy="rejection_sample_method fly", greedy=(5,))
        found = compare_capture(MadeCapture(arms={"plain": PLAIN, "fly": lossy}).make(tmp_path))
        arm = found.arm("fly")
        assert (arm.verdict, arm.outputs.outputs if arm.outputs else "") == ("Pays", "Lossy")
        assert arm.message.endswith("its settings allow different answers")
        assert any("rejection_sample_method fly" in note for note in found.notes)


# Folders that others may have written: refused with a sentence, or said in a note.

Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return MadeCapture(requests=32).make(tmp_path)


def client_lines(folder: Path, change: Callable[[dict[str, Any]], Any], arm: str = "drafted") -> None:
    """Change every line of an arm's client.jsonl, and have its manifest know."""
    for place in sorted((folder / arm).iterdir()):
        path = place / "client.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(change(line) or line)}\n" for line in lines))
        renew(place)


def manifest(change: Callable[[dict[str, Any]], Any], arm: str = "drafted") -> Change:
    return lambda folder: rewrite(folder / arm / "1" / "manifest.json", change)


def everywhere(change: Callable[[dict[str, Any]], Any]) -> Change:
    def in_all(folder: Path) -> None:
        for path in folder.rglob("manifest.json"):
            rewrite(path, change)

    return in_all


def rewrite_steps(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "drafted" / "1" / "step-stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(change(line))}\n" for line in lines))


def torn(folder: Path) -> None:
    path = folder / "drafted" / "2" / "client.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def shorter(folder: Path) -> None:
    path = folder / "drafted" / "2" / "trace.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def cut_gzip(folder: Path) -> None:
    path = folder / "drafted" / "2" / "client.jsonl"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name("client.jsonl.gz").write_bytes(packed[: len(packed) // 2])


def line_of(text: bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / "drafted" / "1" / "client.jsonl"
        path.write_bytes(text + b"\n")
        renew(path.parent)

    return change


def client(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: client_lines(folder, change)


def removed(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.with_name(f"{folder.name}-elsewhere"))

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "no baseline": (removed("plain"), "plain: not found: the other arms are compared with it"),
    "one arm": (removed("drafted"), "has only arm plain"),
    "another workload": (
        manifest(lambda each: each | {"workload": {}}),
        "workloads differ: arms drafted and plain have a different workload",
    ),
    "another seed": (
        manifest(lambda each: each | {"seed": 9}),
        "workloads differ: arms drafted and plain have a different seed",
    ),
    "another capture": (manifest(lambda each: each | {"capture": "b"}), "have a different capture"),
    "other prompts": (
        client(lambda each: each | {"prompt_tokens": each["prompt_tokens"] + 1}),
        "workloads differ: request 0 of phase closed-4 in arm drafted, repetition 1",
    ),
    "other lengths": (client(lambda each: each | {"max_tokens": 7}), "workloads differ: request 0 of phase closed-4"),
    "an arm in the folder of another": (
        lambda folder: (folder / "plain").rename(folder / "x") and (folder / "drafted").rename(folder / "plain"),
        "plain/1: holds repetition 1 of arm drafted: restore the name of the folder",
    ),
    "a repetition in the folder of another": (
        manifest(lambda each: each | {"repetition": 2}),
        "drafted/1: holds repetition 2 of arm drafted",
    ),
    "no experiment": (everywhere(lambda each: each | {"experiment": None}), "holds no capture with arms"),
    "two experiments": (
        manifest(lambda each: each | {"experiment": each["experiment"] | {"repetitions": 5}}),
        "its arms belong to different captures",
    ),
    "a name that leads elsewhere": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["plain", "../../etc"]}}),
        "experiment.arms: ../../etc: is not a valid arm name",
    ),
    "an arm twice": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["plain", "plain"]}}),
        "must name each arm once, baseline first",
    ),
    "a thousand arms": (
        everywhere(lambda each: each | {"experiment": each["experiment"] | {"arms": ["a"] * 1000}}),
        "manifest.json: cannot be read: Expected `array` of length <= 8",
    ),
    "a workload that is none": (
        everywhere(lambda each: each | {"workload": {"phases": [{"name": 5}]}}),
        "manifest.json: workload.phases.0",
    ),
    "a torn line": (torn, "arm drafted, repetition 2: client.jsonl, line 32 cannot be read"),
    "a file that is shorter": (shorter, "arm drafted, repetition 2: trace.jsonl has 32 lines instead of 33"),
    "half a gzip": (cut_gzip, "arm drafted, repetition 2: client.jsonl is cut off or damaged"),
    "no client.jsonl": (removed("drafted/1/client.jsonl"), "repetition 1: client.jsonl not found"),
    "no steps though they were recorded": (removed("drafted/1/step-stats.jsonl"), "step-stats.jsonl not found"),
    "a line that is deep": (line_of(b"[" * 100_000), "client.jsonl, line 1 cannot be read"),
    "no UTF-8": (line_of(b'{"phase": "\xff"}'), "client.jsonl, line 1 cannot be read"),
    "an index that would fill the memory": (client(lambda each: each | {"index": MOST_REQUESTS}), "line 1 cannot be"),
    "engines that would fill the memory": (
        lambda folder: rewrite_steps(folder, lambda each: each | {"engine": 4096}),
        "repetition 1: step-stats.jsonl, line 1 cannot be read",
    ),
    "a negative latency": (client(lambda each: each | {"latency_ms": -1}), "line 1 cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_incomparable_capture_is_refused_with_cause(folder: Path, name: str) -> None:
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises(CaptureError) as refused:
        compare_capture(folder)
    assert message in refused.value.message
    assert refused.value.reason == "NotComparable"
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b"{}", b"\xff\xfe"])
def test_unreadable_manifest_is_refused(folder: Path, text: bytes) -> None:
    (folder / "drafted" / "1" / "manifest.json").write_bytes(text)
    with pytest.raises(CaptureError, match=r"drafted/1/manifest\.json: cannot be read"):
        compare_capture(folder)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot be read: No such file or directory"):
        compare_capture(tmp_path / "none")


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="holds no capture with arms"):
        compare_capture(tmp_path)


class TestNothingAnswered:
    def test_arm_without_answered_requests_is_inconclusive(self, folder: Path) -> None:
        client_lines(
            folder,
            lambda each: (
                {key: each[key] for key in ("id", "phase", "index", "sent_ms", "finished_ms")}
                | {"outcome": "http_rejected", "http_status": 400}
            ),
        )
        arm = compare_capture(folder).arm("drafted")
        assert arm.verdict == "Inconclusive"
        assert "no request of it was answered in arm drafted" in arm.message
        assert arm.loads[0].requests == {"sent": 64, "http_rejected": 64}

    def test_capture_without_requests_is_inconclusive(self, folder: Path) -> None:
        for place in folder.glob("*/*"):
            (place / "client.jsonl").write_bytes(b"")
            renew(place)
        arm = compare_capture(folder).arm("drafted")
        assert (arm.verdict, arm.loads[0].goodput) == ("Inconclusive", None)

    def test_phase_not_reached_by_one_arm_is_not_compared(self, tmp_path: Path) -> None:
        MadeCapture(arrivals="closed:4,closed:8", requests=32).make(tmp_path)
        client_lines(tmp_path, lambda each: {"phase": "closed-4", "index": 0, "outcome": "not_sent"})
        loads = compare_capture(tmp_path).arm("drafted").loads
        assert [each.not_compared is not None for each in loads] == [True, True]


def test_counter_reset_and_backward_timestamp_do_not_change_figures(folder: Path) -> None:
    """A step says what happened in it, so that a reset takes nothing away; a stamp that goes back is left out."""
    path = folder / "drafted" / "1" / "step-stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    whole = compare_capture(folder).arm("drafted")
    lines[50]["ts_ms"] = 0.0
    lines[60]["scheduler"]["prefix_cache_stats"]["reset"] = True
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    again = compare_capture(folder).arm("drafted")
    assert again.drafting is not None
    assert whole.drafting is not None
    assert again.drafting.acceptance == whole.drafting.acceptance
    assert again.loads[0].decode_step_ms == pytest.approx(whole.loads[0].decode_step_ms, rel=0.02)


class TestNotes:
    def test_arms_with_equal_commands_are_noted_as_a_a_test(self, tmp_path: Path) -> None:
        notes = compare_capture(of_equal_arms(requests=16).make(tmp_path)).notes
        assert any(each.startswith("arm other starts the same engine as the baseline: an A/A test") for each in notes)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"gpu_uuids": ["GPU-2"]}, 'GPUs is ["GPU-2"], in the baseline ["GPU-1"]'),
            ({"vllm": "0.32.0"}, "vLLM is 0.32.0, in the baseline 0.33.0"),
            ({"node": "other"}, "node is other, in the baseline node"),
            ({"config": {"async_scheduling": False}}, "async scheduling is off, in the baseline on"),
            (
                {"context": {"command": ["vllm", "--compilation-config", '{"mode": 0}']}},
                'graph mode is {"mode": 0}, in the baseline not known',
            ),
        ],
    )
    def test_notes_name_differences_from_baseline(self, folder: Path, change: dict[str, Any], words: str) -> None:
        manifest(lambda each: each | change)(folder)
        assert any(words in each for each in compare_capture(folder).notes)

    def test_notes_contain_no_escape_sequences(self, folder: Path) -> None:
        manifest(lambda each: each | {"model": "\x1b[2Jtiny"})(folder)
        assert all(each.isprintable() for each in compare_capture(folder).notes)


def test_leftover_folders_are_not_repetitions(folder: Path) -> None:
    (folder / "drafted" / "2.part-123").mkdir()
    (folder / "drafted" / "0").mkdir()
    (folder / ".hidden").mkdir()
    assert replace(MadeCapture()).repetitions == len(compare_capture(folder).arm("drafted").repetitions)


# What loads come to: one verdict, and the load from which an arm stops paying.

P, D, I = "Pays", "DoesNotPay", "Inconclusive"  # noqa: E741


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder: Path = MadeCapture(requests=16).make(tmp_path_factory.mktemp("capture"))
    return compare_capture(folder).arm("drafted").loads[0]


def loads(load: Load, *found: tuple[float, float, str]) -> list[Load]:
    """Make loads of (requests running, ratio, verdict)."""
    compared = load.compared
    assert isinstance(compared, LoadVerdict)
    return [
        msgspec.structs.replace(
            load,
            phase=f"at-{running}",
            running=running,
            compared=msgspec.structs.replace(compared, ratio=ratio, verdict=verdict),
        )
        for running, ratio, verdict in found
    ]


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([P], P),
        ([P, I], P),
        ([I, D], D),
        ([I, I], I),
        ([], I),
        ([P, D], "DependsOnLoad"),
        ([D, I, P], "DependsOnLoad"),
    ],
)
def test_arm_verdict_follows_from_decided_loads(load: Load, verdicts: list[str], verdict: str) -> None:
    assert arm_verdict(loads(load, *((at + 1, 1.0, each) for at, each in enumerate(verdicts))), None) == verdict


@pytest.mark.parametrize(
    ("found", "at"),
    [
        # As far above 1 as below it: in the middle, on a log scale.
        ([(1, 2.0, P), (16, 0.5, D)], 4.0),
        ([(16, 0.5, D), (1, 2.0, P)], 4.0),
        # What is not decided lies between, and on the line.
        ([(1, 2.0, P), (4, 1.0, I), (64, 0.5, D)], 4.0),
        ([(1, 2.0, P), (4, 2.0, P), (9, 0.5, D), (100, 0.1, D)], 6.0),
        ([(1, 2.0, P), (16, 1.5, P)], None),
        ([(1, 0.5, D), (16, 0.4, D)], None),
        # It pays at more load, as adaptive verification does.
        ([(1, 0.5, D), (16, 2.0, P)], None),
        ([(1, 0.5, D), (4, 2.0, P), (16, 0.5, D)], 8.0),
        ([(1, 2.0, P), (16, 0.9, I)], None),
        ([], None),
    ],
)
def test_crossover_is_load_where_ratio_falls_to_one(
    load: Load, found: list[tuple[float, float, str]], at: float | None
) -> None:
    of_arm = loads(load, *found)
    crossing = crossover(of_arm, of_arm)
    assert crossing == (None if at is None else pytest.approx(at, abs=0.06))


def asked(load: Load, ratio: float, low: float, high: float, **others: int | None) -> Load:
    compared = load.compared
    assert compared is not None
    ends = {"low": low, "high": high, "blocks_low": low, "blocks_high": high}
    found = msgspec.structs.replace(
        compared, verdict=I, ratio=ratio, blocks=32, blocks_needed=None, repetitions_needed=None
    )
    return msgspec.structs.replace(load, compared=msgspec.structs.replace(found, **ends, **others))


@pytest.mark.parametrize(
    ("needed", "repetitions", "said"),
    [
        ({"repetitions_needed": 4, "blocks_needed": 60}, 2, "about 4 repetitions instead of 2 would decide it"),
        # Phases are cut into sixteen blocks, however long: more of them are repetitions, or longer phases.
        ({"repetitions_needed": 2, "blocks_needed": 100}, 2, "about 3.2 times as many requests would decide it"),
        (
            {"repetitions_needed": 3, "blocks_needed": 96},
            2,
            "about 3 repetitions instead of 2 with 2 times as many requests would decide it",
        ),
        # Enough of both as measured, and undecided all the same.
        ({"repetitions_needed": 2, "blocks_needed": 11}, 2, "about 3 repetitions instead of 2 would decide it"),
        ({}, 2, "more than 20 repetitions, or many times as many requests, would be needed to decide"),
    ],
)
def test_inconclusive_message_advises_repetitions_or_requests(
    load: Load, needed: dict[str, int], repetitions: int, said: str
) -> None:
    of_arm = [asked(load, 1.04, 0.95, 1.1, **needed)]
    assert said in sentence(ArmVerdict.INCONCLUSIVE, of_arm, of_arm, None, None, 0.95, repetitions, None)


def test_more_repetitions_are_advised_only_for_wide_intervals(load: Load) -> None:
    narrow, wide = [asked(load, 1.004, 0.99, 1.02)], [asked(load, 1.004, 0.8, 1.3)]
    said = [sentence(ArmVerdict.INCONCLUSIVE, each, each, None, None, 0.95, 2, None) for each in (narrow, wide)]
    assert "more repetitions" not in said[0]
    assert "intervals are wide: more repetitions narrow them" in said[1]


# Comparisons whose phases, or whose arms, ask something of their own: sweeps, and precisions before and after.

SWEEP = MadeCapture(arrivals="closed:2,closed:24", requests=320, curve=((1, 10.0), (16, 11.0), (128, 60.0)))
BF16 = {"targetQuantization": "BF16", "kvCacheDtype": "auto"}


def test_sweep_phases_are_named_and_have_no_crossover(tmp_path: Path) -> None:
    """The same pair without temperatures turns with load, and says where: test_compare."""
    made = replace(SWEEP, arms={"plain": PLAIN, "dear": DEAR}, temperatures=("0.0", "1.0"))
    found = compare_capture(made.make(tmp_path)).arm("dear")
    assert [load.asks for load in found.loads] == ["temperature 0.0", "temperature 1.0"]
    assert found.verdict == "DependsOnLoad"
    assert found.crossover_running is None
    assert "in closed-2" in found.message
    assert "in closed-24" in found.message
    assert "running" not in found.message


def quantized(rates: tuple[float, ...], plan: dict[str, str], k: int = 4) -> MadeCapture:
    """A capture before and after another precision."""
    before = replace(SPECULATING, plan=BF16)
    return MadeCapture(arms={"bf16": before, "fp8": replace(SPECULATING, rates=rates[:k], plan=BF16 | plan)})


@pytest.mark.parametrize(
    ("rates", "plan", "said"),
    [
        ((0.7, 0.5, 0.32, 0.2), {"targetQuantization": "FP8"}, "points, more than 5, shows that the draft no"),
        (RATES, {"targetQuantization": "FP8"}, "the loss is at most 5 points, so the draft still fits"),
        (RATES, {"kvCacheDtype": "fp8"}, "its KV cache is in fp8, the baseline's in auto: the loss is at most 5"),
    ],
)
def test_quantized_arm_is_lossy_and_acceptance_loss_is_noted(
    tmp_path: Path, rates: tuple[float, ...], plan: dict[str, str], said: str
) -> None:
    found = compare_capture(quantized(rates, plan).make(tmp_path))
    (note,) = (each for each in found.notes if "acceptance is" in each)
    assert note.startswith("arm fp8: acceptance is ")
    assert said in note
    arm = found.arm("fp8")
    assert arm.outputs is not None
    assert arm.outputs.outputs == "Lossy"
    assert arm.lossy is not None
    assert arm.lossy in next(each for each in found.notes if "may answer otherwise" in each)


def test_quantized_arm_with_different_answers_still_pays(tmp_path: Path) -> None:
    """Whoever quantizes asked for other answers: that is told, and no reason to withhold the verdict."""
    after = replace(SPECULATING, plan=BF16 | {"targetQuantization": "FP8"}, slower=0.7, greedy=(7, 7))
    made = MadeCapture(arms={"bf16": replace(SPECULATING, plan=BF16), "fp8": after})
    assert compare_capture(made.make(tmp_path)).arm("fp8").verdict == "Pays"


# docs/reference/comparison.md names every field of comparison.json.

DOCUMENT = Path(__file__).parents[4] / "docs/reference/comparison.md"
SECTIONS: dict[str, type[Struct]] = {
    "Top": comparison_file.Comparison,
    "Arm": comparison_file.Arm,
    "Engine": comparison_file.Engine,
    "Load": comparison_file.Load,
    "Compared": comparison_file.LoadVerdict,
    "Drafting": comparison_file.Drafting,
    "Acceptance by chunks": comparison_file.AcceptanceOf,
    "Per request": comparison_file.PerRequest,
    "Prefix cache": comparison_file.PrefixCache,
    "KV cache": comparison_file.KvCache,
    "Outputs": comparison_file.OutputsFound,
}


@pytest.mark.parametrize(("title", "struct"), SECTIONS.items(), ids=SECTIONS.keys())
def test_reference_page_documents_exactly_the_comparison_fields(title: str, struct: type[Struct]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, title
    names = re.findall(r"^\| (\w+) \|", section.group(1), re.MULTILINE)
    assert names == ["field", *(field.encode_name for field in msgspec.structs.fields(struct))]


# `specdecode capture compare`: the comparison of files, for people and for programs.


@pytest.fixture(scope="module")
def compared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeCapture(arrivals="closed:4,poisson:20").make(tmp_path_factory.mktemp("capture"))


def test_compare_prints_verdict_and_row_for_each_load_and_arm(compared_folder: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(compared_folder)])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "drafted against plain: Pays"
    assert lines[1].startswith("  goodput +")
    names = [line.split()[0] for line in lines[3:7]]
    assert names == ["closed-4", "closed-4", "poisson-20", "poisson-20"]
    assert "+" in lines[4]
    assert "%" not in lines[3]
    assert any("tokens per verification" in line for line in lines)
    assert "* plain, the baseline; goodput in tokens/s, TTFT and TPOT in ms" in lines


def test_find_trace_in_capture_with_arms_suggests_one_arm(compared_folder: Path) -> None:
    with pytest.raises(RecordingError) as refused:
        find_trace(compared_folder)
    assert str(refused.value).endswith(f"name one of those below it, such as {compared_folder}/drafted/1 or a trace")


def test_compare_with_price_prints_costs(compared_folder: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(compared_folder), "--price-per-gpu-hour", "3.6"])
    assert "GPU time per 1,000 tokens (and cost) " in done.stdout


def test_compare_json_has_fields_of_its_schema(compared_folder: Path) -> None:
    done = CliRunner().invoke(
        app, ["capture", "compare", str(compared_folder), "--price-per-gpu-hour", "3.6", "-o", "json"]
    )
    found = json.loads(done.stdout)
    schema = json.loads(schema_text(Printed.COMPARISON))
    assert found.keys() == schema["$defs"]["Comparison"]["properties"].keys()
    load = found["arms"][1]["loads"][0]
    assert load.keys() == schema["$defs"]["Load"]["properties"].keys()
    assert load["cost_per_1000_tokens"] == pytest.approx(load["gpu_seconds_per_1000_tokens"] / 1000, rel=1e-3)


def test_compare_error_is_one_line_with_exit_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}: holds no capture with arms")
