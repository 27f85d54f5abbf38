"""Equip engine pods for live captures, which record the traffic of users.

The recorder is loaded into vLLM's API server, where it sleeps until a capture arms it. A sidecar connects it with the
capture's pod, and an engine that no capture records opens no connection. Recorder and sidecar come from a ConfigMap of
the namespace and not from the operator's image, so that an upgrade of the operator replaces no engine.
"""

import base64
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, ReplayMode, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.cache import slim
from specdecode_operator.cluster.drift import content_digest
from specdecode_operator.cluster.manifests import shared_config_map, with_new_hash
from specdecode_operator.cluster.resources import CONFIG_MAP, ENGINE_CONTAINER, RECORDER_NAME, SIDECAR, plan_name
from specdecode_operator.deployment.pod_template_merge import (
    FILES_PATH,
    FILES_VOLUME,
    SOCKETS_PATH,
    SOCKETS_VOLUME,
)
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS, pod_templates
from specdecode_operator.enums import DraftUpdate, LiveTokenIds
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.environment import (
    API_KEY_VARIABLE,
    LIVE_FOLDER_VARIABLE,
    LIVE_TOKEN_IDS_VARIABLE,
    known_values,
)
from specdecode_operator.vllm.plugin_bundle import RECORDER

ZIP_ENTRY: Final = "recorder.zip"
BUNDLE_PATH: Final = f"{FILES_PATH}/{ZIP_ENTRY}"
ORDER_ENTRY: Final = "order.json"
CANARIES_ENTRY: Final = "canaries.json"
DRAFT_ENTRY: Final = "draft.json"
HEAD_LOADER: Final = f"{RECORDER.package}.head_loader.HeadLoader"
"""Extension of vLLM's workers that replaces the draft head (capture/recorder/head_loader.py)."""
EXTENSION_FLAG: Final = "--worker-extension-cls"

_MOUNTS: Final = (
    {"name": FILES_VOLUME, "mountPath": FILES_PATH, "readOnly": True},
    {"name": SOCKETS_VOLUME, "mountPath": SOCKETS_PATH},
)
_AMOUNTS: Final = {"cpu": "50m", "memory": "64Mi"}
# A pod whose sidecar is down is not ready, so the shell restarts the program without ending the container. As the first
# process of a container, a shell without a trap would ignore TERM.
_RESTARTED: Final = (
    """trap 'kill "$!" 2>/dev/null; exit 0' TERM INT; """
    'while :; do python3 -I "$0" & wait "$!"; sleep 5 & wait "$!"; done'
)
_USER_FIELDS: Final = ("runAsNonRoot", "runAsUser", "runAsGroup", "seLinuxOptions")
RUST_FRONTEND_VARIABLE: Final = "VLLM_USE_RUST_FRONTEND"
_OFF: Final = frozenset({"", "0", "false"})
_FROM_ELSEWHERE: Final = "from elsewhere"


def live_recorder_blocked(spec: SpecDecodeDeploymentSpec) -> str | None:
    """Return why the engines of a spec carry no recorder for live captures: always a field; None if they carry it.

    Every version of vLLM carries it: the recorder checks vLLM's classes, and reports unknown ones to the capture.
    """
    engine = spec.engine
    if not engine.recorder:
        return "spec.engine.recorder is false"
    if engine.replay is not None and engine.replay.mode is not ReplayMode.EMULATED:
        return "spec.engine.replay: a replay of a recording does not run vLLM"
    if uses_rust_frontend(spec):
        return f"{RUST_FRONTEND_VARIABLE} is set, and that frontend loads no plugins: remove it"
    return None


def uses_rust_frontend(spec: SpecDecodeDeploymentSpec) -> bool:
    """Return whether an engine serves with the Rust frontend, which cannot load the recorder; if in doubt, yes."""
    env = [(name, _FROM_ELSEWHERE if value is None else value) for name, value in known_values(spec.engine.env).items()]
    for container in objects((spec.pod_template.spec if spec.pod_template else None) or {}, "containers"):
        if name_of(container) == ENGINE_CONTAINER:
            env += [(name_of(each), str(each.get("value", _FROM_ELSEWHERE))) for each in objects(container, "env")]
    return any(name == RUST_FRONTEND_VARIABLE and value.lower() not in _OFF for name, value in env)


def has_extension(spec: SpecDecodeDeploymentSpec) -> bool:
    """Return whether the user extends vLLM's workers, which have one extension at most."""
    return any(each.split("=")[0] == EXTENSION_FLAG for each in spec.engine.extra_args)


def _extension(spec: SpecDecodeDeploymentSpec) -> list[str]:
    speculation = spec.speculation
    in_place = speculation is not None and speculation.draft_update is DraftUpdate.IN_PLACE
    runs_vllm = spec.engine.replay is None
    return [f"{EXTENSION_FLAG}={HEAD_LOADER}"] if in_place and runs_vllm and not has_extension(spec) else []


def order_name(key: Key) -> str:
    """Return the name of the ConfigMap with the order of a live capture, which exists while the capture records."""
    return f"{key.name}-live-order"


def recorder_config_map(namespace: str) -> Body:
    """Return the ConfigMap with the recorder and the sidecar's program, for all engines of a namespace."""
    return with_new_hash(shared_config_map(namespace, RECORDER_NAME, {"binaryData": {ZIP_ENTRY: _zip()}}))


@cache
def recorder_digest() -> str:
    """Return the `content_digest` of the ConfigMap with the recorder, which is the same in all namespaces."""
    return _digest(recorder_config_map(""))


def is_recorder(config_map: Body) -> bool:
    """Return whether a ConfigMap has the name and exactly the content of `recorder_config_map`."""
    return config_map["metadata"]["name"] == RECORDER_NAME and _digest(config_map) == recorder_digest()


def _digest(config_map: Body) -> str:
    return content_digest(slim(CONFIG_MAP.kind, config_map), shared_config_map("", RECORDER_NAME, {}))


@cache
def _zip() -> str:
    return base64.b64encode(RECORDER.zipped()).decode()


def with_recorder(
    values: Mapping[str, Any], key: Key, spec: SpecDecodeDeploymentSpec, token_ids: LiveTokenIds
) -> dict[str, Any]:
    """Return the values of an engine pod's template with the recorder in the engine; `with_sidecar` adds the rest."""
    variables = {LIVE_FOLDER_VARIABLE: SOCKETS_PATH, LIVE_TOKEN_IDS_VARIABLE: token_ids.value}
    return {
        **values,
        "command": RECORDER.loaded_by([*values["command"], *_extension(spec)], BUNDLE_PATH),
        "env": [*values["env"], *({"name": name, "value": value} for name, value in variables.items())],
        "mounts": [*values["mounts"], *_MOUNTS],
        "volumes": [*values["volumes"], *_volumes(key)],
    }


def _volumes(key: Key) -> list[Body]:
    # Only these entries, so that no other entry replaces a program.
    entries = {
        RECORDER_NAME: (ZIP_ENTRY,),
        plan_name(key.name): (CANARIES_ENTRY, DRAFT_ENTRY),
        order_name(key): (ORDER_ENTRY,),
    }
    # All are optional: engines must start without them, even if an earlier template is put back.
    sources = [
        {"name": name, "optional": True, "items": [{"key": each, "path": each} for each in found]}
        for name, found in entries.items()
    ]
    return [
        {"name": FILES_VOLUME, "projected": {"sources": [{"configMap": each} for each in sources]}},
        {"name": SOCKETS_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]


def carries_recorder(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod or pod template has the recorder."""
    return any(name_of(each) == FILES_VOLUME for each in objects(mapping(pod, "spec"), "volumes"))


def starts_recorder(child: Body) -> bool:
    """Return whether a child is a workload whose engines have the recorder."""
    return child["kind"] in WORKLOAD_KINDS and any(map(carries_recorder, pod_templates(child)))


def sidecar_of(pod: Body) -> Body:
    """Return the sidecar of an engine pod, with the image, user and API key of its engine."""
    (engine,) = (each for each in pod["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    context, port = engine.get("securityContext") or {}, engine["ports"][0]
    fields = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid", "NODE_NAME": "spec.nodeName"}
    return {
        "name": SIDECAR,
        "image": engine["image"],
        **({"imagePullPolicy": engine["imagePullPolicy"]} if "imagePullPolicy" in engine else {}),
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", _RESTARTED, BUNDLE_PATH],
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
            {"name": "SPECDECODE_ENGINE_URL", "value": f"{port['name']}://127.0.0.1:{port['containerPort']}"},
            *(each for each in engine.get("env") or [] if each["name"] == API_KEY_VARIABLE),
        ],
        "resources": {"requests": dict(_AMOUNTS), "limits": dict(_AMOUNTS)},
        "securityContext": {
            **{field: context[field] for field in _USER_FIELDS if field in context},
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [dict(mount) for mount in _MOUNTS],
    }


def allows_token_ids(pods: Iterable[Mapping[str, Any]], allowed: LiveTokenIds) -> bool:
    """Return whether pod templates that were rendered earlier permit no more token ids than is allowed today."""
    values = {
        str(variable.get("value") or "")
        for pod in pods
        for container in objects(mapping(pod, "spec"), "containers")
        for variable in objects(container, "env")
        if name_of(variable) == LIVE_TOKEN_IDS_VARIABLE
    }
    return all({*value.split(",")} <= {"", *allowed.value.split(",")} for value in values)
