"""An engine that serves TLS: whom the load beside it believes."""

import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from devcluster.cluster import pki
from specdecode_operator.capture.job.answer_checks import CheckRequests, NotAnsweredError
from specdecode_operator.capture.load.engine_client import server_of
from specdecode_operator.capture.load.engine_ready import EngineMonitor
from specdecode_operator.capture.load.run_settings import InvalidSettingsError, tls_of
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.completion_server import CompletionServer, completion_server
from tests.support.load_runs import settings_for

ONE_PHASE = [{"name": "one", "pattern": "Closed", "concurrency": 1, "requests": 2}]
Serving = Callable[[str], AbstractAsyncContextManager[CompletionServer]]


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one authority, and one of nobody's that has expired; none names 127.0.0.1."""
    folder = tmp_path_factory.mktemp("pki") / "pki"
    pki.create(folder, [pki.Identity("engine", "engine"), pki.Identity("renewed", "engine")])
    key, request, expired = (folder / f"expired.{end}" for end in ("key", "csr", "crt"))
    asked = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=engine")
    openssl("req", "-new", *asked, "-keyout", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-signkey", key, "-days", "-1", "-out", expired)
    return folder


@pytest.fixture
def serving(authority: Path) -> Serving:
    @asynccontextmanager
    async def serve(name: str) -> AsyncIterator[CompletionServer]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(authority / f"{name}.crt", authority / f"{name}.key")
        async with completion_server(context) as server:
            yield server

    return serve


@pytest.fixture
def folder(tmp_path: Path, authority: Path) -> Path:
    """What the load's container has of the engine's Secret."""
    (tmp_path / "tls.crt").write_bytes((authority / "engine.crt").read_bytes())
    return tmp_path


async def load(server: CompletionServer, folder: Path) -> LoadResult:
    settings = settings_for(server, phases=ONE_PHASE)
    engine = settings.engine.model_copy(update={"certificates": str(folder)})
    return await run_load(settings.model_copy(update={"engine": engine}), folder, Stop())


async def test_it_believes_the_engines_own_certificate_for_requests_pages_and_checks(
    serving: Serving, folder: Path
) -> None:
    async with serving("engine") as server:
        await load(server, folder)
        assert len(server.received) == 2
        assert server.served["/metrics"] > 0
        address = settings_for(server).engine.model_copy(update={"certificates": str(folder)})
        async with CheckRequests(server_of(address), 30.0) as requests:
            with pytest.raises(NotAnsweredError, match="nobody can read"):
                await requests.greedy([1, 2], "0" * 64, 4)
    assert len(server.received) == 3


async def test_it_believes_no_other_one(serving: Serving, folder: Path) -> None:
    async with serving("renewed") as server:
        address = settings_for(server).engine.model_copy(update={"certificates": str(folder)})
        async with EngineMonitor(address.url, tls_of(address)) as monitor:
            reading = await monitor.read()
        await load(server, folder)
    assert "certificate verify failed" in str(reading)
    assert server.received == []


async def test_one_that_is_renewed_is_believed_where_its_authority_is_known(
    serving: Serving, folder: Path, authority: Path
) -> None:
    (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    async with serving("renewed") as server:
        await load(server, folder)
    assert len(server.received) == 2


async def test_one_that_has_expired_stops_no_capture(serving: Serving, folder: Path, authority: Path) -> None:
    (folder / "tls.crt").write_bytes((authority / "expired.crt").read_bytes())
    async with serving("expired") as server:
        await load(server, folder)
    assert len(server.received) == 2


@pytest.mark.parametrize("content", [None, "no certificate\n"])
async def test_a_secret_without_one_is_named(serving: Serving, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tls.crt").write_text(content)
    async with serving("engine") as server:
        with pytest.raises(InvalidSettingsError, match=r"^spec\.serving\.tlsSecret: its Secret: has no certificates"):
            await load(server, tmp_path)
    assert server.received == []
