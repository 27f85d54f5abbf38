"""ResourceClaimTemplates of earlier requests are deleted when no pod can refer to them."""

from specdecode_operator.cluster.device_slices import read_inventory
from specdecode_operator.cluster.resources import (
    RESOURCE_CLAIM_TEMPLATE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from tests.support.devices import GPUS, claiming, gpu, resource_slice
from tests.support.objects import pair_70b
from tests.unit.handlers.reconciler_world import World


async def test_unused_templates_are_deleted_beside_captures(world: World) -> None:
    world.cache.optional_kinds |= {RESOURCE_CLAIM_TEMPLATE.kind}
    world.cache.devices = read_inventory([resource_slice("h200-0", *[gpu()] * 8)], [GPUS])
    spec = pair_70b(accelerator=claiming(), models={"volume": {"persistentVolumeClaim": {"claimName": "models"}}})
    world.add(spec)
    # Objects of lists have no kind.
    metadata = {"namespace": "team", "name": "evening", "uid": "capture-1", "resourceVersion": "1"}
    world.cache.put_parent(SPECDECODE_CAPTURE.kind, {"metadata": metadata, "spec": {"deployment": "llama"}})
    await world.look()
    (first,) = world.api.names(RESOURCE_CLAIM_TEMPLATE)
    changed = {**spec, "accelerator": claiming(selectors=["device.driver != ''"])}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=changed)
    await world.look()
    await world.look()
    (second,) = world.api.names(RESOURCE_CLAIM_TEMPLATE)
    assert first != second
