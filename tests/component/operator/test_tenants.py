"""What people of a namespace may do with objects of ours there, and that none of it reaches into another."""

from collections.abc import Iterator

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

DEPLOYMENTS, CAPTURES, _ = KINDS = tuple(
    f"specdecode{each}.specdecode.io" for each in ("deployments", "captures", "trainings")
)
READ = {"get", "list", "watch"}
WRITTEN = {"create", "update", "patch", "delete", "deletecollection"}
OURS = ("specdecode-operator-view", "specdecode-operator-edit")


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


@pytest.fixture
def neighbour(crds: Cluster, kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace beside the test's. Its people are named by their role, and have none elsewhere."""
    name = f"{kubectl.namespace}-neighbour"
    kubectl.must("create", "namespace", name)
    beside = Kubectl(crds.kubeconfig, name)
    for role in ("view", "edit", "admin"):
        beside.must("create", "rolebinding", role, f"--clusterrole={role}", f"--user={name}-{role}")
    for role in OURS:  # without the usual roles: who may not so much as look at pods
        beside.must("create", "rolebinding", role, f"--clusterrole={role}", f"--user={name}-ours")
    eventually(lambda: rights(beside, beside, "ours").get(CAPTURES, set()) >= WRITTEN, "the rights count")
    yield beside
    kubectl.must("delete", "namespace", name, "--wait=false")


def person(of: Kubectl, role: str) -> str:
    return f"--as={of.namespace}-{role}"


def rights(where: Kubectl, of: Kubectl, role: str) -> dict[str, set[str]]:
    """Verbs that somebody of a namespace has where they ask, by resource; those that all have are left out."""
    listed = where.must("auth", "can-i", "--list", "--no-headers", person(of, role))
    rows = [row.split(maxsplit=1) for row in listed.splitlines() if not row.startswith((" ", "self"))]
    found: dict[str, set[str]] = {}
    for resource, rest in rows:
        found.setdefault(resource, set()).update(rest.rpartition("[")[2].rstrip("] ").split())
    return found


def deploy(kubectl: Kubectl, *options: str, **changes: object) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    kubectl.must("apply", "--filename=-", *options, stdin=yaml.safe_dump({**body, "spec": tiny_cpu(**changes)}))


def test_roles_do_not_reach_other_namespaces(kubectl: Kubectl, neighbour: Kubectl) -> None:
    deploy(kubectl)
    wait_for(kubectl, "tiny", "Planned", "Fits")
    for role in ("view", "edit", "admin", "ours"):
        assert rights(kubectl, neighbour, role) == {}
    as_admin = person(neighbour, "admin")
    for command in (
        ("get", "sdd", "tiny", "--output=yaml"),  # with its plan
        ("get", "configmap", "tiny-plan"),
        ("get", "pvc,secrets,pods"),
        ("label", "sdd", "tiny", "theirs=1"),
        ("delete", "sdc", "--all"),
        ("delete", "pvc", "--all"),
    ):
        refused = kubectl(*command, as_admin)
        assert refused.returncode != 0
        assert "forbidden" in refused.stderr.lower(), command

    wanted = {"view": READ, "edit": READ | WRITTEN, "admin": READ | WRITTEN, "ours": READ | WRITTEN}

    def have_theirs() -> bool:
        own = {role: rights(neighbour, neighbour, role) for role in wanted}
        for kind in KINDS:
            assert {role: found[kind] for role, found in own.items()} == wanted
            # The operator believes the status of its kinds: nobody else writes it.
            assert {frozenset(found[f"{kind}/status"]) for found in own.values()} == {frozenset(READ)}
        return True

    eventually(have_theirs, "the usual roles have grown by ours")


def test_capture_does_not_find_deployment_of_other_namespace(kubectl: Kubectl, neighbour: Kubectl) -> None:
    """The operator may read both namespaces, and does nothing for people that they may not do."""
    deploy(kubectl)
    wait_for(kubectl, "tiny", "Planned", "Fits")
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeCapture", "metadata": {"name": "theirs"}}
    manifest = yaml.safe_dump({**body, "spec": {"deployment": "tiny"}})
    neighbour.must("apply", "--filename=-", person(neighbour, "edit"), stdin=manifest)
    eventually(
        lambda: "DeploymentNotFound" in str(neighbour.object("sdc", "theirs").get("status")),
        "the capture finds no deployment",
    )
    assert neighbour.objects("jobs,pvc") == kubectl.objects("jobs,pvc") == []


def test_user_without_pod_rights_cannot_request_privileged_pod_fields(neighbour: Kubectl) -> None:
    ours = person(neighbour, "ours")
    deploy(neighbour, ours)
    wait_for(neighbour, "tiny", "Planned", "Fits")
    assert "Ready" in neighbour.must("describe", "sdd", "tiny", ours), "the object itself says how its pods are"
    assert "forbidden" in neighbour("get", "pods", ours).stderr.lower()
    for template, reason in (
        ({"hostNetwork": True}, "PodTemplateNotAllowed"),
        ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "HostPathNotAllowed"),
        ({"containers": [{"name": "engine", "securityContext": {"privileged": True}}]}, "PodTemplateNotAllowed"),
    ):
        deploy(neighbour, ours, podTemplate={"spec": template})
        assert next(iter(template)) in wait_for(neighbour, "tiny", "Ready", reason)
