"""How clients reach engines: the Service, HTTPS, and labels that gateways select by."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.services.rollout import pod_trouble
from tests.support.objects import Body, pod, tiny_cpu, waiting
from tests.unit.services.test_children import render

DOCUMENT = Path(__file__).parents[3] / "docs/access.md"
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
    refused = waiting("CreateContainerConfigError", 'secret "certificate" not found')
    trouble = pod_trouble(pod(containerStatuses=[refused]))
    assert trouble is not None
    assert (trouble.reason, trouble.waits) == ("WaitingForSecret", True)
    assert "spec.serving.apiKeySecret or tlsSecret" in trouble.message


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
