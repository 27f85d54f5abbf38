"""Prompts in the real vLLM's log, of which the kubelet keeps the end: nobody is told of them."""

import pytest

from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from specdecode_operator.vllm import settings_watch
from specdecode_operator.vllm.logging_config import logging_config
from tests.engine.oracle_process import Oracle
from tests.support.objects import ended, pod

SECRET = "secret wish"
KEPT_BYTES = 2048
"""Of a log, by the kubelet."""


@pytest.fixture(scope="module")
def request_log(h100: Oracle, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What vLLM logs of requests at the level that tells most."""
    folder = tmp_path_factory.mktemp("request-log")
    config = folder / "logging.json"
    noted = str(folder / "noted")
    config.write_text(logging_config("DEBUG", str(folder / "said"), watch=settings_watch.__file__, noted=noted))
    return 2 * h100.begin("request_log", folder, config).wait()


def told(log: str, exit_code: int) -> str:
    """What becomes of the end of a log in the status of a deployment."""
    kept = log.encode()[-KEPT_BYTES:].decode(errors="replace")
    blocked = blocked_pod(pod(containerStatuses=[ended(exit_code, kept)]))
    assert blocked is not None
    return blocked.message


def test_vllm_request_log_contains_prompts_and_answers(request_log: str) -> None:
    assert request_log.count(SECRET) > 4
    assert len(request_log.encode()) > KEPT_BYTES


@pytest.mark.parametrize("exit_code", [1, 137])
def test_status_contains_no_prompt_wherever_the_log_ends(request_log: str, exit_code: int) -> None:
    for end in range(1, len(request_log), 3):
        assert "wish" not in told(request_log[:end], exit_code), request_log[:end]


def test_error_cause_is_reported_despite_prompts_in_the_log(request_log: str) -> None:
    cause = "(EngineCore pid=7) ERROR 11-21 17:11:00 [core.py:1510] NCCLError: no route\n"
    for log in (request_log + cause, request_log + cause + request_log[:500], cause + request_log[:1000]):
        assert "NCCLError: no route" in told(log, 1)
