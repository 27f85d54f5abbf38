"""What a cluster was asked to be, kept in its state directory."""

import json
import random
import socket
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from devcluster.builds.binaries import USUAL
from devcluster.cluster.nodes import NodePlan, parse
from devcluster.host.errors import ClusterError
from devcluster.host.sandbox import Addresses

_PORTS = range(16_000, 30_000)
_LWS_PORT = 9443
_reservations: deque[socket.socket] = deque(maxlen=1000)
"""Those of this process. The oldest ones end first: their ports are bound by then, or not needed any more."""


@dataclass(frozen=True)
class Settings:
    """Everything that has to stay the same when parts of a cluster are started again."""

    nodes: str
    """The value of `--nodes`."""
    index: int | None
    """The cluster's address ranges; None without namespaces (control plane on loopback)."""
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    kubernetes: str = USUAL
    """The value of `--kubernetes`: its minor."""
    simulates: bool = False
    """Whether KWOK runs: for the nodes of `--nodes`, or for some that were added later."""
    lws_port: int | None = None
    """Where the LeaderWorkerSet controller answers the API server's questions; None where it does not run."""
    complete: bool = False
    """Whether a previous `up` got to its end."""

    @classmethod
    def new(cls, wanted: str, index: int | None, kubernetes: str = USUAL) -> "Settings":
        """Return settings with the usual ports in a namespace, free ones on loopback."""
        if index is not None:
            return cls(wanted, index, 6443, 2379, 2380, kubernetes, simulates=bool(parse(wanted).fake))
        api, etcd, etcd_peer = free_ports(3)
        return cls(wanted, None, api, etcd, etcd_peer, kubernetes)

    @classmethod
    def load(cls, state: Path) -> "Settings | None":
        """Return the settings of the cluster in `state`, None where there is none."""
        try:
            saved = json.loads((state / "cluster.json").read_text())
        except FileNotFoundError:
            return None
        # A newer checkout on this machine may have written more.
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    def with_lws(self) -> "Settings":
        """Return the settings of the same cluster with the LeaderWorkerSet controller."""
        port = _LWS_PORT if self.index is not None else free_ports(1)[0]
        return replace(self, lws_port=self.lws_port or port)

    def save(self, state: Path) -> None:
        """Write the settings so that a reader sees the old ones or the new ones, never a part."""
        partial = state / "cluster.json.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(state / "cluster.json")

    @property
    def plan(self) -> NodePlan:
        """Return the parsed `--nodes` value."""
        return parse(self.nodes)

    @property
    def addresses(self) -> Addresses:
        """Return the address ranges; those of index 0 inside a control plane on loopback are never routed."""
        return Addresses(self.index or 0)

    @property
    def api_address(self) -> str:
        """Return the address that the machine and the pods reach the API server at."""
        return "127.0.0.1" if self.index is None else self.addresses.node

    @property
    def api_url(self) -> str:
        """Return the API server's URL."""
        return f"https://{self.api_address}:{self.api_port}"


def free_ports(count: int) -> list[int]:
    """Reserve ports of the loopback for this process and what it starts; return them.

    No other call returns the same port while this process runs, also in other processes: it may be bound later.
    The ports lie below the range of outgoing connections. The API server's own connections to etcd could otherwise take
    a port before the API server listens on it.

    Raises
    ------
    ClusterError
        If too few ports are free.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name is unique in the network namespace, as the port is, and goes with the process.
            reservation.bind(f"\0specdecode-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            reservation.close()
            continue
        _reservations.append(reservation)
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError(f"fewer than {count} ports of {_PORTS.start} to {_PORTS.stop - 1} are free on this machine")
