"""Figures computed from metrics pages of engines."""

import pytest

from specdecode_operator.stats.figures import FIGURES, find_figure
from specdecode_operator.stats.measures import Growth, Page, UnreadablePageError, growth_between, read_page
from tests.support.figure_cases import expected, page

NAMES = frozenset().union(*(figure.measure.series() for figure in FIGURES))
TTFT_BUCKET = "vllm:time_to_first_token_seconds_bucket"
DRAFTS, ACCEPTED = (f"vllm:spec_decode_num_{each}_total" for each in ("drafts", "accepted_tokens"))
FIVE_MINUTES_S = 300


def read(text: str, at_s: float) -> Page:
    """Read a page for all figures."""
    return read_page(text, NAMES, at_s)


def grown(before: str, after: str, seconds: float = 10) -> Growth:
    """What one engine did between two pages."""
    return growth_between([(read(before, 0), read(after, seconds))])


@pytest.mark.parametrize(("name", "values"), list(expected()), ids=lambda each: each if isinstance(each, str) else "")
def test_figures_from_pages_match_prometheus(name: str, values: dict[str, float]) -> None:
    looks = [(read(page(pod, 10), 0), read(page(pod, 15), FIVE_MINUTES_S)) for pod in ("a", "b")]
    assert find_figure(name).measure.values(growth_between(looks)) == pytest.approx(values, rel=1e-3)


def test_counters_of_restarted_engine_count_from_zero() -> None:
    growth = grown(f"{DRAFTS} 1000\n{ACCEPTED} 2000\n", f"{DRAFTS} 10\n{ACCEPTED} 5\n")
    assert find_figure("mean_acceptance_length").measure.values(growth) == {"": 1.5}


def test_ratios_are_empty_without_traffic() -> None:
    text = page("a", 5)
    growth = grown(text, text)
    told = {figure.name: figure.measure.values(growth) for figure in FIGURES}
    assert told["acceptance_rate"] == told["time_to_first_token_p99"] == told["time_per_output_token_spread"] == {}
    assert told["output_tokens_per_second"] == {"": 0}
    assert told["kv_cache_usage"] == {"": 0.25}


def test_engine_without_speculation_has_other_figures() -> None:
    growth = grown("vllm:generation_tokens_total 0\n", "vllm:generation_tokens_total 50\n")
    told = {figure.name: figure.measure.values(growth) for figure in FIGURES}
    assert {name for name, values in told.items() if values} == {"output_tokens_per_second"}
    assert told["output_tokens_per_second"] == {"": 5}


def test_quantile_beyond_last_bucket_is_its_limit() -> None:
    histogram = "vllm:time_to_first_token_seconds"
    text = f'# TYPE {histogram} histogram\n{histogram}_bucket{{le="1.0"}} %d\n{histogram}_bucket{{le="+Inf"}} %d\n'
    growth = grown(text % (0, 0), text % (10, 100))
    assert find_figure("time_to_first_token_p99").measure.values(growth) == {"": 1.0}


def test_histogram_without_inf_bucket_has_no_quantile() -> None:
    histogram = "vllm:time_to_first_token_seconds"
    buckets = f'{histogram}_bucket{{le="0.5"}} %d\n{histogram}_bucket{{le="1.0"}} %d\n'
    text = f"# TYPE {histogram} histogram\n{buckets}{histogram}_count %d\n"
    growth = grown(text % (0, 0, 0), text % (5, 9, 9))
    assert find_figure("time_to_first_token_p50").measure.values(growth) == {}


def ranks(pages: list[str]) -> str:
    """Return the page of an engine whose ranks say these."""
    lines = [line.replace("{", f'{{rank="{rank}",') for rank, each in enumerate(pages) for line in each.splitlines()]
    return "\n".join(dict.fromkeys(lines)) + "\n"


@pytest.mark.parametrize(("name", "values"), list(expected()), ids=lambda each: each if isinstance(each, str) else "")
def test_ranks_of_one_engine_add_up_like_engines(name: str, values: dict[str, float]) -> None:
    before, after = (ranks([page(pod, minute) for pod in ("b", "a")]) for minute in (10, 15))
    growth = growth_between([(read(before, 0), read(after, FIVE_MINUTES_S))])
    assert find_figure(name).measure.values(growth) == pytest.approx(values, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not vLLM"),
        ("<html>hello</html>", "not vLLM"),
        (f"{DRAFTS} one\n", "not in Prometheus format"),
        (f"{DRAFTS} NaN\n", "cannot be"),
        (f"{DRAFTS} -1\n", "cannot be"),
        (f"{DRAFTS} +Inf\n", "cannot be"),
        (f'{DRAFTS}{{a="{"x" * 20_000}"}} 1\n', "exceeds the size"),
        ("".join(f'{DRAFTS}{{a="{number}"}} 1\n' for number in range(8_001)), "exceeds the size"),
        ("".join(f'{TTFT_BUCKET}{{le="{number}"}} 1\n' for number in range(1, 130)), "more series are said"),
        (f'{TTFT_BUCKET}{{le="1.{"0" * 31}"}} 1\n', "longer than an engine's"),
        (f"{DRAFTS} 1e308\n" * 2, "cannot be"),
        *(
            (f'{TTFT_BUCKET}{{le="{limit}"}} 1\n', "ends at|Prometheus format")
            for limit in ("", "abc", "nan", "0", "-Inf")
        ),
    ],
    ids=[
        *("empty", "html", "words", "nan", "negative", "infinite", "long line", "many lines"),
        *("many series", "long label", "too much in all"),
        *("no limit", "words as limit", "limit nan", "limit 0", "limit below 0"),
    ],
)
def test_invalid_metrics_page_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnreadablePageError, match=said):
        read(text, 0)
