"""What values of production-stack mean for the pods of a model, as the chart's templates have it."""

from typing import Any

import pytest

from specdecode_operator.importing.sources import read_production_stack
from specdecode_operator.importing.spec_builder import Workload

CLAIM = "spec.models.cache.persistentVolumeClaim.claimName"


def read(common: dict[str, Any] | None = None, **model: Any) -> Workload:
    spec = {"modelSpec": [{"name": "chat", "modelURL": "a/b", **model}], **(common or {})}
    (found,) = read_production_stack({"servingEngineSpec": spec})
    return found


def container(found: Workload) -> dict[str, Any]:
    only: dict[str, Any] = found.pod["containers"][0]
    return only


def test_variables_of_a_model_come_after_those_of_all() -> None:
    common = {"env": [{"name": "A", "value": "all"}]}
    found = container(read(common, env=[{"name": "A", "value": "own"}]))
    assert [each["value"] for each in found["env"]] == ["all", "own"]


@pytest.mark.parametrize(("policy", "keys"), [(None, ["all", "own"]), ("override", ["own"])])
def test_tolerations_add_up_unless_they_override(policy: str | None, keys: list[str]) -> None:
    found = read({"tolerations": [{"key": "all"}]}, tolerations=[{"key": "own"}], tolerationsPolicy=policy)
    assert [each["key"] for each in found.pod["tolerations"]] == keys


def test_an_affinity_goes_before_terms_of_nodes() -> None:
    terms = [{"matchExpressions": []}]
    assert "nodeAffinity" in read(nodeSelectorTerms=terms).pod["affinity"]
    assert read(nodeSelectorTerms=terms, affinity={"podAffinity": {}}).pod["affinity"] == {"podAffinity": {}}


def test_resources_in_full_go_before_those_by_name() -> None:
    limits = {"limits": {"nvidia.com/gpu": 2}}
    assert container(read(resources=limits, requestGPU=4))["resources"] == limits
    by_name = container(read(requestGPU=4, requestGPUType="nvidia.com/mig-4g.71gb"))["resources"]
    assert by_name["limits"] == {"nvidia.com/mig-4g.71gb": "4"}


@pytest.mark.parametrize(("existing", "asks"), [(None, True), ("models", False)])
def test_the_claim_of_a_release_is_asked_for_and_one_that_is_named_is_not(existing: str | None, *, asks: bool) -> None:
    found = read(pvcStorage="10Gi", pvcExistingClaimName=existing)
    assert (CLAIM in [each.field for each in found.remarks.decisions]) is asks


def test_half_a_secret_is_no_secret() -> None:
    env = container(read(hf_token={"secretName": "hub"}))["env"]
    assert [each for each in env if each["name"] == "HF_TOKEN"] == []


def test_a_runtime_of_the_model_goes_before_that_of_all() -> None:
    common = {"runtimeClassName": "nvidia"}
    assert read(common).pod["runtimeClassName"] == "nvidia"
    assert read(common, runtimeClassName="own").pod["runtimeClassName"] == "own"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (None, []),
        ({"dtype": "bfloat16"}, ["--no-enable-prefix-caching", "--dtype", "bfloat16"]),
        ({"enablePrefixCaching": True}, ["--enable-prefix-caching"]),
    ],
)
def test_prefix_caching_is_off_where_settings_do_not_turn_it_on(
    config: dict[str, Any] | None, flags: list[str]
) -> None:
    assert container(read(vllmConfig=config))["args"] == ["a/b", "--port", "8000", *flags]
