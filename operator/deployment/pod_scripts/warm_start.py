"""Starts an engine with what earlier engines of the same template compiled.

It is the engine container's command, so it is one file for Python 3.10 and
newer that needs nothing but the standard library, and becomes the engine
itself (exec). What was compiled lies in a folder of a claim that many pods
share. vLLM writes its cache as if it were alone: temporary files are named by
process id, which is the same in every pod, vllm_compile_cache.py is written in
place, and what cannot be loaded is compiled and written anew
(vllm/compilation/backends.py, decorators.py). So no engine works in the shared
folder. Each has a cache of its own, at the same path in every pod:

- at its start it is a copy of what was published, if something was;
- once it serves, and nothing was published yet, it is copied to the claim and
  published whole, by one rename. Of several that are first, one wins.
"""

import argparse
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from http import HTTPStatus
from pathlib import Path

CACHE_VARIABLE = "VLLM_CACHE_ROOT"
PUBLISHED = "vllm"
_PART = "part-"
_STALE_PART_S = 3600.0
"""A copy takes seconds to minutes: one that is older was cut off."""

_PROBE_PERIOD_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_NOT_PUBLISHED = shutil.ignore_patterns("*.tmp", "gpu_p2p_access_cache_*", "flashinfer_autotune_cache")
"""Files that are being written, what holds for one node's GPUs, and what was tuned by one rank.

Up to vLLM 0.31 the first rank's file is given to all, where entries of experts
hold for the rank that wrote them: it would pass over measurements that the
others wait in (vllm/model_executor/warmup/kernel_warmup.py, flashinfer_autotune; 0.32 says so).
"""


def prepare(folder: Path, cache: Path) -> bool:
    """Bring what was published to the engine's own cache; return whether something was."""
    published = folder / PUBLISHED
    if not published.is_dir():
        return False
    # What an engine that failed left here may be cut off.
    shutil.rmtree(cache, ignore_errors=True)
    try:
        shutil.copytree(published, cache)
    except OSError as error:
        print(f"{published} is not used: {error}", file=sys.stderr)  # noqa: T201
        shutil.rmtree(cache, ignore_errors=True)
    return True


def publish(folder: Path, cache: Path) -> None:
    """Publish an engine's cache as a whole, unless another one was faster."""
    for part in folder.glob(f"{_PART}*"):
        if time.time() - part.stat().st_mtime > _STALE_PART_S:
            shutil.rmtree(part, ignore_errors=True)
    part = folder / f"{_PART}{uuid.uuid4().hex}"
    try:
        shutil.copytree(cache, part, ignore=_NOT_PUBLISHED)
        part.rename(folder / PUBLISHED)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _publish_later(folder: Path, cache: Path, health: str) -> None:
    """Leave a process behind that publishes when the engine, which this one becomes, serves."""
    engine = os.getpid()
    if os.fork() != 0:
        return
    try:
        while os.getppid() == engine:
            if _serves(health):
                publish(folder, cache)
                break
            time.sleep(_PROBE_PERIOD_S)
    except OSError as error:
        print(f"{folder}: nothing is published: {error}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        os._exit(0)


def _serves(health: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its own pod's certificate is of the Service
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(health, timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, ValueError):
        return False


def main(arguments: list[str]) -> None:
    """Become the command that follows ``--``, with its cache in the environment."""
    parser = argparse.ArgumentParser(description="Start an engine with a compile cache.")
    parser.add_argument("--folder", type=Path, required=True, help="shared by engines of this template")
    parser.add_argument("--cache", type=Path, required=True, help="the engine's own, at the same path in every pod")
    parser.add_argument("--health", required=True, help="URL that answers 200 once the engine serves")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(given.cache)
        if not prepare(given.folder, given.cache):
            _publish_later(given.folder, given.cache, given.health)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(given.command[0], given.command)  # noqa: S606  the operator wrote it


if __name__ == "__main__":
    main(sys.argv[1:])
