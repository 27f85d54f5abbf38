"""Launch of an emulated engine."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from specdecode_operator.cli.render import Options, render
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.replay.emulated.engine_model import Settings
from specdecode_operator.replay.emulation import (
    BEGIN,
    END,
    Emulation,
    EngineEnvironment,
    NotEmulatedError,
    emulation,
    text_config,
    text_tokens,
    tokenizer_files,
    tokenizer_json,
    transfer_warnings,
    write_model_folder,
)
from specdecode_operator.replay.model_file import FittedModel, Origin
from specdecode_operator.sizing.memory.kv_cache import cache_layout

EXAMPLES = Path(__file__).parents[3] / "examples"

MODEL = FittedModel(
    schema=1,
    origin=Origin(gpu="NVIDIA-H200", tp=2),
    step_time={"curve": [[1, 8.0]]},
    acceptance={
        "num_speculative_tokens": 5,
        "outcomes": [[5, 0], [5, 5]],
        "classes": [{"share": 1, "outcomes": [0.5, 0.5]}],
    },
)
DENSE = {
    "target": {"model": "meta-llama/Llama-3.1-70B-Instruct"},
    "speculation": {
        "method": "draft_model",
        "numSpeculativeTokens": 5,
        "draft": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "parallelism": {"tensor": 2},
    "accelerator": {"products": ["NVIDIA-H200"]},
    "serving": {"maxModelLen": 8192, "enforceEager": True, "tlsSecret": {"name": "tls"}},
}
HYBRID = {
    "target": {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct"},
    "speculation": {"method": "mtp", "numSpeculativeTokens": 2},
    "parallelism": {"tensor": 2},
    "accelerator": {"products": ["NVIDIA-H200"]},
}
LATENT = {"target": {"model": "deepseek-ai/DeepSeek-V2-Lite"}, "accelerator": {"products": ["NVIDIA-H200"]}}


def _launch(spec: dict[str, Any], folder: Path) -> Launch:
    path = folder / "plan.yaml"
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "a"}}
    path.write_text(yaml.safe_dump(body | {"spec": spec}))
    (found,), errors = render([str(path)], Options())
    assert not errors
    assert found.deployment is not None, found.refusal
    outcome = found.deployment.desired.outcome
    assert isinstance(outcome, Launch)
    return outcome


def _emulation(spec: dict[str, Any], folder: Path, model: FittedModel = MODEL) -> Emulation:
    return emulation(_launch(spec, folder), model)


def _value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_emulated_engine_arguments_follow_deployment(tmp_path: Path) -> None:
    launch = _launch(DENSE, tmp_path)
    arguments = emulation(launch, MODEL).arguments(Path("/t"), Path("/d"), Path("/s.json"))
    assert arguments[0] == "/t"
    assert _value(arguments, "--tensor-parallel-size") == "2"
    assert _value(arguments, "--max-model-len") == "8192"
    assert _value(arguments, "--num-gpu-blocks-override") == str(launch.plan.chosen.budget.num_blocks)
    assert _value(arguments, "--distributed-executor-backend") == "specdecode_emulated.executor.EmulatedExecutor"
    assert json.loads(_value(arguments, "--additional-config")) == {"specdecode_emulated": "/s.json"}
    speculation = json.loads(_value(arguments, "--speculative-config"))
    assert (speculation["method"], speculation["num_speculative_tokens"], speculation["model"]) == (
        "draft_model",
        5,
        "/d",
    )
    assert not {"--gpu-memory-utilization", "--ssl-certfile", "--quantization", "--host"} & set(arguments)


def test_adaptive_verification_is_not_passed_to_emulated_engine(tmp_path: Path) -> None:
    drafting = DENSE["speculation"] | {"adaptiveVerification": True}  # type: ignore[operator]
    spec = DENSE | {"speculation": drafting, "serving": {"maxModelLen": 8192}}
    arguments = _emulation(spec, tmp_path).arguments(tmp_path / "target", tmp_path / "draft", tmp_path / "told")
    config = json.loads(_value(arguments, "--speculative-config"))
    assert "enable_adaptive_verification" not in config, "model runner V1 would refuse it"


def test_async_scheduling_follows_hardware_of_plan(tmp_path: Path) -> None:
    with (EXAMPLES / "tiny-cpu.yaml").open() as stream:
        tiny = yaml.safe_load(stream)["spec"]
    for spec, ahead in ((tiny, False), (DENSE, True)):
        arguments = _emulation(spec, tmp_path).arguments(Path("/t"), Path("/d"), Path("/s.json"))
        assert ("--no-async-scheduling" not in arguments) == ahead


@pytest.mark.parametrize("spec", [DENSE, HYBRID, LATENT])
def test_emulated_layers_match_kv_cache_of_plan(spec: dict[str, Any], tmp_path: Path) -> None:
    launch = _launch(spec, tmp_path)
    emulated = emulation(launch, MODEL)
    told = msgspec.convert(emulated.plugin_settings((300, 1000), seed=3), Settings)
    grouping = cache_layout(launch.facts.pair, launch.plan.chosen.split)[0]
    per_layer = [each.page_bytes for each in told.layers for _ in range(each.count)]
    assert len(per_layer) == sum(group.num_layers for group in grouping.groups)
    assert told.kv_cache_bytes == launch.plan.chosen.budget.num_blocks * grouping.bytes_per_block
    for each in told.layers:
        if each.kind == "state":
            assert each.state_bytes <= each.page_bytes
        else:
            assert each.block_size * each.token_bytes == each.page_bytes
    assert (told.gpu, told.seed, told.text) == ("NVIDIA-H200", 3, (300, 1000))


@pytest.mark.parametrize(
    ("spec", "model", "words"),
    [
        (HYBRID | {"parallelism": {"tensor": 1, "pipeline": 2}}, MODEL, "spec.parallelism.pipeline"),
        (HYBRID | {"parallelism": {"tensor": 2, "data": 2}}, MODEL, "spec.parallelism.data"),
        (LATENT, FittedModel(schema=1, origin=Origin()), "step_time"),
        (DENSE, FittedModel(schema=1, origin=Origin(), step_time=MODEL.step_time), "acceptance"),
    ],
)
def test_unsupported_emulation_is_refused_with_fix(
    spec: dict[str, Any], model: FittedModel, words: str, tmp_path: Path
) -> None:
    with pytest.raises(NotEmulatedError, match=words):
        _emulation(spec, tmp_path, model)


def _of(gpu: str) -> FittedModel:
    return FittedModel(schema=1, origin=Origin(gpu=gpu, tp=2), step_time=MODEL.step_time, acceptance=MODEL.acceptance)


def test_differences_from_fitted_model_cause_warnings(tmp_path: Path) -> None:
    dense = _emulation(DENSE, tmp_path)
    assert transfer_warnings(dense, 2, "NVIDIA-H200") == []
    for short in ("H200", "NVIDIA H200"):
        assert transfer_warnings(replace(dense, model=_of(short)), 2, "NVIDIA-H200") == []
    assert transfer_warnings(replace(dense, model=_of("cpu")), 2, "CPU") == []
    (line,) = transfer_warnings(replace(dense, model=_of("emulated H200")), 2, "NVIDIA-H200")
    assert "emulated H200" in line
    gpu, parallelism = transfer_warnings(dense, 4, "NVIDIA-H100-80GB-HBM3")
    assert ("GPU H200" in gpu, "tensor parallelism 2" in parallelism) == (True, True)
    wider = DENSE | {"speculation": DENSE["speculation"] | {"numSpeculativeTokens": 7}}  # type: ignore[operator]
    (line,) = transfer_warnings(_emulation(wider, tmp_path), 2, "NVIDIA-H200")
    assert "K 5" in line


# The environment that an emulated engine runs in.


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, None),
        ("", "specdecode_emulated,specdecode_recorder"),
        ("mine", "mine,specdecode_emulated,specdecode_recorder"),
    ],
)
def test_emulation_plugins_are_added_to_vllm_plugins(
    given: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    assert EngineEnvironment.at(None).variables([], {}).get("VLLM_PLUGINS") == told


def test_pythonpath_has_plugins_then_packages_then_existing_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    variables = EngineEnvironment.at(tmp_path).variables([Path("/plugins")], {"MORE": "1"})
    assert variables["PYTHONPATH"].split(os.pathsep) == ["/plugins", str(tmp_path), "/there"]
    # With it vLLM would look for no platform.
    assert "VLLM_TARGET_DEVICE" not in variables
    assert variables["MORE"] == "1"


# Folders of models without weights.

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "eos_token_id": [128001, 128009],
    "quantization_config": {"quant_method": "fp8"},
    "num_hidden_layers": 32,
}


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_model_folder_has_config_without_quantization_and_a_tokenizer(tmp_path: Path) -> None:
    first, last = write_model_folder(tmp_path / "m", CONFIG, None)
    config = _read(tmp_path / "m", "config.json")
    assert config["num_hidden_layers"] == 32
    assert "quantization_config" not in config
    assert (config["bos_token_id"], config["eos_token_id"]) == (BEGIN, END)
    assert _read(tmp_path / "m", "generation_config.json")["eos_token_id"] == END
    vocabulary = _read(tmp_path / "m", "tokenizer.json")["model"]["vocab"]
    text = {token for token, number in vocabulary.items() if first <= number <= last}
    assert {"th", "\u0120a"} <= text
    assert text.isdisjoint({"<s>", "</s>", '"', "a"})


def test_own_tokenizer_of_model_is_copied_with_its_eos(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        (own / name).write_text('{"own": true}')
    assert write_model_folder(tmp_path / "m", CONFIG, own) == (300, 1000)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert _read(tmp_path / "m", "tokenizer.json") == {"own": True}
    assert _read(tmp_path / "m", "config.json")["eos_token_id"] == CONFIG["eos_token_id"]


@pytest.mark.parametrize(("vocabulary", "tokens"), [(128256, 960), (960, 960), (400, 400), (258, 258), (64, 258)])
def test_tokenizer_fits_into_vocabulary_size(vocabulary: int, tokens: int) -> None:
    made = tokenizer_json(vocabulary)
    assert sorted(made["model"]["vocab"].values()) == list(range(tokens))
    first, last = text_tokens(made)
    assert END < first < last < tokens


def test_text_config_of_vision_model_is_used() -> None:
    seeing = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 48},
        "vision_config": {"num_hidden_layers": 27},
    }
    assert text_config(seeing) == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 48,
    }
    assert text_config(CONFIG) == CONFIG
    named = seeing | {"text_config": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}}
    assert text_config(named)["architectures"] == ["DeepseekV3ForCausalLM"]


def test_folder_without_tokenizer_has_no_tokenizer_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == []
    assert tokenizer_files(tmp_path / "nowhere") == []
    (tmp_path / "tekken.json").write_text("{}")
    assert {path.name for path in tokenizer_files(tmp_path)} == {"tokenizer_config.json", "tekken.json"}
