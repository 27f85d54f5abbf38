"""As whom engines and downloads run, and who may say otherwise."""

from typing import Any

import pytest

from specdecode_operator.deployment.pod_template_merge import DOWNLOAD_TARGET
from tests.support.model_caches import cached, decide, fetched, jobs, template
from tests.support.objects import Body, pair_70b, tiny_cpu
from tests.unit.deployment.objects.test_children import pod_spec

USER = {"runAsNonRoot": True, "runAsUser": 2000}


def contexts(spec: Body) -> dict[str, Body]:
    """What containers of an engine's pod say of their user, as Kubernetes reads it."""
    pod = pod_spec(spec)
    whole = pod["securityContext"]
    containers = [*(pod.get("initContainers") or []), *pod["containers"]]
    found = {each["name"]: {**whole, **each.get("securityContext", {})} for each in containers}
    return {name: {key: context[key] for key in USER if key in context} for name, context in found.items()}


def overlay(context: Body, **more: Any) -> Body:
    return {"podTemplate": {"spec": {"securityContext": context, **more}}}


def test_neither_engine_nor_download_is_root() -> None:
    found = contexts(pair_70b())
    assert found["engine"] == found[DOWNLOAD_TARGET] == USER


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"runAsUser": 1000}, {"runAsUser": 1000, "runAsNonRoot": True}),
        ({"runAsUser": 0}, {"runAsUser": 0}),
        ({"runAsNonRoot": False}, {"runAsNonRoot": False}),
        ({"runAsNonRoot": True}, USER),
        ({"fsGroup": 7}, USER),
    ],
    ids=str,
)
def test_the_pod_template_says_who(given: Body, expected: Body) -> None:
    assert contexts(pair_70b(**overlay(given)))["engine"] == expected
    engine = {"containers": [{"name": "engine", "securityContext": given}]}
    assert contexts(tiny_cpu(podTemplate={"spec": engine}))["engine"].items() >= expected.items()
    fetcher = {"initContainers": [{"name": DOWNLOAD_TARGET, "securityContext": given}]}
    found = contexts(pair_70b(podTemplate={"spec": fetcher}))
    assert found[DOWNLOAD_TARGET] == expected
    assert found["engine"] == USER
    download = jobs(decide(cached(**overlay(given))))[0]["spec"]["template"]["spec"]
    context = {**download["securityContext"], **download["containers"][0]["securityContext"]}
    assert {key: context[key] for key in USER if key in context} == expected


def test_further_containers_run_as_their_author_says() -> None:
    sidecar = {"name": "shipper", "image": "i:1"}
    assert contexts(tiny_cpu(podTemplate={"spec": {"containers": [sidecar]}}))["shipper"] == {}


def test_a_cache_belongs_to_a_group_that_engines_and_downloads_are_in() -> None:
    group = {"fsGroup": 2000, "fsGroupChangePolicy": "OnRootMismatch"}
    spec = cached()
    download = jobs(decide(spec))[0]["spec"]["template"]["spec"]
    for pod in (template(decide(spec, fetched(spec))), download):
        assert pod["securityContext"].items() >= group.items()
    assert "fsGroup" not in pod_spec(pair_70b())["securityContext"], "a volume of models stays whose it is"
    mine = cached(**overlay({"fsGroup": 7}))
    assert template(decide(mine, fetched(mine)))["securityContext"]["fsGroup"] == 7
