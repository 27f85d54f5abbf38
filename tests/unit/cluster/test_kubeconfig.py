"""Read a cluster through a person's kubeconfig, and report errors with their fix."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.kubeconfig import ClusterView, open_cluster
from specdecode_operator.cluster.resources import NODE, POD, SERVICE, SPECDECODE_CAPTURE, Resource
from tests.support.api_server import ApiServer
from tests.support.objects import Body

REVIEW = Resource("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews")


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with server.serving(tmp_path / "kubeconfig"):
        yield server


@pytest.fixture
async def cluster(api: ApiServer) -> AsyncIterator[ClusterView]:
    async with open_cluster(None) as opened:
        yield opened


def add(api: ApiServer, resource: Resource, name: str, namespace: str = "team", **labels: str) -> Body:
    return api.create(resource, {"metadata": {"namespace": namespace, "name": name, "labels": labels}})


async def names(listing: Any) -> list[str]:
    return [body["metadata"]["name"] for body in await listing]


class TestReading:
    async def test_list_filters_by_namespace_and_label(self, api: ApiServer, cluster: ClusterView) -> None:
        add(api, POD, "a", app="x")
        add(api, POD, "b")
        add(api, POD, "c", namespace="other", app="x")
        assert await names(cluster.list(POD)) == ["c", "a", "b"]
        assert await names(cluster.list(POD, "team")) == ["a", "b"]
        assert await names(cluster.list(POD, "team", "app=x")) == ["a"]
        assert await names(cluster.list(POD, selector="app=x")) == ["c", "a"]

    async def test_get_returns_none_for_missing_object_or_kind(self, api: ApiServer, cluster: ClusterView) -> None:
        made = add(api, SERVICE, "llama")
        assert await cluster.get(SERVICE, "team", "llama") == made
        assert await cluster.get(SERVICE, "team", "other") is None
        del api.served[SPECDECODE_CAPTURE.qualified_plural]
        assert await cluster.get(SPECDECODE_CAPTURE, "team", "demo") is None
        with pytest.raises(ClusterError, match=r"list specdecodecaptures\.specdecode\.io: .*could not find"):
            await cluster.list(SPECDECODE_CAPTURE)

    async def test_access_review_stores_no_object(self, api: ApiServer, cluster: ClusterView) -> None:
        api.granted = frozenset({"list nodes"})
        for verb, resource, allowed in (("get", "secrets", False), ("list", "nodes", True)):
            question = {"spec": {"resourceAttributes": {"verb": verb, "resource": resource}}}
            assert (await cluster.review(REVIEW, question))["status"]["allowed"] is allowed
        assert api.names(*api.served.values()) == []


class TestRefusals:
    async def test_forbidden_verb_and_resource_are_named(self, api: ApiServer, cluster: ClusterView) -> None:
        api.granted = frozenset()
        with pytest.raises(ForbiddenError, match=r"^you may not list nodes: ask the cluster administrator"):
            await cluster.list(NODE)
        with pytest.raises(ForbiddenError, match=r"^you may not list pods in namespace team: "):
            await cluster.list(POD, "team")
        with pytest.raises(ForbiddenError, match=r"^you may not get services llama: "):
            await cluster.get(SERVICE, "team", "llama")

    async def test_expired_credentials_are_reported(self, api: ApiServer, cluster: ClusterView) -> None:
        api.refusals["list nodes"] = (401, "Unauthorized")
        with pytest.raises(ClusterError, match="rejects the credentials: sign in again"):
            await cluster.list(NODE)

    async def test_other_failures_show_the_shortened_server_message(self, api: ApiServer, cluster: ClusterView) -> None:
        api.refusals["list nodes"] = (500, "etcd is slow" + "." * 10_000)
        with pytest.raises(ClusterError, match=r"^list nodes: etcd is slow\.+…$") as refused:
            await cluster.list(NODE)
        assert len(str(refused.value)) < 400

    async def test_response_without_status_object_is_reported_by_http_status(
        self, api: ApiServer, cluster: ClusterView
    ) -> None:
        api.refusals["list nodes"] = (502, "<html>Bad Gateway</html>")
        with pytest.raises(ClusterError, match=r"^list nodes: HTTP 502$"):
            await cluster.list(NODE)

    @pytest.mark.parametrize("text", ["<html>Sign in</html>", "[]", "[" * 100_000, ""])
    async def test_unexpected_content_is_reported_as_not_an_api_server(
        self, api: ApiServer, cluster: ClusterView, text: str
    ) -> None:
        api.refusals["list nodes"] = (200, text)
        with pytest.raises(ClusterError, match=r"^http://127\.0\.0\.1:\d+: is not an API server: set"):
            await cluster.list(NODE)

    async def test_unreachable_server_is_reported_with_its_address(self, tmp_path: Path, api: ApiServer) -> None:
        async with ApiServer().serving(tmp_path / "kubeconfig"):
            context = open_cluster(None)
            view = await context.__aenter__()
        with pytest.raises(
            ClusterError, match=r"^cannot reach the API server at http://127\.0\.0\.1:\d+ \(Connection refused\)"
        ):
            await view.version()
        await context.__aexit__(None, None, None)


class TestKubeconfig:
    async def test_server_and_namespace_come_from_the_context(self, api: ApiServer, tmp_path: Path) -> None:
        file = tmp_path / "kubeconfig"
        config = yaml.safe_load(await asyncio.to_thread(file.read_text))
        config["clusters"].append({"name": "far", "cluster": {"server": "http://far.example:1"}})
        config["contexts"].append({"name": "plain", "context": {"cluster": "far", "user": "u"}})
        await asyncio.to_thread(file.write_text, yaml.safe_dump(config))
        near = config["clusters"][0]["cluster"]["server"]
        found = []
        for context in (None, "x", "plain"):
            async with open_cluster(context) as cluster:
                found.append((cluster.server, cluster.namespace))
        assert found == [(near, "team"), (near, "team"), ("http://far.example:1", "default")]

    async def test_unknown_context_is_named(self, api: ApiServer) -> None:
        with pytest.raises(ClusterError, match=r"^--context: other: no such context"):
            await open_cluster("other").__aenter__()

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, ": no such file: "),
            ("", ": not a kubeconfig: "),
            ("- a list", ": not a kubeconfig: "),
            ("{", ": cannot be read (expected the node content, but found '<stream end>'): "),
            ("current-context: x", "names no cluster"),
        ],
        ids=["none", "empty", "no mapping", "no YAML", "no contexts"],
    )
    async def test_unusable_kubeconfig_file_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
    ) -> None:
        file = tmp_path / "kubeconfig"
        monkeypatch.setenv("KUBECONFIG", str(file))
        # Use PyYAML's own parser, as in production. tests/conftest.py replaces it with libyaml's.
        monkeypatch.setattr(yaml, "SafeLoader", yaml.loader.SafeLoader)
        if text is not None:
            await asyncio.to_thread(file.write_text, text)
        with pytest.raises(ClusterError) as refused:
            await open_cluster(None).__aenter__()
        assert said in str(refused.value)
        assert str(file) in str(refused.value)
