"""Where guidellm is, a load generator that others wrote, and how it gets there.

    .venv/bin/python -m tests.engine.guidellm_package

Most of what it depends on is in vLLM's environment; requirements/guidellm.in names the rest.
"""

from devcluster.host.paths import REPOSITORY
from tests.engine.side_package import SidePackage

PACKAGE = SidePackage(
    "guidellm", (REPOSITORY / "requirements" / "guidellm.txt").read_text(), "installing guidellm and what it needs"
)

if __name__ == "__main__":
    PACKAGE.install()
