"""The measured start-up time in the status, on a real API server; kubelet and engine are played here."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.vllm.settings_watch import PHASE, TIMES
from tests.component.operator.test_draft_update import FIGURES
from tests.component.operator.test_lifecycle import apply, engines
from tests.support.conditions import wait_for
from tests.support.http_server import Quiet, serving
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.rest import Rest
from tests.support.waiting import eventually

ADDRESS = "127.0.0.2"
LOGGED = {"engine": "113.2", "load": "15.2", "init": "64.5", "compile": "33", "graphs": "NaN"}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


class Page(Quiet, BaseHTTPRequestHandler):
    """The metrics of an engine that logged its start."""

    def do_GET(self) -> None:
        """Answer a scrape."""
        body = "".join(f"vllm:{name} {value}\n" for name, value in FIGURES.items())
        body += "".join(f'{TIMES}{{{PHASE}="{phase}"}} {value}\n' for phase, value in LOGGED.items())
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


def report(kubectl: Kubectl, pod: str) -> None:
    """Write a pod's status as a kubelet would."""
    running = {"running": {"startedAt": "2026-01-01T00:05:00Z"}}
    engine = {"name": "engine", "ready": True, "restartCount": 0, "image": "i:1", "imageID": "", "state": running}
    conditions = [
        {"type": name, "status": "True", "lastTransitionTime": time}
        for name, time in (("PodScheduled", "2026-01-01T00:00:30Z"), ("Ready", "2026-01-01T00:08:00Z"))
    ]
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [engine]}
    kubectl.patch_pod_status(pod, {**status, "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]})


def test_measured_start_is_in_the_status_and_written_once(kubectl: Kubectl, rest: Rest) -> None:
    (port,) = free_ports(1)
    apply(kubectl, serving={"port": port})
    (pod,) = engines(kubectl, 1)
    with serving(ThreadingHTTPServer((ADDRESS, port), Page)):
        report(kubectl, pod)
        wait_for(kubectl, "tiny", "Ready", "Serving")
        found = eventually(
            lambda: kubectl.object("sdd", "tiny")["status"].get("observed", {}).get("startup"), "the start is measured"
        )
        assert found == {
            "pod": pod,
            "preparationSeconds": 270,
            "engineSeconds": 113,
            "loadSeconds": 15,
            "compileSeconds": 33,
            "warmUpSeconds": 32,
        }
        rest.reach()
        kubectl.must("label", "sdd", "tiny", "touched=1")
        rest.settle()
        assert rest.changes() == []
