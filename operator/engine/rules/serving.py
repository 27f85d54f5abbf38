"""The engine's rules about everything but speculation, checked before it starts."""

from collections.abc import Iterator

from specdecode_operator.engine.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from specdecode_operator.engine.rules.combinations import combination_problems
from specdecode_operator.engine.rules.graphs import graph_problems
from specdecode_operator.engine.settings import EngineSettings, Platform
from specdecode_operator.problems import Problem
from specdecode_operator.vocabulary import Dtype, KvCacheDtype


def serving_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return what the engine would refuse about model, batch, KV cache and CUDA graphs."""
    return [
        *_name_problems(settings),
        *_batch_problems(settings),
        *_block_problems(settings, profile),
        *_cache_problems(settings, profile),
        *graph_problems(settings, profile),
        *combination_problems(settings, profile),
    ]


def image_problems(image: str | None, platform: Platform, profile: EngineProfile) -> list[Problem]:
    """Return a problem when no image is given and the profile has none for the platform."""
    if image is not None or platform in profile.images:
        return []
    message = f"no {platform.upper()} image of vLLM {profile.version} is known; name one"
    newest = KNOWN_VERSIONS[-1]
    if not profile.tested and platform in find_profile(newest).images:
        message += f", or write spec.engine.version: {newest}, the newest that this operator knows"
    return [Problem("spec.engine.image", "absent", message)]


def _name_problems(settings: EngineSettings) -> Iterator[Problem]:
    """A value that starts with a dash would be read as a flag."""
    named = [
        ("spec.target.model", settings.model),
        *((f"spec.serving.servedModelNames[{i}]", name) for i, name in enumerate(settings.served_model_names)),
    ]
    for field, value in named:
        if value.startswith("-"):
            yield Problem(field, value, "must not start with a dash; vLLM would take it for a flag")


def _batch_problems(settings: EngineSettings) -> Iterator[Problem]:
    """vllm/config/scheduler.py: max_num_batched_tokens is at least max_num_seqs."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        message = f"must be at least serving.maxNumSeqs, {settings.max_num_seqs}: a token for each running request"
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)


def _cache_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/vllm.py, _reject_mismatched_float_kv_cache."""
    known = settings.dtype in (Dtype.FLOAT16, Dtype.FLOAT32)
    if profile.cache_follows_dtype and known and settings.kv_cache_dtype == KvCacheDtype.BFLOAT16:
        message = f"vLLM {profile.version} takes it with serving.dtype bfloat16 only, which is {settings.dtype} here"
        yield Problem("spec.serving.kvCacheDtype", settings.kv_cache_dtype, f"{message}: write auto")


def _block_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """The attention backends have no kernel for other block sizes and say so only after loading."""
    multiple, usual = profile.block_size_multiples[settings.platform], profile.default_block_sizes[settings.platform]
    if settings.block_size % multiple:
        message = f"must be a multiple of {multiple} for accelerator type {settings.platform.upper()}, such as {usual}"
        yield Problem("spec.serving.blockSize", str(settings.block_size), message)
