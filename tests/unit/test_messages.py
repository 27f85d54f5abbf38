"""How a wrong value is told, for every field of a SpecDecodeDeployment: in its file's words, with its whole path."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from specdecode_operator.api.spec_problems import admitted_spec
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.problems import MISSING, InvalidSpecError, Problem, printable
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from tests.support.field_cases import DEPLOYMENT_FIELDS
from tests.support.llama import SMALL_CONFIG
from tests.support.replay_field_cases import REPLAY_FIELDS
from tests.support.schedule_field_cases import SCHEDULE_FIELDS

CASES = {**DEPLOYMENT_FIELDS, **SCHEDULE_FIELDS, **REPLAY_FIELDS}
WRONG: Final = (True, "x", "4096", 1.5, -1, 10**12, [], {"a": None}, [None], "", "a\n\x1b[31mb", [{}])
PYTHON = re.compile(r"\b(None|True|False|NoneType|dict|str|bool|Traceback)\b|<class|\w+Error\b")


def told(field: str, value: Any) -> Iterator[Problem]:
    """What is wrong with a spec that has a value at a field."""
    try:
        valid_facts(admitted_spec(replace(CASES[field], value=value).changed(field)))
    except InvalidSpecError as error:
        yield from error.problems


@pytest.mark.parametrize("field", CASES)
def test_wrong_field_value_is_reported_without_python_terms(field: str) -> None:
    for value in WRONG:
        for problem in told(field, value):
            assert not PYTHON.search(str(problem)), problem
            assert str(problem).isprintable(), problem
            assert problem.field.startswith("spec."), problem
            written = printable(problem.value)
            assert written == MISSING or not problem.message.startswith((f"is {written}", written + " ")), problem


QUANTIZED = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "ignore": ["re:.*head"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    "ignore": ["lm_head"],
}
CONFIGS: Final = {
    "plain": SMALL_CONFIG,
    "rope": {**SMALL_CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "experts": next(
        model["config"]
        for model in read_data("models/deepseek.json")["models"]
        if model["id"] == "deepseek-ai/DeepSeek-R1"
    ),
    "gptq": {**SMALL_CONFIG, "quantization_config": QUANTIZED},
    "compressed": {**SMALL_CONFIG, "quantization_config": COMPRESSED},
}


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config.json, the keys of its sections too."""
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def having(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A config.json with a value at a place."""
    key, *rest = path
    return {**config, key: having(config[key], tuple(rest), value) if rest else value}


def refusal(config: dict[str, Any]) -> SizingError | None:
    """What a config.json is refused with, if it is."""
    try:
        geometry_from_config("my/model", config)
    except SizingError as error:
        return error
    return None


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_config_value_is_reported_with_its_full_path(name: str) -> None:
    config = CONFIGS[name]
    assert refusal(config) is None
    known = {".".join(path) for path in places(config)}
    values = (*WRONG, None, ["re:("], ["re:(a+)+$"], ["re:.*.*.*.*x"], math.nan)
    errors = [refusal(having(config, path, value)) for path in places(config) for value in values]
    found = [error for error in errors if error is not None]
    assert not [error for error in found if PYTHON.search(str(error)) or not str(error).isprintable()]
    # What is missing is told within the section that lacks it.
    assert not [each for each in found if each.field not in known and each.field.rpartition(".")[0] not in {*known, ""}]
    deepest = max(map(len, places(config)))
    assert {each.field for each in found} & {".".join(path) for path in places(config) if len(path) == deepest}
