"""Metrics of vLLM."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.stats.figures import FIGURES
from specdecode_operator.vllm.engine_metrics import (
    CANARY_ANSWERS,
    CANARY_REFUSED,
    CanaryReading,
    EngineReading,
    ExpositionError,
    Sample,
    SpeculationReading,
    UnreadableMetricsError,
    read_exposition,
    read_metrics,
)
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

PROFILE = find_profile("0.32")
SCRAPE = (Path(__file__).parent / "data" / "metrics-draft-model.txt").read_text(encoding="utf-8")
READING = EngineReading(
    num_gpu_blocks=3276,
    block_size=128,
    kv_cache_tokens=419_328,
    kv_cache_max_concurrency=819.0,
    speculation=SpeculationReading(814, 2442, 1211, (542, 391, 278)),
    generation_tokens=2020,
    requests_running=0,
    requests_waiting=0,
    prompt_tokens=543,
)


def without(prefix: str) -> str:
    """Return the scrape without the metrics whose name starts so."""
    kept = (line for line in SCRAPE.splitlines(keepends=True) if prefix not in line)
    return "".join(kept)


def with_second_rank() -> str:
    """Return a scrape of two data-parallel ranks, the second with fewer blocks."""
    second = (line.replace('engine="0"', 'engine="1"') for line in SCRAPE.splitlines() if 'engine="0"' in line)
    changed = (line.replace('num_gpu_blocks="3276"', 'num_gpu_blocks="3000"') for line in second)
    return SCRAPE + "\n".join(changed) + "\n"


def test_real_scrape_is_parsed_completely() -> None:
    assert read_metrics(SCRAPE, PROFILE) == READING


def test_decode_steps_sum_inter_token_counts_of_all_ranks() -> None:
    line = 'vllm:inter_token_latency_seconds_count{{engine="{}",model_name="target"}} {}\n'
    assert read_metrics(SCRAPE + line.format(0, 700.0) + line.format(1, 50.0), PROFILE).decode_steps == 750


def test_decode_seconds_and_first_tokens_are_read_if_present() -> None:
    silent = read_metrics(SCRAPE, PROFILE)
    said = 'vllm:inter_token_latency_seconds_sum{engine="0"} 3.5\nvllm:inter_token_latency_seconds_sum{engine="1"} 1\n'
    told = read_metrics(f'{SCRAPE}{said}vllm:time_to_first_token_seconds_count{{engine="0"}} 7\n', PROFILE)
    assert (told.decode_seconds, told.first_tokens) == (4.5, 7)
    assert silent.decode_seconds is None
    with pytest.raises(UnreadableMetricsError, match="seconds_sum is"):
        read_metrics(f"{SCRAPE}vllm:inter_token_latency_seconds_sum -1\n", PROFILE)


def test_server_errors_are_the_responses_of_all_paths_with_a_status_of_500_or_more() -> None:
    line = 'http_requests_total{{handler="{}",method="POST",status="{}"}} {}\n'
    lines = [
        line.format("/v1/completions", "2xx", 40),
        line.format("/v1/completions", "4xx", 3),
        line.format("/v1/completions", "5xx", 2),
        line.format("/v1/chat/completions", "5xx", 1),
    ]
    assert read_metrics(SCRAPE + "".join(lines), PROFILE).server_errors == 3
    assert read_metrics(SCRAPE + lines[0], PROFILE).server_errors == 0
    assert read_metrics(SCRAPE, PROFILE).server_errors is None
    with pytest.raises(UnreadableMetricsError, match="not a vLLM endpoint"):
        read_metrics(lines[0], PROFILE)


def test_impossible_counter_sum_of_ranks_is_refused() -> None:
    lines = [f'vllm:generation_tokens_total{{engine="{rank}"}} {2.0**53}\n' for rank in (1, 2)]
    with pytest.raises(UnreadableMetricsError, match="which is impossible"):
        read_metrics(SCRAPE + "".join(lines), PROFILE)


def test_acceptance_percent_is_capped_at_100() -> None:
    assert SpeculationReading(1, 1, 2**53, ()).acceptance_percent == 100


def test_mean_draft_length() -> None:
    assert SpeculationReading(4, 10, 1, (1, 0, 0)).mean_draft_length == 2.5
    assert SpeculationReading(0, 0, 0, ()).mean_draft_length is None


def test_acceptance_of_the_real_scrape() -> None:
    speculation = read_metrics(SCRAPE, PROFILE).speculation
    assert speculation is not None
    assert speculation.acceptance_percent == 50
    assert speculation.mean_acceptance_length == pytest.approx(2.4877, abs=1e-4)
    assert sum(speculation.accepted_per_position) == speculation.accepted_tokens


def test_missing_counters_mean_no_speculation() -> None:
    assert read_metrics(without("vllm:spec_decode"), PROFILE) == replace(READING, speculation=None)


def test_acceptance_is_none_before_the_first_draft() -> None:
    reading = SpeculationReading(0, 0, 0, (0, 0, 0))
    assert reading.acceptance_percent is None
    assert reading.mean_acceptance_length is None


def test_counters_of_ranks_are_summed_and_the_smallest_cache_is_used() -> None:
    reading = read_metrics(with_second_rank(), PROFILE)
    assert reading.num_gpu_blocks == 3000
    assert reading.kv_cache_tokens == 419_328
    assert reading.generation_tokens == 4040
    assert reading.speculation == SpeculationReading(1628, 4884, 2422, (1084, 782, 556))


SERVERS = """
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

said = dict(labelnames=["engine"], registry=CollectorRegistry())
generated = Counter("vllm:generation_tokens", "Number of generation tokens processed.", **said).labels("0")
for name in ("running", "waiting"):
    gauge = Gauge(f"vllm:num_requests_{name}", name, multiprocess_mode="mostrecent", **said).labels("0")
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
gauge.set(2)
generated.inc(5)
print("AFTER A STEP", generate_latest(registry).decode(), sep="\\n")
"""
"""What vLLM's gauges and counters are with several API servers (v1/metrics/loggers.py), before and after a step."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what prometheus_client says of them."""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("prometheus"))}
    return subprocess.check_output([sys.executable, "-c", SERVERS], env=env, text=True).split("AFTER A STEP\n")


def test_api_servers_without_gauge_samples_have_zero_requests(pages: list[str]) -> None:
    assert "vllm:num_requests_running{" not in pages[0]
    reading = read_metrics(pages[0], PROFILE)
    assert (reading.generation_tokens, reading.requests_running, reading.requests_waiting) == (0, 0, 0)


def test_gauge_without_samples_is_an_error_after_requests(pages: list[str]) -> None:
    with pytest.raises(UnreadableMetricsError, match="vllm:num_requests_running is missing"):
        read_metrics(pages[1], PROFILE)


@pytest.mark.parametrize("name", ["specdecode:engine_changed_setting", "vllm:spec_decode_num_drafts_total"])
def test_declared_metric_without_samples_is_unknown(name: str) -> None:
    page = without("vllm:spec_decode")
    assert read_metrics(f"{page}# TYPE {name} gauge\n", PROFILE) == read_metrics(page, PROFILE)


def test_undeclared_gauge_is_missing(pages: list[str]) -> None:
    kept = (line for line in pages[0].splitlines(keepends=True) if "requests_waiting" not in line)
    with pytest.raises(UnreadableMetricsError, match="vllm:num_requests_waiting is missing"):
        read_metrics("".join(kept), PROFILE)


def test_missing_cache_config_info_gives_no_cache_figures() -> None:
    reading = read_metrics(without("vllm:cache_config_info"), PROFILE)
    assert (reading.num_gpu_blocks, reading.kv_cache_tokens, reading.kv_cache_max_concurrency) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "vllm:generation_tokens_total is missing"),
        ("<html><body>404</body></html>", "Prometheus format|is missing"),
        ('python_info{version="3"} 1.0\n', "--disable-log-stats"),
        ("vllm:generation_tokens_total{ 1.0\n", "not in Prometheus format"),
        (without("vllm:generation_tokens"), "vllm:generation_tokens_total is missing"),
        (without("vllm:spec_decode_num_accepted_tokens_total"), "accepted_tokens_total is missing"),
        (SCRAPE.replace("} 2442.0", "} NaN"), "draft_tokens_total is nan"),
        (SCRAPE.replace("} 814.0", "} -1"), "drafts_total is -1"),
        (SCRAPE.replace('kv_cache_size_tokens="419328"', 'kv_cache_size_tokens="many"'), "'many', not a number"),
        (SCRAPE.replace('num_gpu_blocks="3276"', 'num_gpu_blocks="inf"'), "num_gpu_blocks is inf"),
        (SCRAPE.replace('position="1"', 'position=""'), "label position"),
    ],
)
def test_invalid_metrics_are_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(UnreadableMetricsError, match=complaint):
        read_metrics(text, PROFILE)


@pytest.mark.parametrize(
    "hostile",
    ["vllm:generation_tokens_total 1\n" * 8_001, "vllm:generation_tokens_total{" + 'a="1",' * 3000 + "} 1"],
    ids=["many lines", "a long line"],
)
def test_too_large_metrics_are_refused(hostile: str) -> None:
    with pytest.raises(UnreadableMetricsError, match="exceeds the size"):
        read_metrics(hostile, PROFILE)


# The reader of /metrics pages says what prometheus_client says of them, and reads no more than an engine says.

TOKENS = find_profile(KNOWN_VERSIONS[-1]).metrics.generation_tokens
MOST_RANKS, MOST_POSITIONS = 64, 32


def test_real_page_is_parsed_as_by_prometheus_client() -> None:
    families = list(text_string_to_metric_families(SCRAPE))
    known = [Sample(each.name, each.labels, each.value) for family in families for each in family.samples]
    read = read_exposition(SCRAPE, {each.name for each in known})
    assert len(known) > 30
    assert read.samples == known
    assert read.gauges == {family.name for family in families if family.type == "gauge"}


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_output_of_prometheus_client_is_parsed(first: str, second: str, value: float) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:x", "Help", ["first", "second"], registry=registry).labels(first, second).set(value)
    labels = {key: escaped(text) for key, text in (("first", first), ("second", second))}
    read = read_exposition(generate_latest(registry).decode(), {"vllm:x"})
    assert read.samples == [Sample("vllm:x", labels, value)]
    assert read.gauges == {"vllm:x"}


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@pytest.mark.parametrize(
    "line",
    ["x 1", "x{} 1", 'x{a="b"} 1.0', 'x{a="b",} 1e0', 'x{a="}", c="d"} 1 1700000000000', "x\t1\r"],
    ids=["bare", "no labels", "a label", "a comma too many", "braces and a time", "other blanks"],
)
def test_line_variants_are_parsed(line: str) -> None:
    (found,) = read_exposition(f"y 2\n{line}\nxx 3", {"x"}).samples
    assert (found.name, found.value) == ("x", 1)


@pytest.mark.parametrize(
    "line", ["x", "x one", "x{ 1", 'x{a="b} 1', "x{a=b} 1", 'x{a="b"}', 'x{a="b"c="d"} 1', "x 1 soon"]
)
def test_malformed_line_is_reported(line: str) -> None:
    with pytest.raises(ExpositionError, match="not in Prometheus format") as raised:
        read_exposition(line, {"x"})
    assert len(str(raised.value)) < 200


def test_page_of_64_ranks_is_parsed() -> None:
    names = frozenset().union(*(figure.measure.series() for figure in FIGURES))
    series = [(name, position) for name in names for position in range(25 if name.endswith("_bucket") else 5)]
    series += [(TOKENS, 100 + position) for position in range(MOST_POSITIONS)]
    assert len(series) >= 66 + MOST_POSITIONS, "as an engine has of them, or more"
    line = '{}{{engine="{}",le="{}",model_name="meta-llama/Llama-3.1-8B"}} 123456.0\n'
    series = series[: 66 + MOST_POSITIONS]
    read = [line.format(name, rank, position) for rank in range(MOST_RANKS) for name, position in series]
    others = [line.format("vllm:other", rank, number) for rank in range(MOST_RANKS) for number in range(378)]
    assert len(read_exposition("".join(read + others), names).samples) == len(read)


@pytest.mark.parametrize(
    "hostile",
    [
        "\n" * 40_001,
        f"{TOKENS} 1\n" * 8_001,
        f'{TOKENS}{{a="{"x" * 8_000}"}} 1\n' * 132,
        f'{TOKENS}{{a="{"x" * 2**13}"}} 1\n',
    ],
    ids=["lines", "lines that are read", "characters that are read", "a line"],
)
def test_too_large_exposition_is_refused(hostile: str) -> None:
    with pytest.raises(ExpositionError, match="exceeds the size"):
        read_exposition(hostile, {TOKENS})


def test_canary_answers_are_counted_by_verdict_and_prompt() -> None:
    counts = {("right", "aa"): 7, ("right", "bb"): 2, ("wrong", "aa"): 3, ("wrong", "bb"): 0, ("failed", "cc"): 1}
    lines = [
        f'{CANARY_ANSWERS}{{prompt="{prompt}",verdict="{verdict}"}} {count}.0\n'
        for (verdict, prompt), count in counts.items()
    ]
    lines += [f'{CANARY_REFUSED}{{reason="{reason}"}} {value}\n' for reason, value in (("earlier", 0), ("HTTP 400", 1))]
    assert read_metrics(SCRAPE, PROFILE).canaries is None
    found = read_metrics(SCRAPE + "".join(lines), PROFILE).canaries
    assert found == CanaryReading(right=9, wrong=3, failed=1, wrong_prompts=1, unsupported="HTTP 400")
    assert found.answers == 12
    with pytest.raises(UnreadableMetricsError, match=CANARY_ANSWERS):
        read_metrics(SCRAPE + f'{CANARY_ANSWERS}{{prompt="aa",verdict="wrong"}} -1\n', PROFILE)
