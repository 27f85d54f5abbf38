"""Plan and render engines that claim their GPUs through Dynamic Resource Allocation."""

import gc
import json
import weakref
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.cache import slim
from specdecode_operator.cluster.device_slices import UNKNOWN_DEVICES, DeviceInventory, Selector, read_inventory
from specdecode_operator.cluster.nodes import gpus_of
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.resource_claim import claimable_gpus
from specdecode_operator.deployment.rollout.blocked_pods import first_blocked
from tests.support.decisions import decide
from tests.support.devices import GPUS, MIGS, claiming, device, gpu, mig, resource_slice
from tests.support.objects import H100, H200, Body, pair_70b, parent

EIGHT_H200 = read_inventory([resource_slice("h200-0", *[gpu()] * 8)], [GPUS, MIGS])
SMALL = {"target": {"model": "Qwen/Qwen3-8B"}, "speculation": {"method": "ngram", "numSpeculativeTokens": 3}}
SMALL |= {"parallelism": {}}
ANY = {"metadata": {"name": "any"}, "spec": {"selectors": [{"cel": {"expression": "true"}}]}}
IGNORED = {"ignorePlan": True, "reason": "only the claim matters"}
DEVICE_PLUGIN = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 2}}}


def made(
    accelerator: Body | None = None, inventory: DeviceInventory = EIGHT_H200, *, has_api: bool = True, **spec: Any
) -> tuple[DesiredState, Any]:
    """Return the desired state and the conditions of the 70B pair with these claims."""
    body = parent(pair_70b(accelerator=accelerator or claiming(), **spec))
    cluster = {"devices": inventory, "has_resource_claims": has_api, "has_leader_worker_sets": True}
    desired, _, conditions = decide(body, nodes=(), **cluster)
    return desired, conditions


def kinds(desired: DesiredState, *wanted: str) -> list[Body]:
    return [child for child in desired.children if child["kind"] in wanted]


def template(desired: DesiredState) -> Body:
    (found,) = kinds(desired, "ResourceClaimTemplate")
    return found


def request(desired: DesiredState) -> Body:
    (found,) = template(desired)["spec"]["spec"]["devices"]["requests"]
    exactly: Body = found["exactly"]
    return exactly


def pod(desired: DesiredState) -> Body:
    found: Body = kinds(desired, "Deployment")[0]["spec"]["template"]
    return found


class TestRendering:
    def test_engines_claim_their_gpus_instead_of_the_extended_resource(self) -> None:
        desired, _ = made()
        (engine,) = pod(desired)["spec"]["containers"]
        (claim,) = pod(desired)["spec"]["resourceClaims"]
        assert engine["resources"] == {"claims": [{"name": claim["name"]}]}
        assert claim["resourceClaimTemplateName"] == template(desired)["metadata"]["name"]
        assert "nodeSelector" not in pod(desired)["spec"]
        assert [owner["uid"] for owner in template(desired)["metadata"]["ownerReferences"]] == ["uid-1"]

    def test_template_exists_before_the_workload(self) -> None:
        order = [child["kind"] for child in made()[0].children]
        assert order.index("ResourceClaimTemplate") < order.index("Deployment")

    def test_request_has_the_count_of_the_plan_and_the_product(self) -> None:
        found = request(made(claiming(selectors=["device.driver != ''"]))[0])
        assert (found["deviceClassName"], found["count"]) == ("gpu.nvidia.com", 2)
        given, product = (each["cel"]["expression"] for each in found["selectors"])
        assert given == "device.driver != ''"
        assert f"'{H200}'" in product

    def test_objects_without_a_claim_have_no_template(self) -> None:
        desired, _, _ = decide(parent(pair_70b()), devices=EIGHT_H200, has_resource_claims=True)
        assert kinds(desired, "ResourceClaimTemplate") == []
        assert pod(desired)["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H200}

    def test_other_claims_and_resources_of_the_pod_template_are_kept(self) -> None:
        claims = [{"name": "nic", "resourceClaimName": "rdma"}]
        engine = {"name": "engine", "resources": {"claims": [{"name": "nic"}], "limits": {"cpu": "4"}}}
        desired, _ = made(podTemplate={"spec": {"resourceClaims": claims, "containers": [engine]}})
        spec = pod(desired)["spec"]
        assert len(spec["resourceClaims"]) == 2
        assert len(spec["containers"][0]["resources"]["claims"]) == 2
        assert spec["containers"][0]["resources"]["limits"] == {"cpu": "4"}

    def test_both_pods_of_a_group_claim_the_gpus_of_their_node(self) -> None:
        two = read_inventory([resource_slice(f"h200-{number}", gpu()) for number in range(2)], [GPUS])
        desired, conditions = made(inventory=two)
        assert conditions["Planned"].status == "True", conditions["Planned"].message
        (group,) = kinds(desired, "LeaderWorkerSet")
        pods = group["spec"]["leaderWorkerTemplate"]
        names = {
            pods[role]["spec"]["resourceClaims"][0]["resourceClaimTemplateName"]
            for role in ("leaderTemplate", "workerTemplate")
        }
        assert names == {template(desired)["metadata"]["name"]}
        assert request(desired)["count"] == 1

    def test_changed_claims_get_another_name_because_templates_are_immutable(self) -> None:
        first, second = (template(made(claiming(selectors=texts))[0]) for texts in ([], ["device.driver != ''"]))
        assert first["metadata"]["name"] != second["metadata"]["name"]

    def test_pods_with_a_claim_count_as_pods_with_gpus(self) -> None:
        assert gpus_of(pod(made()[0])) == 2


class TestPlan:
    def test_product_and_memory_come_from_the_slices(self) -> None:
        desired, conditions = made()
        assert conditions["Planned"].reason == "Fits"
        assert desired.outcome.plan_status.product == H200  # type: ignore[union-attr]

    def test_selectors_choose_among_products(self) -> None:
        slices = [resource_slice("a", *[gpu("NVIDIA H100 80GB HBM3", 81_559)] * 8), resource_slice("b", *[gpu()] * 8)]
        both = read_inventory(slices, [GPUS])
        small = claiming(selectors=["device.capacity['gpu.nvidia.com'].memory.isLessThan(quantity('100Gi'))"])
        for accelerator, product in ((small, H100), (claiming(products=[H200]), H200)):
            desired, _ = made(accelerator, both, **SMALL)
            assert desired.outcome.plan_status.product == product  # type: ignore[union-attr]
            assert f"'{product}'" in request(desired)["selectors"][-1]["cel"]["expression"]

    def test_mig_devices_are_sized_by_their_own_memory(self) -> None:
        sliced = read_inventory([resource_slice("a", *[mig()] * 4)], [GPUS, MIGS])
        desired, conditions = made(claiming("mig.nvidia.com"), sliced, **SMALL)
        assert conditions["Planned"].status == "True", conditions["Planned"].message
        plan = desired.outcome.plan_status  # type: ignore[union-attr]
        assert plan.per_gpu.total_bytes == 40_448 * 2**20
        assert plan.gpus_per_replica == 1
        assert "3g.40gb" in request(desired)["selectors"][-1]["cel"]["expression"]
        assert made(claiming("mig.nvidia.com"), sliced)[1]["Planned"].reason == "NodesTooSmall", "no two MIG devices"

    def test_device_without_product_is_pinned_by_its_memory(self) -> None:
        unnamed = read_inventory([resource_slice("a", device({"type": "gpu"}, 81_920))], [GPUS])
        desired, _ = made(inventory=unnamed, **SMALL)
        assert "81920Mi" in request(desired)["selectors"][-1]["cel"]["expression"]

    def test_claim_matches_devices_of_the_planned_product_only(self) -> None:
        bodies = [
            gpu(),
            gpu("NVIDIA A100-SXM4-80GB", 81_920),
            gpu("NVIDIA X900", 96_000),
            mig(),
            mig("1g.20gb+me", 20_096),
            device({"type": "gpu"}, 81_000),
            device({"type": "gpu"}, 81_001),
        ]
        devices = read_inventory([resource_slice("a", *bodies)], []).devices
        for planned in devices:
            only = read_inventory([resource_slice("a", bodies[devices.index(planned)])], [ANY])
            desired, _ = made(claiming(ANY["metadata"]["name"]), only, override=IGNORED, **SMALL)
            selector = Selector("product", request(desired)["selectors"][-1]["cel"]["expression"])
            assert [each.product for each in devices if selector.mismatch(each) is None] == [planned.product]

    def test_users_figures_decide_without_slices(self) -> None:
        for inventory in (UNKNOWN_DEVICES, read_inventory([], [GPUS])):
            desired, conditions = made(claiming(products=[H200], perNode=8), inventory)
            assert conditions["Planned"].reason == "Fits"
            assert request(desired)["count"] == 2

    def test_selectors_that_only_the_scheduler_can_evaluate_need_the_product(self) -> None:
        text = "device.attributes['gpu.nvidia.com'].?productName.orValue('') != ''"
        assert made(claiming(selectors=[text]))[1]["Planned"].reason == "NoMatchingDevices"
        assert made(claiming(selectors=[text], products=[H200]))[1]["Planned"].reason == "Fits"

    def test_selectors_that_cost_too_much_on_all_devices_are_left_to_the_scheduler(self) -> None:
        costly = [" && ".join(["device.driver != ''"] * 150)] * 16
        slices = [resource_slice(f"n{number}", *[gpu()] * 100) for number in range(4)]
        many = read_inventory(slices, [GPUS])
        assert made(claiming(selectors=costly), many)[1]["Planned"].reason == "NoMatchingDevices"
        assert made(claiming(selectors=costly, products=[H200]), many)[1]["Planned"].reason == "Fits"

    def test_devices_of_earlier_slices_are_not_kept(self) -> None:
        inventory = read_inventory([resource_slice("n", gpu())], [GPUS])
        spec = SpecDecodeDeploymentSpec.parse(pair_70b(accelerator=claiming()))
        assert claimable_gpus(spec, inventory) is claimable_gpus(spec, inventory), "evaluated once"
        assert [each.product for each in claimable_gpus(spec, inventory).nodes] == [H200]
        earlier = weakref.ref(inventory)
        del inventory
        gc.collect()
        assert earlier() is None

    def test_count_sets_the_share_of_each_node(self) -> None:
        two = read_inventory([resource_slice(f"h200-{number}", *[gpu()] * 8) for number in range(2)], [GPUS])
        desired, _ = made(claiming(count=1), two)
        assert request(desired)["count"] == 1
        assert kinds(desired, "LeaderWorkerSet")


class TestBadInput:
    @pytest.mark.parametrize(
        ("accelerator", "inventory", "reason", "words"),
        [
            (claiming(), UNKNOWN_DEVICES, "NoMatchingDevices", "role"),
            (claiming("gpu.example.com"), EIGHT_H200, "DeviceClassNotFound", "gpu.nvidia.com"),
            (claiming(), read_inventory([], [GPUS]), "NoMatchingDevices", "no ResourceSlice"),
            (claiming(products=[H100]), EIGHT_H200, "NoMatchingDevices", H100),
            (
                claiming(selectors=["device.driver == 'x'"]),
                EIGHT_H200,
                "NoMatchingDevices",
                "8 x selectors[0] (device.driver == 'x') is false",
            ),
            (claiming(selectors=["device.model == 'x'"]), EIGHT_H200, "NoMatchingDevices", "reads 'model'"),
            (claiming("mig.nvidia.com"), EIGHT_H200, "NoMatchingDevices", f"8 x {H200}"),
        ],
    )
    def test_claim_that_no_device_satisfies_waits_with_the_reason(
        self, accelerator: Body, inventory: DeviceInventory, reason: str, words: str
    ) -> None:
        desired, conditions = made(accelerator, inventory)
        assert (conditions["Planned"].status, conditions["Planned"].reason) == ("Unknown", reason)
        assert conditions["Ready"].message.startswith("spec.accelerator.resourceClaim")
        assert words in conditions["Ready"].message
        assert kinds(desired, "Deployment", "ResourceClaimTemplate") == []

    def test_cluster_without_the_api_is_reported_with_a_fix(self) -> None:
        _, conditions = made(has_api=False)
        assert conditions["Planned"].reason == conditions["Ready"].reason == "ResourceClaimsMissing"
        assert "1.34" in conditions["Ready"].message

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            (
                {"accelerator": claiming(selectors=["true", "device.driver =="])},
                "accelerator.resourceClaim.selectors[1]",
            ),
            (
                {"accelerator": claiming(count=6), "parallelism": {"tensor": 4, "data": 3}},
                "accelerator.resourceClaim.count",
            ),
            (
                {"podTemplate": {"spec": {"containers": [DEVICE_PLUGIN]}}},
                "podTemplate.spec.containers[0].resources.limits.nvidia.com/gpu",
            ),
            ({"podTemplate": {"spec": {"resourceClaims": None}}}, "podTemplate.spec.resourceClaims"),
            (
                {"podTemplate": {"spec": {"resourceClaims": [{"name": "specdecode-gpus", "resourceClaimName": "x"}]}}},
                "podTemplate.spec.resourceClaims[0].name",
            ),
        ],
    )
    def test_invalid_claims_name_the_field(self, changes: Body, field: str) -> None:
        accelerator = changes.pop("accelerator", None)
        many = read_inventory([resource_slice(f"n{number}", *[gpu()] * 8) for number in range(8)], [GPUS])
        _, conditions = made(accelerator, many, **changes)
        assert conditions["Accepted"].reason == "Invalid"
        assert f"spec.{field}" in conditions["Ready"].message


@pytest.mark.parametrize(
    ("class_name", "device", "is_proposed"),
    [
        ("mig.nvidia.com", mig("1g.10gb", 10_112), False),
        ("gpu.nvidia.com", gpu("NVIDIA Small", 10_112), True),
    ],
)
def test_other_product_is_a_fix_only_for_a_claim_of_whole_gpus(
    class_name: str, device: Body, *, is_proposed: bool
) -> None:
    _, conditions = made(claiming(class_name), read_inventory([resource_slice("a", device)], [GPUS, MIGS]), **SMALL)
    assert conditions["Ready"].reason == "DoesNotFit"
    assert ("accelerator.products" in conditions["Ready"].message) == is_proposed


def test_scheduler_message_about_claims_names_the_field() -> None:
    counts = "0/1 nodes are available: 1 cannot allocate all claims"
    said = f"{counts}. still not schedulable, preemption: 0/1 nodes are available: 1 Preemption is not helpful."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    blocked = first_blocked([{"metadata": {"name": "a"}, "spec": {}, "status": {"conditions": [condition]}}])
    assert blocked is not None
    assert blocked.reason == "Unschedulable"
    assert counts in blocked.message
    assert "reemption" not in blocked.message
    assert "spec.accelerator.resourceClaim" in blocked.message


def test_foreign_annotation_of_a_pod_counts_no_gpus() -> None:
    for text in ("{", "[]", json.dumps({"count": "many"})):
        assert gpus_of(annotated(text, [{"name": "gpus"}])) == 0


def test_annotation_counts_gpus_only_of_pods_with_a_claim() -> None:
    claiming_pod = annotated('{"count": 2}', [{"name": "gpus", "resourceClaimTemplateName": "llama"}])
    assert gpus_of(claiming_pod) == gpus_of(slim("Pod", claiming_pod)) == 2
    assert gpus_of(annotated('{"count": 2}', [])) == 0, "a tenant without GPUs could block captures of others"


def annotated(text: str, claims: list[Body]) -> Body:
    """Return a pod with the annotation of the operator."""
    metadata = {"name": "a", "annotations": {"specdecode.io/resource-claim": text}}
    return {"metadata": metadata, "spec": {"containers": [], "resourceClaims": claims}}
