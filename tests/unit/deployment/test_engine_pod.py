"""Engine pods: timeouts, rollout strategy, TLS, secrets and users."""

import json
from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.pod_template_merge import DOWNLOAD_TARGET
from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from specdecode_operator.deployment.rollout.rollout_progress import read_rollout
from tests.support.decisions import desired_state
from tests.support.model_caches import cached, decide, fetched, jobs, template
from tests.support.objects import H200, Body, deployment, pair_70b, parent, pod, tiny_cpu, waiting
from tests.unit.deployment.test_children import pod_spec as rendered_pod
from tests.unit.deployment.test_children import render

NODES = (NodeFacts("h200-0", H200, 8),)
OVERDUE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}


def child(spec: dict[str, Any], kind: str) -> Body:
    children = desired_state(parse_deployment(parent(spec)), NODES).children
    return next(each for each in children if each["kind"] == kind)


def engine(spec: dict[str, Any]) -> Body:
    return child(spec, "Deployment")


def pod_spec(spec: dict[str, Any]) -> Body:
    content: Body = engine(spec)["spec"]["template"]["spec"]
    return content


@pytest.mark.parametrize(("grace_s", "drain_s"), [(31, 1), (330, 300)])
def test_shutdown_timeout_follows_the_grace_period(grace_s: int, drain_s: int) -> None:
    pod = pod_spec(tiny_cpu(podTemplate={"spec": {"terminationGracePeriodSeconds": grace_s}}))
    assert pod["terminationGracePeriodSeconds"] == grace_s
    command = pod["containers"][0]["command"]
    assert command[command.index("--shutdown-timeout") + 1] == str(drain_s)


def start_budget_s(spec: dict[str, Any]) -> int:
    probe = pod_spec(spec)["containers"][0]["startupProbe"]
    seconds: int = probe["failureThreshold"] * probe["periodSeconds"]
    return seconds


def test_larger_model_gets_a_longer_startup_probe() -> None:
    reading_s = 156_000_000_000 // (125 * 2**20)
    assert start_budget_s(tiny_cpu()) in range(900, 911)
    assert start_budget_s(pair_70b()) in range(900 + reading_s, 900 + reading_s + 120)


@pytest.mark.parametrize("quantization", [None, "FP8"])
def test_startup_probe_allows_the_slowest_planned_start(quantization: str | None) -> None:
    spec = pair_70b()
    if quantization:
        spec["target"]["quantization"] = quantization
    launch = desired_state(parse_deployment(parent(spec)), NODES).outcome
    assert isinstance(launch, Launch)
    planned = launch.plan_status.startup
    assert planned is not None
    assert planned.engine.slowest_seconds <= planned.deadline_seconds == start_budget_s(spec)


def test_progress_deadline_covers_startup_and_download() -> None:
    def deadline_s(spec: dict[str, Any]) -> int:
        seconds: int = engine(spec)["spec"]["progressDeadlineSeconds"]
        return seconds

    on_volume = {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}
    assert deadline_s(pair_70b(models=on_volume)) > start_budget_s(pair_70b())
    assert deadline_s(pair_70b()) > deadline_s(pair_70b(models=on_volume)) + 1000


@pytest.mark.parametrize(
    ("strategy", "limits"),
    [("Replace", {"maxSurge": 0, "maxUnavailable": 1}), ("Surge", {"maxSurge": 1, "maxUnavailable": 0})],
)
def test_rollout_strategy_sets_surge_and_unavailable(strategy: str, limits: dict[str, int]) -> None:
    spec = engine(tiny_cpu(rollout={"strategy": strategy}))["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": limits}
    assert engine(tiny_cpu())["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_deployment_conditions_of_an_older_generation_are_ignored() -> None:
    live = deployment(replicas=2, updated=2, available=0, generation=2)
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    live["status"]["conditions"] = [OVERDUE, refused]
    earlier = read_rollout(live, [], 2)
    assert (earlier.overdue, earlier.blocked) == (False, None)
    live["status"]["observedGeneration"] = 2
    present = read_rollout(live, [], 2)
    assert present.overdue
    assert present.blocked is not None
    assert (present.blocked.reason, present.blocked.message) == (
        "PodsRefused",
        "no engine pod can be created: exceeded quota",
    )


TLS = {"maxModelLen": 1024, "tlsSecret": {"name": "certificate"}}


def engine_pod(**changes: Any) -> Body:
    found: Body = render(tiny_cpu(**changes))["Deployment"]["spec"]["template"]
    return found


def test_tls_secret_sets_https_on_command_probes_and_service() -> None:
    spec = engine_pod(serving=TLS)["spec"]
    (engine,) = spec["containers"]
    command = engine["command"]
    assert command[command.index("--ssl-certfile") + 1] == "/etc/specdecode-tls/tls.crt"
    assert command[command.index("--ssl-keyfile") + 1] == "/etc/specdecode-tls/tls.key"
    assert "--enable-ssl-refresh" in command
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "https", "scheme": "HTTPS"}
    assert engine["ports"] == [{"name": "https", "containerPort": 8000}]
    assert {"name": "tls", "mountPath": "/etc/specdecode-tls", "readOnly": True} in engine["volumeMounts"]
    (port,) = render(tiny_cpu(serving=TLS))["Service"]["spec"]["ports"]
    assert (port["name"], port["targetPort"], port["appProtocol"]) == ("https", "https", "https")


def test_missing_tls_secret_is_detected_through_an_env_reference() -> None:
    spec = engine_pod(serving=TLS)["spec"]
    tls = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "tls")
    assert tls == {"secretName": "certificate", "optional": True}, "a volume would hold the pod up without a word"
    variable = next(each for each in spec["containers"][0]["env"] if each["name"] == "SPECDECODE_TLS_CERTIFICATE")
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "certificate", "key": "tls.crt"}}
    assert "tls.key" not in json.dumps(spec["containers"][0]["env"]), "the private key is in no environment"


SECRETS = {
    "serving": {"apiKeySecret": {"name": "clients", "key": "token"}, "tlsSecret": {"name": "certificate"}},
    "models": {"hubTokenSecret": {"name": "hub", "key": "token"}},
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "engine", "env": [{"name": "PROXY", "valueFrom": {"secretKeyRef": {"name": "p", "key": "k"}}}]}
            ]
        }
    },
}


@pytest.mark.parametrize(
    ("said", "field", "fix"),
    [
        ('secret "clients" not found', "spec.serving.apiKeySecret", "create it, or name another"),
        ("couldn't find key token in Secret team/clients", "spec.serving.apiKeySecret", "add the key, or name one"),
        ('secret "certificate" not found', "spec.serving.tlsSecret", "create it"),
        ("couldn't find key tls.crt in Secret team/certificate", "spec.serving.tlsSecret", "add the key"),
        ("couldn't find key token in Secret team/hub", "spec.models.hubTokenSecret", "add the key"),
        ('secret "p" not found', "spec.engine.env or spec.podTemplate", "create it"),
        ('secret "of a volume" not found', "spec.podTemplate", "create it"),
    ],
)
def test_missing_secret_or_key_is_reported_with_its_field(said: str, field: str, fix: str) -> None:
    spec = engine_pod(**SECRETS)["spec"]
    held = pod(containerStatuses=[waiting("CreateContainerConfigError", said)]) | {"spec": spec}
    blocked = blocked_pod(held)
    assert blocked is not None
    assert (blocked.reason, blocked.waits) == ("WaitingForSecret", True)
    assert blocked.message.startswith(f"{said} ({field}): {fix}")


USER = {"runAsNonRoot": True, "runAsUser": 2000}


def contexts(spec: Body) -> dict[str, Body]:
    """What containers of an engine's pod say of their user, as Kubernetes reads it."""
    pod = rendered_pod(spec)
    whole = pod["securityContext"]
    containers = [*(pod.get("initContainers") or []), *pod["containers"]]
    found = {each["name"]: {**whole, **each.get("securityContext", {})} for each in containers}
    return {name: {key: context[key] for key in USER if key in context} for name, context in found.items()}


def overlay(context: Body, **more: Any) -> Body:
    return {"podTemplate": {"spec": {"securityContext": context, **more}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"runAsUser": 1000}, {"runAsUser": 1000, "runAsNonRoot": True}),
        ({"runAsUser": 0}, {"runAsUser": 0}),
        ({"runAsNonRoot": False}, {"runAsNonRoot": False}),
        ({"runAsNonRoot": True}, USER),
        ({"fsGroup": 7}, USER),
    ],
    ids=str,
)
def test_pod_template_sets_the_container_user(given: Body, expected: Body) -> None:
    assert contexts(pair_70b(**overlay(given)))["engine"] == expected
    engine = {"containers": [{"name": "engine", "securityContext": given}]}
    assert contexts(tiny_cpu(podTemplate={"spec": engine}))["engine"].items() >= expected.items()
    fetcher = {"initContainers": [{"name": DOWNLOAD_TARGET, "securityContext": given}]}
    found = contexts(pair_70b(podTemplate={"spec": fetcher}))
    assert found[DOWNLOAD_TARGET] == expected
    assert found["engine"] == USER
    download = jobs(decide(cached(**overlay(given))))[0]["spec"]["template"]["spec"]
    context = {**download["securityContext"], **download["containers"][0]["securityContext"]}
    assert {key: context[key] for key in USER if key in context} == expected


def test_model_cache_pods_share_an_fs_group() -> None:
    group = {"fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch"}
    spec = cached()
    download = jobs(decide(spec))[0]["spec"]["template"]["spec"]
    for each in (template(decide(spec, fetched(spec))), download):
        assert each["securityContext"].items() >= group.items()
    assert "fsGroup" not in rendered_pod(pair_70b())["securityContext"], "a volume of models stays whose it is"
    mine = cached(**overlay({"fsGroup": 7}))
    assert template(decide(mine, fetched(mine)))["securityContext"]["fsGroup"] == 7
