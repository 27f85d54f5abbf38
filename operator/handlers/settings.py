"""What the command line says of an operator."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.cluster.figures_source import Prometheus
from specdecode_operator.handlers.facts_folder import FactsFolder
from specdecode_operator.handlers.leadership.lease import LeaseName
from specdecode_operator.kube.nodes import NodeFacts, NodesFrom
from specdecode_operator.kube.pod_policy import NONE_ALLOWED


def own_name() -> str:
    """Return the name of this pod, or of this process where it runs elsewhere."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Webhook:
    """How admission reviews are answered, also while another replica leads."""

    port: int
    certificate: Path
    """Folder with tls.crt and tls.key, which may come later and change."""

    refuses_what_does_not_fit: bool = False


@dataclass(frozen=True)
class Settings:
    """What one operator serves, and by which terms; the ports of its process are not among it."""

    calibration: Path | None = None
    """File that corrects estimates; it may come, change and go at any time."""

    facts: FactsFolder | None = None
    """Facts about models that the catalogue lacks; its files may come, change and go at any time."""

    host_paths: tuple[str, ...] = ()
    """Directories of nodes that objects may have their models in."""

    pod_template: frozenset[str] = NONE_ALLOWED
    """What podTemplate of objects may ask for beyond the policy."""

    prometheus: Prometheus | None = None
    """Asked for figures, in place of engines."""

    webhook: Webhook | None = None

    lease: LeaseName | None = None
    """Held while it works; absent: it works alone."""

    namespaces: tuple[str, ...] = ()
    """Those that it serves; none: all."""

    nodes: tuple[NodeFacts, ...] | None = None
    """Those to plan for where namespaces are named: then nothing is asked of the cluster as a whole."""

    signing_key: SigningKey | None = None
    """Signs what is attested of each rollout."""

    reconciles_told_from_s: float | None = None
    """Reconciles that take so long are told in the log."""

    @property
    def identity(self) -> str:
        """By what operators know each other: the replicas of one installation are one."""
        if self.lease is not None:
            return f"{self.lease.namespace}/{self.lease.name}"
        return own_name()

    @property
    def nodes_from(self) -> NodesFrom:
        """Where nodes to plan for are known from."""
        if not self.namespaces:
            return NodesFrom.CLUSTER
        return NodesFrom.NOWHERE if self.nodes is None else NodesFrom.FILE
