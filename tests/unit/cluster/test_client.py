"""What becomes of a refusal of the API server."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ClusterError, ForbiddenError, RefusedForNowError

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "team", "name": "llama"}}


class RefusingApi:
    """An API server that refuses everything with one message."""

    def __init__(self, message: str) -> None:
        self._message = message

    async def param_serialize(self, *request: Any, **_: Any) -> tuple[Any, ...]:
        return request

    async def call_api(self, *_: Any, **__: Any) -> Any:
        async def read() -> bytes:
            return json.dumps({"message": self._message}).encode()

        return SimpleNamespace(status=403, read=read)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('services "llama" is forbidden: exceeded quota: small, requested: count/services=1', RefusedForNowError),
        ('services "llama" is forbidden: status unknown for quota: small, resources: pods', RefusedForNowError),
        ("namespace team because it is being terminated", RefusedForNowError),
        ('User "operator" cannot patch resource "services"', ForbiddenError),
    ],
)
async def test_what_passes_with_time_is_no_missing_permission(message: str, kind: type[ClusterError]) -> None:
    with pytest.raises(ClusterError) as refused:
        await Cluster(cast("ApiClient", RefusingApi(message))).apply(SERVICE)
    assert type(refused.value) is kind
    assert message in str(refused.value)
