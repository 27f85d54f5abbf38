"""Read --kv-transfer-config: whether an engine is one side of a prefill/decode split, and what its side needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from specdecode_operator.vllm.extra_args_parser import json_value, options
from specdecode_operator.vllm.profiles import EngineProfile

KV_TRANSFER: Final = "--kv-transfer-config"

_BETWEEN_ENGINES: Final = frozenset(
    {
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "P2pNcclConnector",
    }
)
"""Connectors that send KV cache from one engine to another (distributed/kv_transfer/kv_connector/factory.py)."""
_WITHIN_ENGINE: Final = frozenset(
    {"ExampleHiddenStatesConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "HiSparseConnector"}
)
"""Connectors that store KV cache or states of one engine, with any role."""


class ServingRole(StrEnum):
    """Side of a prefill/decode split."""

    PREFILL = "prefill"
    DECODE = "decode"


_ROLES: Final = {"kv_producer": ServingRole.PREFILL, "kv_consumer": ServingRole.DECODE}


@dataclass(frozen=True)
class KvTransfer:
    """Connector of a prefill/decode split."""

    connector: str
    role: ServingRole | None
    """None if the engine sends and receives (kv_both)."""

    @property
    def is_nixl(self) -> bool:
        """Whether NIXL transfers the KV cache."""
        return self.connector.startswith("Nixl")


def split_transfer(extra_args: Sequence[str], profile: EngineProfile) -> KvTransfer | None:
    """Return the connector to the other side of a prefill/decode split; None if the arguments configure none."""
    config = json_value([each for each in options(extra_args, profile) if each.flag.name == KV_TRANSFER])
    for part in _parts(config or {}):
        connector, role = str(part.get("kv_connector") or ""), _ROLES.get(str(part.get("kv_role")))
        if connector in _BETWEEN_ENGINES or (connector and role and connector not in _WITHIN_ENGINE):
            return KvTransfer(connector, role)
    return None


def _parts(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the connectors, including those inside a MultiConnector."""
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    if config.get("kv_connector") != "MultiConnector" or not isinstance(inner, list):
        return [config]
    return [each for each in inner if isinstance(each, Mapping)]
