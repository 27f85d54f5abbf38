"""Lets `vllm serve` take less CPU time, where engines share few cores.

On the CPU, vLLM spawns its engine core and its workers, and each of them imports vLLM again, which
takes most of a start: 5 s of CPU time each. Here they come from the standard library's fork server,
which is a copy of the API server from before its first own step. As with spawning, they get pickled
arguments, their parent's environment and nothing of its state.

They wait for each other in naps. vLLM's own look for the next message all the time, for a second after each one.

SPECDECODE_PLAIN_ENGINE=1 leaves vLLM as it is (sitecustomize.py).
"""

import gc
import os
import signal
import socket
import time
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    resource_tracker,
    spawn,
)
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any, cast

import vllm.entrypoints.cli.serve
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401 (for the processes that are forked)
from setproctitle import setproctitle
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry

_NAP_S = 0.0005
# Their stubs do not know that they can be changed.
_spawn: Any = spawn
_spawned: Any = context.SpawnProcess
_describe, _set_up = spawn.get_preparation_data, spawn.prepare


def prepare() -> None:
    """Start the fork server, and have it serve instead of spawning."""
    # vLLM looks at a model's class in another process, for the sake of CUDA.
    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001
    shm_broadcast.sched_yield = lambda: time.sleep(_NAP_S)
    _start_server()
    _fork_instead()


def _fork_instead() -> None:
    _spawn.get_preparation_data, _spawn.prepare = _describe_with_environment, _set_up_with_environment
    _spawned._Popen = staticmethod(_start)  # noqa: SLF001


def _start_server() -> None:
    """Do what `multiprocessing.forkserver.ensure_running` does, with a fork in place of a new interpreter."""
    resource_tracker.ensure_running()
    server: Any = forkserver._forkserver  # noqa: SLF001
    server.ensure_running = lambda: None  # the server's children would start another one
    address = cast("Any", connection).arbitrary_address("AF_UNIX")
    alive_reader, alive_writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()
        gc.enable()  # disabled for the imports: sitecustomize.py
        if not os.fork():
            os.close(alive_writer)
            _serve(listener.detach(), alive_reader)
    os.close(alive_reader)
    server._forkserver_address, server._forkserver_alive_fd = address, alive_writer  # noqa: SLF001


def _serve(listener: int, alive_reader: int) -> None:
    """Serve until the last process of the engine has ended, whatever signals their group gets."""
    _fork_instead()
    setproctitle("VLLM::ForkServer")  # those that come of it change their titles, and lack the first environment
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        forkserver.main(listener, alive_reader, [])
    finally:
        os._exit(0)


def _describe_with_environment(name: str) -> dict[str, Any]:
    return {**_describe(name), "environment": dict(os.environ)}


def _set_up_with_environment(data: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    _set_up(data)


def _start(process: BaseProcess) -> Popen:
    # Several API servers share their metrics by a folder that prometheus_client looks for when it is imported.
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return popen_spawn_posix.Popen(process)
    return popen_forkserver.Popen(process)
