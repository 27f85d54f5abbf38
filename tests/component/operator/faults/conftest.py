"""The operator behind the fault proxy, as a process that is killed and started again.

What goes wrong around it, and where a test shows what comes of it:

| fault | on real parts | as it is seen, played or in memory |
| --- | --- | --- |
| operator killed | here, `test_operator.py`, e2e `test_killed_operator.py` | |
| calls fail, answers are late, old or torn | here | `tests/unit/handlers/test_state.py` |
| watches lose events or go silent | | `tests/unit/handlers/test_watch_progress.py` |
| API server killed | e2e `test_capture_robustness.py` | |
| node drained, pods evicted | e2e `test_capture_robustness.py`, budgets in `test_lifecycle.py` | |
| a volume that never comes | | `test_model_cache.py`, `tests/unit/capture/control/test_status.py` |
| a disk that is too small, or gets full | e2e `test_capture_robustness.py` | `test_captures.py` |
| engine killed, refused, hanging | e2e `test_lifecycle.py` | `test_lifecycle.py`, `test_hanging_engine.py` |
| engine killed for memory | | `tests/unit/deployment/pods/test_rollout.py` |
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.faults.forked_operator import ForkedOperator
from tests.support.faults.proxy import FaultProxy
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
