"""Prometheus and prometheus-adapter beside the control plane, which serve metrics of pods to autoscalers.

Debian's Prometheus cannot discover pods, so its targets are in a file that the caller keeps up to date.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

NAMESPACE, SERVICE = "monitoring", "prometheus-adapter"
SERVICE_NAME = f"{SERVICE}.{NAMESPACE}.svc"
_PROMETHEUS_PORT, _ADAPTER_PORT = 9090, 9445
_CONTROLLER = "horizontal-pod-autoscaler"
_GROUPS = ("custom.metrics.k8s.io", "external.metrics.k8s.io")
Body = dict[str, Any]


def write_files(state: Path, rules: Path, scrape_interval: str) -> None:
    """Write the configuration of Prometheus and of the adapter, whose rules are Helm values of its chart."""
    folder = state / "config" / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    write_targets(state, {})
    jobs = [
        {"job_name": "pods", "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": "1s"}]}
    ]
    prometheus = {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval},
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(prometheus))
    values = yaml.safe_load(rules.read_text())["rules"]
    (folder / "adapter.yaml").write_text(
        yaml.safe_dump({"rules": values["custom"], "externalRules": values["external"]})
    )


def write_targets(state: Path, targets: Mapping[str, Mapping[str, str]]) -> None:
    """Have Prometheus scrape these addresses, each with its labels."""
    file = state / "config" / "metrics" / "targets.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([{"targets": [each], "labels": dict(labels)} for each, labels in targets.items()]))
    partial.replace(file)


def prometheus(program: Path, state: Path) -> list[str]:
    """Return Prometheus' command line."""
    return [
        str(program),
        f"--config.file={state / 'config' / 'metrics' / 'prometheus.yaml'}",
        f"--storage.tsdb.path={state / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{_PROMETHEUS_PORT}",
    ]


def adapter(program: Path, state: Path, relist_interval: str) -> list[str]:
    """Return the adapter's command line."""
    pki, kubeconfig = state / "pki", state / "config" / "metrics-adapter.kubeconfig"
    return [
        str(program),
        f"--secure-port={_ADAPTER_PORT}",
        f"--tls-cert-file={pki / 'metrics-adapter.crt'}",
        f"--tls-private-key-file={pki / 'metrics-adapter.key'}",
        f"--lister-kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--prometheus-url=http://127.0.0.1:{_PROMETHEUS_PORT}",
        f"--metrics-relist-interval={relist_interval}",
        # Engines that are gone must not count.
        "--metrics-max-age=1m",
        f"--config={state / 'config' / 'metrics' / 'adapter.yaml'}",
    ]


def objects(state: Path, address: str) -> Iterator[Body]:
    """Yield what makes the API server ask the adapter, and lets the controller of autoscalers ask."""
    authority = base64.b64encode((state / "pki" / "ca.crt").read_bytes()).decode()
    named = {"name": SERVICE, "namespace": NAMESPACE}
    yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    port = {"name": "https", "port": 443, "targetPort": _ADAPTER_PORT}
    yield {"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": {"ports": [port]}}
    yield {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**named, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]}],
        "ports": [{"name": "https", "port": _ADAPTER_PORT}],
    }
    for group in _GROUPS:
        yield {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{group}"},
            "spec": {
                "group": group,
                "version": "v1beta1",
                "service": named,
                "caBundle": authority,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
    yield from _rights(_GROUPS)


def _rights(groups: Iterable[str]) -> Iterator[Body]:
    rule = {"apiGroups": list(groups), "resources": ["*"], "verbs": ["get", "list"]}
    api, name = "rbac.authorization.k8s.io", "metrics-of-autoscalers"
    yield {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [rule]}
    yield {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": _CONTROLLER, "namespace": "kube-system"}],
    }
