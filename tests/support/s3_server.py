"""An S3 server that others wrote (moto), as a process of its own, and how it gets there.

    .venv/bin/python -m tests.support.s3_server

It is not in the development environment: its botocore needs an older python-dateutil than kubernetes does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from devcluster.host.paths import REPOSITORY
from tests.engine.side_package import SidePackage

PACKAGE = SidePackage(
    "s3-server", (REPOSITORY / "requirements" / "s3-server.txt").read_text(), "installing moto, an S3 server for tests"
)
BUCKET = "captures"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_SERVE = """
import sys
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
_STOP_S = 60


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve an empty bucket; yields the URL."""
    PACKAGE.install()
    folder = PACKAGE.find()
    environment = os.environ | KEYS | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with urlopen(Request(f"{url}/{BUCKET}", method="PUT")):
                pass
            yield url
        finally:
            process.terminate()
            process.wait(_STOP_S)


if __name__ == "__main__":
    PACKAGE.install()
