"""Render objects from templates, and mark the ones that the operator owns.

Templates are rendered with a placeholder for each value. The values are filled in after the YAML is parsed, so they
cannot change its structure, and objects with equal structure share one parse. Container arguments escape `$`, because
the kubelet would expand `$(NAME)` and could put the hub token into a message (third_party/forked/golang/expansion in
Kubernetes).
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from specdecode_operator.api import base, capture, training
from specdecode_operator.api.base import Body, SecretKey
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.resources import (
    APPLIED_HASH_ANNOTATION,
    CAPTURE_LABEL,
    DEPLOYMENT_LABEL,
    MANAGED_BY_LABEL,
    MANAGER,
    PART_OF_LABEL,
    SHARED_CONFIG_MAPS,
    TRAINING_LABEL,
)
from specdecode_operator.vllm.settings import ContainerVariable

if TYPE_CHECKING:
    import jinja2

_STRUCTURES_KEPT: Final = 256
"""Structures of templates; one takes some 5 kB."""
_VALUE: Final = "\ue000"
"""First character of a placeholder, from Unicode's private area. No template has it."""

# The safe loader in C where there is one: it is nine times as fast, and rendering is most of a reconcile.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KUBELET_VARIABLE: Final = re.compile(r"\$\$|\$\(([^)\s]{0,255}+)\)")
"""third_party/forked/golang/expansion/expand.go in Kubernetes: two dollars are one, $(NAME) is a variable."""


def indented_json(value: Any) -> str:
    """Return a value as indented JSON with sorted keys, ten times as fast as `json.dumps`."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode()


def _held(context: "jinja2.runtime.Context", value: Any) -> str:
    """Return a placeholder for a value."""
    values = context["held_values"]
    values.append(value)
    return f'"{_VALUE}{len(values) - 1}"'


def _literally(arguments: Sequence[str]) -> list[str]:
    # The kubelet expands $(NAME), so that a model's name could put the hub token into a message, and $$ to $.
    return [
        argument if isinstance(argument, ContainerVariable) else argument.replace("$", "$$") for argument in arguments
    ]


def variables_in(text: str) -> list[str]:
    """Return the variables that the kubelet replaces in an argument, or in the value of another variable, in order."""
    return [found[1] for found in KUBELET_VARIABLE.finditer(text) if found[1] is not None]


@lru_cache(maxsize=1)
def _templates() -> "jinja2.Environment":
    import jinja2  # noqa: PLC0415  plans render nothing

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  YAML, not HTML: values are quoted by tojson
    )
    environment.filters["tojson"] = jinja2.pass_context(_held)
    environment.filters["literally"] = _literally
    return environment


def render_template(template: str, values: dict[str, Any]) -> Body:
    """Return the object that a template makes of the values."""
    held: list[Any] = []
    text = _templates().get_template(f"{template}.yaml.j2").render({**values, "held_values": held})
    # As JSON and back, to copy the values and to drop Python's own types.
    body: Body = _filled(_structure(text), json.loads(json.dumps(held, sort_keys=True)))
    return body


@lru_cache(maxsize=_STRUCTURES_KEPT)
def _structure(text: str) -> Any:
    """Return the parsed template; read-only, because it is shared."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506


def _filled(node: Any, values: list[Any]) -> Any:
    """Return a copy of a parsed template with the values in place of their placeholders."""
    if isinstance(node, str):
        return values[int(node[1:])] if node.startswith(_VALUE) else node
    if isinstance(node, dict):
        return {key: _filled(each, values) for key, each in node.items()}
    return [_filled(each, values) for each in node] if isinstance(node, list) else node


def secret_key(reference: SecretKey | None) -> Body | None:
    """Return a reference to the key of a Secret for a pod."""
    return {"name": reference.name, "key": reference.key} if reference else None


def owned(body: Body, key: Key, uid: str) -> Body:
    """Add labels, owner and the hash of the desired content to a child."""
    metadata = body["metadata"]
    metadata["namespace"] = key.namespace
    metadata["labels"] = {**metadata.get("labels", {}), **child_labels(key)}
    metadata["ownerReferences"] = [owner_reference(key, uid)]
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_HASH_ANNOTATION: content_hash(body)}
    return body


def shared_config_map(namespace: str, name: str, content: Body) -> Body:
    """Return a ConfigMap that the objects of a namespace share, with its ``data`` or ``binaryData``."""
    labels = {PART_OF_LABEL: "specdecode", MANAGED_BY_LABEL: MANAGER, SHARED_CONFIG_MAPS[name]: "true"}
    metadata = {"namespace": namespace, "name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **content}


def with_new_hash(body: Body) -> Body:
    """Return an object with the hash of its present content in place of its annotations."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "annotations"}
    annotations = {APPLIED_HASH_ANNOTATION: content_hash({**body, "metadata": metadata})}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def child_labels(key: Key) -> dict[str, str]:
    """Return the labels of a child."""
    return {PART_OF_LABEL: "specdecode", MANAGED_BY_LABEL: MANAGER, parent_label(key.kind): key.name}


def parent_label(kind: str) -> str:
    """Return the label with which children of a kind of ours name their parent."""
    return {capture.KIND: CAPTURE_LABEL, training.KIND: TRAINING_LABEL}.get(kind, DEPLOYMENT_LABEL)


def owner_reference(key: Key, uid: str) -> Body:
    """Return the owner reference of a child."""
    return {
        "apiVersion": base.API_VERSION,
        "kind": key.kind,
        "name": key.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
