"""What becomes of the operator when its watches fail, each in its own way."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL
from itertools import islice
from pathlib import Path

import kopf
import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.cluster.resources import LEASE
from specdecode_operator.handlers.main import configure
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import embedded_operator, until
from tests.unit.handlers.state.resync_rounds import add, reason

_ROOT = Path(__file__).parents[3]
_NO_LEADER = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcdserver: no leader"}}


@pytest.mark.parametrize(
    "last_words",
    [
        b"",
        b'{"type":"MODIFIED","object":{"metadata":{"na',
        json.dumps(_NO_LEADER, separators=(",", ":")).encode() + b"\n",
    ],
    ids=["in peace", "in mid-word", "with an error"],
)
async def test_a_watch_that_ends_begins_anew_however_it_ended(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, last_words: bytes
) -> None:
    async with embedded_operator(monkeypatch):
        add(api)
        await until(lambda: reason(api), lambda: "the first is looked at")
        api.end_watches(last_words)
        add(api, "second")
        await until(lambda: reason(api, name="second"), lambda: "the second is looked at")


def test_what_is_refused_is_asked_for_again_without_an_end() -> None:
    """A namespace in which the operator has lost its rights takes it from no other."""
    settings = kopf.OperatorSettings()
    configure(settings)
    backoffs_s = settings.networking.error_backoffs
    for _ in range(2):  # each request begins with the first
        waits_s = [*islice(backoffs_s, 1000)]  # type: ignore[arg-type]  # a number would be one wait
        assert (waits_s[0], len(waits_s), max(waits_s) <= 30) == (1, 1000, True)


async def test_a_process_whose_watches_have_failed_for_good_ends(api: ApiServer, tmp_path: Path) -> None:
    """Nothing would be done by it, and nobody would start it anew."""
    (port,) = free_ports(1)
    add(api)
    command = [sys.executable, "-m", "specdecode_operator", "operator", f"--health-port={port}", "--metrics-port=0"]
    variables = {"SPECDECODE_OPERATOR_IMAGE": "image:1", "POD_NAMESPACE": "system", "POD_NAME": "operator-0"}
    async with api.serving(tmp_path / "kubeconfig"):
        process = await asyncio.create_subprocess_exec(
            *command,
            "--leader-election=operator",
            cwd=_ROOT,
            env={**os.environ, **variables, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        try:
            await until(lambda: reason(api), lambda: f"the object is looked at ({process.returncode})")
            missing = (404, "the server could not find the requested resource")
            api.refusals = {"list pods": missing, "watch pods": missing}
            api.end_watches()
            async with asyncio.timeout(60):
                assert await process.wait() != 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert not (api.find(LEASE, "operator") or {})["spec"].get("holderIdentity"), "another may begin at once"
