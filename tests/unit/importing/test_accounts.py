"""Nothing that a server is told disappears: each key, flag, variable, label and annotation is in object or report."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import pytest

from specdecode_operator.importing.convert import Migration
from specdecode_operator.importing.server_arguments import FLAGS, VARIABLES
from specdecode_operator.importing.speculation import OLD_KEYS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.support.migrations import migrate
from tests.unit.cli.old_deployments import LLAMA_8B, engine

VALUES: Final[dict[str, Any]] = {
    "attention_backend": "TRITON_ATTN",
    "draft_load_config": {"load_format": "safetensors"},
    "draft_lm_head_quantization": "fp8",
    "draft_sample_method": "greedy",
    "fly_entropy_threshold": 0.5,
    "kv_cache_dtype": "auto",
    "method": "eagle3",
    "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "moe_backend": "triton",
    "num_speculative_tokens_per_batch_size": [[1, 8, 2]],
    "quantization": "fp8",
    "rejection_sample_method": "block",
    "revision": "main",
    "code_revision": "main",
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.2,
    "synthetic_acceptance_rates": [0.5],
}
"""A value for each key that is no number and no switch."""

METHODS: Final = ("mtp", "eagle3", "dspark", "dflash", "draft_model", "ngram", "suffix", "magic", "draft_model_eagle")


def accounted(migration: Migration, name: str) -> bool:
    """Return whether the report names a setting."""
    said = [f"{each.name} {each.result}" for each in migration.settings]
    whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return any(whole.search(each) for each in [*said, *map(str, migration.decisions)])


def missing(migration: Migration, names: Iterable[str]) -> list[str]:
    """Return what the report does not name."""
    return [name for name in names if not accounted(migration, name)]


@pytest.mark.parametrize(("cpu", "cores"), [("6500m", 6), ("6.5", 6), ("500m", 1), (6, 6)])
def test_parts_of_a_core_are_left_out(cpu: object, cores: int) -> None:
    amounts = {"limits": {"cpu": cpu, "memory": "64Gi"}}
    body = engine(LLAMA_8B, image="my.io/vllm-cpu:v0.33.0", resources=amounts)
    assert migrate(body).body["spec"]["accelerator"]["cpuCores"] == cores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("version", [KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]])
def test_each_key_of_the_speculative_config_is_accounted_for(version: str, method: str) -> None:
    keys = sorted({*find_profile(version).speculative_keys, "disable_by_batch_size", "acceptance_method", "unheard_of"})
    config = {key: VALUES.get(key, 3) for key in keys} | {"method": method}
    image = f"vllm/vllm-openai:v{version}.0"
    migration = migrate(engine(LLAMA_8B, "-sc", json.dumps(config), image=image))
    written = {key: key for key in keys} | {"model": str(VALUES["model"])}
    written |= {"model": "--speculative-config model"} if method in {"ngram", "suffix", "magic"} else {}
    if method == "draft_model_eagle":
        written["model"] = "model"
    assert missing(migration, written.values()) == []


@pytest.mark.parametrize("value", [None, False, "false"])
def test_a_key_with_the_value_that_holds_anyway_is_told(value: object) -> None:
    keys = sorted(find_profile(KNOWN_VERSIONS[-1]).speculative_keys - {"method", "model"})
    config = {"method": "mtp", "num_speculative_tokens": 2, **dict.fromkeys(keys, value)}
    assert missing(migrate(engine("Qwen/Qwen3.5-27B", "-sc", json.dumps(config))), keys) == []


def test_a_dotted_path_says_a_part_of_a_key() -> None:
    flags = ["-sc.method=mtp", "-sc.num_speculative_tokens=2", "-sc.draft_load_config.load_format=dummy"]
    migration = migrate(engine("Qwen/Qwen3.5-27B", *flags, "-sc.draft_load_config.device", "cpu"))
    assert migration.body["spec"]["speculation"]["extraConfig"] == {
        "draft_load_config": {"load_format": "dummy", "device": "cpu"}
    }


@pytest.mark.parametrize("version", [KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]])
def test_each_flag_is_accounted_for(version: str) -> None:
    profile = find_profile(version)
    words: list[str] = []
    flags = {flag.name: flag for flag in profile.flags.values()}
    for name, flag in flags.items():
        words += [name, *({"0": []}.get(flag.values, ["7"]))]
    gone = {name: older for name, older in FLAGS.items() if name not in profile.flags}
    for name, older in gone.items():
        words += [name, *([] if older.takes in ("0", "?") else ["7"])]
    words += [word for name in OLD_KEYS if name not in profile.flags for word in (name, "7")]
    migration = migrate(engine(LLAMA_8B, *words, image=f"vllm/vllm-openai:v{version}.0"))
    assert missing(migration, [name.replace("--revision", "revision") for name in (*flags, *gone)]) == []


@pytest.mark.parametrize("version", [KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]])
def test_each_variable_is_accounted_for(version: str) -> None:
    others = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    names = sorted({*find_profile(version).variables, *VARIABLES, *others, "NCCL_DEBUG", "MINE"})
    env = [{"name": name, "value": "1"} for name in names]
    migration = migrate(engine(LLAMA_8B, image=f"vllm/vllm-openai:v{version}.0", env=env))
    assert missing(migration, names) == []


def test_each_label_and_annotation_is_accounted_for() -> None:
    body = engine()
    words = {"team": "a", "pod-template-hash": "b", "specdecode.io/x": "c", "kubectl.kubernetes.io/restartedAt": "d"}
    of_object = {"owner": "e", "deployment.kubernetes.io/revision": "1"}
    metadata = body["spec"]["template"]["metadata"]
    metadata["labels"] |= words
    metadata["annotations"] = words
    body["metadata"] |= {"labels": of_object, "annotations": of_object}
    migration = migrate(body)
    assert missing(migration, [f"{kind} {key}" for kind in ("label", "annotation") for key in words]) == []
    assert (
        missing(migration, [f"metadata.{kind} {key}" for kind in ("labels", "annotations") for key in of_object]) == []
    )


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--model", "org/a", "--model", LLAMA_8B], "--model org/a"),
        (["--speculative-config.method=ngram", "--spec-method", "suffix"], "says it again"),
        (["--model=/models/llama", "--revision", "main"], "revision main"),
    ],
)
def test_what_is_said_twice_or_in_vain_is_told(flags: list[str], name: str) -> None:
    body = engine(*flags, volumeMounts=[{"name": "models", "mountPath": "/models"}])
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "weights"}}
    body["spec"]["template"]["spec"]["volumes"] = [claim]
    assert missing(migrate(body), [name]) == []
