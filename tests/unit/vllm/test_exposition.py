"""The reader of /metrics pages says what prometheus_client says of them, and reads no more than an engine says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_operator.stats.figures import FIGURES
from specdecode_operator.vllm.engine_metrics import Exposition, ExpositionError, Sample, read_exposition
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

SCRAPE = (Path(__file__).parent / "data" / "metrics-draft-model.txt").read_text(encoding="utf-8")
TOKENS = find_profile(KNOWN_VERSIONS[-1]).metrics.generation_tokens
MOST_RANKS, MOST_POSITIONS = 64, 32


def test_a_real_page_is_read_as_by_the_library() -> None:
    families = list(text_string_to_metric_families(SCRAPE))
    known = [Sample(each.name, each.labels, each.value) for family in families for each in family.samples]
    read = read_exposition(SCRAPE, {each.name for each in known})
    assert len(known) > 30
    assert read.samples == known
    assert read.gauges == {family.name for family in families if family.type == "gauge"}


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_what_the_library_writes_is_read(first: str, second: str, value: float) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:x", "Help", ["first", "second"], registry=registry).labels(first, second).set(value)
    labels = {key: escaped(text) for key, text in (("first", first), ("second", second))}
    read = read_exposition(generate_latest(registry).decode(), {"vllm:x"})
    assert read.samples == [Sample("vllm:x", labels, value)]
    assert read.gauges == {"vllm:x"}


def test_who_asks_for_no_name_gets_none() -> None:
    assert read_exposition(SCRAPE, []) == Exposition([], frozenset())


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@pytest.mark.parametrize(
    "line",
    ["x 1", "x{} 1", 'x{a="b"} 1.0', 'x{a="b",} 1e0', 'x{a="}", c="d"} 1 1700000000000', "x\t1\r"],
    ids=["bare", "no labels", "a label", "a comma too many", "braces and a time", "other blanks"],
)
def test_a_line_is_read_however_it_is_written(line: str) -> None:
    (found,) = read_exposition(f"y 2\n{line}\nxx 3", {"x"}).samples
    assert (found.name, found.value) == ("x", 1)


@pytest.mark.parametrize(
    "line", ["x", "x one", "x{ 1", 'x{a="b} 1', "x{a=b} 1", 'x{a="b"}', 'x{a="b"c="d"} 1', "x 1 soon"]
)
def test_what_is_in_no_such_format_is_told(line: str) -> None:
    with pytest.raises(ExpositionError, match="not in Prometheus format") as raised:
        read_exposition(line, {"x"})
    assert len(str(raised.value)) < 200


def test_as_many_ranks_as_are_served_are_read() -> None:
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
def test_what_is_more_than_an_engine_says_is_not_read(hostile: str) -> None:
    with pytest.raises(ExpositionError, match="more is said than an engine has to say"):
        read_exposition(hostile, {TOKENS})
