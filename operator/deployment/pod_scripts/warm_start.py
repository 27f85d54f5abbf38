"""Start an engine with the compile cache of earlier engines of the same template.

The script is the engine container's command, so it is one file for Python 3.10
and newer that imports only the standard library, and it becomes the engine
itself (exec). The published cache is a folder on a claim that pods share. vLLM
does not expect other writers in its cache: temporary files are named by process
ID, which is the same in every pod, vllm_compile_cache.py is written in place,
and entries that cannot be loaded are compiled and written again
(vllm/compilation/backends.py, decorators.py). So each engine works in a private
cache at the same path in every pod:

- at its start, the published cache is copied to it, if there is one;
- when the engine serves and no cache is published yet, the private cache is
  copied to the claim and published by one rename. The first engine wins.

The pods of an engine on several nodes publish one folder per pod. Either all of
them start with a published cache or none does, because a pass of the compiler
connects the ranks, and a rank that loads compiled code runs without this pass
(vllm/compilation/passes/fusion/allreduce_rms_fusion.py). So workers report to
the leader whether they have copied their folder, and the leader answers what
all pods do. Only folders of the same start are published, by one rename of the
leader.
"""

import argparse
import os
import shutil
import signal
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

CACHE_VARIABLE = "VLLM_CACHE_ROOT"
PUBLISHED = "vllm"
PORT = 29560
"""Port of the leader at which workers report."""

_WARM, _COLD, _PART = "warm", "cold", "part-"
"""Answers of the leader: use the copied cache; compile; or compile, and publish the result through this folder."""

_STALE_PART_S = 3600.0
"""Age after which a partial copy counts as abandoned; a copy takes seconds to minutes."""

_PERIOD_S = 2.0
_TIMEOUT_S = 5.0
_NOT_PUBLISHED = shutil.ignore_patterns("*.tmp", "gpu_p2p_access_cache_*", "flashinfer_autotune_cache")
"""Incomplete files, results for one node's GPUs, and tuning results of one rank.

Up to vLLM 0.31, all ranks load the first rank's file, although entries of
experts are valid only for the rank that wrote them: that rank would skip
measurements in which the others wait
(vllm/model_executor/warmup/kernel_warmup.py, flashinfer_autotune, as documented in 0.32).
"""


@dataclass(frozen=True)
class _Group:
    """The pods of an engine on several nodes. The leader has rank 0."""

    size: int
    rank: int
    leader: str

    def folders(self, root: Path) -> list[Path]:
        """Return the folders of all pods."""
        return [root / str(rank) for rank in range(self.size)]


def _prepare(published: Path, cache: Path) -> bool:
    """Replace the engine's private cache with a copy of the published one; return whether this worked."""
    # A failed engine may have left an incomplete cache.
    shutil.rmtree(cache, ignore_errors=True)
    try:
        shutil.copytree(published, cache)
    except OSError as error:
        print(f"cannot copy compile cache {published}, continuing without it: {error}", file=sys.stderr)  # noqa: T201
        shutil.rmtree(cache, ignore_errors=True)
        return False
    return True


def _agree(group: _Group, *, is_published: bool, is_copied: bool) -> str:
    """Return the leader's answer to the reports of all pods."""
    return _lead(group, is_published, is_copied) if group.rank == 0 else _report(group, is_copied)


def _lead(group: _Group, is_published: bool, is_copied: bool) -> str:
    reports: dict[int, tuple[socket.socket, bool]] = {}
    family = socket.AF_INET6 if ":" in group.leader else socket.AF_INET
    with socket.create_server((group.leader, PORT), family=family) as server:
        while len(reports) < group.size - 1:
            connection, _ = server.accept()
            connection.settimeout(_TIMEOUT_S)
            try:
                rank, has_copied = map(int, connection.makefile().readline(64).split())
            except (OSError, ValueError):
                rank, has_copied = 0, 0
            if 0 < rank < group.size:
                reports[rank] = connection, bool(has_copied)
            else:
                connection.close()
    answer = _COLD if is_published else f"{_PART}{uuid.uuid4().hex}"
    if is_copied and all(has_copied for _, has_copied in reports.values()):
        answer = _WARM
    for connection, _ in reports.values():
        with suppress(OSError), connection:
            connection.sendall(f"{answer}\n".encode())
    return answer


def _report(group: _Group, is_copied: bool) -> str:
    while True:
        with suppress(OSError), socket.create_connection((group.leader, PORT), _TIMEOUT_S) as connection:
            connection.settimeout(None)  # other workers may start much later
            connection.sendall(f"{group.rank} {is_copied:d}\n".encode())
            answer = connection.makefile().readline(64).strip()
            if answer.removeprefix(_PART).isalnum():  # it becomes the name of a folder
                return answer
        time.sleep(_PERIOD_S)


def _publish(folder: Path, cache: Path, part: str, group: _Group | None, runs: Callable[[], bool]) -> None:
    """Publish an engine's cache atomically, unless another engine did so first.

    A worker adds its folder, and the leader waits for the folders of all pods while its engine runs.
    """
    place = folder / part
    if group is not None and group.rank > 0:
        _copy(cache, group.folders(place)[group.rank])
        return
    for stale in folder.glob(f"{_PART}*"):
        if time.time() - stale.stat().st_mtime > _STALE_PART_S:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        if group is None:
            shutil.copytree(cache, place, ignore=_NOT_PUBLISHED)
        else:
            _copy(cache, group.folders(place)[0])
            while not all(each.is_dir() for each in group.folders(place)):
                if not runs():
                    return
                time.sleep(_PERIOD_S)
        place.rename(folder / PUBLISHED)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _copy(cache: Path, target: Path) -> None:
    incomplete = target.with_suffix(".tmp")
    shutil.copytree(cache, incomplete, ignore=_NOT_PUBLISHED)
    incomplete.rename(target)


def _publish_later(folder: Path, cache: Path, health: str, part: str, group: _Group | None) -> None:
    """Fork a process that publishes the cache when the engine, which this process becomes, serves."""
    engine = os.getpid()
    if os.fork() != 0:
        return

    def runs() -> bool:
        return os.getppid() == engine

    try:
        while runs():
            if _serves(health):
                _publish(folder, cache, part, group, runs)
                break
            time.sleep(_PERIOD_S)
    except OSError as error:
        print(f"cannot publish the compile cache to {folder}: {error}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        os._exit(0)


def _serves(health: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is for the Service's name
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(health, timeout=_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, ValueError):
        return False


def main(arguments: list[str]) -> None:
    """Replace this process with the command after ``--``, with the cache in its environment."""
    parser = argparse.ArgumentParser(description="Start an engine with a compile cache.")
    parser.add_argument("--folder", type=Path, required=True, help="shared by engines of this template")
    parser.add_argument("--cache", type=Path, required=True, help="private cache, at the same path in every pod")
    parser.add_argument("--health", required=True, help="URL that answers 200 once the engine serves")
    parser.add_argument("--pods", type=int, default=1, help="number of pods of the engine")
    parser.add_argument("--rank", type=int, default=0, help="number of this pod; 0 is the leader")
    parser.add_argument("--leader", default="", help="address at which the leader listens")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(given.cache)
        published, part = given.folder / PUBLISHED, f"{_PART}{uuid.uuid4().hex}"
        is_published, group = published.is_dir(), None
        if given.pods > 1:
            # The first process of a container ignores signals without a handler. The engine does not inherit it.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
            group = _Group(given.pods, given.rank, given.leader)
            is_copied = is_published and _prepare(group.folders(published)[group.rank], given.cache)
            part = _agree(group, is_published=is_published, is_copied=is_copied)
            is_published = part in {_WARM, _COLD}
            if part != _WARM:
                shutil.rmtree(given.cache, ignore_errors=True)
        elif is_published:
            _prepare(published, given.cache)
        if not is_published:
            _publish_later(given.folder, given.cache, given.health, part, group)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(given.command[0], given.command)  # noqa: S606  the operator renders this command


if __name__ == "__main__":
    main(sys.argv[1:])
