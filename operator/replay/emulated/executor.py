"""The executor: all ranks of an engine, without processes, weights and KV memory."""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any, Final, TextIO

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds

from .batch import Batch, Sampled
from .grammar import Endings
from .kv_specs import kv_cache_specs
from .lateness import Lateness
from .outputs import constraints_of, model_output
from .settings import read_settings
from .step_time import Paces, StepShape

logger = logging.getLogger("vllm.specdecode_emulated")

STEPS_FILE: Final = "steps.jsonl"
VERDICT_FILE: Final = "lateness.txt"

_TELL_EVERY_S: Final = 2.0

_SLICE_S: Final = 0.0002
"""A sleep ends late by about so much; what is left then is waited for in slices."""

_CLOSING: Final = ('"', "}", "]", ",")
"""What closes a part of JSON, in the order in which it is tried."""

_BLANK: Final = (" ", "\n", "\t", "\r", "  ", "\n\n")

_NOTHING_TO_DO: Final = frozenset({
    "reset_mm_cache",
    "reset_encoder_cache",
    "update_max_model_len",
    "synchronize_device",
    "execute_dummy_batch",
    "profile",
})  # fmt: skip
"""What the engine core asks of workers, where one without tensors has nothing to do."""


class Delivery(Future):  # type: ignore[type-arg]  # vLLM asks with one type for all
    """The output of a step; who asks for it waits until the step would have ended."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        """Return the output, once it is time."""
        if not self.done():
            self.set_result(self._wait())
        return super().result(timeout)


class EmulatedExecutor(Executor):  # type: ignore[misc]  # vLLM ships types only where it is installed
    """Answers the engine core as workers would, at the times at which an accelerator would."""

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

    # What the engine core asks before it serves.

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the KV cache of every layer, those of the draft too, for each rank."""
        specs = kv_cache_specs(self._settings.layers, self.vllm_config)
        return [dict(specs) for _ in range(self.parallel_config.world_size)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return all layouts: nobody reads them (asked since 0.29)."""
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts  # noqa: PLC0415

        names = [layout.name for layout in get_supported_kv_cache_layouts([])]
        return [names] * self.parallel_config.world_size

    def set_kv_cache_layout(self, layout_name: str, *_: Any) -> None:
        """Adopt a layout, as the workers would."""
        from vllm.v1.attention.backends.utils import record_kv_cache_layout  # noqa: PLC0415

        if self.cache_config.kv_cache_layout is None:
            record_kv_cache_layout(self.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        """Return what the plan leaves for the KV cache."""
        return [self._settings.kv_cache_bytes] * self.parallel_config.world_size

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Compile nothing."""

    # What it asks for every step.

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
        """Return what comes of the step that was begun last."""
        if self._scheduled is None:
            raise RuntimeError("emulated: sample_tokens without execute_model")
        (scheduled, shape, begins, ends, idle_s), self._scheduled = self._scheduled, None
        sampled = self._batch.sample(scheduled, constraints_of(grammar_output, scheduled))
        delivery = Delivery(lambda: self._deliver(sampled, shape, begins, ends, idle_s))
        return delivery if non_block else delivery.result()

    def take_draft_token_ids(self) -> Any:
        """Return the drafts of the step that was delivered last."""
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
        """Decide whether an accelerator that stands idle before a step waits for this machine.

        Where steps are not scheduled ahead it does so by nature, but for what the model holds of it.
        """
        follows = bool(scheduled.scheduled_cached_reqs.req_ids) and self._free_at > 0
        return follows and (self.scheduler_config.async_scheduling or self._settings.step_time.host_ms > 0)

    def _warn_outside(self, shape: StepShape) -> None:
        for name, times in self._settings.step_time.outside(shape).items():
            if name not in self._warned:
                self._warned.add(name)
                far = f"{times:.2g} times what the model was fitted on"
                logger.warning("Emulated: %s: %s is %s: step times are guesses", name, getattr(shape, name), far)

    # The rest.

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Only text is generated."""
        return ("generate",)

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        """Do nothing for a call that needs nothing; refuse others."""
        if method in _NOTHING_TO_DO:
            return [None] * self.parallel_config.world_size
        raise NotImplementedError(f"emulated: there are no workers to call {method} on")

    def supports_draft_weight_updates(self) -> bool:
        """There are no weights (asked at the start by some versions)."""
        return False

    def check_health(self) -> None:
        """It is as healthy as its process."""

    def shutdown(self) -> None:
        """Say whether this machine was fast enough."""
        self._tell(time.monotonic())
        logger.log(logging.INFO if self._lateness.is_believable else logging.WARNING, "%s", self._lateness.verdict())
        if self._steps:
            self._steps.close()
            self._steps = None

    def _tell(self, now: float) -> None:
        """Keep the verdict in a file, for whoever started this; warn once where it is clear already."""
        self._told_at = now
        verdict = self._lateness.verdict()
        if self._settings.folder is not None:
            (self._settings.folder / VERDICT_FILE).write_text(f"{verdict}\n", encoding="utf-8")
        if self._lateness.is_hopeless and "late" not in self._warned:
            self._warned.add("late")
            logger.warning("%s", verdict)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps may be scheduled ahead."""
        return True


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left - _SLICE_S if left > 2 * _SLICE_S else min(left, 2e-5))
