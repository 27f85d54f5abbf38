"""What a real vLLM leaves of itself when its core is killed, and what is made of it."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from specdecode_operator.deployment.rollout.blocked_pods import blocked_pod
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import BESIDE, find_packages
from tests.engine.recorder_server import TERMINATION_LOG, serving
from tests.support.objects import ended, pod

DEADLINE_S = 120


@pytest.mark.long
def test_killed_engine_core_writes_a_termination_message(engine: Engine, models: Path, tmp_path: Path) -> None:
    said = tmp_path / TERMINATION_LOG
    with serving(engine, models, tmp_path) as server:
        assert not said.exists(), "an engine that is well has no last words"
        processes = ["ps", "--sid", str(server.process.pid), "-o", "pid=,args="]
        listed = subprocess.run(processes, capture_output=True, text=True, check=True).stdout
        (core,) = re.findall(r"(\d+) VLLM::EngineCore", listed)
        os.kill(int(core), signal.SIGKILL)
        exit_code = server.process.wait(DEADLINE_S)
    blocked = blocked_pod(pod(containerStatuses=[ended(exit_code, said.read_text())]))
    assert blocked is not None
    assert (exit_code, blocked.reason) == (0, "EngineKilled")


@pytest.mark.parametrize("version", BESIDE)
def test_other_versions_log_the_same_engine_core_warning_only(version: str) -> None:
    packages = find_packages(version)
    if packages is None:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    source = (packages / "vllm/v1/engine/core_client.py").read_text()
    assert re.findall(r'logger\.warning\w*\(\s*"([^"]*)"', source) == [
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
    ]
