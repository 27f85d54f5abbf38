"""Options of one operator process, from the command line."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.cluster.observed_figures import Prometheus
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.handlers.leadership import LeaseName
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder

if TYPE_CHECKING:
    # Importing cryptography takes 8 MB, and only signing needs it.
    from specdecode_operator.deployment.attestation.keys import SigningKey


def own_name() -> str:
    """Return the name of this pod, or of this process outside a pod."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Webhook:
    """Options of the admission webhook, which standby replicas also serve."""

    port: int
    certificate: Path
    """Folder with tls.crt and tls.key, which may appear later and change."""
    refuses_what_does_not_fit: bool = False


@dataclass(frozen=True)
class Settings:
    """Options of one operator process."""

    calibration: CalibrationFile = field(default_factory=CalibrationFile)
    facts: FactsFolder = field(default_factory=FactsFolder)
    host_paths: tuple[str, ...] = ()
    """Node directories from which objects may mount models."""
    pod_template: frozenset[str] = NONE_ALLOWED
    """Names of settings that podTemplate may have although the policy forbids them."""
    token_ids: Mapping[str, LiveTokenIds] = field(default_factory=dict)
    """Token ids that live captures may record, by namespace."""
    prometheus: Prometheus | None = None
    """Source of the figures; None to scrape the engines."""
    webhook: Webhook | None = None
    lease: LeaseName | None = None
    """Lease for leader election; None for a single replica."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty for all."""
    nodes: tuple[NodeFacts, ...] | None = None
    """Nodes to plan for if namespaces are named, because the operator then cannot list the cluster's nodes."""
    signing_key: "SigningKey | None" = None
    """Signs the attestation of each rollout."""
    reconciles_told_from_s: float | None = None
    """Minimum duration of reconciles that are logged."""
    operator_image: str | None = None
    """Image of this operator, which Jobs run. It is known after the operator has connected."""

    @property
    def identity(self) -> str:
        """Holder of claims on namespaces, the same for all replicas of an installation."""
        return own_name() if self.lease is None else f"{self.lease.namespace}/{self.lease.name}"

    async def read_files(self) -> None:
        """Read the mounted files that all decisions depend on, if they have changed."""
        await self.facts.look()
        self.calibration.read()

    def token_ids_allowed(self, namespace: str) -> LiveTokenIds:
        """Return the token ids that live captures may record in a namespace."""
        return self.token_ids.get(namespace, LiveTokenIds.NONE)

    @property
    def nodes_from(self) -> NodesFrom:
        """Source of the nodes to plan for."""
        if not self.namespaces:
            return NodesFrom.CLUSTER
        return NodesFrom.NOWHERE if self.nodes is None else NodesFrom.FILE
