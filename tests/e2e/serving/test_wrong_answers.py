"""A real engine that accepts drafts which its target rejects, and the canaries that find it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from devcluster.images.engine_environment import MOUNT
from tests.engine.wrong_verification import write_plugin
from tests.support import plain_http
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
DEADLINE_S = 1200
QUESTIONS = 15
"""Right answers after which an engine counts as healthy: each prompt three times."""
PROMPTS_NEEDED = 2
CANARIES = {"intervalSeconds": 60, "maxTokens": 24}
PLUGIN = "wrong-verification"
SPECULATES = "--speculative-config"
_COUNTED = re.compile(r"^specdecode:canary_answers_total\{(.*)\} ([0-9.e+]+)$", re.MULTILINE)


def plugin(folder: Path) -> dict[str, Any]:
    """Return a ConfigMap with the plugin that replaces vLLM's verification, and how a pod mounts its files."""
    root = write_plugin(folder)
    files = {str(each.relative_to(root)): each.read_text() for each in root.rglob("*") if each.is_file()}
    keys = {path: path.replace("/", ".") for path in files}
    return {
        "body": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": PLUGIN},
            "data": {keys[path]: text for path, text in files.items()},
        },
        "volume": {
            "name": PLUGIN,
            "configMap": {"name": PLUGIN, "items": [{"key": key, "path": path} for path, key in keys.items()]},
        },
    }


def deployment() -> dict[str, Any]:
    body: dict[str, Any] = small_pair()
    body["spec"]["policy"] = {"mode": "Enforce", "canaries": CANARIES}
    return body


@pytest.fixture(scope="module")
def tiny(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """An engine whose image has a faulty plugin, as a user would mount it."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    faulty = plugin(tmp_path_factory.mktemp("plugin"))
    assert kubectl.apply(yaml.safe_dump(faulty["body"])).returncode == 0
    body = deployment()
    # Paused, so that the faulty engine stays until the test has looked at it.
    body["spec"]["policy"]["paused"] = True
    body["spec"]["engine"]["env"] = [{"name": "PYTHONPATH", "value": f"/plugin:{MOUNT}"}]
    mount = {"name": PLUGIN, "mountPath": "/plugin", "readOnly": True}
    body["spec"]["podTemplate"] = {
        "spec": {"containers": [{"name": "engine", "volumeMounts": [mount]}], "volumes": [faulty["volume"]]}
    }
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", DEADLINE_S)
    yield kubectl
    kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not kubectl.objects("pods", ENGINES), "the engines are gone")


def only_engine(kubectl: Kubectl) -> dict[str, Any]:
    (pod,) = kubectl.objects("pods", ENGINES)
    return pod


def speculates(pod: dict[str, Any]) -> bool:
    return SPECULATES in pod["spec"]["containers"][0]["command"]


def counted(kubectl: Kubectl) -> dict[str, float]:
    """Return the engine's own counts of answers by verdict."""
    try:
        page = plain_http.get(f"http://{kubectl.service_address('tiny')}/metrics", timeout=30).text
    except httpx.HTTPError as error:  # a probe may time out on a slow machine, and the Service has no engine then
        raise ValueError(error) from error
    found: dict[str, float] = {}
    for labels, value in _COUNTED.findall(page):
        verdict = re.search('verdict="([a-z]+)"', labels)
        assert verdict is not None, labels
        found[verdict[1]] = found.get(verdict[1], 0) + float(value)
    return found


def answers(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdd", "tiny")["status"]["canaries"]
    return found


def policy(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdd", "tiny")["status"]["policy"]
    return found


def reasons(kubectl: Kubectl) -> set[str]:
    return {each["reason"] for each in kubectl.object("sdd", "tiny")["status"]["conditions"]}


def wait_for_right_answers(kubectl: Kubectl) -> None:
    """Wait until an engine has answered its canaries, all of them right."""

    def enough() -> bool:
        assert "WrongAnswers" not in reasons(kubectl) or not speculates(only_engine(kubectl))
        return counted(kubectl).get("right", 0) >= QUESTIONS

    eventually(enough, "the engine has answered its canaries", DEADLINE_S)
    assert set(counted(kubectl)) == {"right"}, "an answer was not the target's own"
    assert (answers(kubectl)["wrong"], answers(kubectl)["unconfirmed"]) == (0, 0)


def test_canaries_find_an_engine_that_accepts_what_its_target_rejects(tiny: Kubectl) -> None:
    assert "canaries.json" in tiny.object("configmap", "tiny-plan")["data"]
    wait_for(tiny, "tiny", "SpeculationEffective", "WrongAnswers", DEADLINE_S)
    assert condition(tiny, "tiny", "SpeculationEffective")[0] == "False"
    assert counted(tiny).get("wrong", 0) >= PROMPTS_NEEDED
    assert answers(tiny)["wrong"] >= PROMPTS_NEEDED
    assert policy(tiny)["outcome"] == "Paused"
    assert speculates(only_engine(tiny))


def test_a_policy_replaces_it_by_an_engine_that_does_not_speculate(tiny: Kubectl) -> None:
    tiny.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"policy":{"paused":null}}}')
    eventually(lambda: not speculates(only_engine(tiny)), "the faulty engine is gone", DEADLINE_S)
    wait_for(tiny, "tiny", "SpeculationActive", "Disabled", DEADLINE_S)
    wait_for(tiny, "tiny", "Ready", "Serving", DEADLINE_S)
    assert condition(tiny, "tiny", "SpeculationEffective")[:2] == ("False", "WrongAnswers")
    assert (policy(tiny)["reason"], policy(tiny)["action"], policy(tiny)["outcome"]) == (
        *("WrongAnswers", "TurnOff", "Done"),
    )
    assert tiny.object("sdd", "tiny")["spec"]["speculation"]["method"] == "draft_model", "the user's spec is unchanged"
    events = tiny.objects("events", "--field-selector=reason=PolicyActed")
    assert [each["type"] for each in events] == ["Warning"]
    wait_for_right_answers(tiny)
    assert not speculates(only_engine(tiny)), "right answers without speculation do not turn it on again"


def test_a_repaired_engine_speculates_again_and_raises_no_false_alarm(tiny: Kubectl) -> None:
    tiny.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"podTemplate":null,"engine":{"env":null}}}')
    eventually(lambda: speculates(only_engine(tiny)), "the new spec speculates", DEADLINE_S)
    wait_for(tiny, "tiny", "Ready", "Serving", DEADLINE_S)
    wait_for_right_answers(tiny)
    assert speculates(only_engine(tiny))
    assert "WrongAnswers" not in reasons(tiny)
    assert condition(tiny, "tiny", "SpeculationActive")[:2] == ("True", "Drafting")
    assert 0 < tiny.object("sdd", "tiny")["status"]["observed"]["acceptancePercent"] < 100
