"""What GitOps tools make of an object, at every moment of its life: kstatus, Argo CD's health.lua, Flux's expressions.

All three say the same, so that a sync waits for the same things whichever tool makes it.
"""

from functools import cache
from typing import Any

import pytest
import yaml

from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND as DEPLOYMENT
from specdecode_operator.api.training import KIND as TRAINING
from tests.support.gitops.health import LUA, SAID, ask, flux_checks
from tests.support.golden import EXAMPLES
from tests.support.lives import STATES, State

CONFIG = EXAMPLES / "argo-cd/argocd-cm.yaml"


@cache
def answers() -> dict[str, dict[str, Any]]:
    """What is said of each state."""
    found = {}
    for kind, check in flux_checks().items():
        of_kind = [each for each in STATES.values() if each.body["kind"] == kind]
        said = ask(LUA.read_text(), check, [each.body for each in of_kind])
        found |= dict(zip((each.name for each in of_kind), said, strict=True))
    return found


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_gitops_tools_agree_on_health_in_every_state(state: State) -> None:
    said = answers()[state.name]
    assert {**said, "argo": said["argo"]["status"]} == SAID[state.told]


def test_argo_cd_message_starts_with_the_reason() -> None:
    for name, said in answers().items():
        assert STATES[name].told == "wait" or said["argo"]["message"].startswith(f"{STATES[name].reason}: ")


def test_all_kinds_have_flux_and_argo_cd_health_checks() -> None:
    assert set(flux_checks()) == {DEPLOYMENT, CAPTURE, TRAINING}
    config = yaml.safe_load(CONFIG.read_text())["data"]
    for kind in (DEPLOYMENT, CAPTURE, TRAINING):
        assert config[f"resource.customizations.health.specdecode.io_{kind}"] == LUA.read_text()


def test_application_health_is_that_of_its_status() -> None:
    lua = yaml.safe_load(CONFIG.read_text())["data"]["resource.customizations.health.argoproj.io_Application"]
    new = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Application", "metadata": {"name": "pairs"}}
    told = {"health": {"status": "Degraded", "message": "why"}}
    said = ask(lua, {"current": "true"}, [new, {**new, "status": {}}, {**new, "status": told}])
    assert [each["argo"]["status"] for each in said] == ["Progressing", "Progressing", "Degraded"]


def test_status_without_conditions_is_in_progress() -> None:
    for kind, check in flux_checks().items():
        body = {"apiVersion": "specdecode.io/v1alpha1", "kind": kind, "metadata": {"name": "a", "generation": 1}}
        (said,) = ask(LUA.read_text(), check, [{**body, "status": {"observedGeneration": -1}}])
        assert said["kstatus"] == said["flux"] == "InProgress"
        (said,) = ask(LUA.read_text(), {"current": "true"}, [body])
        assert said["argo"]["status"] == "Progressing", "an API server whose CRD is older gives no status"
