"""On which Kubernetes minor the component tests run."""

import os

from devcluster.builds import binaries

MINOR = os.environ.get("SPECDECODE_KUBERNETES") or binaries.USUAL
