"""A model fitted to a small capture of a real vLLM is near to it, as far as so few requests can tell."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.trace_reader import RecordedRequest, read_recording
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.synthetic_load import Lengths
from tests.support.synthetic import forecast

CAPTURES = Path(__file__).parents[3] / "data/captures"


def bursts(requests: list[RecordedRequest]) -> dict[int, float]:
    counts = Counter(tokens for each in requests for tokens in each.chunk_tokens[1:-1])
    return {size: 100 * count / counts.total() for size, count in counts.items()}


def test_a_draft_model_of_a_real_engine_is_played_as_it_was(tmp_path: Path) -> None:
    recording = read_recording(CAPTURES / "draft_model")
    model = fit([recording])
    assert model.origin.limits.max_num_batched_tokens == 2048
    assert model.donors is not None
    assert model.donors.drafts.singles == 1.0
    assert model.origin.limits.draft_slots == 1
    for phase, clients in (("closed-4", 4), ("closed-8", 8)):
        real = [each for each in recording.requests if each.phase == phase]
        lengths = {"prompt_tokens": Lengths(96, 96), "output_tokens": Lengths(200, 200)}
        told = forecast(tmp_path / phase, model, f"closed:{clients}", 300, **lengths).requests
        gaps = [[gap for each in requests for gap in each.gaps_ms] for requests in (real, told)]
        assert median(gaps[1]) == pytest.approx(median(gaps[0]), rel=0.05)
        tpot = [mean(sum(each.gaps_ms) / (each.output_tokens - 1) for each in requests) for requests in (real, told)]
        assert tpot[1] == pytest.approx(tpot[0], rel=0.06)
    played, was = bursts(told), bursts(list(recording.requests))
    assert played == pytest.approx(was, abs=2.5)


def test_a_drafter_that_looks_tokens_up_drafts_as_often_as_it_did() -> None:
    model = fit([read_recording(CAPTURES / "ngram")])
    assert model.donors is not None
    assert 0 < model.donors.drafts.singles < 0.5
    assert model.origin.limits.draft_slots == 0
    assert model.donors.num_speculative_tokens == 4


@pytest.mark.parametrize(
    "said",
    [
        {"method": ["ngram"], "num_speculative_tokens": 4},
        {"method": {}, "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": True},
        {"method": "xyzzy", "num_speculative_tokens": 4},
    ],
    ids=str,
)
def test_what_a_trace_says_oddly_of_speculation_is_not_known(said: dict[str, Any]) -> None:
    recording = read_recording(CAPTURES / "ngram")
    odd = replace(recording, meta=msgspec.structs.replace(recording.meta, speculative=said))
    assert fit([odd]).origin.limits.draft_slots is None
