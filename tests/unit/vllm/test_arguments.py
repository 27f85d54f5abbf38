"""Arguments of the engine."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.documents.launch_tables import with_version_rows
from specdecode_operator.api.deployment import EnvVar
from specdecode_operator.api.speculation import Draft
from specdecode_operator.enums import Method, OnlineQuantization
from specdecode_operator.vllm import profiles
from specdecode_operator.vllm.arguments import ARGUMENTS, command_line
from specdecode_operator.vllm.environment import env_problems, environment
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.settings import EngineSettings, ScheduleRange
from specdecode_operator.vllm.speculative_config import DRAFT_HEAD_KEY, SPECULATIVE_KEYS, XPRESS_KEY, complete_schedule
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import CPU, DRAFT_MODEL, NGRAM, PLAIN, SCHEDULED

PROFILE = find_profile("0.32")


def value_of(flag: str, settings: EngineSettings) -> str:
    """Return what follows a flag that takes one value."""
    line = command_line(settings, PROFILE)
    assert line.count(flag) == 1
    return line[line.index(flag) + 1]


def test_complete_command_line_on_gpu() -> None:
    settings = replace(PLAIN, speculation=DRAFT_MODEL, extra_args=("--async-scheduling",))
    assert command_line(settings, PROFILE) == [
        *("vllm", "serve", "/models/target"),
        *("--served-model-name", "target"),
        *("--host", "0.0.0.0"),
        *("--port", "8000"),
        *("--dtype", "auto"),
        *("--tensor-parallel-size", "2"),
        *("--distributed-executor-backend", "mp"),
        *("--max-model-len", "8192"),
        *("--max-num-seqs", "256"),
        *("--max-num-batched-tokens", "8192"),
        *("--kv-cache-dtype", "auto"),
        *("--block-size", "16"),
        *("--gpu-memory-utilization", "0.92"),
        "--speculative-config",
        '{"draft_tensor_parallel_size":2,"method":"draft_model","model":"/models/draft","num_speculative_tokens":5}',
        *("--shutdown-timeout", "60"),
        "--async-scheduling",
    ]


def test_cpu_kv_cache_is_set_by_environment_without_utilization() -> None:
    settings = replace(PLAIN, cpu=CPU, tensor_parallel_size=1)
    assert "--gpu-memory-utilization" not in command_line(settings, PROFILE)
    variables = environment(settings)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("cores", "tensor", "threads"), [(8, 2, "4"), (7, 2, "3"), (1, 2, "1")])
def test_cpu_ranks_share_the_cores(cores: int, tensor: int, threads: str) -> None:
    settings = replace(PLAIN, cpu=replace(CPU, cores=cores), tensor_parallel_size=tensor)
    assert environment(settings)["OMP_NUM_THREADS"] == threads


def test_cpu_ranks_share_the_kv_cache() -> None:
    """vllm/v1/worker/cpu_worker.py: the variable is what every rank takes."""
    settings = replace(PLAIN, cpu=replace(CPU, kv_cache_gib=6), tensor_parallel_size=2)
    assert environment(settings)["VLLM_CPU_KVCACHE_SPACE"] == "3"


@pytest.mark.parametrize("settings", [PLAIN, replace(PLAIN, cpu=CPU)], ids=["gpu", "cpu"])
def test_engine_environment_is_offline_without_telemetry_or_dev_mode(settings: EngineSettings) -> None:
    variables = environment(settings)
    on = {name for name, value in variables.items() if value == "1"}
    assert {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"} <= on
    assert "VLLM_SERVER_DEV_MODE" not in variables
    assert env_problems([EnvVar(name=name, value="1") for name in ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS")]) == []


@pytest.mark.parametrize(
    ("change", "flag", "value"),
    [
        ({"online_quantization": OnlineQuantization.FP8}, "--quantization", "fp8_per_tensor"),
        ({"dtype": "bfloat16"}, "--dtype", "bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "fp8"),
        ({"port": 9000}, "--port", "9000"),
        ({"max_num_seqs": 7}, "--max-num-seqs", "7"),
        ({"max_num_batched_tokens": 77}, "--max-num-batched-tokens", "77"),
        ({"block_size": 32}, "--block-size", "32"),
        ({"max_model_len": 99}, "--max-model-len", "99"),
        ({"tensor_parallel_size": 8}, "--tensor-parallel-size", "8"),
        ({"shutdown_timeout_s": 5}, "--shutdown-timeout", "5"),
    ],
)
def test_each_setting_reaches_its_flag(change: dict[str, Any], flag: str, value: str) -> None:
    assert value_of(flag, replace(PLAIN, **change)) == value


def test_unset_settings_are_not_rendered() -> None:
    line = command_line(PLAIN, PROFILE)
    assert not {"--quantization", "--enforce-eager", "--speculative-config"} & set(line)
    assert "--enforce-eager" in command_line(replace(PLAIN, enforce_eager=True), PROFILE)


def test_all_served_names_follow_one_flag() -> None:
    line = command_line(replace(PLAIN, served_model_names=("a", "b")), PROFILE)
    at = line.index("--served-model-name")
    assert line[at : at + 4] == ["--served-model-name", "a", "b", "--host"]


def test_every_rendered_flag_is_known_to_vllm() -> None:
    assert {argument.flag.partition(".")[0] for argument in ARGUMENTS} <= set(PROFILE.flags)


def test_speculative_config_has_all_draft_settings() -> None:
    speculation = replace(
        DRAFT_MODEL,
        draft_online_quantization=OnlineQuantization.FP8,
        draft=Draft(model="org/draft", max_model_len=4096),
    )
    assert json.loads(value_of("--speculative-config", replace(PLAIN, speculation=speculation))) == {
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "model": "/models/draft",
        "quantization": "fp8_per_tensor",
        "max_model_len": 4096,
        "draft_tensor_parallel_size": 2,
    }


def test_ngram_speculative_config_names_no_draft() -> None:
    assert json.loads(value_of("--speculative-config", replace(PLAIN, speculation=NGRAM))) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def test_schedule_gaps_use_num_speculative_tokens() -> None:
    config = json.loads(value_of("--speculative-config", replace(PLAIN, speculation=SCHEDULED)))
    assert config["num_speculative_tokens_per_batch_size"] == [
        [1, 16, 5],
        [17, 63, 5],
        [64, 128, 0],
        [129, 256, 5],
    ]


@given(
    boundaries=st.lists(st.integers(1, 300), min_size=2, max_size=12, unique=True).map(sorted),
    data=st.data(),
    max_num_seqs=st.integers(1, 300),
)
def test_completed_schedule_agrees_with_the_given_ranges(
    boundaries: list[int], data: st.DataObject, max_num_seqs: int
) -> None:
    ranges = tuple(
        ScheduleRange(first, last, data.draw(st.integers(0, 5)))
        for first, last in zip(boundaries[::2], boundaries[1::2], strict=False)
    )
    complete = complete_schedule(speculating_with(Method.NGRAM, 5, schedule=ranges), max_num_seqs)
    assert complete[0].first == 1
    assert all(after.first == before.last + 1 for before, after in itertools.pairwise(complete))
    assert complete[-1].last >= max_num_seqs
    for running in range(1, max_num_seqs + 1):
        said = [part.num_speculative_tokens for part in ranges if part.first <= running <= part.last] or [5]
        meant = [part.num_speculative_tokens for part in complete if part.first <= running <= part.last]
        assert meant == said


@pytest.mark.parametrize(
    ("last", "tail"), [(7, [ScheduleRange(8, 8, 5)]), (6, [ScheduleRange(7, 8, 5)]), (8, []), (99, [])]
)
def test_batch_sizes_after_the_last_range_use_num_speculative_tokens(last: int, tail: list[ScheduleRange]) -> None:
    only = ScheduleRange(1, last, 0)
    assert complete_schedule(speculating_with(Method.NGRAM, 5, schedule=(only,)), 8) == [only, *tail]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "spec.accelerator.kvCacheGiB"),
        ("HF_HUB_OFFLINE", "spec.models"),
        ("VLLM_API_KEY", "spec.serving.apiKeySecret"),
        ("HF_TOKEN", "spec.models.hubTokenSecret"),
        ("VLLM_SERVER_DEV_MODE", "remove it"),
    ],
)
def test_operator_owned_variables_are_refused(name: str, fix: str) -> None:
    (problem,) = env_problems([EnvVar(name="A", value="b"), EnvVar(name=name, value="1")])
    assert problem.field == "spec.engine.env[1].name"
    assert problem.value == name
    assert fix in problem.message


# docs/reference/launch.md and vllm-rules.md describe the code; generated tables are compared in tests/unit/docs.

REFERENCE = Path(__file__).parents[3] / "docs/reference"
DOCUMENT, RULES, FIELDS = (REFERENCE / f"{name}.md" for name in ("launch", "vllm-rules", "deployment-fields"))
ENGINE = Path(profiles.__file__).parent


def rows(columns: str, document: Path = DOCUMENT) -> list[list[str]]:
    """Cells of the table whose first columns have these names."""
    (table,) = re.findall(rf"^\| {columns} \|.*\n\| --- .*\n((?:\|.*\n)+)", document.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_documented_tables_are_up_to_date() -> None:
    assert with_version_rows(DOCUMENT.read_text()) == DOCUMENT.read_text(), "stale: run ./just docs"


def test_every_argument_and_speculative_key_is_documented() -> None:
    becomes = {row[1] for row in rows(r"field \| becomes", FIELDS)}
    for argument in ARGUMENTS:
        assert f"`{argument.flag}`" in becomes or argument.flag == "--speculative-config"
    for key in SPECULATIVE_KEYS:
        assert f"`{key.key}` in `--speculative-config`" in becomes


def test_speculative_keys_exist_in_every_version_or_are_checked() -> None:
    keys = {key.key for key in SPECULATIVE_KEYS}
    assert keys <= find_profile(KNOWN_VERSIONS[-1]).speculative_keys
    for version in KNOWN_VERSIONS:
        # test_methods.py shows that older versions are not told.
        assert keys - find_profile(version).speculative_keys <= {DRAFT_HEAD_KEY, XPRESS_KEY}


def test_every_vllm_version_is_documented() -> None:
    assert [row[0] for row in rows("vLLM")] == list(reversed(KNOWN_VERSIONS))


def test_source_of_every_documented_rule_is_in_the_code() -> None:
    """That the rule holds is seen in tests/unit/deployment/test_validation.py."""
    package = ENGINE.parent
    rules = (path for room in ("vllm", "deployment", "sizing") for path in package.glob(f"{room}/*.py"))
    told = (*rules, *package.glob("vllm/data/*.json"))
    code = "\n".join(path.read_text() for path in told)
    for *_, source in rows("field", RULES):
        assert source.strip("`") in code, source
