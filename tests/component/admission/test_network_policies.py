"""Who reaches whom under the NetworkPolicies of the chart, as they are written: nothing here enforces them."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from devcluster import chart
from devcluster.host.errors import ClusterError
from specdecode_operator.capture.job.collect_settings import PORT
from specdecode_operator.cluster.resources import selector_labels, worker_labels
from tests.support.kubectl import Kubectl
from tests.support.network_policies import Connection, Peer, refused

OPERATOR_NAMESPACE = "specdecode-system"
OURS = {"app.kubernetes.io/managed-by": "specdecode-operator"}
ENGINE_PORTS = {"http": 8000}

OPERATOR = Peer(
    "10.0.0.1",
    OPERATOR_NAMESPACE,
    {"app.kubernetes.io/name": "specdecode-operator", "app.kubernetes.io/instance": "specdecode-operator"},
    {"health": 8080, "metrics": 8081},
)
ENGINE = Peer("10.0.0.2", "team", selector_labels("llama"), ENGINE_PORTS)
ENGINE_ELSEWHERE = Peer("10.0.0.10", "other", selector_labels("llama"), ENGINE_PORTS)
WORKER = Peer("10.0.0.3", "team", worker_labels("llama"))
CAPTURE = Peer("10.0.0.4", "team", OURS | {"specdecode.io/capture": "demo"}, ENGINE_PORTS)
TRAINING = Peer("10.0.0.11", "team", OURS | {"specdecode.io/training": "head"}, ENGINE_PORTS)
MODEL_JOB = Peer("10.0.0.5", "team", OURS | {"specdecode.io/reads-model-for": "llama"})
CLIENT = Peer("10.0.0.6", "team", {"app": "chat"})
STRANGER = Peer("10.0.0.7", "other", {"app": "chat"})
PROMETHEUS = Peer("10.0.0.8", "monitoring", {"app": "prometheus"}, {"web": 9090})
NODE = Peer("192.168.0.1", is_node=True)
API_SERVER = Peer("192.168.0.9")
HUB = Peer("203.0.113.7")
DNS = Peer("10.0.0.53", "kube-system", {"k8s-app": "kube-dns"})

SCRAPED = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def policies(tmp_path: Path, others: Mapping[str, Any] = MappingProxyType({}), **values: Any) -> list[dict[str, Any]]:
    """The chart's policies for one namespace."""
    file = tmp_path / "values.yaml"
    network = {"enabled": True, "namespaces": ["team"], **values}
    prometheus = {"url": "http://p.monitoring:9090"}
    file.write_text(yaml.safe_dump({"networkPolicy": network, "prometheus": prometheus, **others}))
    documents = yaml.safe_load_all(chart.template(f"--values={file}"))
    return [each for each in documents if each and each["kind"] == "NetworkPolicy"]


CERTIFICATE_JOB = {
    "app.kubernetes.io/name": "specdecode-operator-webhook-certificate",
    "app.kubernetes.io/part-of": "specdecode",
}
ANYWHERE = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]

LET_THROUGH = {
    "requests of the namespace": (CLIENT, ENGINE, 8000),
    "metrics, read by the operator": (OPERATOR, ENGINE, 8000),
    "metrics, read by Prometheus": (PROMETHEUS, ENGINE, 8000),
    "metrics of the operator": (PROMETHEUS, OPERATOR, 8081),
    "figures, asked of Prometheus": (OPERATOR, PROMETHEUS, 9090),
    "probes of the operator": (NODE, OPERATOR, 8080),
    "whether the operator works, asked by anybody": (STRANGER, OPERATOR, 8080),
    "probes of engines": (NODE, ENGINE, 8000),
    "the API server": (OPERATOR, API_SERVER, 6443),
    "a leader to its worker": (ENGINE, WORKER, 29500),
    "a worker to its leader": (WORKER, ENGINE, 29500),
    "what the recorder of an engine sends to a live capture": (ENGINE, CAPTURE, PORT),
    "a model's download": (MODEL_JOB, HUB, 443),
}
HELD = {
    "requests of another namespace": (STRANGER, ENGINE, 8000),
    "what engines open beside their API": (CLIENT, ENGINE, 29500),
    "the operator, from anywhere": (CLIENT, OPERATOR, 8081),
    "workers, by clients": (CLIENT, WORKER, 29500),
    "captures, by clients": (CLIENT, CAPTURE, 8000),
    "captures, by the operator": (OPERATOR, CAPTURE, 8000),
    "the collector of a live capture, by clients": (CLIENT, CAPTURE, PORT),
    "the collector of a live capture, by engines of another namespace": (ENGINE_ELSEWHERE, CAPTURE, PORT),
    "the collector of a live capture, by workers": (WORKER, CAPTURE, PORT),
    "the other ports of captures, by engines": (ENGINE, CAPTURE, 8000),
    "engines, by captures": (CAPTURE, ENGINE, 8000),
    "trainings, by clients": (CLIENT, TRAINING, 8000),
    "engines, by trainings": (TRAINING, ENGINE, 8000),
    "the hub, by trainings": (TRAINING, HUB, 443),
    "the API server, by trainings": (TRAINING, API_SERVER, 6443),
    "a model's reader, by anybody": (CLIENT, MODEL_JOB, 80),
    "the hub, by engines": (ENGINE, HUB, 443),
    "the hub, by captures": (CAPTURE, HUB, 443),
    "the hub, by the operator on another port": (OPERATOR, HUB, 80),
    "the API server, by engines": (ENGINE, API_SERVER, 6443),
    "the API server, by what reads a model": (MODEL_JOB, API_SERVER, 6443),
    "other pods, by engines": (ENGINE, CLIENT, 80),
    "other pods, by captures": (CAPTURE, CLIENT, 80),
    "other pods, by the operator": (OPERATOR, CLIENT, 80),
    "the metadata of the cloud": (ENGINE, Peer("169.254.169.254"), 80),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return policies(tmp_path_factory.mktemp("values"), scrapers=[SCRAPED])


@pytest.mark.parametrize("case", LET_THROUGH)
def test_needed_connections_are_allowed(usual: list[dict[str, Any]], case: str) -> None:
    source, destination, port = LET_THROUGH[case]
    assert refused(usual, Connection(source, destination, port)) == []


@pytest.mark.parametrize("case", HELD)
def test_other_connections_are_blocked(usual: list[dict[str, Any]], case: str) -> None:
    source, destination, port = HELD[case]
    assert refused(usual, Connection(source, destination, port)) != []


@pytest.mark.parametrize("pod", [OPERATOR, ENGINE, WORKER, CAPTURE, TRAINING, MODEL_JOB], ids=lambda pod: pod.address)
def test_all_pods_may_reach_dns(usual: list[dict[str, Any]], pod: Peer) -> None:
    assert refused(usual, Connection(pod, DNS, 53, "UDP")) == []


def test_values_open_additional_connections(tmp_path: Path) -> None:
    gateway = Peer("10.0.0.9", "gateways", {"app": "envoy"})
    found = policies(
        tmp_path,
        clients=[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}],
        hub={"ports": [8443], "to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "fromEngines": True},
        engineEgress=[{"ports": [{"port": 4317}], "to": [{"podSelector": {"matchLabels": {"app": "chat"}}}]}],
        apiServer={"cidrs": ["192.168.0.9/32"], "ports": [6443]},
    )
    assert refused(found, Connection(gateway, ENGINE, 8000)) == []
    assert refused(found, Connection(CLIENT, ENGINE, 8000)) == ["team/specdecode-engines"]
    assert refused(found, Connection(CAPTURE, HUB, 8443)) == []
    assert refused(found, Connection(MODEL_JOB, HUB, 443)) == ["team/specdecode-model-jobs"]
    assert refused(found, Connection(ENGINE, CLIENT, 4317)) == []
    assert refused(found, Connection(OPERATOR, HUB, 6443)) == ["specdecode-system/specdecode-operator"]


@pytest.mark.parametrize(("url", "port", "other"), [("https://p.example", 443, 80), ("http://p.example", 80, 443)])
def test_prometheus_url_without_port_uses_the_scheme_port(tmp_path: Path, url: str, port: int, other: int) -> None:
    api_server = {"cidrs": [f"{API_SERVER.address}/32"], "ports": [6443]}
    found = policies(tmp_path, others={"prometheus": {"url": url}}, apiServer=api_server)
    assert refused(found, Connection(OPERATOR, PROMETHEUS, port)) == []
    assert refused(found, Connection(OPERATOR, PROMETHEUS, other)) != []


def test_api_server_reaches_the_webhook_if_enabled(tmp_path: Path) -> None:
    asked = Connection(API_SERVER, OPERATOR, 9443)
    assert refused(policies(tmp_path), asked) == ["specdecode-system/specdecode-operator"]
    assert refused(policies(tmp_path, others={"webhook": {"enabled": True}}), asked) == []


def test_certificate_job_reaches_only_dns_and_the_api_server(tmp_path: Path) -> None:
    job = Peer("10.0.0.10", OPERATOR_NAMESPACE, CERTIFICATE_JOB)
    found = policies(
        tmp_path, others={"webhook": {"enabled": True}}, hub={"ports": [443], "to": ANYWHERE, "fromEngines": True}
    )
    assert refused(found, Connection(job, API_SERVER, 6443)) == []
    assert refused(found, Connection(job, DNS, 53, "UDP")) == []
    assert refused(found, Connection(job, CLIENT, 80)) == ["specdecode-system/specdecode-operator-webhook-certificate"]
    assert refused(found, Connection(CLIENT, job, 80)) == ["specdecode-system/specdecode-operator-webhook-certificate"]
    assert refused(found, Connection(job, OPERATOR, 9100)) != []
    given = {"webhook": {"enabled": True, "certificate": {"from": "CertManager"}}}
    assert not [each for each in policies(tmp_path, others=given) if "certificate" in each["metadata"]["name"]]


def test_certificate_jobs_have_the_labels_of_the_policy() -> None:
    found = yaml.safe_load_all(chart.template("--set=webhook.enabled=true"))
    jobs = {each["kind"]: each["spec"] for each in found if each and each["kind"] in ("Job", "CronJob")}
    templates = (jobs["Job"]["template"], jobs["CronJob"]["jobTemplate"]["spec"]["template"])
    assert [each["metadata"]["labels"] for each in templates] == [CERTIFICATE_JOB] * 2


def test_policy_namespaces_with_disabled_policies_are_refused(tmp_path: Path) -> None:
    told = r"networkPolicy\.namespaces: contains a, b, but .*: enable it, or remove"
    with pytest.raises(ClusterError, match=told):
        policies(tmp_path, enabled=False, namespaces=["a", "b"])


def test_policies_default_to_the_watched_namespaces(tmp_path: Path) -> None:
    watched = {"watchNamespaces": ["one", "two"]}
    found = policies(tmp_path, namespaces=[], others=watched)
    assert {each["metadata"]["namespace"] for each in found} == {OPERATOR_NAMESPACE, "one", "two"}


def test_without_namespaces_only_the_operator_gets_a_policy(tmp_path: Path) -> None:
    (only,) = policies(tmp_path, namespaces=[])
    assert only["metadata"] == only["metadata"] | {"name": "specdecode-operator", "namespace": OPERATOR_NAMESPACE}


def test_api_server_accepts_the_policies(kubectl: Kubectl, usual: list[dict[str, Any]]) -> None:
    found = [deepcopy(each) for each in usual if each["metadata"]["namespace"] == "team"]
    for each in found:
        del each["metadata"]["namespace"]
    answer = kubectl("apply", "--server-side", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump_all(found))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("serverside-applied") == 5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("networkPolicy.enabled=yes please", "enabled"),
        ("networkPolicy.namespaces={Team}", "namespaces"),
        ("networkPolicy.apiServer.cidrs={kubernetes.default}", "cidrs"),
        ("networkPolicy.apiServer.ports={https}", "ports"),
        ("networkPolicy.clients=null", "clients"),
        ("networkPolicy.hubs.ports={443}", "hubs"),
    ],
)
def test_malformed_network_policy_values_are_refused(value: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        chart.template(f"--set={value}")
