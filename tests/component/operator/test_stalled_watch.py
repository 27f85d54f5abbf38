"""A watch that goes silent although there is news: the probe of liveness notices it, and a new process sees all."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from specdecode_operator.api.deployment import KIND
from tests.support.conditions import condition
from tests.support.faults.faults import DropEvent, Fault
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

pytestmark = pytest.mark.long


def livez(operator: OperatorProcess) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(operator.address("/livez"), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def write(kubectl: Kubectl, replicas: int) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": KIND, "metadata": {"name": "llama"}}
    answer = kubectl.write(yaml.safe_dump(body | {"spec": tiny_cpu(replicas=replicas, suspend=not replicas)}))
    assert answer.returncode == 0, answer.stderr


def test_stalled_watch_fails_liveness_and_restart_sees_the_missed_change(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path
) -> None:
    assert operator.stop() == 0
    with FaultProxy(operator.kubeconfig) as proxy:
        through = proxy.write_kubeconfig(operator.kubeconfig, tmp_path / "kubeconfig")
        watched = OperatorProcess(through, tmp_path / "log", "stalls")
        watched.start()
        try:
            write(kubectl, replicas=1)
            eventually(lambda: kubectl.object("deployment", "llama"), "it is carried out")
            assert livez(watched)[0] == 200
            # The watch stays open, and whenever it is opened anew nothing comes by it, bookmarks neither.
            proxy.faults = [Fault(DropEvent(), "watch specdecodedeployments*")]
            write(kubectl, replicas=0)
            # By another watch it hears of its child, looks at the object as it knows it, and writes a status.
            kubectl.must("delete", "deployment", "llama")
            status, words = eventually(lambda: found if (found := livez(watched))[0] != 200 else None, "it is noticed")
            assert (status, KIND in words, "although objects changed" in words) == (500, True, True), words
            watched.kill()
            proxy.faults = []
            watched.start()
            eventually(lambda: condition(kubectl, "llama", "Ready")[1] == "Suspended", "the change is seen")
            assert livez(watched)[0] == 200
        finally:
            assert watched.stop() == 0
