"""Fixtures of all unit tests."""

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from tests.support.certificates import write_certificate


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make HTTP clients load one certificate authority, because unit tests do not use the internet.

    httpx reads all authorities for each client, which takes 20 ms, although most servers of tests speak plain HTTP.
    """
    folder: Path = tmp_path_factory.mktemp("authority")
    write_certificate(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(certifi, "where", lambda: str(folder / "tls.crt"))
        yield
