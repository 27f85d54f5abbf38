"""All writes go through one client, which asks before each of them whether this replica holds the Lease."""

from collections.abc import Awaitable, Callable

import pytest

from specdecode_operator.cluster.client import Cluster, NotLeadingError
from specdecode_operator.cluster.resources import POD, SERVICE, SPECDECODE_DEPLOYMENT
from tests.support.api_server import ApiServer
from tests.support.objects import Body

METADATA = {"namespace": "team", "name": "llama"}
BODY: Body = {"apiVersion": "v1", "kind": "Service", "metadata": {**METADATA, "uid": "1"}}
WRITES: dict[str, Callable[[Cluster], Awaitable[object]]] = {
    "apply": lambda cluster: cluster.apply(BODY),
    "apply_new": lambda cluster: cluster.apply_new(BODY),
    "apply_status": lambda cluster: cluster.apply_status(SPECDECODE_DEPLOYMENT, BODY),
    "create": lambda cluster: cluster.create(BODY),
    "delete": lambda cluster: cluster.delete(BODY),
    "evict": lambda cluster: cluster.evict(BODY),
    "merge": lambda cluster: cluster.merge(BODY, {}),
    "post_event": lambda cluster: cluster.post_event("team", {}),
    "try_create": lambda cluster: cluster.try_create(POD, BODY),
    "take_over_fields": lambda cluster: cluster.take_over_fields(BODY, ()),
}
READS = {"close", "connect", "get", "list", "pages"}


def test_every_call_is_known_as_a_read_or_a_write() -> None:
    assert {name for name in vars(Cluster) if not name.startswith("_")} == {*WRITES, *READS}


@pytest.mark.parametrize("name", WRITES)
async def test_without_the_lease_nothing_is_written(api: ApiServer, name: str) -> None:
    uid = api.create(SERVICE, {"metadata": METADATA})["metadata"]["uid"]
    BODY["metadata"]["uid"] = uid
    cluster = await Cluster.connect(may_write=lambda: False)
    try:
        with pytest.raises(NotLeadingError, match="does not hold the Lease"):
            await WRITES[name](cluster)
        assert await cluster.get(SERVICE, "team", "llama") is not None
        assert await cluster.list(POD) is not None
    finally:
        await cluster.close()
    assert {request.split()[0] for request in api.requests} <= {"get", "list"}
