"""The engine core of a vLLM in a pod, and its end."""

from tests.support.kubectl import Kubectl

_KILL = """
import contextlib, os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if (process / "cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
            os.kill(int(process.name), signal.SIGKILL)
            print("killed")
"""


def kill_engine_core(kubectl: Kubectl, pod: str) -> None:
    """Kill it as the kernel does when memory runs out."""
    assert "killed" in kubectl.must("exec", pod, "--", "python3", "-c", _KILL)
