"""Arms of a capture against the first: what is said of engines whose truth is known."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specdecode_operator.api.capture_status import ComparisonStatus
from specdecode_operator.capture.comparison.arm_verdict import comparison_status
from specdecode_operator.capture.comparison.compare_arms import compare_capture, write_comparison
from specdecode_operator.capture.comparison.comparison_file import COMPARISON, Comparison
from specdecode_operator.stats.verdict import student_quantile
from tests.support.compared_captures import PLAIN, SPECULATING, MadeArm, MadeCapture, of_equal_arms, renew

LOADS = MadeCapture(arrivals="closed:2,closed:24", requests=320, curve=((1, 10.0), (16, 11.0), (128, 60.0)))
"""Few requests, where drafts are cheap, and as many as make each token cost."""

DEAR = replace(SPECULATING, rates=(0.5, 0.2, 0.1, 0.05), draft_ms=1.0)


@pytest.fixture(scope="module")
def pays(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare_capture(MadeCapture(requests=64).make(tmp_path_factory.mktemp("pays")), price_per_gpu_hour=3.6)


class TestVerdict:
    def test_an_arm_that_brings_more_pays_with_its_interval_in_the_sentence(self, pays: Comparison) -> None:
        arm = pays.arm("drafted")
        assert arm.verdict == "Pays"
        compared = arm.loads[0].compared
        assert compared is not None
        assert compared.low is not None
        assert compared.ratio is not None
        assert 1 < compared.low < compared.ratio < (compared.high or 0)
        assert f"{100 * (compared.low - 1):+.3g} % to" in arm.message
        assert "(95 %:" in arm.message

    def test_an_arm_that_is_slower_does_not_pay(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "dear": MadeArm(rates=(0.1, 0.01), draft_ms=2.0)})
        assert compare_capture(made.make(tmp_path)).arm("dear").verdict == "DoesNotPay"

    def test_equal_arms_are_inconclusive(self, tmp_path: Path) -> None:
        found = compare_capture(of_equal_arms().make(tmp_path))
        assert found.arm("other").verdict == "Inconclusive"
        assert any("A/A" in note for note in found.notes)

    def test_what_turns_with_load_says_where(self, tmp_path: Path) -> None:
        made = replace(LOADS, arms={"plain": PLAIN, "dear": DEAR})
        found = compare_capture(made.make(tmp_path)).arm("dear")
        assert found.verdict == "DependsOnLoad"
        assert found.crossover_running is not None
        few, many = (each.running or 0 for each in compare_capture(tmp_path).arms[0].loads)
        assert few < found.crossover_running < many
        assert f"stops paying above about {found.crossover_running:g} running" in found.message

    def test_a_start_effect_that_looks_like_one_is_no_verdict(self, tmp_path: Path) -> None:
        """Each arm's two starts lie 4 % apart; the blocks of either would swear that the arms differ."""
        made = of_equal_arms(start_effect=0.03, seed=11, noise=0.02)
        compared = compare_capture(made.make(tmp_path)).arm("other").loads[0].compared
        assert compared is not None
        assert compared.verdict == "Inconclusive"
        assert (compared.blocks_low or 0) > 1 or (compared.blocks_high or 2) < 1
        assert compared.low == min(compared.blocks_low or 0, compared.starts_low or 0)
        assert compared.high == max(compared.blocks_high or 0, compared.starts_high or 0)

    def test_all_loads_together_hold_with_the_level(self, tmp_path: Path) -> None:
        """What is beside a load makes its own interval wider."""
        alone = compare_capture(replace(LOADS, arrivals="closed:2").make(tmp_path / "alone"))
        beside = compare_capture(LOADS.make(tmp_path / "beside"))
        widths = []
        for found, phases in ((alone, 1), (beside, 2)):
            load = found.arm("drafted").loads[0]
            compared = load.compared
            assert compared is not None
            width = math.log((compared.starts_high or 0) / (compared.starts_low or 1))
            widths.append(width / student_quantile(1 - 0.05 / phases / 2, 2))
        assert widths[1] == pytest.approx(widths[0], rel=1e-3)

    def test_without_all_repetitions_there_is_none(self, tmp_path: Path) -> None:
        made = MadeCapture(repetitions=3)
        for name in made.arms:
            for repetition in (1, 2):
                made.make_one(tmp_path, name, repetition)
        found = compare_capture(tmp_path)
        assert found.arm("drafted").verdict == "Inconclusive"
        assert "1 of 3 repetitions are missing" in found.arm("drafted").message
        assert "arm drafted: 1 of 3 repetitions are missing: no verdict on it" in found.notes

    def test_one_repetition_is_no_verdict_whatever_its_blocks_say(self, tmp_path: Path) -> None:
        arm = compare_capture(MadeCapture(repetitions=1).make(tmp_path)).arm("drafted")
        assert arm.verdict == "Inconclusive"
        assert arm.message.startswith("no verdict with one repetition")
        assert "(one start of each engine gives no interval)" in arm.message
        assert "too few blocks" not in arm.message
        compared = arm.loads[0].compared
        assert compared is not None
        assert (compared.blocks_low or 0) > 1

    def test_an_arm_of_which_nothing_is_there_is_said_and_the_others_compared(self, tmp_path: Path) -> None:
        made = MadeCapture(arms={"plain": PLAIN, "drafted": SPECULATING, "lost": SPECULATING})
        for name in ("plain", "drafted"):
            for repetition in (1, 2):
                made.make_one(tmp_path, name, repetition)
        found = compare_capture(tmp_path)
        assert found.arm("drafted").verdict == "Pays"
        assert found.arm("lost").verdict == "Inconclusive"
        assert "none of its repetitions is there" in found.arm("lost").message

    def test_a_rate_without_slo_gives_latencies_and_no_verdict(self, tmp_path: Path) -> None:
        found = compare_capture(MadeCapture(arrivals="poisson:20").make(tmp_path)).arm("drafted")
        (load,) = found.loads
        assert found.verdict == "Inconclusive"
        assert load.compared is None
        assert load.tpot_ms is not None
        assert "slo" in (load.not_compared or "")

    def test_with_slo_a_rate_is_compared_by_what_keeps_to_it(self, tmp_path: Path) -> None:
        made = MadeCapture(arrivals="poisson:20", requests=160, slo={"tpotMs": 8})
        plain, drafted = compare_capture(made.make(tmp_path)).arms
        assert plain.loads[0].within_slo == 0
        assert plain.loads[0].goodput == 0
        assert drafted.loads[0].within_slo > 0
        assert drafted.loads[0].throughput == pytest.approx(plain.loads[0].throughput or 0, rel=0.1)
        assert drafted.verdict == "Pays"


class TestFigures:
    def test_warm_up_is_in_none(self, tmp_path: Path) -> None:
        without = compare_capture(MadeCapture().make(tmp_path))
        for place in tmp_path.glob("*/*"):
            path = place / "client.jsonl"
            first = json.loads(path.read_text().splitlines()[0])
            with path.open("a") as stream:
                stream.write(f"{json.dumps({**first, 'warmup': True, 'sent_ms': 0.0, 'finished_ms': 1e6})}\n")
            renew(place)
        assert compare_capture(tmp_path).arms == without.arms

    def test_acceptance_is_that_of_the_engine(self, pays: Comparison) -> None:
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

    def test_a_step_takes_longer_by_its_drafts(self, pays: Comparison) -> None:
        load = pays.arm("drafted").loads[0]
        # Four drafts of 0.3 ms, and some tokens more to verify, on 10 ms.
        assert load.speculation_overhead == pytest.approx(0.13, abs=0.03)
        assert load.tokens_per_step == pytest.approx(1 + sum(SPECULATING.rates), abs=0.1)

    def test_the_predicted_speed_up_stands_beside_the_measured_one(self, pays: Comparison) -> None:
        load = pays.arm("drafted").loads[0]
        assert load.compared is not None
        plain = pays.arms[0].loads[0]
        decoding = (load.tokens_per_step or 0) / (1 + (load.speculation_overhead or 0))
        assert load.compared.predicted_ratio == pytest.approx(
            decoding * (load.running or 0) / (plain.running or 1), rel=0.1
        )

    def test_cost_is_gpu_time_and_money_where_a_price_is_given(self, pays: Comparison) -> None:
        load = pays.arm("plain").loads[0]
        assert load.gpu_seconds_per_1000_tokens == pytest.approx(1000 / (load.goodput or 1), rel=1e-3)
        assert load.cost_per_1000_tokens == pytest.approx(load.gpu_seconds_per_1000_tokens / 1000, rel=1e-3)

    def test_the_prefix_cache_tax_is_what_an_arm_found_less(self, tmp_path: Path) -> None:
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


class TestFile:
    def test_comes_back_as_it_was_written_and_twice_the_same(self, tmp_path: Path, pays: Comparison) -> None:
        first = write_comparison(tmp_path, pays).read_bytes()
        assert msgspec.json.decode(first, type=Comparison) == msgspec.convert(msgspec.to_builtins(pays), Comparison)
        assert write_comparison(tmp_path, pays).read_bytes() == first
        assert [each.name for each in tmp_path.iterdir()] == [COMPARISON]


class TestStatus:
    def test_is_what_the_api_takes(self, pays: Comparison) -> None:
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

    @pytest.mark.parametrize("most_bytes", [3072, 2000, 1200])
    def test_is_cut_to_what_a_termination_message_takes(self, pays: Comparison, most_bytes: int) -> None:
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
