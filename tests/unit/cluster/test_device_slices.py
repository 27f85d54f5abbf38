"""Read devices from ResourceSlices: product, memory, partitions, sharing and selectors."""

from typing import Any

import pytest

from specdecode_operator.api.crd_validation import UnsupportedCelError
from specdecode_operator.cluster.device_slices import Device, Selector, read_inventory
from specdecode_operator.sizing.devices import find_device, generation_of
from tests.support.devices import DRIVER, GPUS, MIB, device, gpu, mig, resource_slice
from tests.support.objects import H100, H200, Body

MIG_PRODUCT = f"{H100}-MIG-3g.40gb-40448MiB"


def read(*devices: Body, **more: Any) -> tuple[Device, ...]:
    return read_inventory([resource_slice("n", *devices, **more)], [GPUS]).devices


@pytest.mark.parametrize(
    ("body", "product"),
    [
        (gpu(), H200),
        (gpu("NVIDIA H100 80GB HBM3"), H100),
        (gpu("NVIDIA H100 80GB HBM3", mebibytes=None), H100),
        (gpu("NVIDIA X900", 96_000), "NVIDIA-X900-96000MiB"),
        (gpu("NVIDIA X900", mebibytes=None), "NVIDIA-X900"),
        (mig(), MIG_PRODUCT),
        (mig("1g.10gb+me", 9_728), f"{H100}-MIG-1g.10gb.me-9728MiB"),
        (device({}, 40_960), "GPU-40960MiB"),
        (device({}, None), ""),
    ],
)
def test_product_names_the_gpu_and_memory_without_known_figures(body: Body, product: str) -> None:
    (found,) = read(body)
    assert found.product == product


@pytest.mark.parametrize(
    ("product", "mebibytes", "generation"),
    [("NVIDIA-X900-96000MiB", 96_000, None), (MIG_PRODUCT, 40_448, "Hopper"), ("GPU-40960MiB", 40_960, None)],
)
def test_measured_products_are_sized_by_their_own_memory(product: str, mebibytes: int, generation: str | None) -> None:
    found = find_device(product)
    assert found is not None
    assert found.total_bytes == mebibytes * MIB
    assert not found.calibrated
    assert generation_of(product) == generation


def test_mig_device_is_not_known_under_the_label_without_memory() -> None:
    assert find_device(f"{H100}-MIG-3g.40gb") is None


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    old, new = resource_slice("n", gpu(), gpu()), resource_slice("n", gpu(), generation=2)
    assert len(read_inventory([old, new, resource_slice("m", gpu())], []).devices) == 2


def test_device_may_name_its_own_node() -> None:
    found = read({**gpu(), "nodeName": "m"}, gpu(), nodeName=None)
    assert [each.node for each in found] == ["m", "n"], "its own node, or else the pool"


def consuming(body: Body, **counters: str) -> Body:
    amounts = {name: {"value": value} for name, value in counters.items()}
    return {**body, "consumesCounters": [{"counterSet": "gpu-0", "counters": amounts}]}


def test_partitions_of_one_gpu_are_not_counted_twice() -> None:
    whole = consuming(gpu("NVIDIA H100 80GB HBM3"), memory="80Gi")
    parts = [consuming(mig(), memory="40Gi") for _ in range(3)]
    shared = [{"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}]
    inventory = read_inventory([resource_slice("n", whole, *parts, sharedCounters=shared)], [])
    assert inventory.at_once(inventory.devices) == 1
    assert inventory.at_once(inventory.devices[1:]) == 2


def shared_gpu(default: str | None) -> Body:
    memory: Body = {"value": "80Gi"}
    if default is not None:
        memory["requestPolicy"] = {"default": default}
    return {**gpu(), "allowMultipleAllocations": True, "capacity": {"memory": memory}}


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (gpu(), False),
        (shared_gpu("0"), True),
        (shared_gpu("20Gi"), True),
        (shared_gpu("80Gi"), False),
        (shared_gpu(None), False),
        ({**gpu(), "taints": [{"key": "x", "effect": "NoSchedule"}]}, True),
        (device({"type": "vfio", "productName": "NVIDIA H200"}, 1), True),
    ],
)
def test_devices_whose_memory_an_engine_does_not_have_alone_are_refused(body: Body, is_refused: bool) -> None:
    (found,) = read(body)
    assert (found.refusal is not None) == is_refused


@pytest.mark.parametrize(
    ("text", "is_match"),
    [
        (f"device.driver == '{DRIVER}'", True),
        (f"device.attributes['{DRIVER}'].productName == 'NVIDIA H200'", True),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('100Gi')) >= 0", True),
        (f"device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('1Ti'))", False),
        (f"device.attributes['{DRIVER}'].cudaComputeCapability.compareTo(semver('9.0.0')) >= 0", True),
        (f"device.attributes['{DRIVER}'].cudaComputeCapability.isLessThan(semver('9.0.0'))", False),
        (f"device.attributes['{DRIVER}'].productName.lowerAscii().matches('h200$')", True),
        (f"has(device.attributes['{DRIVER}'].profile)", False),
        (f"device.attributes['{DRIVER}'].missing == 'a'", False),
        ("device.attributes['other'].missing == 'a'", False),
        ("device.allowMultipleAllocations", False),
    ],
)
def test_selectors_are_evaluated_as_the_scheduler_does(text: str, is_match: bool) -> None:
    (found,) = read(gpu())
    assert (Selector("selectors[0]", text).mismatch(found) is None) == is_match


def test_selector_that_only_kubernetes_knows_is_not_guessed() -> None:
    (found,) = read(gpu())
    with pytest.raises(UnsupportedCelError):
        Selector("selectors[0]", "device.attributes['x'].?y.orValue('') == ''").mismatch(found)


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2].all(a, [1, 2].all(b, a + b > 0))",
        "[1, 2].all // a comment\n (a, a > 0)",
        "device.driver.matches('(.{50}){9}')",
        r"device.driver.matches('\\w\\w')",
        r"device.driver.matches('(.\x7b50})')",
        "device.driver.matches('.<50}'.replace('<', 'x'))",
    ],
)
def test_selectors_whose_cost_has_no_bound_are_left_to_the_scheduler(text: str) -> None:
    (found,) = read(gpu())
    with pytest.raises(UnsupportedCelError):
        Selector("selectors[0]", text).mismatch(found)


def test_text_that_a_selector_makes_long_is_refused() -> None:
    (found,) = read(gpu())
    text = "'a'" + ".replace('a', 'aaaaaaaaaa')" * 5 + " != ''"
    assert "longer than" in str(Selector("selectors[0]", text).mismatch(found))
