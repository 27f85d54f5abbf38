"""Ask the installed vLLM for weight bytes and KV cache blocks; runs in the engine's Python.

Reads a JSON list of cases from standard input and writes the answers as a JSON
list to the file named by the first argument, in the same order. See
run_oracle.py, which starts it, for the keys of cases and answers.

Models are built by vLLM's own classes on the meta device, one after the other
for each pipeline stage, as tensor rank 0 with process groups that only say how
large they are. vLLM is imported once: it takes 15 to 30 seconds, a case 0.1 to
a few.
"""

import contextlib
import copy
import io
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dump_engine_flags import cli_args, serve_parser
from kv_planning import divided
from oracle_models import Stage, build_draft, build_model, last_words, own_parameters, set_groups
from transformers import AutoConfig, PretrainedConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends import utils as backends_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker import worker_base
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

PLAIN_FLAGS = {
    "block_size": "--block-size",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
}
SWITCHES = {"async": "async-scheduling", "prefix_caching": "enable-prefix-caching", "ep": "enable-expert-parallel"}
DERIVED_CONFIGS = {"mimo": Qwen2Config}
UNNEEDED_NUMBERS = {"rms_norm_eps": 1e-6, "layernorm_epsilon": 1e-6, "hc_eps": 1e-6}


def arguments(case: dict[str, Any], folder: Path) -> list[str]:
    """Return what follows `vllm serve`, with the configs written to the folder."""
    argv = ["--model", write_config(folder / "target", case["config"]), "--skip-tokenizer-init"]
    for key, flag in PLAIN_FLAGS.items():
        if case.get(key) is not None:
            argv += [flag, str(case[key])]
    for key, flag in SWITCHES.items():
        if case.get(key) is not None:
            argv.append(f"--{'' if case[key] else 'no-'}{flag}")
    speculative = dict(case.get("speculative") or {})
    draft = speculative.pop("config", None)
    if draft:
        speculative["model"] = write_config(folder / "draft", draft)
    speculative = {key: value for key, value in speculative.items() if value is not None}
    if speculative:
        argv += ["--speculative-config", json.dumps(speculative)]
    return argv + list(case.get("argv", ()))


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """Return the path of a model that consists of its config.json.

    Files that were shortened to what decides memory may lack keys that vLLM
    asks for all the same: the type, which follows from the architecture, and
    small numbers. Types that transformers does not know come with code of
    their own, which is not run: their keys are taken as they are, or as by
    the class of transformers that their own is derived from.
    """
    architecture = (config.get("architectures") or [""])[0]
    kind = config.get("model_type") or architecture.removesuffix("ForCausalLM").lower()
    if "speculators_config" in config:  # complete, and without a type
        kind = "speculators"
    else:
        config = {"model_type": kind} | UNNEEDED_NUMBERS | config
    if kind not in CONFIG_MAPPING and kind not in _CONFIG_REGISTRY:
        base = DERIVED_CONFIGS.get(kind, PretrainedConfig)
        AutoConfig.register(kind, type("PlainConfig", (base,), {"model_type": kind}))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def engine_config(parser: Any, argv: list[str]) -> Any:
    """Return the engine's configuration, built as at start."""
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            options = parser.parse_args(argv)
    except SystemExit as stop:
        raise ValueError(complaints.getvalue()[-400:]) from stop
    cli_args().validate_parsed_serve_args(options)
    engine_args = AsyncEngineArgs.from_cli_args(options)
    return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def build_stage(parser: Any, case: dict[str, Any], argv: list[str], index: int) -> Stage:
    """Return one pipeline stage; the draft lies on the last."""
    rotary_embedding._ROPE_DICT.clear()
    set_groups(case, index)
    config = engine_config(parser, argv)
    config.parallel_config.rank = index * case.get("tp", 1)
    stage = Stage(config, build_model(config))
    target_names = set(config.compilation_config.static_forward_context)
    if config.speculative_config and index == case.get("pp", 1) - 1:
        build_draft(stage)
    stage.draft_names = set(config.compilation_config.static_forward_context) - target_names
    with set_current_vllm_config(config):
        current_platform.update_block_size_for_backend(config)
        stage.specs = get_kv_cache_spec(config)
    return stage


def size_bytes(tensors: Any) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def buffer_bytes(model: Any, other: Any = None) -> dict[str, int]:
    """Return the bytes of the buffers that the other model does not hold too, by the last part of the name."""
    held = {id(buffer) for buffer in other.buffers()} if other is not None else set()
    sizes: Counter[str] = Counter()
    for name, buffer in model.named_buffers():
        if id(buffer) not in held:
            sizes[name.rpartition(".")[2]] += size_bytes([buffer])
    return dict(sizes)


def table(tensors: Any) -> dict[str, Any]:
    """Return shape and type of each tensor."""
    return {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors}


def describe_stage(stage: Stage, *, dump: bool) -> dict[str, Any]:
    """Return the bytes of one stage."""
    target, draft = stage.target, stage.draft
    answer: dict[str, Any] = {
        "target_class": type(target).__name__,
        "target_param_bytes": size_bytes(target.parameters()),
        "target_buffer_bytes": buffer_bytes(target),
        "specs": summary(stage.specs, stage.draft_names),
    }
    if draft is not None:
        buffers = buffer_bytes(draft, target)
        # A weight of P-EAGLE's checkpoint, which is loaded into a buffer.
        of_places = buffers.get("mask_hidden", 0)
        answer |= {
            "draft_class": type(draft).__name__,
            "draft_param_bytes": size_bytes(stage.draft_shared.values()) + of_places,
            "draft_unshared_param_bytes": size_bytes(own_parameters(draft, target).values()) + of_places,
            "draft_copied_bytes": copied_bytes(draft),
            "draft_buffer_bytes": buffers,
        }
    if stage.draft_error:
        answer["draft_sharing_error"] = stage.draft_error
    if dump:
        answer["target_params"] = table([*target.named_parameters(), *target.named_buffers()])
        if draft is not None:
            answer["draft_params"] = table([*stage.draft_shared.items(), *draft.named_buffers()])
    return answer


def copied_bytes(draft: Any) -> int:
    """Return the bytes of the weights that a block head keeps a second time, made as after loading."""
    model = getattr(draft, "model", None)
    if not hasattr(model, "_build_fused_kv_buffers"):
        return 0
    model._build_fused_kv_buffers()
    copies = [model._fused_kv_weight, model._fused_kv_bias, model._k_norm_weights]
    if hasattr(model, "xpress_head"):
        model.xpress_head.build_fused_buffers()
        copies += model.xpress_head._fused_buf.values()
    return size_bytes(copy for copy in copies if copy is not None)


def summary(specs: dict[str, Any], draft_names: set[str]) -> list[dict[str, Any]]:
    """Return the distinct KV cache specs of a stage with how many layers have each."""
    counts = Counter((name in draft_names, describe_spec(spec)) for name, spec in specs.items())
    return [{"draft": draft, **json.loads(spec), "count": count} for (draft, spec), count in counts.items()]


def describe_spec(spec: Any) -> str:
    """Return what of a spec decides bytes and blocks, as one hashable text."""
    facts = {"class": type(spec).__name__, "page_size_bytes": spec.page_size_bytes, "block_size": spec.block_size}
    for key in ("num_kv_heads", "head_size", "head_size_v", "sliding_window", "attention_chunk_size"):
        if getattr(spec, key, None) is not None:
            facts[key] = getattr(spec, key)
    for key in ("dtype", "cache_dtype_str", "shapes", "dtypes", "page_size_padded", "num_speculative_blocks"):
        if getattr(spec, key, None) is not None:
            facts[key] = str(getattr(spec, key))
    return json.dumps(facts)


def capacity(stages: list[Stage], available_bytes: int | list[int]) -> dict[str, Any]:
    """Return the groups, blocks, tokens and concurrency that vLLM makes of the space on each stage."""
    config = stages[0].config
    maximum = config.model_config.max_model_len
    available = available_bytes if isinstance(available_bytes, list) else [available_bytes] * len(stages)
    try:
        specs = [copy.deepcopy(stage.specs) for stage in stages]
        with set_current_vllm_config(config):
            kv_configs, whole = divided(config, specs, available)
            tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, whole)
    except Exception:  # noqa: BLE001 (a space too small is an answer too)
        return {"available_bytes": available_bytes, "error": last_words()}
    finally:
        config.model_config.max_model_len = maximum
    return {
        "available_bytes": available_bytes,
        "num_blocks": whole.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": [[describe_group(group) for group in one.kv_cache_groups] for one in kv_configs],
    }


def describe_group(group: Any) -> list[Any]:
    """Return class, layers, bytes of a page and tokens of a block of a group."""
    spec = group.kv_cache_spec
    name = type(spec).__name__
    if isinstance(spec, UniformTypeKVCacheSpecs):
        name += ":" + "+".join(sorted({type(one).__name__ for one in spec.kv_cache_specs.values()}))
    return [name, len(group.layer_names), spec.page_size_bytes, spec.block_size]


def settings(config: Any) -> dict[str, Any]:
    """Return what the engine made of the flags."""
    speculative = config.speculative_config
    return {
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "hybrid_manager": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "max_concurrent_batches": config.max_concurrent_batches,
        "mamba_cache_mode": config.cache_config.mamba_cache_mode,
        "kv_cache_layout": getattr(config.cache_config, "kv_cache_layout", None),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "method": speculative.method if speculative else None,
    }


def answer(parser: Any, case: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an answer, so that what came before a failure is kept."""
    with tempfile.TemporaryDirectory() as folder:
        argv = arguments(case, Path(folder))
        stages = []
        described: list[dict[str, Any]] = []
        yield "stages", described
        for index in range(case.get("pp", 1)):
            stages.append(build_stage(parser, case, argv, index))
            described.append(describe_stage(stages[-1], dump=case.get("dump", False)))
    config = stages[0].config
    yield "settings", settings(config)
    register_all_kvcache_specs(config)
    specs = [spec for stage in stages for spec in stage.specs.values()]
    if not specs:
        return
    resolve_layouts(stages, specs)
    yield "settings", settings(config)
    yield "kv", [capacity(stages, available) for available in case.get("available_bytes", ())]


def resolve_layouts(stages: list[Stage], specs: list[Any]) -> None:
    """Choose the KV cache layout as the engine core does, from what the backends of every stage support.

    Before 0.29 there is nothing to choose.
    """
    if not hasattr(backends_utils, "resolve_kv_cache_layout"):
        return
    supported = []
    for stage in stages:
        with set_current_vllm_config(stage.config):
            backends = worker_base.get_current_attn_backends(stage.config)
            supported.append([layout.name for layout in backends_utils.get_supported_kv_cache_layouts(backends)])
    layout = backends_utils.resolve_kv_cache_layout(stages[0].config, supported, specs)
    for stage in stages:
        stage.config.cache_config.kv_cache_layout = layout.name


def main() -> None:
    """Answer every case; a failing one says why."""
    parser = serve_parser()
    answers = []
    for case in json.load(sys.stdin):
        given: dict[str, Any] = {"id": case["id"]}
        started = time.monotonic()
        try:
            for key, value in answer(parser, case):
                given[key] = value
        except Exception:  # noqa: BLE001 (any error is the answer)
            given["error"] = last_words()
        given["seconds"] = round(time.monotonic() - started, 2)
        answers.append(given)
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
