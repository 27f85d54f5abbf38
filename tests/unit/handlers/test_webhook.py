"""The webhook of a running operator: it answers with the operator's terms, also while it waits for the API server."""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.cluster.settings import free_ports
from specdecode_operator.api.base import Body
from tests.support.admission_cases import ADMITTED, TOO_LARGE, deployment
from tests.support.certificates import write_certificate
from tests.support.objects import H100, tiny_cpu
from tests.support.waiting import eventually
from tests.unit.handlers.test_review import review

NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "small", "labels": {"nvidia.com/gpu.product": H100}},
    "status": {"capacity": {"nvidia.com/gpu": "2"}, "allocatable": {"nvidia.com/gpu": "2"}},
}
Ask = Callable[[Body], dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Start an operator whose API server is away; return what asks its webhook for a verdict on a spec."""
    write_certificate(tmp_path / "certificate")
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump(NODE))
    health, webhook, nobody = free_ports(3)
    cluster = {"clusters": [{"name": "away", "cluster": {"server": f"http://127.0.0.1:{nobody}"}}]}
    context = {"contexts": [{"name": "away", "context": {"cluster": "away", "user": "me"}}], "current-context": "away"}
    (tmp_path / "kubeconfig").write_text(json.dumps({**cluster, **context, "users": [{"name": "me", "user": {}}]}))
    options = [f"--health-port={health}", "--metrics-port=0", f"--webhook-port={webhook}"]
    options += [f"--webhook-certificate={tmp_path / 'certificate'}", "--allow-host-path=/mnt", "--refuse-does-not-fit"]
    options += ["--namespace=team", f"--nodes={tmp_path / 'nodes.yaml'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdecode_operator", "operator", *options],
            env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            stdout=log,
            stderr=log,
        )
    trusted = ssl.create_default_context(cafile=str(tmp_path / "certificate" / "tls.crt"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted))

    def post(spec: Body) -> dict[str, Any] | None:
        assert process.poll() is None, (tmp_path / "log").read_text()
        body = json.dumps(review(deployment(spec))).encode()
        try:
            with opener.open(f"https://127.0.0.1:{webhook}/validate", body, timeout=120) as answer:
                response: dict[str, Any] = json.load(answer)["response"]
                return response
        except OSError:  # it does not listen yet
            return None

    yield lambda spec: eventually(lambda: post(spec), "the webhook answers")
    process.terminate()
    process.wait(timeout=120)


def test_each_replica_answers_with_the_terms_of_the_operator(ask: Ask) -> None:
    allowed, refused = (tiny_cpu(models={"volume": {"hostPath": {"path": path}}}) for path in ("/mnt/models", "/etc"))
    assert ask(allowed)["allowed"]
    assert "[HostPathNotAllowed]" in ask(refused)["status"]["message"]
    assert "[DoesNotFit]" in ask(TOO_LARGE)["status"]["message"]
    # The fleet that it is given has one node of two GPUs.
    (warning,) = ask({**ADMITTED, "parallelism": {"tensor": 4}})["warnings"]
    assert "4 GPUs" in warning
