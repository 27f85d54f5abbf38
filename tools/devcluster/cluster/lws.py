"""The LeaderWorkerSet controller beside the control plane: its files, its command line, and what it adds to the API."""

import base64
import json
from pathlib import Path

import yaml

from devcluster.builds import binaries
from devcluster.cluster.api import Api, is_established
from devcluster.cluster.settings import Settings

COMPONENT = "lws-manager"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/leaderworkersets.leaderworkerset.x-k8s.io"
_HOOKS = "/apis/admissionregistration.k8s.io/v1"
_OF_A_GROUP = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
"""Only pods of groups concern it: a controller that is down must not keep the others from starting."""


def write_files(state: Path, settings: Settings) -> None:
    """Write its configuration and the certificate of its webhooks where it looks for them."""
    folder = state / "config" / "lws"
    folder.mkdir(parents=True, exist_ok=True)
    for file, kept in (("tls.crt", "lws.crt"), ("tls.key", "lws.key")):
        (folder / file).write_bytes((state / "pki" / kept).read_bytes())
    configuration = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": settings.api_address, "port": settings.lws_port, "certDir": str(folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }
    (folder / "configuration.yaml").write_text(json.dumps(configuration))


def command(program: Path, state: Path) -> list[str]:
    """Return its command line."""
    return [
        str(program),
        f"--config={state / 'config' / 'lws' / 'configuration.yaml'}",
        f"--kubeconfig={state / 'config' / 'lws.kubeconfig'}",
    ]


def apply_crd(api: Api) -> None:
    """Add the kind to the API, without the conversion that only its old versions need."""
    (file,) = (binaries.lws_sources() / "crd" / "bases").glob("*.yaml")
    api.apply(CRD_PATH, yaml.safe_load(file.read_text()))


def apply_hooks(api: Api, state: Path, settings: Settings) -> None:
    """Have the API server ask it about groups and their pods."""
    authority = base64.b64encode((state / "pki" / "ca.crt").read_bytes()).decode()
    for body in yaml.safe_load_all((binaries.lws_sources() / "webhook" / "manifests.yaml").read_text()):
        for hook in body["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {
                "url": f"https://{settings.api_address}:{settings.lws_port}{path}",
                "caBundle": authority,
            }
            if "pods" in hook["rules"][0]["resources"]:
                hook["objectSelector"] = _OF_A_GROUP
        name = body["metadata"]["name"] = f"lws-{body['metadata']['name']}"
        api.apply(f"{_HOOKS}/{body['kind'].lower()}s/{name}", body)


def hooks_answer(api: Api) -> bool:
    """Decide whether the API server calls the webhooks: it reads their configuration a moment after it was written.

    Pods of groups that start before lack the variables of their group. A dry run creates nothing.
    """
    name = "lws-hooks-0"
    probe = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                "leaderworkerset.sigs.k8s.io/name": "lws-hooks",
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
            },
            "annotations": {"leaderworkerset.sigs.k8s.io/size": "1"},
        },
        "spec": {"containers": [{"name": "probe", "image": "probe"}]},
    }
    pod = api.apply(f"/api/v1/namespaces/default/pods/{name}", probe, dry_run=True)
    return any(each["name"] == "LWS_WORKER_INDEX" for each in pod["spec"]["containers"][0].get("env", []))


def established(api: Api) -> bool:
    """Decide whether the API server serves the kind."""
    return is_established(api.get(CRD_PATH))
