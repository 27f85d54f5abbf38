"""What figures, rules and dashboard are made of, against what the real vLLM of each version publishes."""

from prometheus_client.parser import text_string_to_metric_families

from bench.documents.monitoring import dashboard
from specdecode_operator.stats.figures import FIGURES, TPOT_LIMIT, TTFT_LIMIT, find_figure
from specdecode_operator.stats.measures import Gauge, read_page
from tests.engine.contract_cases import GOOD
from tests.engine.contract_checks import Vllm


def test_vllm_publishes_the_series_and_buckets_of_the_figures(vllm: Vllm) -> None:
    page = vllm.h100.ask("metrics", vllm.line(GOOD["gpu-ngram"])).value
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    asked = frozenset().union(*(figure.measure.series() for figure in FIGURES))
    assert asked <= {sample.name for sample in samples}
    read = read_page(page, asked, 0)
    gauges = set(read.gauges)
    assert gauges | {name for name, _ in read.counters} == asked
    of_now = [figure.measure.series() for figure in FIGURES if isinstance(figure.measure, Gauge)]
    assert gauges == frozenset().union(*of_now)
    for variable, name in (
        (TTFT_LIMIT, "time_to_first_token_within_limit"),
        (TPOT_LIMIT, "time_per_output_token_within_limit"),
    ):
        histogram = find_figure(name).measure.series()
        buckets = {sample.labels["le"] for sample in samples if sample.name in histogram and "le" in sample.labels}
        (offered,) = (each for each in dashboard()["templating"]["list"] if f"${each['name']}" == variable)
        assert {option["value"] for option in offered["options"]} <= buckets
