"""The engine's ``--speculative-config``: one JSON object for all of speculation."""

import json
from typing import Any

from specdecode_operator.api.deployment import Method
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.settings import EngineSettings, ScheduleRange, SpeculationSettings


def speculative_config(settings: EngineSettings, profile: EngineProfile) -> str | None:
    """Return the value of ``--speculative-config``, or None without speculation.

    Compact and with sorted keys, so that equal settings give equal pods.
    """
    speculation = settings.speculation
    if speculation is None:
        return None
    config: dict[str, Any] = {
        "method": speculation.method.value,
        "num_speculative_tokens": speculation.num_speculative_tokens,
    }
    if speculation.schedule:
        config["num_speculative_tokens_per_batch_size"] = [
            [part.first, part.last, part.num_speculative_tokens]
            for part in complete_schedule(speculation, settings.max_num_seqs)
        ]
    if speculation.method is Method.DRAFT_MODEL:
        config |= _draft(settings, speculation, profile)
    if speculation.method is Method.NGRAM:
        config["prompt_lookup_min"] = speculation.prompt_lookup_min
        config["prompt_lookup_max"] = speculation.prompt_lookup_max
    given = {key: value for key, value in config.items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def complete_schedule(speculation: SpeculationSettings, max_num_seqs: int) -> list[ScheduleRange]:
    """Return ranges that cover 1 to ``max_num_seqs`` without a gap.

    Where the user gave no range, the general K holds. The engine would carry
    the K of the range before into a gap and past the end, and refuses a first
    range that does not start at 1 (vllm/v1/spec_decode/dynamic/utils.py).
    """
    general = speculation.num_speculative_tokens
    complete: list[ScheduleRange] = []
    next_uncovered = 1
    for part in sorted(speculation.schedule, key=lambda part: part.first):
        if part.first > next_uncovered:
            complete.append(ScheduleRange(next_uncovered, part.first - 1, general))
        complete.append(part)
        next_uncovered = part.last + 1
    if next_uncovered <= max_num_seqs:
        complete.append(ScheduleRange(next_uncovered, max_num_seqs, general))
    return complete


def _draft(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> dict[str, Any]:
    """Return what a draft model adds.

    The draft's layers are split over the target's process group whatever is
    asked for, so its tensor parallelism is always said to be the target's.
    """
    quantization = speculation.draft_online_quantization
    return {
        "model": speculation.draft_model,
        "quantization": None if quantization is None else profile.online_quantization[quantization],
        "max_model_len": speculation.draft_max_model_len,
        "draft_tensor_parallel_size": settings.tensor_parallel_size,
    }
