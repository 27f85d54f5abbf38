"""How clients reach engines: the Service, HTTPS, and labels that gateways select by."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from tests.support.objects import Body, pod, tiny_cpu, waiting
from tests.unit.deployment.objects.test_children import render

DOCUMENT = Path(__file__).parents[4] / "docs/how-to/access.md"
TLS = {"maxModelLen": 1024, "tlsSecret": {"name": "certificate"}}


def engine_pod(**changes: Any) -> Body:
    found: Body = render(tiny_cpu(**changes))["Deployment"]["spec"]["template"]
    return found


def test_an_engine_with_a_certificate_speaks_https_to_everybody() -> None:
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


def test_without_a_certificate_nothing_of_it_is_there() -> None:
    template = engine_pod()
    assert "tls" not in json.dumps(template).lower()
    assert "ssl" not in json.dumps(template)
    assert template["spec"]["containers"][0]["ports"] == [{"name": "http", "containerPort": 8000}]


def test_a_certificate_that_is_missing_is_told_by_the_pod_itself() -> None:
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
def test_a_secret_that_is_missing_or_lacks_its_key_is_told_with_its_field(said: str, field: str, fix: str) -> None:
    spec = engine_pod(**SECRETS)["spec"]
    held = pod(containerStatuses=[waiting("CreateContainerConfigError", said)]) | {"spec": spec}
    blocked = blocked_pod(held)
    assert blocked is not None
    assert (blocked.reason, blocked.waits) == ("WaitingForSecret", True)
    assert blocked.message.startswith(f"{said} ({field}): {fix}")


def test_the_pool_of_the_document_selects_engine_pods_at_their_port() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    bodies = [body for block in blocks for body in yaml.safe_load_all(block)]
    by_kind = {body["kind"]: body for body in bodies if "kind" in body}
    pool, route = by_kind["InferencePool"], by_kind["HTTPRoute"]
    labels = render(tiny_cpu(), name="llama-70b")["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"]) == (pool["apiVersion"].partition("/")[0], "InferencePool")
    assert backend["name"] == pool["metadata"]["name"]
