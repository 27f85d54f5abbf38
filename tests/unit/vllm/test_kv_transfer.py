"""Which --kv-transfer-config makes an engine one side of a prefill/decode split."""

import json
from typing import Any

import pytest

from specdecode_operator.vllm.kv_transfer import ServingRole, split_transfer
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

NEWEST = find_profile(KNOWN_VERSIONS[-1])
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def multi(*connectors: Any) -> dict[str, Any]:
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("config", "connector", "role"),
    [
        (NIXL, "NixlConnector", None),
        ({**NIXL, "kv_role": "kv_producer"}, "NixlConnector", ServingRole.PREFILL),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}, "LMCacheConnectorV1", ServingRole.DECODE),
        ({"kv_connector": "OwnConnector", "kv_role": "kv_producer"}, "OwnConnector", ServingRole.PREFILL),
        (multi({"kv_connector": "OffloadingConnector"}, {**NIXL, "kv_role": "kv_consumer"}), "NixlConnector", "decode"),
    ],
)
def test_connector_between_engines_is_a_split(config: Any, connector: str, role: str | None) -> None:
    found = split_transfer(["--kv-transfer-config", json.dumps(config)], NEWEST)
    assert found is not None
    assert (found.connector, found.role) == (connector, role)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"},
        multi({"kv_connector": "OffloadingConnector"}, 5),
        multi(),
        {"kv_connector": ["NixlConnector"], "kv_role": {}},
        [],
        "text",
        None,
    ],
)
def test_storage_of_one_engine_and_bad_values_are_no_split(config: Any) -> None:
    assert split_transfer(["--kv-transfer-config", json.dumps(config)], NEWEST) is None


def test_dotted_paths_and_other_spellings_are_read() -> None:
    args = ["--kv_transfer_config.kv_connector=NixlPullConnector", "--kv_transfer_config.kv_role", "kv_consumer"]
    found = split_transfer(args, NEWEST)
    assert found is not None
    assert (found.connector, found.role, found.is_nixl) == ("NixlPullConnector", ServingRole.DECODE, True)
    assert split_transfer(["--enable-lora"], NEWEST) is None
