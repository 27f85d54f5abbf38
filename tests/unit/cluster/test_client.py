"""What becomes of a refusal of the API server, and of what others write meanwhile."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ClusterError, ConflictError, ForbiddenError, RefusedForNowError

SERVICE_METADATA = {"namespace": "team", "name": "llama"}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": SERVICE_METADATA}


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


class WrittenByOthers:
    """An API server with an object into which somebody else has written, and whose controller keeps writing."""

    def __init__(self, uid: str = "1", conflicts: int = 0) -> None:
        self._uid, self._conflicts = uid, conflicts
        self.reads = 0
        self.written: list[Any] = []

    async def param_serialize(self, *request: Any, **more: Any) -> tuple[Any, ...]:
        return *request, more.get("body")

    async def call_api(self, method: str, *rest: Any, **_: Any) -> Any:
        status, answer = 200, {}
        if method == "GET":
            self.reads += 1
            theirs = {"manager": "vim", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}
            metadata = {"uid": self._uid, "resourceVersion": f"v{self.reads}", "managedFields": [theirs]}
            answer = {**SERVICE, "metadata": {**SERVICE_METADATA, **metadata}}
        elif self._conflicts:
            status, self._conflicts = 409, self._conflicts - 1
        else:
            self.written.append(rest[-1]["metadata"])

        async def read() -> bytes:
            return json.dumps(answer).encode()

        return SimpleNamespace(status=status, read=read)


CHILD = {**SERVICE, "metadata": {**SERVICE_METADATA, "uid": "1"}}


async def test_fields_are_taken_over_of_what_was_read_and_of_nothing_newer() -> None:
    api = WrittenByOthers(conflicts=2)
    await Cluster(cast("ApiClient", api)).take_over_fields(CHILD, ())
    (metadata,) = api.written
    assert metadata["resourceVersion"] == "v3", "that of the last reading: another write in between is a conflict"
    assert [each["manager"] for each in metadata["managedFields"]] == ["specdecode-operator"]


async def test_of_another_object_of_the_name_nothing_is_taken_over() -> None:
    api = WrittenByOthers(uid="2")
    await Cluster(cast("ApiClient", api)).take_over_fields(CHILD, ())
    assert api.written == []


async def test_an_object_that_is_always_written_in_between_is_left_for_later() -> None:
    api = WrittenByOthers(conflicts=99)
    with pytest.raises(ConflictError):
        await Cluster(cast("ApiClient", api)).take_over_fields(CHILD, ())
    assert api.reads == 5
