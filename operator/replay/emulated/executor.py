"""vLLM executor for all ranks of an engine, without processes, weights or KV memory.

KV cache specs and step outputs use vLLM's own classes, so vLLM divides the cache itself. `Lateness` reports whether
the machine kept up with the emulated speed.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from itertools import accumulate, islice
from random import Random
from typing import Any, Final, TextIO

import numpy as np
import torch
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, LogprobsLists, ModelRunnerOutput

from .batch import Batch, Constraint, Endings, Lateness, Sampled
from .engine_model import CachedLayers, Paces, StepShape, read_settings

_ELEMENTS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def kv_cache_specs(layers: Iterable[CachedLayers], vllm_config: Any) -> dict[str, Any]:
    """Return the specification of every layer of a rank, by a generated name."""
    cache = vllm_config.cache_config
    layers = list(layers)
    if any(each.kind == "state" for each in layers):
        # Adopt the blocks that hold a state: vLLM's workers would choose them, by the same rule as the plan.
        cache.block_size = max((each.block_size for each in layers), default=0) or cache.block_size
        cache.mamba_page_size_padded = max(each.page_bytes for each in layers if each.kind == "state")
        if cache.mamba_cache_mode == "align":
            cache.mamba_block_size = cache.block_size
    found: dict[str, Any] = {}
    for each in layers:
        spec = _state(each, vllm_config) if each.kind == "state" else _attention(each)
        for _ in range(each.count):
            found[f"{'draft' if each.of_draft else 'model'}.layers.{len(found)}.attn"] = spec
    return found


def _attention(layer: CachedLayers) -> Any:
    shape = {"block_size": layer.block_size, "dtype": _ELEMENTS[layer.element_bytes]}
    if layer.kind == "latent":
        width = layer.token_bytes // layer.element_bytes
        return _made(kinds.MLAAttentionSpec, **shape, num_kv_heads=1, head_size=width)
    heads, rest = divmod(layer.token_bytes, 2 * layer.head_width * layer.element_bytes)
    # If keys and values differ in width, only the sum of their bytes counts.
    width = layer.token_bytes // (2 * layer.element_bytes) if rest else layer.head_width
    shape |= {"num_kv_heads": 1 if rest else heads, "head_size": width}
    if layer.kind == "sliding":
        return _made(kinds.SlidingWindowSpec, **shape, sliding_window=layer.reach_tokens)
    if layer.kind == "chunked":
        return _made(kinds.ChunkedLocalAttentionSpec, **shape, attention_chunk_size=layer.reach_tokens)
    return _made(kinds.FullAttentionSpec, **shape)


def _state(layer: CachedLayers, vllm_config: Any) -> Any:
    cache = vllm_config.cache_config
    return _made(
        kinds.MambaSpec,
        block_size=cache.mamba_block_size or vllm_config.model_config.max_model_len,
        shapes=((layer.state_bytes,),),
        dtypes=(torch.uint8,),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=vllm_config.num_speculative_tokens,
        num_prefill_checkpoint_blocks=int(layer.exports_checkpoint and cache.mamba_cache_mode == "align"),
    )


def _made(kind: Any, **known: Any) -> Any:
    """Return a specification with the fields that this version of vLLM has."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in known.items() if name in names})


def model_output(sampled: Sampled, text: tuple[int, int], random: Random) -> Any:
    """Return the output of a step."""
    output = ModelRunnerOutput(
        req_ids=sampled.req_ids,
        req_id_to_index={req_id: row for row, req_id in enumerate(sampled.req_ids)},
        sampled_token_ids=sampled.tokens,
    )
    if sampled.logprobs is not None:
        output.logprobs = _logprobs(sampled.tokens, sampled.logprobs, text, random)
    return output


def constraints_of(grammar: Any, scheduled: Any) -> dict[str, Constraint]:
    """Return the constraints of a GrammarOutput by request."""
    if grammar is None:
        return {}
    found, row = {}, 0
    told = getattr(grammar, "num_acceptable_drafts", None)  # since 0.32
    for index, req_id in enumerate(grammar.structured_output_request_ids):
        proposed = scheduled.scheduled_spec_decode_tokens.get(req_id, ())
        acceptable = next((at for at, token in enumerate(proposed) if token < 0), len(proposed))
        if told is not None:
            acceptable = min(acceptable, told[index])
        rows = grammar.grammar_bitmask[row : row + len(proposed) + 1].tolist()
        found[req_id] = Constraint(rows, acceptable)
        row += len(proposed) + 1
    return found


def _logprobs(tokens: Sequence[Sequence[int]], wanted: int, text: tuple[int, int], random: Random) -> Any:
    """Return made-up logprobs: the sampled token is the likeliest, each one after it half as likely."""
    first, last = text
    size = max(last - first + 1, wanted + 2)
    flat = [token for row in tokens for token in row]
    ids = np.empty((len(flat), wanted + 1), dtype=np.int32)
    for row, token in enumerate(flat):
        start = random.randrange(size)
        near = (first + (start + offset) % size for offset in range(wanted + 1))
        ids[row] = [token, *islice((other for other in near if other != token), wanted)]
    falling = np.log(0.5) * (np.arange(wanted + 1, dtype=np.float32) + 1)
    starts = list(accumulate((len(each) for each in tokens), initial=0))
    ranks = np.ones(len(flat), dtype=np.int32)
    return LogprobsLists(ids, np.tile(falling, (len(flat), 1)), ranks, cu_num_generated_tokens=starts)


logger = logging.getLogger("vllm.specdecode_emulated")

STEPS_FILE: Final = "steps.jsonl"
VERDICT_FILE: Final = "lateness.txt"

_TELL_EVERY_S: Final = 2.0

_SLICE_S: Final = 0.0002  # a sleep may end this late, so the last part of a wait is slept in slices

_CLOSING: Final = ('"', "}", "]", ",")  # tokens that close a part of JSON, in order of preference

_BLANK: Final = (" ", "\n", "\t", "\r", "  ", "\n\n")

_NOTHING_TO_DO: Final = frozenset({
    "reset_mm_cache",
    "reset_encoder_cache",
    "update_max_model_len",
    "synchronize_device",
    "execute_dummy_batch",
    "profile",
})  # fmt: skip
"""Calls of the engine core that need no work without tensors."""


class Delivery(Future):  # type: ignore[type-arg]  # vLLM asks with one type for all
    """The output of a step, available when the step would have ended."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        """Return the output when the step has ended."""
        if not self.done():
            self.set_result(self._wait())
        return super().result(timeout)


class EmulatedExecutor(Executor):  # type: ignore[misc]  # vLLM ships types only where it is installed
    """Answers the engine core as workers would, with the timing of an accelerator."""

    supports_pp = False

    def _init_executor(self) -> None:
        self._settings = settings = read_settings(self.vllm_config.additional_config)
        if self.speculative_config is not None and settings.acceptance is None:
            raise ValueError("emulated: this model file has no acceptance: fit it to a capture with speculation")
        self._random = Random(settings.seed)  # noqa: S311  nothing is secret here
        self._batch = Batch(settings.acceptance, settings.text, self._endings(), self._random)
        self._paces = Paces(settings.step_time, self._random)
        self._free_at = 0.0
        self._scheduled: tuple[Any, StepShape, float, float, float] | None = None
        self._drafts: Any = None
        self._lateness = Lateness()
        self._warned: set[str] = set()
        self._steps: TextIO | None = None
        self._told_at = 0.0
        if settings.folder is not None and settings.tells_steps:
            self._steps = (settings.folder / STEPS_FILE).open("w", buffering=1, encoding="utf-8")
        ahead = self.scheduler_config.async_scheduling
        logger.info("Emulated: no model is computed; steps are scheduled ahead: %s", "yes" if ahead else "no")

    def _endings(self) -> Endings:
        """Return the tokens that close parts of JSON, and those that are blank."""
        if self.model_config.skip_tokenizer_init:
            return Endings()
        from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415

        tokenizer = cached_tokenizer_from_config(self.model_config)
        closing, blank = (
            [ids[0] for ids in (tokenizer.encode(each, add_special_tokens=False) for each in texts) if len(ids) == 1]
            for texts in (_CLOSING, _BLANK)
        )
        return Endings(closing=closing, blank=frozenset(blank))

    # Calls before the engine core serves.

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the KV cache of every layer of target and draft for each rank."""
        specs = kv_cache_specs(self._settings.layers, self.vllm_config)
        return [dict(specs) for _ in range(self.parallel_config.world_size)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return all layouts, because the executor reads no cache (called since 0.29)."""
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: PLC0415

        names = [layout.name for layout in get_supported_kv_cache_layouts([])]
        return [names] * self.parallel_config.world_size

    def set_kv_cache_layout(self, layout_name: str, *_: Any) -> None:
        """Adopt a layout, as the workers would."""
        from vllm.v1.attention.backends.utils import record_kv_cache_layout  # noqa: PLC0415

        if self.cache_config.kv_cache_layout is None:
            record_kv_cache_layout(self.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        """Return the planned size of the KV cache."""
        return [self._settings.kv_cache_bytes] * self.parallel_config.world_size

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Skip the allocation of the KV cache."""

    def compile_or_warm_up_model(self) -> None:
        """Skip compilation: there is no model to compile."""

    # Calls in every step.

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step."""
        shape = self._batch.admit(scheduler_output)
        if not shape.requests:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._warn_outside(shape)
        submitted = time.monotonic()
        model = self._settings.step_time
        # An accelerator does one step after the other: one that was scheduled ahead waits for the one before.
        begins = max(submitted - 1e-3 * model.host_ms, self._free_at)
        idle_s = begins - self._free_at if self._is_held_up(scheduler_output) else 0.0
        self._free_at = begins + 1e-3 * self._paces.draw_ms(shape)
        self._scheduled = scheduler_output, shape, begins, self._free_at, idle_s
        return _done(None) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the output of the latest step."""
        if self._scheduled is None:
            raise RuntimeError("emulated: sample_tokens without execute_model")
        (scheduled, shape, begins, ends, idle_s), self._scheduled = self._scheduled, None
        sampled = self._batch.sample(scheduled, constraints_of(grammar_output, scheduled))
        delivery = Delivery(lambda: self._deliver(sampled, shape, begins, ends, idle_s))
        return delivery if non_block else delivery.result()

    def take_draft_token_ids(self) -> Any:
        """Return the drafts of the latest delivered step."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def _deliver(self, sampled: Sampled, shape: StepShape, begins: float, ends: float, idle_s: float) -> Any:
        _sleep_until(ends)
        delivered = time.monotonic()
        self._lateness.add(ends - begins, delivered - ends + idle_s)
        if delivered > self._told_at + _TELL_EVERY_S:
            self._tell(delivered)
        self._drafts = DraftTokenIds(sampled.req_ids, sampled.drafts)
        if self._steps:
            line = vars(shape) | {"begins": begins, "ends": ends, "delivered": delivered, "idle_s": idle_s}
            self._steps.write(json.dumps(line | {"tokens": sum(map(len, sampled.tokens))}) + "\n")
        return model_output(sampled, self._settings.text, self._random)

    def _is_held_up(self, scheduled: Any) -> bool:
        """Return whether an idle accelerator waits for this machine.

        Without asynchronous scheduling it always waits; then it counts only if the model has the host's time.
        """
        follows = bool(scheduled.scheduled_cached_reqs.req_ids) and self._free_at > 0
        return follows and (self.scheduler_config.async_scheduling or self._settings.step_time.host_ms > 0)

    def _warn_outside(self, shape: StepShape) -> None:
        for name, times in self._settings.step_time.outside(shape).items():
            if name not in self._warned:
                self._warned.add(name)
                far = f"{times:.2g} times the largest value of the fit"
                logger.warning("Emulated: %s: %s is %s: step times are extrapolated", name, getattr(shape, name), far)

    # The rest.

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The supported tasks."""
        return ("generate",)

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        """Ignore calls that need no work, and reject others."""
        if method in _NOTHING_TO_DO:
            return [None] * self.parallel_config.world_size
        raise NotImplementedError(f"emulated: there are no workers to call {method} on")

    def supports_draft_weight_updates(self) -> bool:
        """Return False: there are no weights (some versions call this at the start)."""
        return False

    def check_health(self) -> None:
        """Succeed: the executor is healthy as long as its process runs."""

    def shutdown(self) -> None:
        """Log whether this machine was fast enough."""
        self._tell(time.monotonic())
        logger.log(logging.INFO if self._lateness.is_believable else logging.WARNING, "%s", self._lateness.verdict())
        if self._steps:
            self._steps.close()
            self._steps = None

    def _tell(self, now: float) -> None:
        """Write the verdict to a file for the parent process; warn once if it is already certain."""
        self._told_at = now
        verdict = self._lateness.verdict()
        if self._settings.folder is not None:
            (self._settings.folder / VERDICT_FILE).write_text(f"{verdict}\n", encoding="utf-8")
        if self._lateness.is_hopeless and "late" not in self._warned:
            self._warned.add("late")
            logger.warning("%s", verdict)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: steps may be scheduled ahead."""
        return True


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left - _SLICE_S if left > 2 * _SLICE_S else min(left, 2e-5))
