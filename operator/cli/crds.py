"""`specdecode crds`: print the CustomResourceDefinitions."""

import sys

from specdecode_operator.api.crd import crd_yaml


def crds_command() -> None:
    """Print the CustomResourceDefinitions as YAML, ready for kubectl apply."""
    sys.stdout.write(crd_yaml())
