"""What operators of earlier releases made of the examples: objects as they were stored, and what came of each.

Run as a module, this file writes that of this checkout: `./just snapshot-release`.
"""

import copy
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.api import deployment, training
from specdecode_operator.api.base import GROUP
from specdecode_operator.cli.render import AssumedCluster, RenderedDeployment, render_capture, render_deployment
from specdecode_operator.cluster.drift import differing_paths
from specdecode_operator.cluster.resources import CAPTURE_LABEL, DEPLOYMENT_LABEL, TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS, pod_templates
from specdecode_operator.version import __version__
from tests.support.golden import EXAMPLES, FLEET, ROOT, rendered_examples
from tests.support.objects import Body

RELEASES = ROOT / "tests/data/releases"
RESTARTS = "### Engines restart"
"""Heading in CHANGELOG: fields of pod templates that a new operator changes of objects that nobody changed."""

_LONGEST_TEXT = 120


def releases() -> list[str]:
    """Return the releases that there are snapshots of."""
    return sorted(path.stem for path in RELEASES.glob("*.json"))


@cache
def snapshot(release: str) -> list[Body]:
    """Return the objects of a release: each with its children and their pod templates, in short."""
    entries: list[Body] = json.loads((RELEASES / f"{release}.json").read_text())
    return entries


def made_now(entry: Body, among: list[Body]) -> Body:
    """Return what this operator makes of the object of an entry, which may name another one among its snapshot."""
    stored = entry["object"]
    if stored["kind"] == deployment.KIND:
        return _entry(stored, _rendered(json.dumps(stored)).objects)
    named = (deployment.KIND, stored["spec"]["deployment"])
    captured = next(e["object"] for e in among if (e["object"]["kind"], e["object"]["metadata"]["name"]) == named)
    return _entry(stored, render_capture(stored, _rendered(json.dumps(captured))))


@cache
def _rendered(stored: str) -> RenderedDeployment:
    return render_deployment(json.loads(stored), AssumedCluster(FLEET))


def restarting_fields(before: Body, after: Body) -> set[str]:
    """Name the fields for which engines start anew, of two entries of one object."""
    known, new = before["podTemplates"], after["podTemplates"]
    return {
        path.removeprefix("pod.")
        for workload in {*known, *new}
        for role in {*known.get(workload, {}), *new.get(workload, {})}
        for path in differing_paths("pod", known.get(workload, {}).get(role), new.get(workload, {}).get(role))
    }


def announced(changelog: str, release: str) -> list[re.Pattern[str]]:
    """Return the fields that the CHANGELOG announces to restart engines since a release; * stands for anything."""
    since = re.split(rf"^## \[{re.escape(release)}\]", changelog, flags=re.MULTILINE)[0]
    sections = re.findall(rf"^{RESTARTS}\n(.*?)(?=^##|\Z)", since, re.MULTILINE | re.DOTALL)
    names = [name for section in sections for name in re.findall(r"`([^`]+)`", section)]
    return [re.compile(re.escape(name).replace(r"\*", ".*")) for name in names]


@cache
def taken_now() -> list[Body]:
    """Return the snapshot of this checkout: of its examples and CRDs, and what it makes of them."""
    schemas = {
        crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for path in sorted((ROOT / "crds").glob(f"{GROUP}_*.yaml"))
        for crd in _documents(path)
    }
    rendered = rendered_examples()
    return [
        _entry(_stored(body, schemas[body["kind"]]), _children(rendered[path.name], body))
        for path in sorted(EXAMPLES.glob("*.yaml"))
        for body in _documents(path)
        if body["apiVersion"].startswith(f"{GROUP}/") and body["kind"] != training.KIND
    ]


def _documents(path: Path) -> list[Body]:
    return list(yaml.safe_load_all(path.read_text()))


def _children(made: list[Body], owner: Body) -> list[Body]:
    label = DEPLOYMENT_LABEL if owner["kind"] == deployment.KIND else CAPTURE_LABEL
    return [body for body in made if body["metadata"]["labels"].get(label) == owner["metadata"]["name"]]


def _entry(stored: Body, children: Iterable[Body]) -> Body:
    made = {f"{body['kind']}/{body['metadata']['name']}": body for body in children}
    templates = {name: _by_role(body) for name, body in made.items() if body["kind"] in WORKLOAD_KINDS}
    return {"object": stored, "children": sorted(made), "podTemplates": templates}


def _by_role(workload: Body) -> Body:
    """Return the templates of all its pods, without their own hash, which changes with anything."""
    kept = {}
    for role, template in zip(("serving", "worker"), pod_templates(workload), strict=False):
        body = copy.deepcopy(template)
        del body["metadata"]["annotations"][TEMPLATE_HASH_ANNOTATION]
        kept[role] = _short(body)
    return kept


def _short(value: Any) -> Any:
    """Return a value with a digest in the place of each long text: a snapshot tells differences, and is to be small."""
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:40]}… sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value


def _stored(body: Body, schema: Body) -> Body:
    """Return an object as its API server stored it: with the defaults of then, which stay when a CRD changes."""
    stored: Body = _completed(body, {**schema, "properties": {"spec": schema["properties"]["spec"]}})
    return stored


def _completed(value: Any, schema: Body) -> Any:
    if isinstance(value, list):
        return [_completed(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    given = {name: copy.deepcopy(each["default"]) for name, each in properties.items() if "default" in each} | value
    return {name: _completed(each, properties.get(name, {})) for name, each in given.items()}


if __name__ == "__main__":
    file = RELEASES / f"{__version__}.json"
    RELEASES.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in taken_now())
    file.write_text(f"[\n{lines}\n]\n")
    sys.stdout.write(f"{file.relative_to(ROOT)}: {len(taken_now())} objects\n")
