"""What we say about vLLM, against the real vLLM: parser, configuration, scheduler.

One engine process answers everything (see engine_oracle.py); the tests below
read its answers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.deployment import Method
from specdecode_operator.engine import profiles
from specdecode_operator.engine.arguments import command_line
from specdecode_operator.engine.environment import environment
from specdecode_operator.engine.extra_args import extra_args_problems
from specdecode_operator.engine.profiles import find_profile
from specdecode_operator.engine.serving_rules import serving_problems
from specdecode_operator.engine.settings import (
    CpuSettings,
    EngineSettings,
    OnlineQuantization,
    Platform,
    ScheduleRange,
    SpeculationSettings,
)
from specdecode_operator.engine.speculation_rules import speculation_problems
from specdecode_operator.engine.speculative_config import complete_schedule
from tests.engine.engine_process import HERE, Engine

PROFILE = find_profile("0.32")
TARGET, DRAFT, OTHER_VOCABULARY, EAGLE_PATH = "target", "draft", "other-vocabulary", "eagle-house/draft"

DRAFT_MODEL = SpeculationSettings(Method.DRAFT_MODEL, 5, draft_model=DRAFT)
FULL_DRAFT = replace(DRAFT_MODEL, draft_online_quantization=OnlineQuantization.FP8, draft_max_model_len=256)
NGRAM = SpeculationSettings(Method.NGRAM, 4, prompt_lookup_min=2, prompt_lookup_max=4)
SCHEDULED = replace(DRAFT_MODEL, schedule=(ScheduleRange(3, 8, 2), ScheduleRange(20, 30, 0)))

GPU = EngineSettings(
    model=TARGET,
    served_model_names=("one", "two"),
    max_model_len=512,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    kv_cache_dtype="auto",
    block_size=32,
    memory_utilization_percent=92,
    tensor_parallel_size=1,
    port=8000,
    shutdown_timeout_s=60,
)
CPU = replace(GPU, cpu=CpuSettings(kv_cache_gib=1, cores=2), block_size=128)

GOOD = {
    f"{platform}-{name}": replace(base, speculation=speculation)
    for platform, base in (("gpu", GPU), ("cpu", CPU), ("gpu-tp2", replace(GPU, tensor_parallel_size=2)))
    for name, speculation in (("none", None), ("draft", DRAFT_MODEL), ("ngram", NGRAM), ("schedule", SCHEDULED))
} | {
    "gpu-everything": replace(
        GPU,
        dtype="bfloat16",
        online_quantization=OnlineQuantization.FP8,
        kv_cache_dtype="fp8",
        enforce_eager=True,
        speculation=FULL_DRAFT,
        extra_args=("--async-scheduling", "--seed=3"),
    ),
    "ngram-one-bound": replace(GPU, speculation=SpeculationSettings(Method.NGRAM, 2, prompt_lookup_max=3)),
}
BAD = {
    "vocabulary": (
        replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=OTHER_VOCABULARY)),
        "same vocabulary size",
    ),
    "draft-length": (replace(GPU, speculation=replace(DRAFT_MODEL, draft_max_model_len=2048)), "max_model_len"),
    "no-tokens": (replace(GPU, speculation=replace(NGRAM, num_speculative_tokens=0)), "num_speculative_tokens"),
    "lookup": (replace(GPU, speculation=replace(NGRAM, prompt_lookup_min=5)), "prompt_lookup_min"),
    "batch": (replace(GPU, max_num_batched_tokens=32), "max_num_seqs"),
}
SCHEDULES = [((1, 4, 1),), ((3, 8, 2), (20, 30, 0)), ((1, 16, 0), (17, 64, 3)), ((60, 900, 1),)]

PASSING_EXTRA = [
    "--async-sched",
    "--no_async_scheduling",
    "--seed -1",
    "--max-logpr 20",
    "--compilation-config.cudagraph_mode NONE",
    "-cc.cudagraph_mode=NONE",
    "-O3",
    "-O 3",
    "--watermark 0.5",
    "--watermark=-0.5",
]
FAILING_EXTRA = [
    "--xyzzy",
    "--max-num 1",
    "--seed",
    "--watermark -0.5",
    "--seed --async-scheduling",
    "--async-scheduling=true",
    "--async-scheduling true",
    "--seed 1 2",
    "-O fast",
    "-tp2",
]


def tiny_config(vocab_size: int) -> str:
    """Return a config.json of a Llama that nobody will ever load."""
    return json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": vocab_size,
            "max_position_embeddings": 1024,
            "torch_dtype": "bfloat16",
        }
    )


def with_models_under(folder: Path, settings: EngineSettings) -> EngineSettings:
    """Return the settings with real paths of models."""
    speculation = settings.speculation
    if speculation and speculation.draft_model:
        speculation = replace(speculation, draft_model=str(folder / speculation.draft_model))
    return replace(settings, model=str(folder / settings.model), speculation=speculation)


def serve_line(settings: EngineSettings) -> list[str]:
    """Return what follows `vllm serve`."""
    return command_line(settings, PROFILE)[2:]


@pytest.fixture(scope="session")
def answers(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what the real vLLM makes of everything above."""
    folder = tmp_path_factory.mktemp("models")
    for name, vocab_size in ((TARGET, 1024), (DRAFT, 1024), (OTHER_VOCABULARY, 2048), (EAGLE_PATH, 1024)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(tiny_config(vocab_size), encoding="utf-8")
    removed = {f"removed {flag}": [TARGET, flag, "1"] for flag in PROFILE.removed_flags}
    extra = {f"extra {line}": [TARGET, *line.split()] for line in PASSING_EXTRA + FAILING_EXTRA}
    flipped = replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=EAGLE_PATH))
    questions = {
        "parse": {name: serve_line(settings) for name, settings in GOOD.items()} | removed | extra,
        "start": {
            name: serve_line(with_models_under(folder, settings))
            for name, settings in (GOOD | {name: bad for name, (bad, _) in BAD.items()} | {"flipped": flipped}).items()
        },
        "schedules": [
            [[[part.first, part.last, part.num_speculative_tokens] for part in completed(ranges)], GPU.max_num_seqs, 5]
            for ranges in SCHEDULES
        ],
        "cpu_block_sizes": ["16", "32", "48", "128"],
    }
    output = folder / "answers.json"
    engine.run(str(HERE / "engine_oracle.py"), str(output), text_in=json.dumps(questions))
    return json.loads(output.read_text(encoding="utf-8"))


def completed(ranges: tuple[tuple[int, int, int], ...]) -> list[ScheduleRange]:
    """Return the schedule that the operator would render."""
    speculation = replace(NGRAM, num_speculative_tokens=5, schedule=tuple(ScheduleRange(*part) for part in ranges))
    return complete_schedule(speculation, GPU.max_num_seqs)


def test_flag_table_is_what_the_parser_says(engine: Engine) -> None:
    kept = Path(profiles.__file__).parent / "data" / "vllm-0.32.flags.json"
    dumped = engine.run(str(HERE / "dump_engine_flags.py"))
    assert json.loads(dumped) == json.loads(kept.read_text(encoding="utf-8")), (
        "dump_engine_flags.py says how to renew it"
    )


@pytest.mark.parametrize("name", GOOD)
def test_rendered_line_is_parsed_to_what_was_meant(answers: Any, name: str) -> None:
    settings, parsed = GOOD[name], answers["parse"][name]
    assert parsed["ok"], parsed
    options = parsed["value"]
    assert options["model_tag"] == settings.model
    assert options["served_model_name"] == list(settings.served_model_names)
    assert options["tensor_parallel_size"] == settings.tensor_parallel_size
    assert options["max_num_seqs"] == settings.max_num_seqs
    assert options["max_num_batched_tokens"] == settings.max_num_batched_tokens
    assert options["block_size"] == settings.block_size
    assert options["enforce_eager"] == settings.enforce_eager
    assert options["shutdown_timeout"] == settings.shutdown_timeout_s
    assert options["gpu_memory_utilization"] == 0.92


@pytest.mark.parametrize("name", GOOD)
def test_engine_configures_itself_as_was_meant(answers: Any, name: str) -> None:
    settings, started = GOOD[name], answers["start"][name]
    assert started["ok"], started
    speculation = settings.speculation
    assert started["value"]["method"] == (speculation.method.value if speculation else None)
    assert started["value"]["num_speculative_tokens"] == (speculation.num_speculative_tokens if speculation else None)
    assert started["value"]["tensor_parallel_size"] == settings.tensor_parallel_size
    assert started["value"]["max_model_len"] == settings.max_model_len
    assert started["value"]["block_size"] == settings.block_size


@pytest.mark.parametrize("name", BAD)
def test_what_our_rules_refuse_the_engine_refuses(answers: Any, name: str) -> None:
    settings, complaint = BAD[name]
    assert complaint in answers["start"][name].get("error", "accepted")
    if name != "vocabulary":
        assert speculation_problems(settings, PROFILE) + serving_problems(settings, PROFILE)


def test_a_path_really_flips_the_method(answers: Any) -> None:
    assert answers["start"]["flipped"]["value"]["method"] == PROFILE.draft_path_markers["eagle-"] == "eagle"


@pytest.mark.parametrize("flag", PROFILE.removed_flags)
def test_removed_flag_is_really_gone(answers: Any, flag: str) -> None:
    assert answers["parse"][f"removed {flag}"]["error"].startswith("exit 2")


@pytest.mark.parametrize("line", PASSING_EXTRA + FAILING_EXTRA)
def test_extra_args_are_read_as_the_parser_reads_them(answers: Any, line: str) -> None:
    parsed = answers["parse"][f"extra {line}"]
    assert parsed["ok"] == (extra_args_problems(line.split(), PROFILE) == []), parsed


@pytest.mark.parametrize("index", range(len(SCHEDULES)))
def test_scheduler_uses_the_schedule_that_the_user_wrote(answers: Any, index: int) -> None:
    lookup = answers["schedules"][index]["value"]
    for running, tokens in enumerate(lookup, start=1):
        said = [k for first, last, k in SCHEDULES[index] if first <= running <= last] or [5]
        assert [tokens] == said, f"with {running} running requests"


@pytest.mark.parametrize("size", ["16", "32", "48", "128"])
def test_cpu_block_sizes_are_those_that_the_backend_takes(answers: Any, size: str) -> None:
    assert answers["cpu_block_sizes"][size]["ok"] == (int(size) % PROFILE.block_size_multiples[Platform.CPU] == 0)


def test_variables_are_ones_that_the_engine_reads(engine: Engine) -> None:
    look = "import json, vllm.envs as envs; print(json.dumps(sorted(envs.environment_variables)))"
    known = json.loads(engine.run("-c", look).splitlines()[-1])
    ours = {name for name in environment(CPU) if name.startswith("VLLM_")}
    assert ours <= set(known)
