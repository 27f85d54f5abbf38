"""Where aiperf and speculators are, which read exported captures, and how they get there.

    .venv/bin/python -m tests.engine.export_packages

Only what their readers import is installed, beside vLLM's environment and guidellm's packages
(requirements/export-readers.in).
"""

from devcluster.host.paths import REPOSITORY
from tests.engine.side_package import SidePackage

PACKAGE = SidePackage(
    "export-readers",
    (REPOSITORY / "requirements" / "export-readers.txt").read_text(),
    "installing aiperf and speculators, which read exported captures",
)

if __name__ == "__main__":
    PACKAGE.install()
