"""CRDs of another version than the operator's are told, once."""

import logging

import pytest

from specdecode_operator.cluster.resources import CUSTOM_RESOURCE_DEFINITION
from specdecode_operator.handlers import operator_state as state_module
from specdecode_operator.handlers import resync
from specdecode_operator.handlers.operator_state import OperatorState
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until

NAME = "specdecodedeployments.specdecode.io"


def install(api: ApiServer, version: str | None) -> None:
    labels = {"app.kubernetes.io/part-of": "specdecode"} | ({"app.kubernetes.io/version": version} if version else {})
    api.create(CUSTOM_RESOURCE_DEFINITION, {"metadata": {"name": NAME, "labels": labels}})


async def said(caplog: pytest.LogCaptureFixture, state: OperatorState) -> list[str]:
    with caplog.at_level(logging.WARNING, resync.__name__):
        await state.start()
        await state.stop()
    return [record.getMessage() for record in caplog.records if "CRDs" in record.getMessage()]


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ("1.9.0", "is of 1.9.0, older than this 1.10.0: the API server drops fields"),
        ("1.11.0", "is of 1.11.0, newer than this 1.10.0, which knows none of the fields that came since"),
        ("1.10.1", "is of 1.10.1, newer than this 1.10.0"),
        (None, "does not say its version, older than this 1.10.0"),
    ],
)
async def test_older_and_newer_crds_are_told(
    api: ApiServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    words: str,
) -> None:
    monkeypatch.setattr("specdecode_operator.api.crds.__version__", "1.10.0")
    install(api, installed)
    (sentence,) = await said(caplog, OperatorState())
    assert sentence.startswith(f"{NAME} {words}")
    assert "specdecode crds | kubectl apply --server-side" in sentence


async def test_a_crd_of_the_same_version_is_not_spoken_of(
    api: ApiServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.api.crds.__version__", "1.10.0")
    install(api, "1.10.0")
    assert await said(caplog, OperatorState()) == []
    assert f"list {CUSTOM_RESOURCE_DEFINITION.qualified_plural}" in api.used


async def test_it_is_told_once_and_again_when_it_changes(
    api: ApiServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.api.crds.__version__", "1.10.0")
    monkeypatch.setattr(state_module, "RESYNC_S", 0.01)
    monkeypatch.setattr(resync, "_ROUNDS_TO_RELIST", 1)
    install(api, "1.9.0")
    state = OperatorState()
    await state.start()
    asked = f"list {CUSTOM_RESOURCE_DEFINITION.qualified_plural}"
    await until(lambda: api.requests.count(asked) > 3, lambda: "it looks again")
    labels = {"app.kubernetes.io/part-of": "specdecode", "app.kubernetes.io/version": "1.8.0"}
    live = api.find(CUSTOM_RESOURCE_DEFINITION, NAME) or {}
    api.change(CUSTOM_RESOURCE_DEFINITION, NAME, metadata={**live["metadata"], "labels": labels})
    await until(lambda: "is of 1.8.0" in caplog.text, lambda: "the change is told")
    await state.stop()
    assert caplog.text.count("is of 1.9.0") == 1
