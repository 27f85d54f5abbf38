"""Engines that serve a fitted model."""

from pathlib import Path
from statistics import mean

import msgspec
import pytest

from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.compare import LIMITS, Comparison, compare
from specdecode_operator.replay.emulated.engine_model import Acceptance, Difficulty, StepTime, from_rates
from specdecode_operator.replay.engine import Burst, Incoming
from specdecode_operator.replay.fit import fit
from specdecode_operator.replay.model_file import Limits, decode_model, encode_model
from specdecode_operator.replay.modelled_engine import ModelledBehaviour
from specdecode_operator.replay.stepped_engine import SteppedEngine
from specdecode_operator.replay.synthetic_load import Lengths
from specdecode_operator.replay.virtual_run import spread
from tests.support.synthetic import Truth, forecast, play
from tests.support.traces import record, write_trace

OUTCOMES = [(4, accepted) for accepted in range(5)]
EASY, HARD = (0.05, 0.05, 0.1, 0.2, 0.6), (0.6, 0.2, 0.1, 0.05, 0.05)
ENGINES = {
    "usual": Truth(),
    "ngram": Truth(from_rates((0.7, 0.6, 0.55, 0.5), drafting=0.4)),
    "no speculation": Truth(None),
    "blocks of a diffusion model": Truth(from_rates((0.99,) * 15)),
    "easy and hard requests": Truth(Acceptance(4, OUTCOMES, [Difficulty(0.5, EASY), Difficulty(0.5, HARD)])),
    "hits in a row": Truth(
        Acceptance(4, OUTCOMES, [Difficulty(1.0, EASY, [HARD, HARD, (0.2,) * 5, EASY, EASY])]),
    ),
    "context costs": Truth(step_time=StepTime(curve=((1, 8.0),), context_ns=2000.0, residuals=spread(0.1))),
    "little cache": Truth(limits=Limits(max_num_seqs=64, block_size=16, num_gpu_blocks=220)),
    "small batches": Truth(limits=Limits(max_num_seqs=6, block_size=16)),
}


def far(found: Comparison, *names: str) -> list[str]:
    """Return what is farther than it may be, of figures whose names begin so."""
    return [
        f"{figure.name}: {figure.first} {figure.second} {figure.difference:+.2f}"
        for figure in found.figures
        if figure.name.startswith(names) and not figure.passed
    ]


@pytest.mark.parametrize("name", ENGINES)
def test_model_reproduces_figures_under_the_same_load(tmp_path: Path, name: str) -> None:
    # Close to what six at once can bear, a queue is as long as chance has it.
    made = ENGINES[name].make(tmp_path / "made", "poisson:7" if name == "small batches" else "poisson:12", 600)
    model = fit([made.recording])
    played = play(tmp_path / "played", model, made.recording)
    found = compare(made.recording, played.recording)
    assert len(found.figures) > 15
    assert far(found, "gap", "bursts", "acceptance", "throughput") == []
    ttft = next(figure for figure in found.figures if figure.name == "TTFT P50")
    assert abs(ttft.difference) <= LIMITS["TTFT"], ttft


def test_model_forecasts_figures_of_unseen_load(tmp_path: Path) -> None:
    truth = Truth()
    model = fit([truth.make(tmp_path / name, name, 600).recording for name in ("closed:4", "closed:16")])
    for arrivals, prompts in (
        ("closed:2", {}),
        ("closed:32", {}),
        ("poisson:20", {}),
        ("closed:8", {"prompt_tokens": Lengths(800, 1200)}),
    ):
        where = tmp_path / f"{arrivals}-{len(prompts)}"
        where.mkdir()
        real = truth.make(where / "real", arrivals, 600, **prompts).recording
        told = forecast(where / "told", model, arrivals, 600, **prompts).recording
        found = compare(real, told)
        judged = ("gap mean", "gap P50", "gap P90", "bursts", "acceptance", "throughput", "TPOT", "TTFT mean")
        assert far(found, *judged) == [], where


def test_doubled_load_factor_increases_ttft(tmp_path: Path) -> None:
    made = Truth(limits=Limits(max_num_seqs=8)).make(tmp_path / "made", "poisson:10", 300)
    model = fit([made.recording])
    once = play(tmp_path / "once", model, made.recording).requests
    twice = play(tmp_path / "twice", model, made.recording, load_factor=2.0).requests
    assert mean(each.ttft_ms for each in twice) > 5 * mean(each.ttft_ms for each in once)
    assert max(max(each.num_running or [0]) for each in twice) == 8
    assert sum(each.output_tokens for each in twice) == sum(each.output_tokens for each in once)


def test_spread_of_tokens_per_step_between_requests_is_reproduced(tmp_path: Path) -> None:
    """How many tokens a step of a request brings is spread as widely as it was: some are easy throughout."""
    made = ENGINES["easy and hard requests"].make(tmp_path / "made", "closed:8", 400)
    played = play(tmp_path / "played", fit([made.recording]), made.recording)
    found = compare(made.recording, played.recording)
    low, _, high = (each for each in found.figures if each.name.startswith("tokens per step"))
    assert low.first < 2.5
    assert high.first > 3.5
    assert abs(low.difference) < 6
    assert abs(high.difference) < 6


def test_runs_of_large_bursts_are_reproduced(tmp_path: Path) -> None:
    made = ENGINES["hits in a row"].make(tmp_path / "made", "closed:8", 300)
    played = play(tmp_path / "played", fit([made.recording]), made.recording)
    shares = []
    for recording in (made, played):
        pairs = [
            pair
            for each in recording.requests
            for pair in zip(each.chunk_tokens[1:-2], each.chunk_tokens[2:-1], strict=True)
        ]
        shares.append(mean(after >= 4 for before, after in pairs if before >= 4))
    assert shares[0] > 0.7
    assert shares[1] == pytest.approx(shares[0], abs=0.03)


def test_gap_depends_on_tokens_of_its_burst(tmp_path: Path) -> None:
    """A step that verifies a draft takes twice as long as one without: so it does in what is played."""
    records = []
    for number in range(40):
        tokens = [1 if (number + step) % 3 else 4 for step in range(30)]
        gaps_ms = [10.0 if each == 1 else 20.0 for each in tokens]
        usual = {"itl_ms": gaps_ms, "itl_tokens": tokens, "output_tokens": 1 + sum(tokens)}
        records.append(record(request_id=f"r-{number}", arrival_ms=number * 10_000.0, **usual))
    load = read_recording(write_trace(tmp_path / "trace.jsonl", records))
    played = play(tmp_path / "played", fit([load]), load)
    gaps: dict[int, list[float]] = {1: [], 4: []}
    for each in played.requests:
        for gap, tokens in zip(each.gaps_ms[:-1], each.chunk_tokens[1:-1], strict=True):
            gaps[tokens].append(gap)
    assert mean(gaps[4]) > 1.6 * mean(gaps[1])
    assert len(gaps[4]) / (len(gaps[1]) + len(gaps[4])) == pytest.approx(1 / 3, abs=0.03)


def test_persistence_of_slow_steps_is_fitted(tmp_path: Path) -> None:
    usual = {"itl_tokens": [2] * 60, "output_tokens": 121}
    records = [
        record(arrival_ms=10_000.0 * number, itl_ms=[15.0 if number % 2 else 10.0] * 60, **usual)
        for number in range(60)
    ]
    model = fit([read_recording(write_trace(tmp_path / "trace.jsonl", records))])
    assert model.donors is not None
    assert model.donors.persistence > 0.6


def test_acceptance_can_be_given_and_changed_during_run(tmp_path: Path) -> None:
    model = fit([Truth().make(tmp_path / "made", "closed:4", 60).recording])
    clock = VirtualClock()
    behaviour = ModelledBehaviour(model, 0, lambda: 0.9 if clock.now_ms() < 20_000 else 0.1)
    engine = SteppedEngine(clock, behaviour, model.origin.limits)
    bursts: list[tuple[float, Burst]] = []
    for number in range(4):
        request = Incoming(request_id=str(number), prompt_tokens=300, max_tokens=20_000)
        engine.submit(request, lambda burst: bursts.append((clock.now_ms(), burst)))
    clock.run(60_000)
    for begin_ms, end_ms, wanted in ((0, 20_000, 0.9), (20_100, 60_000, 0.1)):
        of_time = [burst for when_ms, burst in bursts if begin_ms <= when_ms < end_ms]
        share = sum(burst.accepted for burst in of_time) / sum(burst.drafted for burst in of_time)
        assert share == pytest.approx(wanted, abs=0.01)


def test_request_stops_as_recorded_unless_eos_is_ignored(tmp_path: Path) -> None:
    records = [record(request_id=str(number), arrival_ms=1000.0 * number, finish_reason="stop") for number in range(50)]
    model = fit([read_recording(write_trace(tmp_path / "trace.jsonl", records))])
    ends = {}
    for ignore_eos in (False, True):
        clock, bursts = VirtualClock(), list[Burst]()
        request = Incoming(request_id="a", prompt_tokens=20, max_tokens=40, ignore_eos=ignore_eos)
        SteppedEngine(clock, ModelledBehaviour(model, 0), model.origin.limits).submit(request, bursts.append)
        clock.run()
        ends[ignore_eos] = (sum(burst.tokens for burst in bursts), bursts[-1].finish_reason)
    assert ends == {False: (6, "stop"), True: (40, "length")}


def test_request_outside_fitted_range_is_reported_with_ratio(tmp_path: Path) -> None:
    model = fit([Truth().make(tmp_path / "made", "closed:4", 60).recording])
    behaviour = ModelledBehaviour(model, 0)
    assert behaviour.outside() == []
    behaviour.begin(Incoming(request_id="a", prompt_tokens=4000, max_tokens=10, ignore_eos=True))
    prompt, request = behaviour.outside()
    assert (prompt[:23], prompt[-15:]) == ("tokens of a prompt 4000", "10.1 times that")
    assert request.startswith("tokens of a request")


def test_model_file_is_small_and_read_back(tmp_path: Path) -> None:
    model = fit([Truth().make(tmp_path / "made", "poisson:20", 400).recording])
    text = encode_model(model)
    assert len(text) < 200_000
    assert decode_model(text) == model


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("bursts", "tokens", [0]),
        ("bursts", "counts", [1]),
        ("trend", "curve", []),
        ("stops", "share", 2.0),
        ("cells", None, []),
        ("classes", None, []),
        ("persistence", None, 1.0),
    ],
)
def test_invalid_donors_section_is_refused(tmp_path: Path, section: str, field: str | None, value: object) -> None:
    model = fit([Truth().make(tmp_path / "made", "closed:2", 10).recording])
    document = msgspec.json.decode(encode_model(model))
    document["donors"][section] = value if field is None else document["donors"][section] | {field: value}
    with pytest.raises(ValueError, match=r"\$\.donors.*fit it again"):
        decode_model(msgspec.json.encode(document))
