"""A pod that the namespace's Pod Security refuses: told with the fields of our object that help."""

import pytest

from specdecode_operator.deployment.rollout.rollout_progress import name_pod_security_field

START = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": '
"""As an API server of Kubernetes 1.34 begins."""


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            'runAsNonRoot != true (pod or container "engine" must set securityContext.runAsNonRoot=true)',
            "spec.podTemplate.spec.securityContext",
        ),
        ("runAsUser=0 (pod must not set runAsUser=0)", "spec.podTemplate.spec.securityContext"),
        (
            'allowPrivilegeEscalation != false (containers "shipper", "proxy" must set that)',
            "securityContext of shipper in spec.podTemplate.spec.containers, securityContext of proxy",
        ),
        ('hostPath volumes (volume "models")', "spec.models.volume.hostPath"),
        (
            'restricted volume types (volume "v" uses restricted volume type "nfs")',
            "spec.podTemplate.spec.volumes",
        ),
        ("host namespaces (hostNetwork=true)", "hostNetwork, hostPID and hostIPC of spec.podTemplate.spec"),
        ("something new (of a later version)", "spec.podTemplate"),
    ],
)
def test_the_field_that_helps_is_named(said: str, field: str) -> None:
    told = name_pod_security_field(START + said)
    assert told.startswith(START + said)
    assert f"look at {field}" in told
    assert "pod-security.kubernetes.io/enforce" in told


def test_other_refusals_are_told_as_they_are() -> None:
    assert name_pod_security_field("exceeded quota: small") == "exceeded quota: small"
