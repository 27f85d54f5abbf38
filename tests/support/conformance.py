"""kubeconform with the schemas of a real API server: built-in kinds and those of its CRDs, without a network."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.kubectl import Kubectl, program
from tests.support.waiting import eventually

Schema = dict[str, Any]

_KINDS = "x-kubernetes-group-version-kind"
_COMPONENTS = "components"


def write_schemas(kubectl: Kubectl, folder: Path) -> Path:
    """Write a JSON schema for every kind that the API server knows; unknown fields are errors."""
    for crd in kubectl.objects("crd"):
        eventually(lambda crd=crd: _is_published(kubectl, crd), f"{crd['metadata']['name']} is published")
    groups = json.loads(kubectl.must("get", "--raw=/openapi/v3"))["paths"]
    for path in groups:
        if not path.startswith(("api/", "apis/")):
            continue
        document = json.loads(kubectl.must("get", f"--raw=/openapi/v3/{path}"))
        schemas = document.get(_COMPONENTS, {}).get("schemas", {})
        closed = {name: _closed(schema) for name, schema in schemas.items()}
        for name, schema in schemas.items():
            for kind in schema.get(_KINDS, []):
                whole = {"$ref": f"#/{_COMPONENTS}/schemas/{name}", _COMPONENTS: {"schemas": closed}}
                # kubeconform calls the group of the oldest kinds, which has no name, by their version.
                group = kind["group"] or kind["version"]
                file = folder / f"{group}_{kind['version']}_{kind['kind'].lower()}.json"
                if name.endswith(f".{kind['kind']}"):
                    file.write_text(json.dumps(whole))
    return folder


def _is_published(kubectl: Kubectl, crd: Schema) -> bool:
    """Whether the schemas that the API server gives out have a kind already: they come after it is established."""
    spec = crd["spec"]
    answer = kubectl("get", f"--raw=/openapi/v3/apis/{spec['group']}/{spec['versions'][0]['name']}")
    return f'"kind":"{spec["names"]["kind"]}"' in answer.stdout


def _closed(schema: Any) -> Any:
    """Return a schema that takes only the fields that it names, as ``additionalProperties: false`` says it."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and "properties" in schema and not open_ended:
        closed["additionalProperties"] = False
    return closed


def complaints(schemas: Path, manifest: str) -> list[str]:
    """Return what kubeconform says against the objects of a manifest."""
    location = f"{schemas}/{{{{.Group}}}}_{{{{.ResourceAPIVersion}}}}_{{{{.ResourceKind}}}}.json"
    answer = subprocess.run(
        [program("kubeconform"), "-strict", "-output=json", f"-schema-location={location}", "-"],
        input=manifest,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout, answer.stderr
    found = json.loads(answer.stdout)["resources"] or []
    said = [f"{each['kind']} {each['name']}: {each['msg']}" for each in found]
    assert (answer.returncode == 0) == (not said), answer.stdout + answer.stderr
    return said
