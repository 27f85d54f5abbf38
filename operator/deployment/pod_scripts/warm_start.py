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
"""Age after which a partial copy counts as abandoned; a copy takes seconds to minutes."""

_PROBE_PERIOD_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_NOT_PUBLISHED = shutil.ignore_patterns("*.tmp", "gpu_p2p_access_cache_*", "flashinfer_autotune_cache")
"""Incomplete files, results for one node's GPUs, and tuning results of one rank.

Up to vLLM 0.31, all ranks load the first rank's file, although entries of
experts are valid only for the rank that wrote them: that rank would skip
measurements in which the others wait
(vllm/model_executor/warmup/kernel_warmup.py, flashinfer_autotune, as documented in 0.32).
"""


def prepare(folder: Path, cache: Path) -> bool:
    """Copy the published cache to the engine's private cache; return whether there is a published one."""
    published = folder / PUBLISHED
    if not published.is_dir():
        return False
    # A failed engine may have left an incomplete cache.
    shutil.rmtree(cache, ignore_errors=True)
    try:
        shutil.copytree(published, cache)
    except OSError as error:
        print(f"cannot copy compile cache {published}, continuing without it: {error}", file=sys.stderr)  # noqa: T201
        shutil.rmtree(cache, ignore_errors=True)
    return True


def publish(folder: Path, cache: Path) -> None:
    """Publish an engine's cache atomically, unless another engine did so first."""
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
    """Fork a process that publishes the cache when the engine, which this process becomes, serves."""
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
        print(f"cannot publish the compile cache to {folder}: {error}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        os._exit(0)


def _serves(health: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is for the Service's name
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(health, timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except (OSError, ValueError):
        return False


def main(arguments: list[str]) -> None:
    """Replace this process with the command after ``--``, with the cache in its environment."""
    parser = argparse.ArgumentParser(description="Start an engine with a compile cache.")
    parser.add_argument("--folder", type=Path, required=True, help="shared by engines of this template")
    parser.add_argument("--cache", type=Path, required=True, help="private cache, at the same path in every pod")
    parser.add_argument("--health", required=True, help="URL that answers 200 once the engine serves")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(given.cache)
        if not prepare(given.folder, given.cache):
            _publish_later(given.folder, given.cache, given.health)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(given.command[0], given.command)  # noqa: S606  the operator renders this command


if __name__ == "__main__":
    main(sys.argv[1:])
