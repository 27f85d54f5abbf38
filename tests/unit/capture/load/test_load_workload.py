"""The settings of a run: what is read, and what is refused with field, value and fix."""

import json
from decimal import Decimal
from typing import Any

import pytest

from specdecode_operator.api.capture_workload import CaptureWorkload
from specdecode_operator.capture.load.workload import (
    Closed,
    InvalidSettingsError,
    Multiturn,
    Staircase,
    Workload,
    read_settings,
    read_workload,
)

CLOSED = {"name": "a", "pattern": "Closed", "concurrency": 2, "requests": 5}
SETTINGS = {
    "namespace": "demo",
    "capture": "first",
    "seed": 7,
    "engine": {"url": "http://127.0.0.1:8000", "model": "demo", "max_model_len": 4096, "vocab_size": 32000},
    "workload": {"phases": [CLOSED]},
    "record": {"tokenIds": True, "stepStats": False},
    "deadline_seconds": 3600,
    "context": {"image": "engine:1"},
}


def test_what_the_api_defaults_to_is_what_is_read() -> None:
    assert read_workload(CaptureWorkload().model_dump(mode="json", by_alias=True)) == read_workload({}) == Workload()


def test_settings_are_read_whole() -> None:
    settings = read_settings(json.dumps(SETTINGS))
    assert (settings.namespace, settings.capture, settings.seed) == ("demo", "first", 7)
    assert settings.engine.vocab_size == 32000
    assert settings.engine.api_key_variable is None
    assert settings.workload.phases == (Closed(name="a", concurrency=2, requests=5),)
    assert (settings.record.token_ids, settings.record.step_stats) == (True, False)
    assert settings.context == {"image": "engine:1"}


def test_each_pattern_has_its_own_fields_and_null_means_not_given() -> None:
    phases = read_workload(
        {
            "phases": [
                {
                    "name": "stairs",
                    "pattern": "Staircase",
                    "requestsPerSecond": "0.5",
                    "stepSeconds": 30,
                    "stepRequestsPerSecond": "1",
                    "durationSeconds": 90,
                    "concurrency": None,
                },
                {"name": "talk", "pattern": "Multiturn", "concurrency": 3, "turns": 4, "requests": 24},
            ]
        }
    ).phases
    assert phases == (
        Staircase(
            name="stairs",
            requests_per_second=Decimal("0.5"),
            step_seconds=Decimal(30),
            step_requests_per_second=Decimal(1),
            duration_seconds=Decimal(90),
        ),
        Multiturn(name="talk", concurrency=3, turns=4, requests=24),
    )


def _phase(**fields: Any) -> dict[str, Any]:
    return {"phases": [{**CLOSED, **fields}]}


RATE = {"name": "a", "pattern": "Constant", "requests": 5}


@pytest.mark.parametrize(
    ("workload", "field", "value", "complaint"),
    [
        (_phase(pattern="Square"), "spec.workload.phases[0].pattern", '"Square"', "Invalid value"),
        (_phase(concurrency=0), "spec.workload.phases[0].concurrency", "0", ">= 1"),
        (_phase(concurrency="2"), "spec.workload.phases[0].concurrency", '"2"', "Expected `int`"),
        (_phase(concurrency=None), "spec.workload.phases[0]", "Closed", "missing required field `concurrency`"),
        (_phase(turns=3), "spec.workload.phases[0]", '"turns":3', "unknown field `turns`"),
        (_phase(durationSeconds=9), "spec.workload.phases[0]", '"durationSeconds":9', "exactly one"),
        (_phase(requests=None), "spec.workload.phases[0]", "Closed", "exactly one of durationSeconds and requests"),
        (_phase(name="A b"), "spec.workload.phases[0].name", '"A b"', "matching regex"),
        (_phase(name="warmup"), "spec.workload", "warmup", "rename it"),
        ({"phases": [CLOSED, CLOSED]}, "spec.workload", '"a"', "same name"),
        ({"phases": []}, "spec.workload.phases", "[]", "length >= 1"),
        (
            {"phases": [{**RATE, "requestsPerSecond": "fast"}]},
            "spec.workload.phases[0].requestsPerSecond",
            '"fast"',
            "decimal",
        ),
        ({"phases": [{**RATE, "requestsPerSecond": "0"}]}, "spec.workload.phases[0]", '"0"', "above 0"),
        ({"phases": [{**RATE, "requestsPerSecond": "NaN"}]}, "spec.workload.phases[0]", "NaN", "above 0"),
        ({"prompts": {}}, "spec.workload.prompts", "{}", "exactly one of synthetic and dataset"),
        (
            {"prompts": {"synthetic": {"promptTokens": 8, "sharedPrefixTokens": 9}}},
            "spec.workload.prompts.synthetic",
            "9",
            "lower the one or raise the other",
        ),
        (
            {"prompts": {"dataset": {"path": "a", "format": "CSV"}}},
            "spec.workload.prompts.dataset.format",
            "CSV",
            "'CSV'",
        ),
        ({"temperatures": [{"temperature": "0.5", "sharePercent": 30}]}, "spec.workload", "30", "make them 100"),
        (
            {"temperatures": [{"temperature": "-1", "sharePercent": 100}]},
            "spec.workload.temperatures[0]",
            '"-1"',
            "0 or more",
        ),
        ({"timeoutSeconds": 0}, "spec.workload", "0", "timeoutSeconds is 0"),
        ({"warmupRequests": -1}, "spec.workload.warmupRequests", "-1", ">= 0"),
        ({"phasen": []}, "spec.workload", "phasen", "unknown field"),
    ],
)
def test_a_bad_workload_is_refused(workload: dict[str, Any], field: str, value: str, complaint: str) -> None:
    with pytest.raises(InvalidSettingsError) as refused:
        read_workload(workload)
    assert refused.value.problem.field == field
    assert value in refused.value.problem.value
    assert complaint in refused.value.problem.message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "SPECDECODE_CAPTURE: 1 characters: not JSON"),
        ("[]", "settings: []: Expected `object`"),
        (json.dumps({**SETTINGS, "seed": "x"}), 'settings.seed: "x": Expected `int`'),
        (json.dumps({**SETTINGS, "engine": {**SETTINGS["engine"], "url": "https://a:1"}}), "settings.engine.url"),
        (json.dumps({**SETTINGS, "engine": {**SETTINGS["engine"], "vocab_size": 1}}), "settings.engine.vocab_size: 1:"),
        (json.dumps({**SETTINGS, "workload": _phase(concurrency=0)}), "settings.workload.phases[0].concurrency: 0:"),
    ],
)
def test_bad_settings_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidSettingsError) as refused:
        read_settings(text)
    assert complaint in str(refused.value)
