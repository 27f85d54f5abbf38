"""The operator behind the fault proxy, as a process that is killed and started again.

What goes wrong around it, and where a test shows what comes of it:

| fault | on real parts | as it is seen, played or in memory |
| --- | --- | --- |
| operator killed | here, e2e `test_killed_operator.py` | |
| calls fail, answers are late or torn | `test_user_actions.py` | `tests/unit/handlers/test_resync.py` |
| events lost or twice, silent watches, old reads | `test_disturbed_lives.py` | `test_stalled_watch.py` |
| a clock that jumps | `test_disturbed_lives.py`, `test_clocks.py` | `tests/unit/handlers/test_clocks.py` |
| leader frozen | `test_leader_election.py` | |
| API server or etcd killed | `test_surroundings.py`, e2e `test_capture_robustness.py` | |
| node not heard of | | `test_surroundings.py` |
| node drained, pods evicted | `test_surroundings.py`, e2e `test_capture_robustness.py` | |
| a volume that never comes | `test_surroundings.py` | `test_model_cache.py` |
| a disk that gets full | e2e `test_capture_robustness.py` | `tests/unit/capture/recorder/test_writer.py` |
| engine killed, refused, hanging | e2e `test_lifecycle.py` | `test_lifecycle.py`, `test_hanging_engine.py` |
| engine killed for memory | | `test_surroundings.py` |
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from devcluster.cluster.cluster import Cluster
from tests.component.operator.faults.lives import Lives
from tests.support.faults.forked_operator import ForkedOperator
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess


@dataclass
class Faulty:
    """An operator and what stands between it and the API server."""

    proxy: FaultProxy
    operator: ForkedOperator


@pytest.fixture(scope="session")
def faulty(operator_process: OperatorProcess) -> Iterator[Faulty]:
    """An operator behind the proxy, with the rights that it is installed with; the session's own one does not run."""
    folder = operator_process.log.parent
    with FaultProxy(operator_process.kubeconfig) as proxy:
        through = proxy.write_kubeconfig(operator_process.kubeconfig, folder / "through-proxy")
        operator = ForkedOperator(through, operator_process.log)
        try:
            yield Faulty(proxy, operator)
        finally:
            operator.kill()


@pytest.fixture
def behind_proxy(faulty: Faulty, operator_process: OperatorProcess) -> Iterator[Faulty]:
    """The same, fresh and without faults."""
    assert operator_process.stop() == 0
    faulty.proxy.faults = ()
    faulty.proxy.calls.clear()
    faulty.operator.start()
    yield faulty
    faulty.operator.kill()
    faulty.proxy.faults = ()


@pytest.fixture(scope="session")
def all_lives(crds: Cluster, faulty: Faulty) -> Lives:
    """What comes of each life undisturbed is found out once."""
    return Lives(Kubectl(crds.kubeconfig), faulty.proxy, faulty.operator)


@pytest.fixture
def lives(all_lives: Lives, operator_process: OperatorProcess) -> Lives:
    """Lives that the session's own operator sees nothing of."""
    assert operator_process.stop() == 0
    return all_lives
