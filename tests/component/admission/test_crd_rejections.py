"""A real API server refuses each bad object with a sentence that names the field and the fix."""

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from tests.component.admission.bad_spec import Bad
from tests.component.admission.rejection_cases import BAD
from tests.support.kubectl import Kubectl


@pytest.fixture(scope="module")
def refusing(crds: Cluster) -> Kubectl:
    """kubectl in a namespace that all tests here may share, for nothing gets into it."""
    kubectl = Kubectl(crds.kubeconfig, "refusals")
    kubectl.create_namespace()
    kubectl.must("apply", "--dry-run=server", "--filename=-", stdin=sdd("good", {"target": {"model": "org/target"}}))
    return kubectl


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_invalid_spec_is_refused_with_field_and_fix(refusing: Kubectl, bad: Bad) -> None:
    spec = {"target": {"model": "org/target"}} | yaml.safe_load(bad.spec)
    answer = refusing.create(sdd("bad", spec))
    assert answer.returncode != 0, "the API server took it"
    complaint = [line for line in answer.stderr.splitlines() if f"{bad.field}:" in line]
    assert complaint, f"{bad.field} is not named in: {answer.stderr}"
    assert any(bad.fix in line for line in complaint), f"{bad.fix!r} is not offered in: {answer.stderr}"


@pytest.mark.parametrize("name", ["1st", "a" * 53, "a.b"])
def test_name_invalid_for_a_service_is_refused(refusing: Kubectl, name: str) -> None:
    answer = refusing.create(sdd(name, {"target": {"model": "org/target"}}))
    assert answer.returncode != 0, "the API server took it"
    assert "metadata.name" in answer.stderr
    assert "use at most 52 of a-z, 0-9 and -" in answer.stderr


@pytest.mark.parametrize("how", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_unknown_field_is_refused_by_name(refusing: Kubectl, how: tuple[str, ...]) -> None:
    answer = refusing.apply(sdd("odd", {"target": {"model": "org/target", "modle": "typo"}}), *how)
    assert answer.returncode != 0
    assert "spec.target.modle" in answer.stderr


def sdd(name: str, spec: object) -> str:
    """YAML of a SpecDecodeDeployment."""
    return yaml.safe_dump(
        {
            "apiVersion": "specdecode.io/v1alpha1",
            "kind": "SpecDecodeDeployment",
            "metadata": {"name": name},
            "spec": spec,
        }
    )
