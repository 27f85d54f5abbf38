"""Where that is what the server of the newest vLLM imports and the development cluster's environment has not got.

.venv/bin/python -m tests.engine.newest_package
"""

from devcluster.host.paths import REPOSITORY
from tests.engine.side_package import SidePackage

PACKAGE = SidePackage(
    "newest",
    (REPOSITORY / "requirements" / "engine-newest.txt").read_text(),
    "installing what the newest vLLM needs beside the environment",
)

if __name__ == "__main__":
    PACKAGE.install()
