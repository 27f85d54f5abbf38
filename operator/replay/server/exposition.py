"""/metrics: counts of the meter and the engine's load, by vLLM's names and labels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from specdecode_operator.replay.engines.engine import ReplayEngine
from specdecode_operator.replay.server.meter import Meter

_ENGINE: Final = "0"
_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_LABELS: Final = ("model_name", "engine")


@dataclass(frozen=True, eq=False)
class Exposition:
    """All that is said there; as a collector of the client library for Prometheus."""

    meter: Meter
    engine: ReplayEngine
    model: str
    load_factor: float  # so many requests each of ours stands for
    cache_config: Mapping[str, str]  # labels of ``vllm:cache_config_info``

    def text(self) -> bytes:
        """Return the page."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Return every metric."""
        yield from self._load()
        yield from self._tokens()
        yield from self._histograms()
        if len(self.meter.drafts_by_accepted) > 1:
            yield from self._speculation()

    def _load(self) -> Iterator[Metric]:
        load, factor = self.engine.load(), self.load_factor
        yield self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", load.running * factor
        )
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting * factor)
        usage = min(1.0, load.kv_cache_usage * factor)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", load.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", load.prefix_cache_hits)
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", load.preemptions)
        names = ("engine", *self.cache_config)
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=names)
        info.add_metric((_ENGINE, *self.cache_config.values()), 1.0)
        yield info

    def _tokens(self) -> Iterator[Metric]:
        meter = self.meter
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", meter.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Number of cached prompt tokens.", meter.cached_tokens)
        yield self._counter("generation_tokens", "Number of generation tokens processed.", meter.generation_tokens)
        finished = CounterMetricFamily(
            "vllm:request_success", "Count of successfully processed requests.", labels=(*_LABELS, "finished_reason")
        )
        for reason in _REASONS:
            finished.add_metric((self.model, _ENGINE, reason), meter.finished[reason])
        yield finished

    def _histograms(self) -> Iterator[Metric]:
        meter = self.meter
        for name, histogram in (
            ("time_to_first_token_seconds", meter.ttft_s),
            ("inter_token_latency_seconds", meter.itl_s),
            ("request_time_per_output_token_seconds", meter.tpot_s),
            ("e2e_request_latency_seconds", meter.latency_s),
            ("request_queue_time_seconds", meter.queue_s),
            ("request_prefill_time_seconds", meter.prefill_s),
            ("request_decode_time_seconds", meter.decode_s),
            ("request_inference_time_seconds", meter.inference_s),
            ("request_prompt_tokens", meter.request_prompt_tokens),
            ("request_generation_tokens", meter.request_generation_tokens),
            ("request_params_max_tokens", meter.request_max_tokens),
            ("request_params_n", meter.request_n),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", f"Histogram of {name.replace('_', ' ')}.", labels=_LABELS)
            family.add_metric((self.model, _ENGINE), histogram.buckets(), histogram.total)
            yield family

    def _speculation(self) -> Iterator[Metric]:
        meter, by_accepted = self.meter, self.meter.drafts_by_accepted
        # How many drafts had at least so many tokens accepted, K first.
        at_least = list(accumulate(reversed(by_accepted)))
        per_position = at_least[-2::-1]
        yield self._counter("spec_decode_num_drafts", "Number of spec decoding drafts.", at_least[-1])
        yield self._counter("spec_decode_num_draft_tokens", "Number of draft tokens.", meter.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.", sum(per_position))
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            labels=(*_LABELS, "position"),
        )
        for position, accepted in enumerate(per_position):
            positions.add_metric((self.model, _ENGINE, str(position)), accepted)
        yield positions

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric((self.model, _ENGINE), value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric((self.model, _ENGINE), value)
        return family
