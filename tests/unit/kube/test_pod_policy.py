"""What podTemplate may ask for: nothing beyond the pod's namespace, but what is allowed by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.deployment.desired_state import Launch, RolledBack
from specdecode_operator.deployment.pods.rollback import Failure, LastGood, attempt_of
from specdecode_operator.deployment.spec.parent import read_parent
from specdecode_operator.kube.pod_policy import GRANTS, is_grant, pod_problems
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu

GOLDEN = Path("tests/golden")


def engine(**fields: Any) -> Body:
    return {"containers": [{"name": "engine", **fields}]}


def secured(**context: Any) -> Body:
    return engine(securityContext=context)


def volume(**source: Any) -> Body:
    return {"volumes": [{"name": "v", **source}]}


def projected(**source: Any) -> Body:
    return volume(projected={"sources": [{"configMap": {"name": "c"}}, source]})


REFUSED: list[tuple[Body, str, str]] = [
    ({"hostNetwork": True}, "hostNetwork", "hostNetwork"),
    ({"hostNetwork": "true"}, "hostNetwork", "hostNetwork"),
    ({"hostPID": True}, "hostPID", "hostPID"),
    ({"hostIPC": True}, "hostIPC", "hostIPC"),
    ({"nodeName": "n"}, "nodeName", "nodeName"),
    ({"serviceAccountName": "admin"}, "serviceAccountName", "serviceAccountName"),
    ({"serviceAccount": "admin"}, "serviceAccount", "serviceAccountName"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken", "automountServiceAccountToken"),
    ({"automountServiceAccountToken": None}, "automountServiceAccountToken", "automountServiceAccountToken"),
    ({"priorityClassName": "system-node-critical"}, "priorityClassName", "priorityClassName"),
    ({"securityContext": None}, "securityContext", "seccompProfile"),
    (
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "securityContext.seccompProfile",
        "seccompProfile",
    ),
    ({"securityContext": {"seccompProfile": None}}, "securityContext.seccompProfile", "seccompProfile"),
    (
        {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
        "securityContext.appArmorProfile",
        "appArmorProfile",
    ),
    (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "securityContext.sysctls[0]",
        "sysctls.kernel.msgmax",
    ),
    (
        {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
        "securityContext.seLinuxOptions",
        "seLinuxOptions",
    ),
    (secured(seLinuxOptions={"user": "u"}), "containers[0].securityContext.seLinuxOptions", "seLinuxOptions"),
    (secured(seLinuxOptions={"role": "r"}), "containers[0].securityContext.seLinuxOptions", "seLinuxOptions"),
    (
        {"securityContext": {"windowsOptions": {"hostProcess": True}}},
        "securityContext.windowsOptions.hostProcess",
        "windowsOptions",
    ),
    (secured(privileged=True), "containers[0].securityContext.privileged", "privileged"),
    (
        {
            "initContainers": [
                {"name": "a", "image": "i"},
                {"name": "b", "image": "i", "securityContext": {"privileged": True}},
            ]
        },
        "initContainers[1].securityContext.privileged",
        "privileged",
    ),
    (
        {"ephemeralContainers": [{"name": "a", "image": "i", "securityContext": {"privileged": True}}]},
        "ephemeralContainers[0].securityContext.privileged",
        "privileged",
    ),
    (
        secured(allowPrivilegeEscalation=True),
        "containers[0].securityContext.allowPrivilegeEscalation",
        "allowPrivilegeEscalation",
    ),
    (
        secured(allowPrivilegeEscalation=None),
        "containers[0].securityContext.allowPrivilegeEscalation",
        "allowPrivilegeEscalation",
    ),
    (engine(securityContext=None), "containers[0].securityContext", "seccompProfile"),
    (secured(procMount="Unmasked"), "containers[0].securityContext.procMount", "procMount"),
    (secured(seccompProfile={"type": "Unconfined"}), "containers[0].securityContext.seccompProfile", "seccompProfile"),
    (
        secured(capabilities={"add": ["IPC_LOCK"]}),
        "containers[0].securityContext.capabilities.add",
        "capabilities.IPC_LOCK",
    ),
    (
        secured(capabilities={"add": ["NET_BIND_SERVICE", "CAP_sys_admin"]}),
        "containers[0].securityContext.capabilities.add",
        "capabilities.SYS_ADMIN",
    ),
    (secured(capabilities={"drop": []}), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (secured(capabilities={"drop": ["NET_RAW"]}), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (secured(capabilities=None), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (
        {"containers": [{"name": "more", "image": "i", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
        "containers[0].ports[0].hostPort",
        "hostPort",
    ),
    (
        {"containers": [{"name": "more", "image": "i", "ports": [{"containerPort": 1, "hostIP": "10.0.0.1"}]}]},
        "containers[0].ports[0].hostPort",
        "hostPort",
    ),
    (
        {"containers": [{"name": "more", "image": "i", "livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 1}}}]},
        "containers[0].livenessProbe.httpGet.host",
        "probeHost",
    ),
    (
        {
            "containers": [
                {"name": "more", "image": "i", "lifecycle": {"postStart": {"tcpSocket": {"host": "h", "port": 1}}}}
            ]
        },
        "containers[0].lifecycle.postStart.tcpSocket.host",
        "probeHost",
    ),
    (
        engine(lifecycle={"preStop": {"httpGet": {"host": "h", "port": 1}}}),
        "containers[0].lifecycle.preStop.httpGet.host",
        "probeHost",
    ),
    (engine(startupProbe={"httpGet": {"host": "h"}}), "containers[0].startupProbe.httpGet.host", "probeHost"),
    (engine(readinessProbe={"tcpSocket": {"host": "h"}}), "containers[0].readinessProbe.tcpSocket.host", "probeHost"),
    (volume(nfs={"server": "s", "path": "/"}), "volumes[0].nfs", "volumes.nfs"),
    (volume(flexVolume={"driver": "d"}), "volumes[0].flexVolume", "volumes.flexVolume"),
    (
        projected(serviceAccountToken={"path": "t"}),
        "volumes[0].projected.sources[1].serviceAccountToken",
        "serviceAccountToken",
    ),
    (
        projected(podCertificate={"keyType": "k"}),
        "volumes[0].projected.sources[1].podCertificate",
        "serviceAccountToken",
    ),
]

LET_THROUGH: list[Body] = [
    {"hostNetwork": False, "hostPID": False, "nodeName": "", "serviceAccountName": "default"},
    {"priorityClassName": "high", "runtimeClassName": "nvidia", "schedulerName": "volcano"},
    {"tolerations": [{"operator": "Exists"}], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["h"]}]},
    {"securityContext": {"runAsUser": 0, "runAsNonRoot": False, "fsGroup": 1, "supplementalGroups": [1]}},
    {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}},
    {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "1"}]}},
    {"securityContext": {"seLinuxOptions": {"level": "s0:c1,c2"}}},
    secured(privileged=False, allowPrivilegeEscalation=False, readOnlyRootFilesystem=True),
    secured(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    volume(emptyDir={}),
    volume(persistentVolumeClaim={"claimName": "c"}),
    projected(secret={"name": "s"}),
    {"containers": [{"name": "more", "image": "i", "readinessProbe": {"httpGet": {"path": "/", "port": 1}}}]},
    {"containers": "none", "volumes": [3], "securityContext": {}},
]


def accepted(spec: Body, **cluster: Any) -> tuple[str, str, str]:
    """Status, reason and message of the condition."""
    desired = desired_state(read_parent(parent(spec)), (), **cluster)
    found = next(each for each in desired.conditions if each.type == "Accepted")
    return found.status.value, found.reason, found.message


@pytest.mark.parametrize(("template", "field", "grant"), REFUSED, ids=str)
def test_what_reaches_beyond_the_namespace_is_refused_by_field_unless_it_is_allowed(
    template: Body, field: str, grant: str
) -> None:
    (problem,) = pod_problems({"spec": template}, "spec.podTemplate")
    assert problem.field == f"spec.podTemplate.spec.{field}"
    assert f"--allow-pod-template={grant}" in problem.message
    assert pod_problems({"spec": template}, "spec.podTemplate", frozenset({grant})) == []
    assert pod_problems({"spec": template}, "", frozenset({grant.partition(".")[0]})) == [], "all of its kind"
    assert pod_problems({"spec": template}, "", frozenset(GRANTS) - {grant.partition(".")[0]}), "but nothing else"


@pytest.mark.parametrize(
    "template",
    [
        {"volumes": [{"name": ["x"]}]},
        {"initContainers": [{"name": ["x"]}]},
        {"containers": [{"name": {"x": 1}}]},
        {"securityContext": {"sysctls": [{"name": ["x"]}]}},
        {"securityContext": {"seccompProfile": {"type": ["x"]}}},
    ],
    ids=str,
)
def test_names_that_are_no_names_are_told_like_all_else(template: Body) -> None:
    assert accepted(tiny_cpu(podTemplate={"spec": template}))[0] == "False"


def test_every_grant_lets_something_through() -> None:
    assert {grant.partition(".")[0] for *_, grant in REFUSED} == set(GRANTS)


@pytest.mark.parametrize("template", LET_THROUGH, ids=str)
def test_what_a_pod_does_to_itself_alone_is_let_through(template: Body) -> None:
    assert pod_problems({"spec": template}, "spec.podTemplate") == []


def test_an_annotation_takes_no_profile_away_either() -> None:
    name = "container.apparmor.security.beta.kubernetes.io/engine"
    (problem,) = pod_problems({"metadata": {"annotations": {name: "unconfined"}}}, "spec.podTemplate")
    assert problem.field == f"spec.podTemplate.metadata.annotations.{name}"
    assert pod_problems({"metadata": {"annotations": {name: "localhost/mine", "team": "a"}}}, "") == []


def test_accepted_names_field_and_fix_and_nothing_is_made() -> None:
    spec = tiny_cpu(podTemplate={"spec": {"hostNetwork": True, "hostPID": True}})
    status, reason, message = accepted(spec)
    assert (status, reason) == ("False", "PodTemplateNotAllowed")
    assert "spec.podTemplate.spec.hostNetwork: true: shares the node's network" in message
    assert "spec.podTemplate.spec.hostPID: true" in message
    assert desired_state(read_parent(parent(spec)), ()).children == []
    assert accepted(spec, pod_template=frozenset({"hostNetwork", "hostPID"}))[0] == "True"


def test_annotations_are_judged_before_anything_is_made() -> None:
    annotations = {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}
    assert accepted(tiny_cpu(podTemplate={"metadata": {"annotations": annotations}}))[1] == "PodTemplateNotAllowed"


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.yaml")), ids=lambda file: file.stem)
def test_all_that_the_operator_renders_passes(file: Path) -> None:
    for body in yaml.safe_load_all(file.read_text()):
        template = ((body or {}).get("spec") or {}).get("template")
        assert template is None or pod_problems(template, "") == []


def test_what_served_last_is_put_back_only_while_it_is_allowed() -> None:
    spec = tiny_cpu(podTemplate={"spec": {"hostNetwork": True}})
    allowed = frozenset({"hostNetwork"})
    workload = desired_state(read_parent(parent(spec)), (), pod_template=allowed).workload
    assert workload is not None
    now = desired_state(read_parent(parent(tiny_cpu())), ())
    assert isinstance(now.outcome, Launch)
    failure = Failure(attempt_of(now.outcome.facts.spec, now.outcome.plan), "EngineFailed", "it did")
    last_good = LastGood({field: workload[field] for field in ("apiVersion", "kind", "spec")}, failure)
    owner = read_parent(parent(tiny_cpu()))
    back = desired_state(owner, (), last_good=last_good, pod_template=allowed)
    assert isinstance(back.outcome, RolledBack)
    assert isinstance(desired_state(owner, (), last_good=last_good).outcome, Launch)


class TestCommandLine:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        spec = tiny_cpu(podTemplate={"spec": secured(capabilities={"add": ["IPC_LOCK"]})})
        body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "a"}}
        path = tmp_path / "a.json"
        path.write_text(json.dumps({**body, "spec": spec}))
        return str(path)

    @pytest.mark.parametrize("command", ["plan", "render"])
    def test_it_is_told_offline(self, file: str, command: str) -> None:
        answer = CliRunner().invoke(app, [command, file])
        assert answer.exit_code == 2
        assert "spec.podTemplate.spec.containers[0].securityContext.capabilities.add" in answer.output
        assert "--allow-pod-template=capabilities.IPC_LOCK" in answer.output
        allow = "--allow-pod-template=hostNetwork, capabilities.IPC_LOCK"
        assert CliRunner().invoke(app, [command, file, allow]).exit_code == 0

    @pytest.mark.parametrize(
        "name", ["hostnetwork", "capabilities.", "hostNetwork.x", "", "hostPath", "volumes.hostPath"]
    )
    def test_a_name_that_allows_nothing_is_refused(self, file: str, name: str) -> None:
        assert not is_grant(name)
        answer = CliRunner().invoke(app, ["plan", file, f"--allow-pod-template={name}"])
        assert answer.exit_code == 2
        assert "cannot be allowed" in answer.output
