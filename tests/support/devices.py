"""ResourceSlices and DeviceClasses as NVIDIA's DRA driver publishes them."""

from typing import Any

from tests.support.objects import Body

DRIVER = "gpu.nvidia.com"
API_VERSION = "resource.k8s.io/v1"
MIB = 2**20


def gpu(product: str = "NVIDIA H200", mebibytes: int | None = 143_771, **more: Any) -> Body:
    """Return a device that is a whole GPU; ``mebibytes`` is None for a driver that does not report the memory."""
    attributes = {"type": "gpu", "productName": product, "cudaComputeCapability": (9, 0, 0)}
    return device(attributes, mebibytes, **more)


def mig(profile: str = "3g.40gb", mebibytes: int = 40_448, product: str = "NVIDIA H100 80GB HBM3", **more: Any) -> Body:
    """Return a device that is a part of a GPU."""
    return device({"type": "mig", "productName": product, "profile": profile}, mebibytes, **more)


def device(attributes: dict[str, Any], mebibytes: int | None, **more: Any) -> Body:
    """Return a device; versions are tuples."""
    typed: Body = {}
    for name, value in attributes.items():
        typed[name] = {"version": ".".join(map(str, value))} if isinstance(value, tuple) else {"string": value}
    capacity = {} if mebibytes is None else {"capacity": {"memory": {"value": f"{mebibytes}Mi"}}}
    return {"attributes": typed, **capacity, **more}


def resource_slice(node: str, *devices: Body, generation: int = 1, **more: Any) -> Body:
    """Return the ResourceSlice of a node with these devices, which are numbered."""
    named = [{"name": f"gpu-{number}", **each} for number, each in enumerate(devices)]
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": named, **more}
    metadata = {"name": f"{node}-{DRIVER}"}
    return {"apiVersion": API_VERSION, "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def device_class(name: str = DRIVER, type_: str = "gpu") -> Body:
    """Return a DeviceClass as the driver's chart creates it."""
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{type_}'"
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": API_VERSION, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


GPUS = device_class()
MIGS = device_class("mig.nvidia.com", "mig")


def claiming(device_class_name: str = DRIVER, **fields: Any) -> Body:
    """Return spec.accelerator of an object that claims its GPUs."""
    accelerator = {name: fields.pop(name) for name in ("products", "perNode", "memoryGiBPerGPU") if name in fields}
    return {"resourceClaim": {"deviceClassName": device_class_name, **fields}, **accelerator}
