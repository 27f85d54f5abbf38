"""A real vLLM that serves TLS: the operator reads it, and a capture of it speaks TLS with the engine beside it."""

import base64
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from devcluster.images import operator_image
from tests.e2e.serving.test_capture import (
    CAPTURE_DEADLINE_S,
    ENGINE_DEADLINE_S,
    EXAMPLES,
    REQUESTS,
    capture,
    deployment,
)
from tests.support.certificates import DAY, made_certificate
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

ASK = """
import ssl, sys, urllib.request
trusted = ssl.create_default_context(cafile="/trusted/tls.crt")
trusted.check_hostname = False  # nobody answers names here
print(urllib.request.urlopen(sys.argv[1], timeout=30, context=trusted).status)
"""
"""A client that believes the Secret's certificate alone."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def serving(kubectl: Kubectl) -> Kubectl:
    """kubectl where an engine serves TLS."""
    certificate, key = made_certificate(datetime.now(UTC) + DAY, "tiny")
    data = {"tls.crt": certificate, "tls.key": key}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "engine-tls"}, "type": "kubernetes.io/tls"}
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    assert kubectl.write(yaml.safe_dump({**secret, "data": encoded})).returncode == 0
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body = deployment()
    body["spec"]["serving"]["tlsSecret"] = {"name": "engine-tls"}
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    return kubectl


def asked(kubectl: Kubectl, name: str, url: str) -> tuple[str, str]:
    """How a client in a pod of its own ends, and what it says."""
    container = {
        "name": "ask",
        "image": operator_image.REFERENCE,
        "command": ["python3", "-c", ASK, url],
        "volumeMounts": [{"name": "tls", "mountPath": "/trusted"}],
    }
    items = [{"key": "tls.crt", "path": "tls.crt"}]
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": "engine-tls", "items": items}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    assert kubectl.apply(yaml.safe_dump(pod)).returncode == 0

    def phase() -> str:
        return str(kubectl.object("pod", name).get("status", {}).get("phase"))

    eventually(lambda: phase() in {"Succeeded", "Failed"}, f"{name} ends")
    return phase(), kubectl.must("logs", name)


def test_engine_is_reached_only_over_tls(serving: Kubectl) -> None:
    (pod,) = serving.objects("pods", "--selector=specdecode.io/deployment=tiny")
    engine = f"{pod['status']['podIP']}:8000"
    assert asked(serving, "by-tls", f"https://{engine}/v1/models") == ("Succeeded", "200\n")
    ended, said = asked(serving, "in-plain", f"http://{engine}/v1/models")
    assert ended == "Failed", said
    # What it says of drafting it has read from the engine's metrics.
    eventually(lambda: condition(serving, "tiny", "SettingsInForce")[0] == "True", "the operator reads the engine")


def test_capture_of_tls_engine_completes_all_requests(serving: Kubectl) -> None:
    assert serving.apply(yaml.safe_dump(capture())).returncode == 0

    def phase() -> Any:
        found = serving.object("sdc", "demo").get("status") or {}
        assert found.get("phase") != "Failed", found
        return found.get("phase")

    eventually(lambda: phase() == "Succeeded", "the capture succeeds", CAPTURE_DEADLINE_S)
    (pod,) = serving.objects("pods", "--selector=specdecode.io/capture=demo")
    (engine,) = (each for each in pod["spec"]["initContainers"] if each["name"] == "engine")
    assert any(each.startswith("--ssl-certfile") for each in engine["command"]), engine["command"]
    requests = serving.object("sdc", "demo")["status"]["summary"]["requests"]
    assert requests["sent"] == requests["completed"] == REQUESTS
    wait_for(serving, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
