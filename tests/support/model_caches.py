"""A SpecDecodeDeployment whose models come by way of a cache, and the pods that fetch them."""

import json
from datetime import UTC, datetime
from typing import Any

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import desired_state
from tests.support.objects import H200, Body, pair_70b, parent

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODES = (NodeFacts("h200-0", H200, 8),)
TARGET, DRAFT = "a" * 40, "b" * 40
CACHE = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
TOKEN = {"hubTokenSecret": {"name": "hub", "key": "token"}}


def cached(**changes: Any) -> Body:
    return pair_70b(**{"models": {**CACHE, **TOKEN}, **changes})


def decide(spec: Body, pods: list[Body] | None = None, downloads: dict[str, str] | None = None) -> DesiredState:
    return desired_state(parse_deployment(parent(spec)), NODES, pods=pods or [], downloads=downloads or {})


def jobs(desired: DesiredState) -> list[Body]:
    return [child for child in desired.children if child["kind"] == "Job"]


def config_map(desired: DesiredState) -> Body | None:
    return next((child for child in desired.children if child["metadata"]["name"] == "llama-downloads"), None)


def container(job: Body) -> Body:
    found: Body = job["spec"]["template"]["spec"]["containers"][0]
    return found


def pod(job: Body, message: str, exit_code: int = 0, **more: Any) -> Body:
    """The pod of a Job whose download has ended."""
    ended = {"terminated": {"exitCode": exit_code, "message": message, **more}}
    status: Body = {"name": "download-model", "image": "i:1", "ready": False, "state": ended}
    if exit_code:
        status |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    template = job["spec"]["template"]["metadata"]
    return {"metadata": {**template, "name": "p"}, "status": {"containerStatuses": [status]}}


def fetched(spec: Body) -> list[Body]:
    found = zip(jobs(decide(spec)), (TARGET, DRAFT), strict=True)
    return [pod(job, json.dumps({"commit": commit})) for job, commit in found]


def launched(spec: Body) -> Body:
    """The pod spec of engines whose models are there."""
    return template(decide(spec, fetched(spec)))


def template(desired: DesiredState) -> Body:
    found: Body = next(child for child in desired.children if child["kind"] == "Deployment")["spec"]["template"]["spec"]
    return found


def said(desired: DesiredState, spec: Body, **observed: Any) -> dict[str, tuple[str, str, str]]:
    status = compose_status(parse_deployment(parent(spec)), desired, Observation(**observed), NOW)
    return {found.type: (found.status.value, found.reason, found.message) for found in status.conditions}
