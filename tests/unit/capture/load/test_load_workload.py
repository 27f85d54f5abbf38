"""The settings of a run: what is read, and what is refused with field, value and fix."""

import json
from typing import Any

import pytest

from specdecode_operator.api.capture import CaptureWorkload, Pattern, Phase
from specdecode_operator.capture.load.run_settings import InvalidSettingsError, read_settings

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


def test_settings_are_read_whole() -> None:
    settings = read_settings(json.dumps(SETTINGS))
    assert (settings.namespace, settings.capture, settings.seed) == ("demo", "first", 7)
    assert (settings.root, settings.deadline_seconds) == ("/capture", 3600)
    assert settings.engine.vocab_size == 32000
    assert settings.engine.api_key_variable is None
    assert settings.workload.phases == [Phase(name="a", pattern=Pattern.CLOSED, concurrency=2, requests=5)]


def test_what_is_not_given_is_what_the_api_defaults_to() -> None:
    written = CaptureWorkload().model_dump(mode="json", by_alias=True, exclude_none=True)
    for workload in ({}, written):
        assert read_settings(json.dumps({**SETTINGS, "workload": workload})).workload == CaptureWorkload()


def _engine(**fields: Any) -> dict[str, Any]:
    return {"engine": {**SETTINGS["engine"], **fields}}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"seed": "x"}, "SPECDECODE_CAPTURE.seed: x: Input should be a valid integer"),
        ({"seed": "7"}, "SPECDECODE_CAPTURE.seed: 7: Input should be a valid integer"),
        (_engine(url="ftp://a:1"), "SPECDECODE_CAPTURE.engine.url: ftp://a:1: String should match pattern"),
        (_engine(vocab_size=1), "SPECDECODE_CAPTURE.engine.vocab_size: 1: Input should be greater"),
        (
            {"workload": {"phases": [{**CLOSED, "concurrency": 0}]}},
            "SPECDECODE_CAPTURE.workload.phases.0.concurrency: 0: Input should be greater",
        ),
        ({"workload": {"phasen": []}}, "SPECDECODE_CAPTURE.workload.phasen: []: Extra inputs are not permitted"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSettingsError) as refused:
        read_settings(json.dumps({**SETTINGS, **changed}))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "Invalid JSON"), ("[]", "should be an object"), ("", "Invalid JSON")]
)
def test_what_is_no_document_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidSettingsError, match="SPECDECODE_CAPTURE: ") as refused:
        read_settings(text)
    assert complaint in str(refused.value)
