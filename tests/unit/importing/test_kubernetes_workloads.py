"""Kubernetes objects of other kinds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.sources import read_production_stack, read_workloads
from specdecode_operator.importing.spec_builder import Workload
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import INVALID, LLAMA_8B, engine

HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


def beside(body: Mapping[str, Any], *others: Mapping[str, Any]) -> Migration:
    """Import an object with those of the same file."""
    (workload,) = read_workloads(body, [body, *others])
    return migrate_workload(workload)


def told(migration: Migration) -> str:
    """Return what became of each setting."""
    return "\n".join(f"{each.name}: {each.result}" for each in migration.settings)


def decided(migration: Migration) -> str:
    """Return what a person must decide."""
    return "\n".join(map(str, migration.decisions))


FOREIGN = {
    "LLMKube": (
        "inference.llmkube.dev/v1alpha1",
        "InferenceService",
        {"modelRef": "x"},
        "specdecode import deployment/chat -n llm",
    ),
    "KAITO": ("kaito.sh/v1beta1", "Workspace", {}, "specdecode import statefulset/chat -n llm"),
    "KubeAI": ("kubeai.org/v1", "Model", {}, "kubectl get pods -n llm -l model=chat"),
    "another group's Deployment": ("example.com/v1", "Deployment", {}, "specdecode import deployment/NAME -n llm"),
}


@pytest.mark.parametrize("case", FOREIGN.values(), ids=FOREIGN)
def test_unsupported_object_error_names_what_to_import_instead(
    specdecode: Specdecode, write: WriteObject, case: tuple[str, str, dict[str, Any], str]
) -> None:
    version, kind, spec, answer = case
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": "chat", "namespace": "llm"}, "spec": spec}
    result = specdecode("import", "-f", write("o.yaml", body))
    assert result.exit_code == INVALID
    assert f"{kind} of {version} is not read" in result.stderr
    assert answer in " ".join(result.stderr.split())


def test_unsupported_object_does_not_hide_a_server_beside_it(specdecode: Specdecode, tmp_path: Path) -> None:
    foreign = {"apiVersion": "inference.llmkube.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "x"}}
    file = tmp_path / "both.yaml"
    file.write_text(yaml.safe_dump_all([foreign, engine()]))
    assert specdecode("import", "-f", file).exit_code == 0


def config_map(**data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "runtime"}, "data": data}


def from_map(name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"configMapKeyRef": {"name": "runtime", "key": name}}}


SPLIT = ["--model", "$(MODEL)", "--tensor-parallel-size", "$(TP)"]


def test_config_map_values_in_the_file_are_read() -> None:
    """GKE accelerated-platforms: kustomize output with the model and the split in a ConfigMap."""
    body = engine(*SPLIT, env=[from_map("MODEL"), from_map("TP"), from_map("VLLM_LOGGING_LEVEL")])
    migration = beside(body, config_map(MODEL=LLAMA_8B, TP="1", VLLM_LOGGING_LEVEL="DEBUG"))
    spec = migration.body["spec"]
    assert not migration.decisions, decided(migration)
    assert (spec["target"]["model"], spec["parallelism"]["tensor"]) == (LLAMA_8B, 1)
    assert {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"} in spec["engine"]["env"]
    assert "ConfigMap runtime: its current values are copied" in told(migration)


def test_env_from_config_map_is_read_and_own_variables_win() -> None:
    sources = [{"prefix": "VLLM_", "configMapRef": {"name": "runtime"}}]
    env = [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}]
    migration = beside(engine(envFrom=sources, env=env), config_map(LOGGING_LEVEL="DEBUG", USE_AOT_COMPILE="1"))
    assert not migration.decisions, decided(migration)
    assert migration.body["spec"]["engine"]["env"] == [
        {"name": "VLLM_USE_AOT_COMPILE", "value": "1"},
        {"name": "VLLM_LOGGING_LEVEL", "value": "INFO"},
    ]


def test_only_key_names_of_a_secret_are_read() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"VLLM_API_KEY": "sk-live-1234567890"}}
    migration = beside(engine(envFrom=[{"secretRef": {"name": "keys"}}]), secret)
    assert not migration.decisions, decided(migration)
    assert migration.body["spec"]["serving"]["apiKeySecret"] == {"name": "keys", "key": "VLLM_API_KEY"}
    assert "sk-live" not in str(migration)


@pytest.mark.parametrize("place", [{"name": "another"}, {"name": "runtime", "namespace": "elsewhere"}])
def test_config_map_missing_in_the_file_is_a_decision(place: dict[str, str]) -> None:
    body = engine(*SPLIT, env=[from_map("MODEL"), from_map("TP")], resources={"limits": {"nvidia.com/gpu": "4"}})
    migration = beside(body, config_map(MODEL=LLAMA_8B, TP="4") | {"metadata": place})
    assert {"--model", "--tensor-parallel-size"} <= {each.value for each in migration.decisions}


LLMISVC = {
    "apiVersion": "serving.kserve.io/v1alpha2",
    "kind": "LLMInferenceService",
    "metadata": {"name": "chat", "annotations": {"serving.kserve.io/secretName": "hf", "team": "a"}},
}
KSERVE = {
    "eagle3": (
        {
            "speculator": {
                "model": {"uri": f"hf://{HEAD}"},
                "config": {"method": "eagle3", "num_speculative_tokens": "3"},
            }
        },
        {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": HEAD}},
    ),
    "a draft model": (
        {
            "speculator": {
                "model": {"uri": "hf://meta-llama/Llama-3.2-1B-Instruct"},
                "config": {"method": "draft_model", "num_speculative_tokens": "5"},
            }
        },
        {"method": "draft_model", "numSpeculativeTokens": 5, "draft": {"model": "meta-llama/Llama-3.2-1B-Instruct"}},
    ),
    "ngram": (
        {"speculativeDecoding": {"method": "ngram", "numSpeculativeTokens": 4, "ngram": {"promptLookupMax": 4}}},
        {"method": "ngram", "numSpeculativeTokens": 4, "ngram": {"promptLookupMax": 4}},
    ),
}


@pytest.mark.parametrize(("field", "speculation"), KSERVE.values(), ids=KSERVE)
def test_kserve_speculator_is_imported(field: dict[str, Any], speculation: dict[str, Any]) -> None:
    """kserve#5370 and kserve#5687."""
    template = {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.33.0", "resources": ONE_GPU}]}
    migration = migrate(LLMISVC | {"spec": {"model": {"uri": f"hf://{LLAMA_8B}"}, "template": template, **field}})
    spec = migration.body["spec"]
    assert not migration.decisions, decided(migration)
    assert spec["speculation"] == speculation
    assert spec["models"]["hubTokenSecret"] == {"name": "hf", "key": "HF_TOKEN"}
    assert "metadata.annotations team" in told(migration)


ONE_GPU = {"limits": {"nvidia.com/gpu": "1"}}


def test_kserve_draft_on_a_claim_is_imported() -> None:
    template = {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.33.0", "resources": ONE_GPU}]}
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    speculator = {"model": {"uri": "pvc://weights/draft"}, "config": config}
    spec = {"model": {"uri": "pvc://weights/target"}, "template": template, "speculator": speculator}
    found = migrate(LLMISVC | {"spec": spec}).body["spec"]
    assert found["speculation"]["draft"]["model"] == "draft"
    assert found["target"]["model"] == "target"
    assert found["models"]["volume"] == {"persistentVolumeClaim": {"claimName": "weights"}}


@pytest.mark.parametrize("uri", ["pvc://weights", "pvc://weights/"])
def test_a_model_at_the_root_of_a_claim_is_a_decision(uri: str) -> None:
    """A model is named by its folder of the claim, and the root has none."""
    template = {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.33.0", "resources": ONE_GPU}]}
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    target, draft = {"uri": uri}, {"model": {"uri": "pvc://weights/draft"}, "config": config}
    (decision,) = migrate(LLMISVC | {"spec": {"model": target, "template": template, "speculator": draft}}).decisions
    assert (decision.field, "folder" in decision.message) == ("spec.target.model", True)
    target, draft = {"uri": "pvc://weights/target"}, {"model": {"uri": uri}, "config": config}
    (decision,) = migrate(LLMISVC | {"spec": {"model": target, "template": template, "speculator": draft}}).decisions
    assert (decision.field, "folder" in decision.message) == ("spec.speculation.draft.model", True)


def test_unsupported_kserve_key_is_a_decision() -> None:
    spec = {
        "model": {"uri": f"hf://{LLAMA_8B}"},
        "template": {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.33.0", "resources": ONE_GPU}]},
        "speculator": {"model": {"uri": f"hf://{HEAD}", "lora": {"adapters": []}, "storage": {"key": "x"}}},
    }
    said = decided(migrate(LLMISVC | {"spec": spec}))
    assert "spec.speculator.model.storage" in said
    assert "spec.speculator.model.lora" in said


def test_storage_initializer_download_becomes_a_hub_model() -> None:
    """KServe's samples before it had a field: an init container fetches the draft."""
    config = {"method": "eagle3", "model": "/mnt/drafts/head", "num_speculative_tokens": 3}
    body = engine(
        *("/mnt/models", "--served-model-name", "chat", "-sc", json.dumps(config)),
        volumeMounts=[{"name": "all", "mountPath": "/mnt"}],
    )
    initializer = {
        "name": "fetch",
        "image": "kserve/storage-initializer:v0.15.0",
        "args": [f"hf://{LLAMA_8B}:main", "/mnt/models", f"hf://{HEAD}", "/mnt/drafts/head/"],
    }
    pod = body["spec"]["template"]["spec"]
    pod |= {"initContainers": [initializer], "volumes": [{"name": "all", "emptyDir": {}}]}
    migration = migrate(body)
    spec = migration.body["spec"]
    assert not migration.decisions, decided(migration)
    assert (spec["target"]["model"], spec["target"]["revision"]) == (LLAMA_8B, "main")
    assert spec["speculation"]["draft"]["model"] == HEAD
    assert "initContainers" not in spec.get("podTemplate", {}).get("spec", {})
    initializer["args"][2] = "s3://bucket/head"
    assert "is fetched by fetch from s3" in decided(migrate(body))


def test_adapters_of_a_kserve_service_become_adapters() -> None:
    adapters = [{"name": "sql", "uri": "hf://owner/sql"}, {"name": "law", "uri": "pvc://claim/folder/law"}]
    spec = {
        "model": {"uri": f"hf://{LLAMA_8B}", "lora": {"adapters": adapters}},
        "template": {"containers": [{"name": "main", "image": "vllm/vllm-openai:v0.33.0", "resources": ONE_GPU}]},
    }
    migration = migrate(LLMISVC | {"spec": spec})
    assert not migration.decisions, decided(migration)
    assert migration.body["spec"]["adapters"] == [
        {"name": "sql", "model": "owner/sql", "rank": 16},
        {"name": "law", "model": "folder/law", "rank": 16, "persistentVolumeClaim": {"claimName": "claim"}},
    ]


# How many pods a group of a LeaderWorkerSet may have.


def group(size: Any) -> dict[str, Any]:
    pod = {"spec": {"containers": [{"name": "vllm", "command": ["vllm", "serve", "a/b"]}]}}
    return {"metadata": {"name": "wide"}, "spec": {"leaderWorkerTemplate": {"size": size, "workerTemplate": pod}}}


# What values of production-stack mean for the pods of a model, as the chart's templates have it.

CLAIM = "spec.models.cache.persistentVolumeClaim.claimName"


def read(common: dict[str, Any] | None = None, **model: Any) -> Workload:
    spec = {"modelSpec": [{"name": "chat", "modelURL": "a/b", **model}], **(common or {})}
    (found,) = read_production_stack({"servingEngineSpec": spec})
    return found


def container(found: Workload) -> dict[str, Any]:
    only: dict[str, Any] = found.pod["containers"][0]
    return only


def test_model_env_comes_after_common_env() -> None:
    common = {"env": [{"name": "A", "value": "all"}]}
    found = container(read(common, env=[{"name": "A", "value": "own"}]))
    assert [each["value"] for each in found["env"]] == ["all", "own"]


@pytest.mark.parametrize(("policy", "keys"), [(None, ["all", "own"]), ("override", ["own"])])
def test_tolerations_are_merged_unless_overridden(policy: str | None, keys: list[str]) -> None:
    found = read({"tolerations": [{"key": "all"}]}, tolerations=[{"key": "own"}], tolerationsPolicy=policy)
    assert [each["key"] for each in found.pod["tolerations"]] == keys


def test_affinity_wins_over_node_selector_terms() -> None:
    terms = [{"matchExpressions": []}]
    assert "nodeAffinity" in read(nodeSelectorTerms=terms).pod["affinity"]
    assert read(nodeSelectorTerms=terms, affinity={"podAffinity": {}}).pod["affinity"] == {"podAffinity": {}}


def test_resources_win_over_request_gpu() -> None:
    limits = {"limits": {"nvidia.com/gpu": 2}}
    assert container(read(resources=limits, requestGPU=4))["resources"] == limits
    by_name = container(read(requestGPU=4, requestGPUType="nvidia.com/mig-4g.71gb"))["resources"]
    assert by_name["limits"] == {"nvidia.com/mig-4g.71gb": "4"}


@pytest.mark.parametrize(("existing", "asks"), [(None, True), ("models", False)])
def test_claim_without_an_existing_name_is_a_decision(existing: str | None, *, asks: bool) -> None:
    found = read(pvcStorage="10Gi", pvcExistingClaimName=existing)
    assert (CLAIM in [each.field for each in found.remarks.decisions]) is asks


def test_incomplete_secret_reference_is_ignored() -> None:
    env = container(read(hf_token={"secretName": "hub"}))["env"]
    assert [each for each in env if each["name"] == "HF_TOKEN"] == []


def test_runtime_class_of_the_model_wins_over_the_common_one() -> None:
    common = {"runtimeClassName": "nvidia"}
    assert read(common).pod["runtimeClassName"] == "nvidia"
    assert read(common, runtimeClassName="own").pod["runtimeClassName"] == "own"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (None, []),
        ({"dtype": "bfloat16"}, ["--no-enable-prefix-caching", "--dtype", "bfloat16"]),
        ({"enablePrefixCaching": True}, ["--enable-prefix-caching"]),
    ],
)
def test_vllm_config_without_prefix_caching_turns_it_off(config: dict[str, Any] | None, flags: list[str]) -> None:
    assert container(read(vllmConfig=config))["args"] == ["a/b", "--port", "8000", *flags]
