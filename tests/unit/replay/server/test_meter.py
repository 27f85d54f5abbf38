"""Each of vLLM's metrics is what its name says."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.engine import Burst, Incoming, Load, Sink, Submission
from specdecode_operator.replay.server.served_answers import Answer, Exposition, Meter
from specdecode_operator.stats.figures import FIGURES


class Engine:
    """Gives one answer: 1, 3 and 2 tokens at 30, 40 and 52.5 ms."""

    def __init__(self, clock: VirtualClock, waited_ms: float) -> None:
        self.clock = clock
        self.waited_ms = waited_ms

    def submit(self, request: Incoming, sink: Sink) -> Submission:
        for at_ms, burst in (
            (30.0, Burst(tokens=1, cached_tokens=16)),
            (40.0, Burst(tokens=3, drafted=4, accepted=2)),
            (52.5, Burst(tokens=2, drafted=4, accepted=3, finish_reason="length")),
        ):
            self.clock.call_at(at_ms, lambda burst=burst: sink(burst))
        return SimpleNamespace(cancel=lambda: None, waited_ms=lambda: self.waited_ms)

    def load(self) -> Load:
        return Load(
            running=3, waiting=5, kv_cache_usage=0.4, preemptions=7, prefix_cache_queries=40, prefix_cache_hits=10
        )


def metrics(load_factor: float, waited_ms: float = 12.0) -> dict[str, float]:
    """Return the value of each metric after the answer, by its name without ``vllm:`` and its own label."""
    clock = VirtualClock()
    engine, meter = Engine(clock, waited_ms), Meter(clock, 4)
    Answer(meter, engine, Incoming(request_id="r", prompt_tokens=20, max_tokens=6), lambda _: None)
    clock.run()
    page = Exposition(meter, engine, "tiny", load_factor, {}).text().decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            own = "".join(sample.labels.get(name, "") for name in ("finished_reason", "position", "le"))
            found[f"{sample.name.removeprefix('vllm:')}{own and f' {own}'}"] = round(sample.value, 9)
    return found


def test_metrics_page_has_expected_values() -> None:
    found = metrics(2.0)
    expected = {
        "num_requests_running": 6,
        "num_requests_waiting": 10,
        "kv_cache_usage_perc": 0.8,
        "prefix_cache_queries_total": 40,
        "prefix_cache_hits_total": 10,
        "num_preemptions_total": 7,
        "prompt_tokens_total": 20,
        "prompt_tokens_cached_total": 16,
        "generation_tokens_total": 6,
        "request_success_total length": 1,
        "request_success_total abort": 0,
        "time_to_first_token_seconds_sum": 0.03,
        "inter_token_latency_seconds_sum": 0.0225,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_bucket 0.01": 1,
        "request_time_per_output_token_seconds_sum": 0.0045,
        "e2e_request_latency_seconds_sum": 0.0525,
        "request_queue_time_seconds_sum": 0.012,
        "request_prefill_time_seconds_sum": 0.018,
        "request_inference_time_seconds_sum": 0.0405,
        "request_decode_time_seconds_sum": 0.0225,
        "request_prompt_tokens_sum": 20,
        "request_generation_tokens_sum": 6,
        "request_params_max_tokens_sum": 6,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_accepted_tokens_total": 5,
        **{f"spec_decode_num_accepted_tokens_per_pos_total {place}": count for place, count in enumerate((2, 2, 1, 0))},
    }
    assert {name: found[name] for name in expected} == expected


def test_metrics_page_has_all_series_of_figures() -> None:
    asked = frozenset().union(*(figure.measure.series() for figure in FIGURES))
    said = {name.partition(" ")[0] for name in metrics(1.0)}
    assert {name.removeprefix("vllm:") for name in asked} <= said
