"""kubectl as tests use it."""

import json
from functools import cache
from typing import Any

from devcluster import binaries, kubectl
from devcluster.kubectl import Answer


class Kubectl(kubectl.Kubectl):
    """kubectl, with what only tests need."""

    def apply(self, manifest: str, *options: str) -> Answer:
        """Apply YAML text."""
        return self("apply", *options, "--filename=-", stdin=manifest)

    def patch_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a SpecDecodeDeployment, as the operator does."""
        patch = json.dumps({"status": status})
        self.must("patch", "sdd", name, "--subresource=status", "--type=merge", f"--patch={patch}")


@cache
def program(name: str) -> str:
    """Return the path of a program such as kubectl or helm: the machine's, or one that devcluster builds."""
    return str(binaries.find(name)[name])
