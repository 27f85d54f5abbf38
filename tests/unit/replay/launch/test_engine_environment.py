"""The environment that an emulated engine runs in."""

import os
from pathlib import Path

import pytest

from specdecode_operator.replay.emulation import EngineEnvironment, free_port


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, None),
        ("", "specdecode_emulated,specdecode_recorder"),
        ("mine", "mine,specdecode_emulated,specdecode_recorder"),
    ],
)
def test_plugins_that_are_listed_are_joined_by_ours(
    given: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    assert EngineEnvironment.at(None).variables([], {}).get("VLLM_PLUGINS") == told


def test_plugins_come_before_packages_and_those_before_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    variables = EngineEnvironment.at(tmp_path).variables([Path("/plugins")], {"MORE": "1"})
    assert variables["PYTHONPATH"].split(os.pathsep) == ["/plugins", str(tmp_path), "/there"]
    # With it vLLM would look for no platform.
    assert "VLLM_TARGET_DEVICE" not in variables
    assert variables["MORE"] == "1"


def test_a_free_port_is_one_at_which_one_can_listen() -> None:
    assert 0 < free_port("127.0.0.1") < 65536
