"""An emulated engine for a SpecDecodeDeployment: what vLLM and the plugin in it are told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from specdecode_operator.capture.files.config_hash import gpu_label
from specdecode_operator.capture.job.plugin_bundle import PluginBundle
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.spec.checkpoints import config_of
from specdecode_operator.deployment.spec.engine_settings import engine_settings
from specdecode_operator.engine.arguments import ARGUMENTS, COMPILATION_CONFIG
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.settings import EngineSettings, Platform
from specdecode_operator.replay.emulated.settings import KEY
from specdecode_operator.replay.fitted.model import FittedModel
from specdecode_operator.sizing.choice.plan import CPU_PRODUCT, Row
from specdecode_operator.sizing.kv.layers import CacheKind, LayerRun
from specdecode_operator.sizing.kv.layout import cache_layout, cache_pages
from specdecode_operator.sizing.kv.pages import Page
from specdecode_operator.sizing.kv.settings import kv_rules
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.version import __version__

PACKAGE: Final = "specdecode_emulated"

PLUGIN: Final = PluginBundle(
    package=PACKAGE,
    version=__version__,
    sources=Path(__file__).parents[1] / "emulated",
    entry_points=f"[vllm.platform_plugins]\n{PACKAGE} = {PACKAGE}.plugin:platform\n",
)

_LEFT_OUT: Final = frozenset({
    "--host",
    "--port",
    "--quantization",
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--enforce-eager",
    f"{COMPILATION_CONFIG}.cudagraph_mode",
    "--max-cudagraph-capture-size",
    "--enable-expert-parallel",
    "--distributed-executor-backend",
})  # fmt: skip
"""Flags about weights, kernels and processes that are not there, and those that are said here."""


class NotEmulatedError(Exception):
    """A deployment or a model that cannot be emulated: what, why, and what to do, in one line."""


@dataclass(frozen=True)
class Emulation:
    """What is emulated."""

    settings: EngineSettings
    profile: EngineProfile
    target_config: Mapping[str, Any]
    draft_config: Mapping[str, Any] | None  # None where no model drafts
    layers: Sequence[dict[str, Any]]  # What each layer keeps on a rank, as replay/emulated/settings.py reads it
    num_blocks: int  # Of the KV cache, as planned
    kv_cache_bytes: int  # On each rank
    gpu: str  # Product of the plan, or CPU
    model: FittedModel

    def with_blocks(self, num_blocks: int | None) -> "Emulation":
        """Return it with a KV cache of so many blocks; None: of as many as planned."""
        if num_blocks is None:
            return self
        return replace(self, num_blocks=num_blocks, kv_cache_bytes=self.kv_cache_bytes // self.num_blocks * num_blocks)

    def plugin_settings(self, text: tuple[int, int], seed: int) -> dict[str, Any]:
        """Return what the plugin is told."""
        return {
            "step_time": self.model.step_time,
            "acceptance": self.model.acceptance,
            "layers": list(self.layers),
            "kv_cache_bytes": self.kv_cache_bytes,
            "text": list(text),
            "seed": seed,
            "gpu": self.gpu,
        }

    def arguments(self, target: Path, draft: Path | None, told: Path) -> list[str]:
        """Return what follows `vllm serve`, but for where it listens; what the plugin is told lies in a file."""
        speculation = self.settings.speculation
        if speculation is not None:
            own = str(draft) if draft is not None else None
            # Model runner V1 computes nothing here, and refuses adaptive verification; the recorded acceptance has it.
            speculation = replace(
                speculation, draft_model=own, draft_online_quantization=None, adaptive_verification=None
            )
        settings = replace(self.settings, speculation=speculation)
        line = [str(target)]
        for argument in ARGUMENTS:
            values = None if argument.flag in _LEFT_OUT else argument.values(settings, self.profile)
            if values is not None:
                line += [argument.flag, *values]
        line += ["--num-gpu-blocks-override", str(self.num_blocks)]
        line += ["--load-format", "dummy", "--enforce-eager"]
        # vLLM's CPU platform never plans a step while one runs; the emulated one leaves that as for a GPU.
        line += ["--no-async-scheduling"] if settings.platform is Platform.CPU else []
        line += ["--distributed-executor-backend", f"{PACKAGE}.executor.EmulatedExecutor"]
        return [*line, "--additional-config", json.dumps({KEY: str(told)}), *settings.extra_args]


def emulation(launch: Launch, model: FittedModel) -> Emulation:
    """Return what an engine of a plan would be, emulated by a model that was fitted to a capture.

    Raises
    ------
    NotEmulatedError
        When the plan or the model lacks what it takes.
    """
    row = launch.plan.chosen
    facts = launch.facts.at(*row.served)
    _check(facts.pair, row, model)
    speculation = facts.spec.speculation
    draft = speculation.draft if speculation is not None else None
    target_config = config_of(facts.spec.target, None)
    draft_config = config_of(draft, None) if draft is not None else None
    if target_config is None or (draft is not None and draft_config is None):
        raise NotEmulatedError("the config.json of target and draft are needed: name them with --model-config")
    settings = replace(engine_settings(facts.spec, facts.pair, row.tensor), tls=False, group=None)
    grouping = cache_layout(facts.pair, row.split)[0]
    return Emulation(
        settings=settings,
        profile=facts.profile,
        target_config=target_config,
        draft_config=draft_config,
        layers=[_kept(run, page, facts.pair) for run, page in cache_pages(facts.pair, row.tensor)],
        num_blocks=row.budget.num_blocks,
        kv_cache_bytes=row.budget.num_blocks * grouping.bytes_per_block,
        gpu=row.product,
        model=model,
    )


def _check(pair: Pair, row: Row, model: FittedModel) -> None:
    if row.split.pipeline > 1:
        raise NotEmulatedError(f"spec.parallelism.pipeline: {row.split.pipeline}: stages are not emulated: use 1")
    if row.split.data > 1:
        raise NotEmulatedError(f"spec.parallelism.data: {row.split.data}: one copy is emulated: use 1")
    if model.step_time is None:
        raise NotEmulatedError(
            "the model has no step_time: fit it to a capture with step statistics (engine.extraArgs"
            " --enable-logging-iteration-details)"
        )
    if pair.num_speculative_tokens and model.acceptance is None:
        raise NotEmulatedError("the model has no acceptance: fit it to a capture of an engine that speculates")


def transfer_warnings(emulated: Emulation, tensor: int, product: str) -> list[str]:
    """Return in which ways a model was fitted to something else than what is planned, each in one line."""
    origin, acceptance = emulated.model.origin, emulated.model.acceptance
    # A trace has the short name, or cpu; a plan the product's label, or CPU.
    gpu = None if origin.gpu is None else gpu_label(origin.gpu)
    planned = "cpu" if product == CPU_PRODUCT else gpu_label(product)
    fitted = {"GPU": (gpu, planned), "tensor parallelism": (origin.tp, tensor)}
    found = [
        f"the model was fitted on {what} {seen}, and the plan has {wanted}: step times are those of {seen}"
        for what, (seen, wanted) in fitted.items()
        if seen is not None and seen != wanted
    ]
    speculation = emulated.settings.speculation
    if speculation is not None and acceptance is not None:
        width, seen_width = speculation.num_speculative_tokens, acceptance["num_speculative_tokens"]
        if width > seen_width:
            found.append(
                f"the model was fitted on K {seen_width}, and the plan has {width}: positions after {seen_width} are"
                " accepted as the last one, which nobody measured"
            )
    return found


def _kept(run: LayerRun, page: Page, pair: Pair) -> dict[str, Any]:
    layer, rules = run.layer, kv_rules(pair.limits.engine_version)
    kept = {
        "count": int(run.count),
        "kind": layer.kind.value,
        "of_draft": layer.of_draft,
        "page_bytes": page.page_bytes,
    }
    if layer.kind is CacheKind.STATE:
        speculated = pair.num_speculative_tokens * layer.state_bytes_per_speculated_token
        return kept | {
            "state_bytes": layer.state_bytes + speculated,
            "exports_checkpoint": layer.exports_checkpoint or (layer.delta_rule and rules.exports_delta_states),
        }
    return kept | {
        "block_size": page.block_size,
        "token_bytes": layer.token_bytes,
        "head_width": layer.head_width,
        "element_bytes": layer.element_bytes,
        "reach_tokens": layer.reach_tokens,
    }
