"""One version of the real vLLM, and whether it takes a command line for what was meant."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdecode_operator.enums import Method, Platform
from specdecode_operator.sizing.version_rules import ModelTraits, Runner, find_version_rules
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import EngineSettings
from specdecode_operator.vllm.settings_watch import word
from specdecode_operator.vllm.speculation_rules import draft_slots
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS, SPOKEN_KEYS
from tests.engine.contract_cases import METHODS, with_models_under
from tests.engine.oracle_process import Answer, Oracle
from tests.support.engine_settings import replace

BLOCKS = (Method.DFLASH, Method.DSPARK)
"""Methods that always propose all tokens in one pass."""


@dataclass(frozen=True, repr=False)
class Vllm:
    """One version, running on H100s and on the CPU, and what we know of it."""

    profile: EngineProfile
    h100: Oracle
    cpu: Oracle
    models: Path

    def line(self, settings: EngineSettings) -> list[str]:
        """Return what follows `vllm serve`, with models that exist."""
        return command_line(with_models_under(self.models, settings), self.profile)[2:]

    def oracle(self, settings: EngineSettings) -> Oracle:
        """Return the one that runs where the settings want it."""
        return self.cpu if settings.platform is Platform.CPU else self.h100

    def parse(self, settings: EngineSettings) -> Answer:
        """Return what its parser makes of the settings."""
        return self.oracle(settings).ask("options_of", self.line(settings))

    def start(self, settings: EngineSettings) -> Answer:
        """Return what its configuration makes of the settings."""
        return self.oracle(settings).ask("start", self.line(settings))


def skip_without_package(vllm: Vllm, method: Method) -> None:
    """Skip where a method needs a package that is not built here: no build of the engine comes with it."""
    package = vllm.profile.method_packages.get(method)
    error = vllm.start(METHODS[method]).error if package else None
    if package and error and package in error:
        pytest.skip(f"vLLM {vllm.profile.version} comes without {package}: ./just engine-versions builds it")


def check_parsed(vllm: Vllm, settings: EngineSettings) -> None:
    """The parser takes the line for what was meant."""
    answer = vllm.parse(settings)
    assert answer.ok, answer.error
    options = answer.value
    assert options["model_tag"] == with_models_under(vllm.models, settings).model
    assert options["served_model_name"] == list(settings.served_model_names)
    assert options["port"] == settings.serving.port
    assert options["dtype"] == settings.dtype
    assert options["max_num_batched_tokens"] == settings.max_num_batched_tokens
    assert options["enforce_eager"] == settings.serving.enforce_eager
    assert options["shutdown_timeout"] == settings.shutdown_timeout_s


def _served_length(settings: EngineSettings, profile: EngineProfile) -> int:
    """Return the longest sequence that is served: from 0.33 on V2 ends with a draft, which warnings.py tells."""
    speculation = settings.speculation
    length = speculation.spec.draft.max_model_len if speculation and speculation.spec.draft else None
    ends = profile.ends_with_draft and not runs_on_v1(settings, profile)
    return min(length, settings.max_model_len) if length and ends else settings.max_model_len


def check_started(vllm: Vllm, settings: EngineSettings) -> None:
    """The engine configures itself as was meant."""
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    speculation, quantization = settings.speculation, settings.online_quantization
    expected = {
        "method": speculation.method.value if speculation else None,
        "num_speculative_tokens": speculation.num_speculative_tokens if speculation else None,
        "extra_draft_slots": (draft_slots(speculation, vllm.profile) if speculation else None),
        "--quantization": vllm.profile.online_quantization[quantization] if quantization else None,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--pipeline-parallel-size": settings.pipeline_parallel_size,
        "--data-parallel-size": settings.data_parallel_size,
        "--enable-expert-parallel": settings.expert_parallel,
        "--max-model-len": _served_length(settings, vllm.profile),
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--kv-cache-dtype": settings.serving.kv_cache_dtype,
        "--block-size": settings.block_size,
        "--enforce-eager": settings.serving.enforce_eager,
        "--shutdown-timeout": settings.shutdown_timeout_s,
        "use_heterogeneous_vocab": speculation.maps_vocabulary if speculation else None,
        "parallel_drafting": speculation.drafts_in_parallel or speculation.method in BLOCKS if speculation else None,
        "rejection_sample_method": (speculation.spec.rejection_sampling or "standard") if speculation else None,
        "draft_sample_method": (speculation.spec.draft_sampling or "greedy") if speculation else None,
        "enable_adaptive_verification": (speculation.spec.adaptive_verification or False) if speculation else None,
    }
    if settings.serving.cudagraph_mode is not None:
        expected["cudagraph_mode"] = settings.serving.cudagraph_mode.value
    uncompiled = any("mode" in argument for argument in settings.extra_args)  # vLLM then takes no graphs in pieces
    if settings.serving.max_cudagraph_capture_size is not None and not uncompiled:
        # Sizes come in steps, of 16 tokens at most.
        largest = min(settings.serving.max_cudagraph_capture_size, settings.max_num_batched_tokens)
        assert largest - 16 < answer.value["--max-cudagraph-capture-size"] <= largest
    if settings.platform is Platform.GPU:
        expected["--gpu-memory-utilization"] = settings.serving.gpu_memory_utilization_percent / 100
    if settings.platform is Platform.GPU and speculation:
        expected |= _runner(settings, speculation.method, vllm.profile)
    assert {key: answer.value[key] for key in expected} == expected
    check_says_what_was_asked(settings, vllm.profile, answer.value["speculative_config"])


def _runner(settings: EngineSettings, method: Method, profile: EngineProfile) -> dict[str, object]:
    """Return the model runner on a GPU, and whether it prepares a step while one runs."""
    experts = ModelTraits("", has_experts=method is Method.MTP)
    era_on_v1 = find_version_rules(profile.version, method.value, experts).runner is Runner.V1
    on_v1 = runs_on_v1(replace(settings, target_on_v1=era_on_v1), profile)
    over_stages = on_v1 and settings.pipeline_parallel_size > 1 and not profile.asynchronous_over_stages_on_v1
    waits = over_stages or any(argument.startswith("--no") for argument in settings.extra_args)
    return {"runner": "V1" if on_v1 else "V2", "async_scheduling": profile.async_scheduling[method] and not waits}


def check_says_what_was_asked(settings: EngineSettings, profile: EngineProfile, started: Mapping[str, object]) -> None:
    """What the engine's core says that it started with is what it was told, so that another word is news."""
    if settings.speculation is None:
        return
    asked = {key.key: key.value(settings, settings.speculation, profile) for key in SPECULATIVE_KEYS}
    told = {key: word(value) for key, value in asked.items() if value is not None and key in SPOKEN_KEYS}
    assert {key: word(started.get(key)) for key in told} == told
