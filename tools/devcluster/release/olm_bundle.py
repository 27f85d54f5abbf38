"""The bundle of a release for the Operator Lifecycle Manager: `python -m devcluster.release.olm_bundle IMAGE FOLDER`.

`manifests/`, `crds/` and `examples/` are its only sources. It installs for the whole cluster, because OLM does not set
the namespaces that the operator serves. `./just release` writes it into dist/ as an archive.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster import chart
from devcluster.host.errors import exit_status
from devcluster.host.paths import REPOSITORY
from devcluster.release.version import current

PACKAGE: Final = "specdecode-operator"
CHANNEL: Final = "alpha"
"""The API is v1alpha1."""

_EXAMPLES: Final = ("llama-70b.yaml", "capture-llama-70b.yaml", "training-llama.yaml")
_NOT_IN_BUNDLE: Final = {"ServiceAccount", "ClusterRoleBinding", "Role", "RoleBinding"}
"""Kinds that OLM creates from the ClusterServiceVersion."""

_ANNOTATIONS: Final = {
    "operators.operatorframework.io.bundle.mediatype.v1": "registry+v1",
    "operators.operatorframework.io.bundle.manifests.v1": "manifests/",
    "operators.operatorframework.io.bundle.metadata.v1": "metadata/",
    "operators.operatorframework.io.bundle.package.v1": PACKAGE,
    "operators.operatorframework.io.bundle.channels.v1": CHANNEL,
    "operators.operatorframework.io.bundle.channel.default.v1": CHANNEL,
}
_DESCRIPTION: Final = """\
Runs vLLM with speculative decoding on Kubernetes. You describe a target model and a draft in one object.

- **Plan:** The operator calculates whether the pair fits in GPU memory before a pod starts.
- **Launch:** It creates the vLLM pods and a Service.
- **Verify:** It reports whether speculation is active, and its acceptance rate.
- **Measure:** Captures compare settings under your load.

The operator has not run on real GPUs yet.
"""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""CRDs are large, and the loader in C is ten times as fast."""

Object = dict[str, Any]


def archive_name(version: str) -> str:
    """Return the name of the bundle's archive in dist/."""
    return f"olm-bundle-{version}.tar.gz"


def bundle(image: str) -> dict[str, str]:
    """Return the files of the bundle for an image of the operator, by path."""
    rendered = sorted(file for file in chart.MANIFESTS.glob("*.yaml") if file.name not in chart.BY_HAND)
    objects = [body for file in rendered for body in _documents(file)]
    crd_files = sorted((REPOSITORY / "crds").glob("specdecode.io_*.yaml"))
    crds = [body for file in crd_files for body in _documents(file)]
    csv = _service_version(image, objects, crds)
    account = _named(objects, "ServiceAccount")["metadata"]["name"]
    bound = _named(objects, "ClusterRoleBinding")["roleRef"]["name"]
    others = [
        body
        for body in objects
        if body["kind"] not in _NOT_IN_BUNDLE
        and (body["kind"], body["metadata"]["name"]) not in {("Deployment", account), ("ClusterRole", bound)}
    ]
    files = {f"manifests/{PACKAGE}.clusterserviceversion.yaml": csv}
    files |= {f"manifests/{body['metadata']['name']}.{body['kind'].lower()}.yaml": body for body in others}
    files["metadata/annotations.yaml"] = {"annotations": _ANNOTATIONS}
    return {
        **{path: yaml.safe_dump(body, sort_keys=False) for path, body in files.items()},
        **{f"manifests/{file.name}": file.read_text() for file in crd_files},
        "bundle.Dockerfile": _containerfile(),
    }


def write(image: str, folder: Path) -> None:
    """Write the bundle into a folder."""
    for path, text in bundle(image).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _service_version(image: str, objects: Iterable[Object], crds: Iterable[Object]) -> Object:
    version = current()
    metadata = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    deployment = _named(objects, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = image
    account = _named(objects, "ServiceAccount")["metadata"]["name"]
    bound = _named(objects, "ClusterRoleBinding")["roleRef"]["name"]
    cluster_rules = next(
        body["rules"] for body in objects if (body["kind"], body["metadata"]["name"]) == ("ClusterRole", bound)
    )
    examples = [body for name in _EXAMPLES for body in _documents(REPOSITORY / "examples" / name)]
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": f"{PACKAGE}.v{version}",
            "annotations": {
                "alm-examples": json.dumps(examples, indent=1),
                "capabilities": metadata["annotations"]["artifacthub.io/operatorCapabilities"],
                "categories": "AI/Machine Learning",
                "containerImage": image,
                "description": metadata["description"],
                "olm.skipRange": f"<{version}",
            },
        },
        "spec": {
            "displayName": "specdecode-operator",
            "description": _DESCRIPTION,
            "version": version,
            "maturity": CHANNEL,
            "minKubeVersion": metadata["kubeVersion"].removeprefix(">=").removesuffix("-0"),
            "keywords": metadata["keywords"],
            "provider": {"name": "specdecode-operator maintainers"},
            "installModes": [
                {"type": each, "supported": each == "AllNamespaces"}
                for each in ("OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces")
            ],
            "customresourcedefinitions": {"owned": [_owned(crd) for crd in crds]},
            "install": {
                "strategy": "deployment",
                "spec": {
                    "clusterPermissions": [{"serviceAccountName": account, "rules": cluster_rules}],
                    "permissions": [{"serviceAccountName": account, "rules": _named(objects, "Role")["rules"]}],
                    "deployments": [
                        {
                            "name": deployment["metadata"]["name"],
                            "label": deployment["metadata"]["labels"],
                            "spec": deployment["spec"],
                        }
                    ],
                },
            },
            "relatedImages": [{"name": "operator", "image": image}],
        },
    }


def _owned(crd: Object) -> Object:
    (version,) = crd["spec"]["versions"]
    return {
        "name": crd["metadata"]["name"],
        "kind": crd["spec"]["names"]["kind"],
        "version": version["name"],
        "displayName": crd["spec"]["names"]["kind"],
        "description": version["schema"]["openAPIV3Schema"]["description"],
    }


def _containerfile() -> str:
    labels = "".join(f"LABEL {name}={value}\n" for name, value in _ANNOTATIONS.items())
    return f"FROM scratch\n\n{labels}\nCOPY manifests /manifests/\nCOPY metadata /metadata/\n"


def _named(objects: Iterable[Mapping[str, Any]], kind: str) -> Any:
    """Return the only object of a kind."""
    (found,) = (body for body in objects if body["kind"] == kind)
    return found


def _documents(file: Path) -> list[Object]:
    return [body for body in yaml.load_all(file.read_text(), _LOADER) if body]


def main() -> int:
    """Write a bundle and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.release.olm_bundle", description=__doc__)
    parser.add_argument("image", help="image of the operator: registry.example.com/team/specdecode-operator:0.1.0")
    parser.add_argument(
        "folder", type=Path, help="folder for the bundle; `docker build -f bundle.Dockerfile .` builds it"
    )
    given = parser.parse_args()
    return exit_status(lambda: write(given.image, given.folder))


if __name__ == "__main__":
    sys.exit(main())
