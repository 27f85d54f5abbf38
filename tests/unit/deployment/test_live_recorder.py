"""The recorder for live captures in engine pods: what a pod carries, when it carries none, and what users may set."""

import base64
import io
import json
import os
import signal
import subprocess
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched, RolledBack
from specdecode_operator.deployment.live_recorder import (
    is_recorder,
    live_recorder_blocked,
    recorder_config_map,
    starts_recorder,
)
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.rollback import Failure, LastGood, attempt_of
from specdecode_operator.enums import LiveTokenIds
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.test_groups import STAGES, TWO_H100, templates
from tests.unit.deployment.test_replays import emulated

IMAGE = {"image": "localhost/engine:1"}
RUST = {"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}
OFF = {**IMAGE, "recorder": False}


def decided(spec: Body, **cluster: Any) -> DesiredState:
    return desired_state(parse_deployment(parent(spec)), **cluster)


def pod_of(spec: Body, **cluster: Any) -> Body:
    workload = decided(spec, **cluster).workload
    assert workload is not None
    pod: Body = workload["spec"]["template"]["spec"]
    return pod


def recorder_of(pod: Body) -> Body | None:
    return next((each for each in pod.get("initContainers") or [] if each["name"] == "recorder"), None)


def sidecar(spec: Body) -> Body:
    found = recorder_of(pod_of(spec))
    assert found is not None
    return found


def variables(container: Body) -> Body:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def plan_entries(desired: DesiredState) -> Body:
    (plan,) = (each for each in desired.children if each["metadata"]["name"] == "llama-plan")
    data: Body = plan["data"]
    return data


def with_template(spec: Body, **changes: Any) -> Body:
    return tiny_cpu(podTemplate={"spec": spec}, **changes)


def test_engine_and_sidecar_share_files_and_sockets() -> None:
    pod = pod_of(tiny_cpu())
    (engine,), found = pod["containers"], recorder_of(pod)
    assert found is not None
    shared = [
        {"name": "specdecode-recorder", "mountPath": "/specdecode/recorder", "readOnly": True},
        {"name": "specdecode-sockets", "mountPath": "/specdecode/sockets"},
    ]
    assert found["volumeMounts"] == shared
    assert all(mount in engine["volumeMounts"] for mount in shared)
    assert (found["image"], found["restartPolicy"]) == (engine["image"], "Always")
    assert found["resources"]["requests"] == found["resources"]["limits"]
    assert "ports" not in found
    assert variables(engine)["SPECDECODE_LIVE_DIR"] == "/specdecode/sockets"
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    sources = [each["configMap"] for each in volumes["specdecode-recorder"]["projected"]["sources"]]
    assert all(each["optional"] for each in sources), "engines start without them"
    entries = {each["name"]: {item["key"]: item["path"] for item in each["items"]} for each in sources}
    assert entries == {
        "specdecode-recorder": {"recorder.zip": "recorder.zip"},
        "llama-plan": {"canaries.json": "canaries.json", "draft.json": "draft.json"},
        "llama-live-order": {"order.json": "order.json"},
    }, "no other entry replaces a program"


def test_shared_config_map_has_the_programs_and_no_owner() -> None:
    shared = recorder_config_map("team")
    assert "ownerReferences" not in shared["metadata"]
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(shared["binaryData"]["recorder.zip"], validate=True)))
    assert "specdecode_recorder/plugin.py" in archive.namelist()


def test_only_the_content_of_this_version_is_the_recorder() -> None:
    shared = recorder_config_map("team")
    assert is_recorder(shared)
    assert is_recorder(recorder_config_map("other"))
    for change in (
        {"binaryData": {"recorder.zip": "AA=="}},
        {"binaryData": {**shared["binaryData"], "more": "AA=="}},
        {"data": {"recorder.zip": "x"}},
        {"metadata": {**shared["metadata"], "labels": {"specdecode.io/recorder": "true"}}},
        {"metadata": {**shared["metadata"], "name": "other"}},
    ):
        assert not is_recorder({**shared, **change}), change


def test_canaries_are_in_the_config_map_with_the_plan() -> None:
    policy = {"canaries": {"prompts": ["1 + 1 ="]}}
    assert json.loads(plan_entries(decided(tiny_cpu(policy=policy)))["canaries.json"])["prompts"] == ["1 + 1 ="]
    assert "canaries.json" not in plan_entries(decided(tiny_cpu(policy=policy, engine=OFF)))
    assert "canaries.json" not in plan_entries(decided(tiny_cpu()))


def test_running_engines_are_asked_while_a_new_spec_does_not_fit() -> None:
    desired = decided(tiny_cpu(policy={"canaries": {}}, serving={"maxModelLen": 1024, "minConcurrency": 60_000}))
    assert isinstance(desired.outcome, NotLaunched)
    assert "canaries.json" in plan_entries(desired)


def test_sidecar_has_the_user_but_not_the_capabilities_of_its_engine() -> None:
    context = {"runAsUser": 1000, "runAsGroup": 5, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}
    found = sidecar(
        with_template({"containers": [{"name": "engine", "securityContext": context, "imagePullPolicy": "Never"}]})
    )
    assert found["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 5,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found["imagePullPolicy"] == "Never"


def test_sidecar_uses_the_protocol_port_and_api_key_of_its_engine() -> None:
    assert variables(sidecar(tiny_cpu()))["SPECDECODE_ENGINE_URL"] == "http://127.0.0.1:8000"
    serving = {"port": 8443, "tlsSecret": {"name": "tls"}, "apiKeySecret": {"name": "clients", "key": "key"}}
    found = variables(sidecar(tiny_cpu(serving=serving)))
    assert found["SPECDECODE_ENGINE_URL"] == "https://127.0.0.1:8443"
    assert found["VLLM_API_KEY"] == {"secretKeyRef": {"name": "clients", "key": "key"}}


def test_sidecar_starts_after_user_init_containers() -> None:
    given = [
        {"name": "recorder", "resources": {"limits": {"memory": "128Mi"}}},
        {"name": "warm-up", "image": "w:1"},
    ]
    initial = pod_of(with_template({"initContainers": given}))["initContainers"]
    assert [each["name"] for each in initial] == ["warm-up", "recorder"]
    assert initial[1]["resources"]["limits"] == {"cpu": "50m", "memory": "128Mi"}
    without = pod_of(with_template({"initContainers": given}, engine=OFF))
    assert [each["name"] for each in without["initContainers"]] == ["warm-up"]


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"initContainers": [{"name": "recorder", "image": "i:2"}]}, "initContainers[0].image"),
        ({"initContainers": [{"name": "recorder", "command": ["sh"]}]}, "initContainers[0].command"),
        ({"containers": [{"name": "recorder", "image": "i:2"}]}, "containers[0].name"),
        ({"volumes": [{"name": "specdecode-recorder", "emptyDir": {}}]}, "volumes[0].name"),
        (
            {"containers": [{"name": "engine", "volumeMounts": [{"name": "a", "mountPath": "/specdecode/sockets"}]}]},
            "containers[0].volumeMounts[0].mountPath",
        ),
        (
            {"containers": [{"name": "engine", "env": [{"name": "SPECDECODE_LIVE_TOKEN_IDS", "value": "answers"}]}]},
            "containers[0].env[0].name",
        ),
    ],
)
def test_pod_template_cannot_change_what_is_recorded(template: Body, field: str) -> None:
    outcome = decided(with_template(template)).outcome
    assert isinstance(outcome, NotLaunched)
    assert f"spec.podTemplate.spec.{field}: " in outcome.readiness.message


def test_engine_env_cannot_allow_token_ids() -> None:
    outcome = decided(
        tiny_cpu(engine={**IMAGE, "env": [{"name": "SPECDECODE_LIVE_TOKEN_IDS", "value": "answers"}]})
    ).outcome
    assert isinstance(outcome, NotLaunched)
    assert "spec.engine.env[0].name: SPECDECODE_LIVE_TOKEN_IDS: " in outcome.readiness.message


@pytest.mark.parametrize("allowed", LiveTokenIds)
def test_engine_env_has_the_token_ids_that_the_operator_allows(allowed: LiveTokenIds) -> None:
    (engine,) = pod_of(tiny_cpu(), live_token_ids=allowed)["containers"]
    assert variables(engine)["SPECDECODE_LIVE_TOKEN_IDS"] == allowed.value


@pytest.mark.parametrize(
    "spec",
    [
        tiny_cpu(engine=OFF),
        tiny_cpu(engine={**IMAGE, "env": [RUST]}),
        with_template({"containers": [{"name": "engine", "env": [RUST]}]}),
        replaying(),
    ],
    ids=["off", "frontend without Python", "the same in podTemplate", "replay"],
)
def test_recorder_is_absent_if_off_or_not_supported(spec: Body) -> None:
    desired, pod = decided(spec), pod_of(spec)
    assert recorder_of(pod) is None
    assert "/bin/sh" not in pod["containers"][0]["command"]
    assert not [each for each in pod["volumes"] if each["name"].startswith("specdecode-sockets")]
    assert desired.workload is not None
    assert not starts_recorder(desired.workload)
    assert isinstance(desired.outcome, Launch)
    assert live_recorder_blocked(desired.outcome.facts.spec)


@pytest.mark.parametrize("value", ["", "0", "False"])
def test_recorder_is_present_if_the_rust_frontend_is_off(value: str) -> None:
    assert recorder_of(pod_of(tiny_cpu(engine={**IMAGE, "env": [{**RUST, "value": value}]}))) is not None


def test_planned_warns_only_of_a_requested_recorder_that_is_missing() -> None:
    def message(engine: Body) -> str:
        return next(each.message for each in decided(tiny_cpu(engine=engine)).conditions if each.type == "Planned")

    assert "live captures are not possible: VLLM_USE_RUST_FRONTEND" in message({**IMAGE, "env": [RUST]})
    assert "live captures" not in message({**OFF, "env": [RUST]})
    assert "live captures" not in message(IMAGE)


def test_emulated_engine_has_a_recorder() -> None:
    pod = pod_of(emulated())
    assert [each["name"] for each in pod["initContainers"]] == ["prepare-emulation", "recorder"]
    assert variables(pod["containers"][0])["SPECDECODE_LIVE_DIR"] == "/specdecode/sockets"


def test_only_the_leader_of_a_group_has_a_recorder() -> None:
    desired = decided(STAGES, nodes=TWO_H100, has_leader_worker_sets=True)
    assert desired.workload is not None
    leader, worker = templates(desired.workload)
    assert recorder_of(leader["spec"]) is not None
    assert recorder_of(worker["spec"]) is None
    assert "specdecode-recorder" not in {each["name"] for each in worker["spec"]["volumes"]}


def test_recorder_does_not_change_the_compile_cache_folder() -> None:
    def folder(engine: Body) -> str:
        models = {**tiny_cpu()["models"], "cache": {"persistentVolumeClaim": {"claimName": "cache"}}}
        mounts = pod_of(tiny_cpu(models=models, engine=engine))["containers"][0]["volumeMounts"]
        return next(str(each["subPath"]) for each in mounts if each["mountPath"] == "/compiled")

    assert folder(IMAGE) == folder(OFF)


def put_back(earlier: DesiredState, spec: Body, **cluster: Any) -> DesiredState:
    """Return what should exist for a spec whose engines failed, after an earlier workload served."""
    wanted = decided(spec).outcome
    assert isinstance(wanted, Launch)
    assert earlier.workload is not None
    failure = Failure(attempt_of(wanted.facts.spec, wanted.plan.chosen), "EngineFailed", "it ended")
    return decided(spec, last_good=LastGood.of(earlier.workload, failure), **cluster)


def test_rolled_back_engines_keep_their_recorder() -> None:
    desired = put_back(decided(tiny_cpu()), tiny_cpu(engine=OFF))
    assert isinstance(desired.outcome, RolledBack)
    assert desired.workload is not None
    assert starts_recorder(desired.workload)


@pytest.mark.parametrize(
    ("before", "now", "is_put_back"),
    [
        (LiveTokenIds.ANSWERS, LiveTokenIds.ANSWERS, True),
        (LiveTokenIds.ANSWERS, LiveTokenIds.PROMPTS, True),
        (LiveTokenIds.NONE, LiveTokenIds.NONE, True),
        (LiveTokenIds.NONE, LiveTokenIds.ANSWERS, True),
        (LiveTokenIds.PROMPTS, LiveTokenIds.ANSWERS, False),
        (LiveTokenIds.ANSWERS, LiveTokenIds.NONE, False),
    ],
)
def test_engines_with_revoked_token_id_permission_are_not_restored(
    before: LiveTokenIds, now: LiveTokenIds, *, is_put_back: bool
) -> None:
    earlier = decided(tiny_cpu(), live_token_ids=before)
    desired = put_back(earlier, tiny_cpu(serving={"maxModelLen": 512}), live_token_ids=now)
    assert isinstance(desired.outcome, RolledBack) == is_put_back


PROGRAM = """\
#!/bin/sh
echo "started $*"
mkdir "$FOLDER/once" 2>/dev/null && exit 1
exec /bin/sleep 600
"""


def test_sidecar_survives_a_program_crash_and_ends_on_sigterm(tmp_path: Path) -> None:
    """Its end would make the pod unready, and a shell is deaf to TERM as the first process of a container."""
    for name, text in (("python3", PROGRAM), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = sidecar(tiny_cpu())["command"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = "started -I /specdecode/recorder/recorder.zip\n"
        assert [process.stdout.readline() for _ in range(2)] == [line, line]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
