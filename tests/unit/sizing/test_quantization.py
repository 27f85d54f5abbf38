"""Layers that a checkpoint leaves in 16 bits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.quantization import Exclusions
from tests.support.objects import TINY_CONFIG

KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
NAMES = [
    f"{prefix}.{number}.{module}"
    for prefix in ("model.layers", "language_model.model.layers")
    for number in (0, 1, 10, 47)
    for module in ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.0.down_proj", "mlp.shared_expert.gate")
]


def left_out(*patterns: str, key: str = "ignored_layers", layers: int = 4, **more: list[str]) -> list[frozenset[str]]:
    """Return the modules that each layer keeps in 16 bits."""
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", key: list(patterns)} | more
    config = {**TINY_CONFIG, "num_hidden_layers": layers, "quantization_config": quantization}
    return [layer.unquantized for layer in geometry_from_config("my/model", config).layers]


@pytest.mark.parametrize(
    "pattern",
    [
        "*" * 30 + "X",
        "*a" * 30 + "X",
        "re:" + ".*" * 30 + "X",
        *("re:" + ".?" * repeats + "X" for repeats in (14, 20, 40)),
        "re:" + "(?:.|.)" * 17 + "X",
        "re:(?:.|.)*X",
        "re:(?:(?:.*)*)*X",
        r"re:(\w+)+X",
        r"re:(?:\w|\w?|[\w.]+)+X",
        "re:^(?!(?:.|.)*X)" + ".?" * 40 + "X",
    ],
)
def test_exclusion_patterns_are_matched_in_bounded_time(pattern: str) -> None:
    assert not any(left_out(pattern, layers=128))


@pytest.mark.parametrize(
    "expression",
    [
        ".*lm_head",
        ".*self_attn.*",
        "self_attn",
        r"model\.layers\.\d+\.mlp\.gate$",
        r"model\.layers\.[0-9]{1,2}\.mlp\..*",
        r"^model\.layers\.(0|47)\..*",
        r".*mlp\.(gate|up|gate_up|down)_proj.*",
        r".*\.mlp\.shared_expert\.gate",
        "(?i).*MLP.*",
        "^(?!.*experts).*$",
        r"(?!.*\.mlp\.experts(?:\.|$))",
        r"^(?!.*(?:self_attn\.(?:q_proj|k_proj)|[)(]|\))).*layers.*$",
    ],
)
def test_exclusion_regexes_match_as_in_python(expression: str) -> None:
    exclusions = Exclusions.of([f"re:{expression}"])
    assert [name for name in NAMES if exclusions.hold(name)] == [name for name in NAMES if re.match(expression, name)]


def test_merged_projection_is_excluded_by_the_names_of_its_parts() -> None:
    """Qwen3.5's files name its two parts, which vLLM merges into in_proj_qkvz (qwen3_5.py, packed_modules_mapping)."""
    parts = [f"model.layers.2.linear_attn.in_proj_{part}" for part in ("qkv", "z")]
    kept = left_out(*parts, key="modules_to_not_convert")
    assert [sorted(layer) for layer in kept] == [[], [], ["linear_attn.in_proj_qkvz"], []]


@given(
    st.lists(st.sampled_from(["a", "b", ".", "layers.1", "*"]), max_size=4).map("".join),
    st.sampled_from(["*", "*a", ".*"]),
    st.sampled_from(["a", "b", "layers.1", "layers.11"]),
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=3),
)
def test_globs_match_whole_name_parts(beginning: str, end: str, first: str, words: list[str]) -> None:
    glob, name = beginning + end, ".".join([first, *words])
    # Python's engine goes back, which ends for so few stars.
    wanted = re.compile(r"(^|.*\.)" + re.escape(glob).replace(r"\*", ".*") + r"(\.|$)")
    assert Exclusions.of([glob]).hold(name) == (wanted.match(name) is not None)


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "ab", ""]), min_size=1, max_size=4).map(".".join), max_size=4),
    st.lists(st.sampled_from(["a", "b", "ab", ""]), min_size=1, max_size=4).map(".".join),
)
def test_plain_names_match_consecutive_whole_name_parts(texts: list[str], name: str) -> None:
    assert Exclusions.of(texts).hold(name) == any(f".{text}." in f".{name}." for text in texts)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        ([f"*x{number}y" for number in range(9000)], "characters over 4 layers"),
        ([f"re:a{number}" for number in range(33)], "more than 32 regular expressions"),
        (["*" * 129], "a pattern of more than 128 characters"),
        (["re:("], "is not a regular expression"),
        (["re:a)|(?:b"], "is not a regular expression"),
        (["re:(?x)a#"], "is not a regular expression"),
        ([r"re:(a)\1"], "looks back or around"),
        (["re:a(?=b)"], "looks back or around"),
        (["re:(?!a)b|c"], "looks back or around"),
        (["re:(?:a{99}){99}"], "counts by { and }"),
        ([r"re:\d{9}{9}"], "counts by { and }"),
        ([r"re:" + "." * number + r"\w?" * 35 for number in range(16)], "16 patterns are too many"),
    ],
)
def test_excessive_or_invalid_patterns_are_refused(key: str, patterns: list[str], why: str) -> None:
    with pytest.raises(GeometryError) as refused:
        left_out(*patterns, key=key)
    assert refused.value.field == f"quantization_config.{key}"
    assert why in refused.value.message
    assert "name the modules" in refused.value.message


def test_pattern_limit_depends_on_the_layer_count() -> None:
    patterns = [f"*visual.blocks.{number}.*" for number in range(40)]
    assert not any(left_out(*patterns, layers=128))
    with pytest.raises(GeometryError, match="over 1,024 layers"):
        left_out(*patterns, layers=1024)


def test_limit_is_for_the_patterns_of_all_keys() -> None:
    patterns = [f"*visual.blocks.{number}.*" for number in range(5)]
    assert not any(left_out(*patterns, layers=1024))
    by_key = {key: [f"{pattern}{key}" for pattern in patterns] for key in KEYS}
    with pytest.raises(GeometryError, match="over 1,024 layers"):
        left_out(layers=1024, **by_key)


def test_negated_patterns_count_more_because_each_is_matched_apart() -> None:
    assert not any(left_out("re:(?!.)", layers=1024))
    with pytest.raises(GeometryError, match="over 1,024 layers"):
        left_out("re:(?!.)", "re:(?!.)a", layers=1024)


def test_names_longer_than_any_module_leave_nothing_out() -> None:
    long = [".".join(["layers", *"a" * length]) for length in range(1, 400)]
    assert not any(left_out(*long))


def test_many_globs_with_layer_numbers_are_accepted() -> None:
    patterns = [f"model.layers.{number}.{module}*" for number in range(1024) for module in ("self_attn", "mlp.down")]
    assert all(left_out(*patterns, layers=1024))


def test_many_names_without_wildcards_are_accepted() -> None:
    names = [f"model.layers.{number}.{'a.' * number}self_attn.q_proj" for number in range(300)]
    assert [bool(modules) for modules in left_out(*names, layers=4)] == [True, False, False, False]
    assert any(left_out(*names, layers=300))
