"""Download Jobs of a model cache, their failures, and the engines that share the cache."""

import json

import pytest

from specdecode_operator.deployment.models.model_jobs import read_downloads
from tests.support.model_caches import (
    DRAFT,
    TARGET,
    cached,
    config_map,
    container,
    decide,
    fetched,
    jobs,
    launched,
    pod,
    said,
    template,
)
from tests.support.objects import Body, pair_70b


def test_models_are_downloaded_before_engines_launch() -> None:
    spec = cached()
    desired = decide(spec)
    assert [child["kind"] for child in desired.children] == ["ConfigMap", "Job", "Job"], "the plan, and no engines"
    conditions = said(desired, spec)
    assert (conditions["Ready"][:2], conditions["Reconciling"][0]) == (("Unknown", "DownloadingModels"), "True")
    assert (conditions["Accepted"][0], conditions["Planned"][0]) == ("True", "True")
    target, draft = (job["metadata"]["name"] for job in jobs(desired))
    assert conditions["Ready"][2].startswith(
        f"Jobs {target} and {draft} download meta-llama/Llama-3.1-70B-Instruct and"
    )
    assert [container(job)["args"] for job in jobs(desired)] == [
        ["--model=meta-llama/Llama-3.1-70B-Instruct", "--cache=/models/hub"],
        ["--model=meta-llama/Llama-3.1-8B-Instruct", "--cache=/models/hub"],
    ]


def test_message_names_the_only_job_that_downloads() -> None:
    spec = cached(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    desired = decide(spec)
    (job,) = jobs(desired)
    told = said(desired, spec)["Ready"][2]
    assert told.startswith(f"Job {job['metadata']['name']} downloads meta-llama/Llama-3.1-70B-Instruct to claim hub; ")


def test_only_the_download_job_has_the_token_and_a_writable_cache() -> None:
    (job, _), pod_spec = jobs(decide(cached())), launched(cached())
    token = next(each for each in container(job)["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container(job)["volumeMounts"][0] == {"name": "models", "mountPath": "/models"}
    assert "specdecode.io/deployment" not in job["spec"]["template"]["metadata"]["labels"], "no Service may select it"
    (engine,) = pod_spec["containers"]
    env = {each["name"]: each.get("value") for each in engine["env"]}
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in json.dumps(pod_spec)
    assert [each["name"] for each in pod_spec["initContainers"]] == ["recorder"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in engine["volumeMounts"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "hub"}} in pod_spec["volumes"]


def test_engines_serve_the_downloaded_commits() -> None:
    command = launched(cached())["containers"][0]["command"]
    assert f"/models/hub/models--meta-llama--Llama-3.1-70B-Instruct/snapshots/{TARGET}" in command
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative["model"] == f"/models/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/{DRAFT}"
    assert command[command.index("--served-model-name") + 1] == "Llama-3.1-70B-Instruct"


def test_downloaded_commits_are_kept_after_pods_and_jobs_are_gone() -> None:
    spec = cached()
    desired = decide(spec, fetched(spec))
    assert jobs(desired) == [], "a Job that is done is not wanted any more"
    kept = read_downloads(config_map(desired))
    assert sorted(kept.values()) == [TARGET, DRAFT]
    again = decide(spec, downloads=kept)
    assert template(again) == template(desired)
    assert config_map(again) == config_map(desired)


def test_new_revision_is_downloaded_while_old_engines_stay() -> None:
    spec = cached()
    kept = read_downloads(config_map(decide(spec, fetched(spec))))
    changed = {**spec, "target": {**spec["target"], "revision": "v2"}}
    desired = decide(changed, downloads=kept)
    (job,) = jobs(desired)
    assert "--revision=v2" in container(job)["args"]
    assert desired.workload is None, "without one in the desired the engines that run are left alone"


FAILURES = [
    ("ModelGated", "is gated", "spec.models.hubTokenSecret"),
    ("ModelNotFound", "does not exist", "correct spec.target.model"),
    ("RevisionNotFound", "has no such revision", "correct spec.target.revision"),
    ("NoSpaceLeft", "files need 131.4 GiB", "enlarge claim hub"),
    ("VolumeNotWritable", "cannot be written", "fsGroup in spec.podTemplate.spec.securityContext"),
    ("HubUnreachable", "ConnectError", "spec.models.volume"),
]


@pytest.mark.parametrize(("reason", "message", "fix"), FAILURES)
def test_failed_download_reports_its_cause_and_a_fix(reason: str, message: str, fix: str) -> None:
    spec = cached()
    job = jobs(decide(spec))[0]
    answer = json.dumps({"error": {"reason": reason, "message": message}})
    ready = said(decide(spec, [pod(job, answer, exit_code=1)]), spec)["Ready"]
    assert ready[:2] == ("Unknown", reason)
    for part in ("spec.target.model", "meta-llama/Llama-3.1-70B-Instruct", message, fix, "retried automatically"):
        assert part in ready[2]


@pytest.mark.parametrize(
    ("message", "more", "reason"),
    [
        ("Traceback\nImportError: no module", {}, "DownloadFailed"),
        ("", {"reason": "OOMKilled"}, "OutOfMemory"),
        (json.dumps({"error": {"reason": "Ready", "message": "x"}}), {}, "DownloadFailed"),
        (json.dumps({"error": "x"}), {}, "DownloadFailed"),
    ],
)
def test_unexpected_download_exit_is_reported(message: str, more: Body, reason: str) -> None:
    spec = cached()
    job = jobs(decide(spec))[0]
    assert said(decide(spec, [pod(job, message, exit_code=1, **more)]), spec)["Ready"][1] == reason


@pytest.mark.parametrize("message", ['{"commit": "../../etc"}', '{"commit": 7}', "[]", "", '{"commit": ""}'])
def test_forged_download_result_is_a_failure(message: str) -> None:
    spec = cached()
    job = jobs(decide(spec))[0]
    desired = decide(spec, [pod(job, message)])
    assert len(jobs(desired)) == 2
    assert said(desired, spec)["Ready"][1] == "DownloadFailed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"commit": "../x"}', '{"commit": null}'])
def test_broken_config_map_entries_are_ignored(text: str) -> None:
    assert read_downloads({"data": {"key": text}}) == {}


def compiled(pod_spec: Body) -> str:
    mounts = {mount["mountPath"]: mount for mount in pod_spec["containers"][0]["volumeMounts"]}
    folder: str = mounts["/compiled"]["subPath"]
    return folder


def test_only_engines_of_one_template_share_a_compile_cache() -> None:
    folder = compiled(launched(cached()))
    assert folder.startswith("specdecode/compiled/0.33-NVIDIA-H200-")
    assert compiled(launched(cached(replicas=3))) == folder
    for other in (
        cached(serving={"maxModelLen": 8192, "gpuMemoryUtilizationPercent": 90}),
        cached(engine={"image": "localhost/vllm:2"}),
        cached(engine={"env": [{"name": "VLLM_USE_DEEP_GEMM", "value": "0"}]}),
    ):
        assert compiled(launched(other)) != folder, "the start-up plan holds for one way to start"


def test_startup_plan_is_enabled_only_for_engines_of_one_rank() -> None:
    """Each rank decides for itself whether to profile, which needs all of them: ranks that differ would hang."""
    small = cached(target={"model": "meta-llama/Llama-3.1-8B-Instruct"}, speculation=None, parallelism={"tensor": 1})
    pods = {1: launched_alone(small), 2: launched(cached())}
    names = {ranks: {each["name"] for each in pod["containers"][0]["env"]} for ranks, pod in pods.items()}
    assert "VLLM_ENABLE_STARTUP_PLAN" in names[1]
    assert "VLLM_ENABLE_STARTUP_PLAN" not in names[2]


def launched_alone(spec: Body) -> Body:
    """The pod spec of engines without a draft."""
    (job,) = jobs(decide(spec))
    return template(decide(spec, [pod(job, json.dumps({"commit": TARGET}))]))


def test_hub_clients_get_endpoint_and_proxy_from_engine_env() -> None:
    variables = {"HF_ENDPOINT": "https://hub.example.com", "https_proxy": "http://proxy:3128"}
    own = [{"name": name, "value": value} for name, value in variables.items()]
    engine = {"env": [*own, {"name": "VLLM_USE_DEEP_GEMM", "value": "0"}]}
    download = container(jobs(decide(cached(engine=engine)))[0])
    init = template(decide(pair_70b(engine=engine)))["initContainers"][0]
    (reader,) = jobs(decide(pair_70b(engine=engine, target={"model": "org/unknown"})))
    for each in (download, init, container(reader)):
        env = {variable["name"]: variable.get("value") for variable in each["env"]}
        assert env.items() >= variables.items()
        assert "VLLM_USE_DEEP_GEMM" not in env
