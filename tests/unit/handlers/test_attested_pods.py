"""Which pods start where only those do that an attestation speaks of."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.attestation.attest import Seen
from specdecode_operator.attestation.keys import PublicKey, SigningKey
from specdecode_operator.attestation.pod_admission import Gate
from specdecode_operator.attestation.statement import MOST_BYTES
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.handlers.webhook import NoReviewError, answer_pod
from tests.support.attestations import attest, key_pair, serving
from tests.support.objects import pair_70b, parent

KEY = SigningKey.read(key_pair()[0])
OTHER = SigningKey.read(key_pair()[0])
GATE = Gate((KEY.public,))
SIDECAR = {"name": "istio-proxy", "image": "docker.io/istio/proxyv2:1"}


def config_map(body: Body | None = None, key: SigningKey = KEY, seen: Seen | None = None) -> Body:
    return copy.deepcopy(attest(body or parent(pair_70b()), key, seen).children[0])


def owned_by(config_map: Body, **changes: str) -> Body:
    """A ConfigMap whose owner the API server does not look for, so that it stays when that one is gone."""
    metadata = config_map["metadata"]
    owners = [{**each, **changes} for each in metadata["ownerReferences"]]
    return {**config_map, "metadata": {**metadata, "ownerReferences": owners}}


def asked(
    pod: Body, kept: Body | Exception | None, before: Body | None = None, gate: Gate = GATE, namespace: str = "default"
) -> str:
    """Return why a pod may not start; an empty text where it may."""

    def read(key: Key) -> Body | None:
        assert key == Key(namespace, "llama")
        if isinstance(kept, Exception):
            raise kept
        return kept

    request = {"uid": "u1", "namespace": namespace, "object": pod, "oldObject": before}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    response = answer_pod(review, gate, read)["response"]
    assert response["allowed"] == ("status" not in response)
    return str(response["status"]["message"]) if "status" in response else ""


def a_pod(**labels: str | None) -> Body:
    pod = serving()[2]
    del pod["status"]
    for name, value in labels.items():
        pod["metadata"]["labels"][f"specdecode.io/{name}"] = value
    return pod


def test_an_attested_pod_starts() -> None:
    assert asked(a_pod(), config_map()) == ""


CHANGES: dict[str, Callable[[Body], object]] = {
    "container engine: image: evil:1": lambda pod: engine(pod).update(image="evil:1"),
    "container engine: args": lambda pod: engine(pod).update(args=["--trust-remote-code"]),
    "container engine: command": lambda pod: engine(pod).update(command=["sh"]),
    "container engine: env (SHA-256)": lambda pod: engine(pod)["env"].append({"name": "LD_PRELOAD", "value": "/x"}),
    "container engine: commands of hooks and probes (SHA-256)": lambda pod: engine(pod).update(
        lifecycle={"postStart": {"exec": {"command": ["sh"]}}}
    ),
    "container engine: volumes and workingDir (SHA-256)": lambda pod: engine(pod).update(workingDir="/x"),
    "container engine: terminationMessagePath": lambda pod: engine(pod).update(terminationMessagePath="/x.py"),
    "container engine: stdin, stdinOnce, tty": lambda pod: engine(pod).update(stdin=True),
    "container engine: restartPolicy": lambda pod: engine(pod).update(restartPolicy="Always"),
    "enableServiceLinks": lambda pod: pod["spec"].update(enableServiceLinks=True),
    "container sniffer": lambda pod: pod["spec"]["containers"].append({"name": "sniffer", "image": "evil:1"}),
    "container debugger": lambda pod: pod["spec"].update(ephemeralContainers=[{"name": "debugger", "image": "sh"}]),
}


def engine(pod: Body) -> Body:
    found: Body = pod["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("says", CHANGES)
def test_another_pod_does_not_and_what_is_attested_is_not_told(says: str) -> None:
    pod, before = a_pod(), a_pod()
    CHANGES[says](pod)
    for operation in (None, before):
        refusal = asked(pod, config_map(), operation)
        assert refusal == f"engine of default/llama: is not as attested in ConfigMap llama-attestation: {says}"


def test_what_a_mesh_adds_is_let_in_by_name_and_image() -> None:
    pod = a_pod()
    pod["spec"]["containers"].append({**SIDECAR})
    named = Gate((KEY.public,), frozenset({("istio-proxy", SIDECAR["image"])}))
    assert asked(pod, config_map(), gate=named) == ""
    assert "istio-proxy" in asked(pod, config_map())
    pod["spec"]["containers"][-1]["image"] = "evil:1"
    assert "istio-proxy" in asked(pod, config_map(), gate=named)


def test_changes_that_say_nothing_of_what_runs_pass_whatever_became_of_the_attestation() -> None:
    pod = a_pod()
    pod["metadata"] |= {"annotations": {**pod["metadata"]["annotations"], "a": "b"}, "finalizers": []}
    assert asked(pod, None, before=a_pod()) == ""


def test_a_pod_without_an_engines_label_is_told_why_it_is_none() -> None:
    stranger = a_pod()
    del stranger["metadata"]["labels"]["specdecode.io/deployment"]
    assert "the pod has no label specdecode.io/deployment" in asked(stranger, None)
    for label, words in (
        ("capture", "captures are not attested; label the namespace specdecode.io/attested-pods=engines"),
        ("reads-model-for", "Jobs that read or download models are not attested; give each model with its config"),
    ):
        stranger["metadata"]["labels"][f"specdecode.io/{label}"] = "llama"
        assert words in asked(stranger, None)
        del stranger["metadata"]["labels"][f"specdecode.io/{label}"]


BORN = "a pod is an engine's from its creation or never: its labels"


@pytest.mark.parametrize("labels", [{}, {"computes-for": "llama"}, {"deployment": "other"}], ids=str)
def test_no_pod_becomes_an_engines_or_ceases_to_be_one(labels: dict[str, str]) -> None:
    other = a_pod()
    del other["metadata"]["labels"]["specdecode.io/deployment"]
    other["metadata"]["labels"] |= {f"specdecode.io/{name}": value for name, value in labels.items()}
    for image in (engine(other)["image"], "evil:1"):
        engine(other)["image"] = image
        assert BORN in asked(a_pod(), config_map(), before=other)
        assert BORN in asked(other, config_map(), before=a_pod())


def test_what_was_not_attested_before_becomes_nothing_that_is() -> None:
    before = a_pod()
    engine(before)["image"] = "evil:1"
    refusal = asked(a_pod(), config_map(), before)
    assert "what it was before the change is not as attested" in refusal
    assert "container engine: image: evil:1: delete the pod" in refusal


def test_an_engine_may_become_one_of_another_rollout() -> None:
    first = config_map()
    changed = parent(pair_70b(engine={"image": "vllm/other:1"}), generation=2)
    second = config_map(changed, seen=Seen(first["data"], [], []))
    pod = a_pod()
    for each in (*pod["spec"]["initContainers"], engine(pod)):
        each["image"] = "vllm/other:1"
    assert asked(pod, second, before=a_pod()) == ""
    assert "what it was before the change is not as attested" in asked(pod, config_map(changed), before=a_pod())


def test_workers_of_a_group_are_attested_too() -> None:
    pod = a_pod()
    del pod["metadata"]["labels"]["specdecode.io/deployment"]
    pod["metadata"]["labels"]["specdecode.io/computes-for"] = "llama"
    engine(pod)["env"].append({"name": "LWS_LEADER_ADDRESS", "value": "10.0.0.1"})
    assert asked(pod, config_map()) == ""


def test_only_what_the_key_signed_of_this_very_object_counts() -> None:
    elsewhere, earlier = parent(pair_70b()), parent(pair_70b())
    elsewhere["metadata"]["namespace"] = "theirs"
    earlier["metadata"]["uid"] = "uid-0"
    kept = config_map()
    for attested, says in (
        (None, "ConfigMap llama-attestation is not there"),
        (config_map(key=OTHER), "holds no attestation that verifies: one was signed with another key"),
        ({**kept, "data": config_map(elsewhere)["data"]}, "one is of theirs/llama"),
        ({**kept, "data": config_map(earlier)["data"]}, "one is of an earlier object of this name"),
        (owned_by(kept, kind="Gone"), "one is of an earlier object of this name"),
        ({**kept, "data": {}}, "holds no attestation that verifies"),
        ({**kept, "data": {f"{n}.intoto.json": "{}" for n in range(5)}}, "has 5 attestations"),
        ({**kept, "data": {"a.intoto.json": " " * MOST_BYTES + "{}"}}, "no DSSE envelope"),
        ({**kept, "data": {"a.intoto.json": json.dumps({"payload": "\x1b[2J" * 900})}}, "no DSSE envelope"),
        (ForbiddenError("no"), "let the webhook get ConfigMaps in namespace default"),
        (ClusterError("it does not answer"), "cannot be read: it does not answer"),
    ):
        refusal = asked(a_pod(), attested)
        assert says in refusal
        assert len(refusal) < 600
        assert refusal.isprintable()


def test_what_others_write_beside_it_is_passed_over_and_either_key_verifies() -> None:
    kept = config_map()
    kept["data"]["forged.intoto.json"] = "{}"
    assert asked(a_pod(), kept) == ""
    both = Gate((OTHER.public, PublicKey.read(key_pair()[1]), KEY.public))
    assert asked(a_pod(), kept, gate=both) == ""


def test_engines_of_an_earlier_rollout_start_while_it_is_kept() -> None:
    first = config_map()
    changed = parent(pair_70b(serving={"maxModelLen": 4112}), generation=2)
    second = config_map(changed, seen=Seen(first["data"], [], []))
    assert len(second["data"]) == 2
    assert asked(a_pod(), second) == ""
    assert "is not as attested" in asked(a_pod(), config_map(changed))


@pytest.mark.parametrize("name", ["a/../../secrets", "..", "A", "", "x" * 300, 1, ["a"]], ids=str)
def test_no_label_leads_elsewhere(name: Any) -> None:
    refusal = asked(a_pod(deployment=name), AssertionError("it was read"))
    assert "is no name of a SpecDecodeDeployment" in refusal
    assert len(refusal) < 400


@pytest.mark.parametrize("body", [None, {}, [], {"apiVersion": "v1", "kind": "Secret"}], ids=str)
def test_reviews_of_anything_else_are_no_reviews(body: Any) -> None:
    review = {"apiVersion": "admission.k8s.io/v1", "request": {"uid": "u1", "namespace": "default", "object": body}}
    with pytest.raises(NoReviewError):
        answer_pod(review, GATE, lambda _: None)


ODD: tuple[Any, ...] = ([[]], {"a": 1}, [{"name": []}], {"name": {}}, [{"valueFrom": [1]}], "x", 1.5, float("inf"))
ATTESTED = ("name", "image", "command", "args", "env", "volumeMounts", "workingDir")


def test_whatever_stands_in_a_pod_is_answered_and_nothing_that_is_attested_may_be_odd() -> None:
    kept, attested = config_map(), a_pod()
    del attested["apiVersion"], attested["kind"], attested["metadata"]["labels"]
    labels = a_pod()["metadata"]["labels"]
    for path in places(attested):
        for odd in ODD:
            pod = copy.deepcopy(attested)
            target: Any = pod
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = odd
            pod |= {"apiVersion": "v1", "kind": "Pod"}
            if isinstance(pod["metadata"], dict):
                pod["metadata"]["labels"] = labels
            before = {"metadata": {"labels": labels, "annotations": odd}, "spec": odd}
            refusal = asked(pod, kept, before)
            if path[:2] == ("spec", "containers") and len(path) > 3 and path[3] in ATTESTED:
                assert refusal, (path, odd)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where something stands in a value, by each step."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in steps:
        yield (*path, step)
        yield from places(each, (*path, step))
