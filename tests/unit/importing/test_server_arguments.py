"""Settings that are kept, translated or lost."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import pytest
import yaml

from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.server_arguments import FLAGS, VARIABLES, older_variable, read_arguments
from specdecode_operator.importing.sources import read_words
from specdecode_operator.importing.speculation import OLD_KEYS
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import LLAMA_8B, asked, engine

YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}'


def imported(*flags: str, version: str = "0.33", env: dict[str, str] | None = None, **more: Any) -> Migration:
    variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
    return migrate(engine(LLAMA_8B, *flags, image=f"vllm/vllm-openai:v{version}.0", env=variables, **more))


def told(migration: Migration) -> str:
    return "; ".join(f"{each.name}: {each.result}" for each in migration.settings)


def decided(migration: Migration) -> str:
    return "; ".join(map(str, migration.decisions))


@pytest.mark.parametrize(
    "flags",
    [
        ["--rope-scaling", YARN],
        ["--hf-overrides", f'{{"rope_scaling": {YARN}, "max_position_embeddings": 131072}}'],
        [f'--hf-overrides={{"rope_parameters": {YARN}}}'],
        ["--hf-overrides.rope_parameters", YARN],
        ["--hf-overrides", f'{{"rope_parameters": {YARN[:-1]}, "rope_theta": 1000000}}}}'],
    ],
)
def test_yarn_rope_scaling_becomes_its_field(specdecode: Specdecode, write: WriteObject, flags: list[str]) -> None:
    source = write("d.yaml", engine("Qwen/Qwen3-32B", *flags, "--max-model-len", "131072"))
    finished = specdecode("import", "-f", source)
    assert finished.exit_code == 0, finished.output
    spec = yaml.safe_load(finished.stdout)["spec"]
    assert spec["target"]["ropeScaling"] == {"type": "yarn", "factor": "4", "originalMaxPositionEmbeddings": 32768}
    assert "engine" not in spec or "extraArgs" not in spec["engine"]


@pytest.mark.parametrize(
    "rope",
    [
        '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}',
        '{"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 32768}',
        '{"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1, "original_max_position_embeddings": 32768}',
        '{"rope_type": ["yarn"], "factor": 4.0}',
        "4",
    ],
)
def test_unsupported_rope_scaling_is_a_decision(specdecode: Specdecode, write: WriteObject, rope: str) -> None:
    source = write("d.yaml", engine("Qwen/Qwen3-32B", "--rope-scaling", rope, "--max-model-len", "131072"))
    assert "--hf-overrides" in asked(specdecode, source)
    assert specdecode("import", "-f", source).stdout.startswith("# Decide first")


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 81920},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 40960}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1.23456}},
        {"rope_parameters": json.loads(YARN), "max_position_embeddings": 65536},
        {"rope_parameters": json.loads(YARN) | {"rope_theta": 5000000}},
    ],
    ids=["a length that it multiplies", "an original length", "a factor of many digits", "another length", "a base"],
)
def test_rope_scaling_that_the_field_would_change_stays_an_argument(overrides: dict[str, Any]) -> None:
    migration = migrate(engine("Qwen/Qwen3-32B", "--hf-overrides", json.dumps(overrides)))
    assert "ropeScaling" not in migration.body["spec"]["target"]


ASKED = {
    "a flag that no version has": ["--max-modellen", "8192"],
    "a flag with the model behind it": ["--all-new=1"],
    "a base of rotation": ["--rope-theta", "1000000"],
    "scales of the KV cache": ["--calculate-kv-scales"],
    "a fixed KV cache": ["--kv-cache-memory-bytes", "10G"],
    "a fixed number of blocks": ["--num-gpu-blocks-override=1000"],
    "certificates of clients": ["--ssl-ca-certs", "/ca.crt"],
    "a socket": ["--uds", "/run/vllm.sock"],
    "an embedding server": ["--task", "embed"],
    "another device": ["--device", "tpu"],
    "a quantization while loading": ["--quantization", "bitsandbytes"],
    "INT8 while loading": ["-q", "experts_int8"],
    "a dtype that vLLM does not have": ["--dtype", "float64"],
    "a dtype of the KV cache": ["--kv-cache-dtype", "turboquant_4bit_nc"],
    "a length that is found out": ["--max-model-len", "auto"],
    "a backend that is gone": ["--guided-decoding-backend", "xgrammar:no-fallback"],
    "adapters of prompts": ["--enable-prompt-adapter"],
    "a flag of speculation that nobody knows": ["--speculative-magic", "1"],
    "a key of speculation that nobody knows": ["-sc", '{"method":"ngram","num_speculative_tokens":2,"magic":1}'],
    "nodes": ["--nnodes", "2", "--node-rank", "0"],
    "a follower": ["--headless"],
    "too new a flag": ["--custom-histogram-buckets=[1]"],
}


@pytest.mark.parametrize("flags", ASKED.values(), ids=ASKED)
def test_flag_that_changes_the_server_is_a_decision(flags: list[str]) -> None:
    version = "0.31" if "--custom-histogram-buckets=[1]" in flags else "0.33"
    migration = imported(*flags, version=version)
    assert migration.decisions, told(migration)
    assert migration.body["spec"]["target"]["model"] == LLAMA_8B


HARMLESS = {
    "the block manager": ["--use-v2-block-manager"],
    "swap": ["--swap-space", "4"],
    "several steps": ["--num_scheduler_steps=8", "--multi-step-stream-outputs", "false"],
    "the task of all": ["--task", "generate"],
    "the device of all": ["--device=cuda"],
    "logging": ["--disable-log-requests", "--disable-log-stats"],
    "a checkpoint's scheme": ["--quantization", "awq_marlin"],
    "reasoning": ["--enable-reasoning", "--reasoning-parser", "deepseek_r1"],
    "one node": ["--nnodes", "1"],
    "typical acceptance": ["-sc", '{"method":"ngram","num_speculative_tokens":2,"acceptance_method":"typical"}'],
}


@pytest.mark.parametrize("flags", HARMLESS.values(), ids=HARMLESS)
def test_dropped_harmless_flag_is_reported(flags: list[str]) -> None:
    migration = imported(*flags)
    assert not migration.decisions, decided(migration)
    assert flags[0].partition("=")[0].replace("_", "-").strip("-")[:9] in told(migration).replace("speculative-c", "sc")


CARRIED = {
    "a backend of structured outputs": (
        ["--guided-decoding-backend", "xgrammar"],
        ["--structured-outputs-config.backend", "xgrammar"],
    ),
    "a switch that is a key": (
        ["--guided-decoding-backend", "guidance", "--guided-decoding-disable-any-whitespace"],
        [
            "--structured-outputs-config.backend",
            "guidance",
            "--structured-outputs-config.disable_any_whitespace",
            "true",
        ],
    ),
    "sizes of graphs": (["--cuda-graph-sizes", "1", "2", "4"], ["--cudagraph-capture-sizes", "1", "2", "4"]),
    "a cache": (["--disable-mm-preprocessor-cache"], ["--mm-processor-cache-gb", "0"]),
    "redundant experts": (["--num_redundant_experts=0"], ["--eplb-config.num_redundant_experts", "0"]),
    "on in words": (["--enable-chunked-prefill=True"], ["--enable-chunked-prefill"]),
    "off in words": (["--enable-prefix-caching", "false"], ["--no-enable-prefix-caching"]),
    "off twice": (["--no-enable-prefix-caching=false"], ["--enable-prefix-caching"]),
    "no cache of prefixes": (["--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
}


@pytest.mark.parametrize(("flags", "now"), CARRIED.values(), ids=CARRIED)
def test_removed_flag_is_replaced_by_its_successor(flags: list[str], now: list[str]) -> None:
    migration = imported(*flags)
    assert not migration.decisions, decided(migration)
    assert migration.body["spec"]["engine"]["extraArgs"] == now


def test_renamed_flag_follows_the_vllm_version() -> None:
    old, new = "--enable-mamba-fine-grained-prefix-cache", "--enable-mamba-shared-prefix-checkpoint"
    assert imported(old, version="0.30").body["spec"]["engine"]["extraArgs"] == [old]
    assert imported(old, version="0.31").body["spec"]["engine"]["extraArgs"] == [new]


TWICE = {
    "a number": (["--max-num-seqs", "64", "--max-num-seqs=32"], ("maxNumSeqs", 32)),
    "by an alias": (["--max_model_len", "4096", "--max-model-len", "2k"], ("maxModelLen", 2000)),
    "on, then off": (["--enforce-eager", "--no-enforce-eager"], ("enforceEager", None)),
    "off, then on": (["--no-enforce-eager", "--enforce-eager"], ("enforceEager", True)),
}


@pytest.mark.parametrize(("flags", "expected"), TWICE.values(), ids=TWICE)
def test_last_value_of_a_repeated_flag_is_used(flags: list[str], expected: tuple[str, Any]) -> None:
    migration = imported(*flags)
    field, value = expected
    assert migration.body["spec"]["serving"].get(field) == value
    assert "vLLM uses the last value" in told(migration)


def test_dotted_keys_override_the_json_value() -> None:
    """vllm/utils/argparse_utils.py puts them together and appends them as one JSON value."""
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    migration = imported(
        *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=2"),
        *("--speculative-config", config),
    )
    assert migration.body["spec"]["speculation"] == {"method": "ngram", "numSpeculativeTokens": 2}


VARIABLES_CARRIED = {
    "VLLM_ATTENTION_BACKEND": ("FLASHINFER", ["--attention-backend", "FLASHINFER"]),
    "VLLM_FLASH_ATTN_VERSION": ("3", ["--attention-config.flash_attn_version", "3"]),
    "VLLM_ALL2ALL_BACKEND": ("deepep_low_latency", ["--all2all-backend", "deepep_low_latency"]),
}


@pytest.mark.parametrize("name", VARIABLES_CARRIED)
def test_variable_that_became_a_flag_is_imported_as_the_flag(name: str) -> None:
    value, flags = VARIABLES_CARRIED[name]
    migration = imported(env={name: value})
    assert not migration.decisions
    assert migration.body["spec"]["engine"] == {"extraArgs": flags}


@pytest.mark.parametrize(
    ("words", "name"),
    [(["-n2"], "--nnodes"), (["-n", "2"], "--nnodes"), (["-t", "2"], "--tensor-parallel-size")],
)
def test_short_flag_takes_its_value_as_in_vllm(words: list[str], name: str) -> None:
    first, *_, last = read_arguments([*words, "org/model"], find_profile("0.33"))
    assert (first.name, first.value, first.known) == (name, "2", True)
    assert (last.name, last.value) == ("", "org/model")


def test_replaced_variable_follows_the_vllm_version() -> None:
    name = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    kept = imported(version="0.28", env={name: "64"}).body["spec"]["engine"]
    assert kept == {"version": "0.28", "env": [{"name": name, "value": "64"}]}
    assert imported(env={name: "64"}).body["spec"]["engine"]["extraArgs"] == [
        "--prefix-cache-retention-interval",
        "64",
    ]
    renamed = imported(env={"VLLM_KIMI_K3_GEMM_RS": "1"}).body["spec"]["engine"]["env"]
    assert renamed == [{"name": "VLLM_ENABLE_GEMM_RS", "value": "1"}]


def test_flag_wins_over_the_variable_it_replaced() -> None:
    migration = imported("--attention-backend", "FLASH_ATTN", env={"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    assert migration.body["spec"]["engine"]["extraArgs"] == ["--attention-backend", "FLASH_ATTN"]
    assert "VLLM_ATTENTION_BACKEND" in decided(migration)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_ATTENTION_BACKEND", "XFORMERS"),
        ("VLLM_MAX_SPECULATION_MAGIC", "sk-secret"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0x"),
        ("VLLM_SERVER_DEV_MODE", "true!"),
        ("VLLM_TORCH_PROFILER_DIR", "/traces"),
        ("HF_ENDPOINT", "https://mirror.example.com"),
        ("VLLM_USE_MODELSCOPE", "True"),
    ],
)
def test_variable_that_changes_the_server_is_a_decision(name: str, value: str) -> None:
    migration = imported(env={name: value})
    assert name in decided(migration)
    assert value not in str(migration), "it may be a secret"


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_USE_V1", "1"), ("VLLM_SERVER_DEV_MODE", "0"), ("VLLM_ROCM_NEW", "1")]
)
def test_dropped_harmless_variable_is_reported(name: str, value: str) -> None:
    migration = imported(env={name: value})
    assert not migration.decisions
    assert name in told(migration)
    assert "engine" not in migration.body["spec"]


def test_env_from_is_a_decision() -> None:
    migration = imported(
        envFrom=[{"secretRef": {"name": "tuning"}}, {"prefix": "A_", "configMapRef": {"name": "more"}}]
    )
    assert "envFrom: tuning, more" in decided(migration)


def test_every_removed_flag_and_variable_has_an_entry() -> None:
    for version in KNOWN_VERSIONS:
        profile = find_profile(version)
        assert set(profile.removed_flags) <= {*FLAGS, *OLD_KEYS}
        gone = {name for known in KNOWN_VERSIONS for name in find_profile(known).variables} - profile.variables
        later = {name for name in gone if all(name not in find_profile(each).variables for each in KNOWN_VERSIONS[:1])}
        for name in gone - later:
            assert older_variable(name, version, profile.variables) is not None
            assert name in VARIABLES or older_variable(name, version, profile.variables).gone  # type: ignore[union-attr]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_successor_flags_exist_in_the_version(version: str) -> None:
    profile = find_profile(version)
    since = {"--prefix-cache-retention-interval", "--enable-mamba-shared-prefix-checkpoint"}
    for name, older in {**FLAGS, **VARIABLES}.items():
        now = older.now.partition(".")[0]
        assert not now or now in since or now in profile.flags or now.startswith("VLLM_"), name
        taken = profile.flags.get(name)
        assert taken is None or taken.name == name or taken.is_undone_by(name)


FILES = {
    "a template": ["--chat-template", "./loras/a"],
    "a template by its ending": ["--chat-template=loras/a.jinja"],
    "a plugin": ["--tool-parser-plugin", "/loras/a.py"],
}


@pytest.mark.parametrize("flags", FILES.values(), ids=FILES)
def test_file_argument_without_a_mount_is_a_decision(flags: list[str]) -> None:
    (decision,) = imported(*flags).decisions
    assert decision.field == "spec.engine.extraArgs"
    assert "loras/a" in decision.value
    assert migrate_workload(read_words(["vllm", "serve", LLAMA_8B, *flags])).decisions


@pytest.mark.parametrize(
    "flags",
    [
        ["--chat-template", "/held/a.jinja"],
        ["--chat-template", "{{ a / b }}.jinja"],
        ["--chat-template", "/vllm-workspace/examples/tool_chat_template_hermes.jinja"],
        ["--root-path", "/v1"],
    ],
)
def test_file_argument_in_a_mount_or_the_image_is_no_decision(flags: list[str]) -> None:
    body = engine(LLAMA_8B, *flags, volumeMounts=[{"name": "held", "mountPath": "/held"}])
    body["spec"]["template"]["spec"]["volumes"] = [{"name": "held", "configMap": {"name": "held"}}]
    assert not migrate(body).decisions


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_draft_keys_of_a_method_without_a_draft_are_reported(method: str) -> None:
    keys = {"model": "a/b", "max_model_len": 2048, "revision": "main", "draft_tensor_parallel_size": 1}
    config = {"method": method, "num_speculative_tokens": 3, "quantization": "fp8", **keys}
    migration = imported("-sc", json.dumps(config))
    assert "draft" not in decided(migration)
    assert migration.body["spec"]["speculation"] == {"method": method, "numSpeculativeTokens": 3}
    assert all(f"--speculative-config {key}: applies to drafts" in told(migration) for key in (*keys, "quantization"))


def test_lossy_rejection_sampling_is_a_decision_and_keeps_its_parameters() -> None:
    fly = {"method": "ngram", "num_speculative_tokens": 5, "rejection_sample_method": "fly"}
    plain = imported("-sc", json.dumps(fly | {"fly_window_size": 4, "fly_entropy_threshold": 0.3}))
    assert plain.body["spec"]["speculation"]["rejectionSampling"] == "fly"
    assert [each.field for each in plain.decisions] == ["spec.speculation.lossy"]
    assert "set lossy: true to accept that" in decided(plain)
    other = imported("-sc", json.dumps({"fly_entropy_top_k": 9, "fly_window_size": 2} | fly))
    assert [each.field for each in other.decisions] == ["spec.speculation.lossy"]
    assert other.body["spec"]["speculation"]["extraConfig"] == {"fly_entropy_top_k": 9, "fly_window_size": 2}
    block = imported("-sc", json.dumps(fly | {"rejection_sample_method": "block", "fly_entropy_top_k": 9}))
    assert not block.decisions
    assert "only applies to rejection_sample_method fly" in told(block)


# Nothing that a server is told disappears: each key, flag, variable, label and annotation is in object or report.

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
def test_fractional_cpu_cores_become_whole(cpu: object, cores: int) -> None:
    amounts = {"limits": {"cpu": cpu, "memory": "64Gi"}}
    body = engine(LLAMA_8B, image="my.io/vllm-cpu:v0.33.0", resources=amounts)
    assert migrate(body).body["spec"]["accelerator"]["cpuCores"] == cores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("version", [KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]])
def test_report_names_each_speculative_config_key(version: str, method: str) -> None:
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
def test_report_names_speculative_keys_with_default_values(value: object) -> None:
    keys = sorted(find_profile(KNOWN_VERSIONS[-1]).speculative_keys - {"method", "model"})
    config = {"method": "mtp", "num_speculative_tokens": 2, **dict.fromkeys(keys, value)}
    assert missing(migrate(engine("Qwen/Qwen3.5-27B", "-sc", json.dumps(config))), keys) == []


def test_dotted_paths_are_merged_into_their_key() -> None:
    flags = ["-sc.method=mtp", "-sc.num_speculative_tokens=2", "-sc.draft_load_config.load_format=dummy"]
    migration = migrate(engine("Qwen/Qwen3.5-27B", *flags, "-sc.draft_load_config.device", "cpu"))
    assert migration.body["spec"]["speculation"]["extraConfig"] == {
        "draft_load_config": {"load_format": "dummy", "device": "cpu"}
    }


@pytest.mark.parametrize("version", [KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]])
def test_report_names_each_flag(version: str) -> None:
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
def test_report_names_each_variable(version: str) -> None:
    others = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    names = sorted({*find_profile(version).variables, *VARIABLES, *others, "NCCL_DEBUG", "MINE"})
    env = [{"name": name, "value": "1"} for name in names]
    migration = migrate(engine(LLAMA_8B, image=f"vllm/vllm-openai:v{version}.0", env=env))
    assert missing(migration, names) == []


def test_report_names_each_label_and_annotation() -> None:
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
        (["--speculative-config.method=ngram", "--spec-method", "suffix"], "repeats it"),
        (["--model=/models/llama", "--revision", "main"], "revision main"),
    ],
)
def test_repeated_or_useless_setting_is_reported(flags: list[str], name: str) -> None:
    body = engine(*flags, volumeMounts=[{"name": "models", "mountPath": "/models"}])
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "weights"}}
    body["spec"]["template"]["spec"]["volumes"] = [claim]
    assert missing(migrate(body), [name]) == []
