"""`specdecode calibrate`: measure real engines, and record the error of the predictions."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import ObservedStatus, PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cli.input_files import read_deployments, read_models, refuse_unused, with_configs
from specdecode_operator.cli.options import HiddenName, ModelConfigOption, ended, fail
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import DocumentError, open_to_read, place_of, read_text, replaced_whole
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.models.checkpoints import MODEL_UNKNOWN
from specdecode_operator.deployment.observed.engine_reports import residual_share
from specdecode_operator.deployment.planning import make_plan
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.enums import SIXTEEN_BIT_BYTES, Dtype, KvCacheDtype, Method, Precision, Quantization
from specdecode_operator.problems import InvalidSpecError, shown
from specdecode_operator.redaction import clip_start
from specdecode_operator.sizing import calibration
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.estimate_fields import full_product
from specdecode_operator.sizing.kernel_support import checkpoint_problem
from specdecode_operator.sizing.memory.budget import Budget, engine_kind, estimate
from specdecode_operator.sizing.pair import TENSOR_ONLY
from specdecode_operator.sizing.plan import CPU_PRODUCT, Plan
from specdecode_operator.untrusted import MAX_BYTES, mapping
from specdecode_operator.vllm.startup_log import (
    LoggedSettings,
    MalformedLogError,
    StartupLog,
    read_startup_log,
)

_ONLINE_FP8: Final = ("fp8", "fp8_per_tensor", "fp8_per_channel", "online")
"""Values of --quantization that quantize to FP8 while loading (vLLM, quantization/online)."""


class UnusableLogError(ValueError):
    """The log lacks a setting, or its engine is not supported by the memory estimate."""


@dataclass(frozen=True)
class Given:
    """Settings from options. They take precedence over the log."""

    product: str
    """GPU product, as in the node label. Logs do not contain it."""
    engine_version: str | None = None
    tensor: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    configs: Mapping[str, Body] = field(default_factory=dict)
    """Content of config.json, by model name in the log."""


class Term(NamedTuple):
    """Predicted and reported memory of one term in bytes per GPU; None if not in the log."""

    name: str
    predicted_bytes: int
    reported_bytes: int | None


class Measurement(NamedTuple):
    """Predicted and reported memory of an engine, and its entry in the calibration file."""

    entry: calibration.CalibrationEntry
    terms: tuple[Term, ...]
    predicted_tokens: int
    reported_tokens: int | None


def measure(log: StartupLog, given: Given) -> Measurement:
    """Compare a log with the prediction for the same engine.

    Raises UnusableLogError if the log lacks a setting or the engine cannot be estimated, and InvalidSpecError if the
    operator would reject the engine's settings.
    """
    version, logged = given.engine_version or log.version, log.settings
    settings = replace(
        logged,
        tensor=given.tensor or logged.tensor or 1,
        max_model_len=given.max_model_len or logged.max_model_len,
        max_num_seqs=given.max_num_seqs or logged.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens or logged.max_num_batched_tokens,
    )
    needed = {
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--engine-version": version,
        "the line 'Initializing a V1 LLM engine'": settings.model,
    }
    if version is None or None in needed.values():
        absent = ", ".join(name for name, value in needed.items() if value is None)
        raise UnusableLogError(f"settings that affect memory are missing: add {absent}")
    if (settings.pipeline or 1) > 1:
        raise UnusableLogError(
            f"pipeline_parallel_size {settings.pipeline}: calibration supports only tensor parallelism"
        )
    if settings.dtype == f"torch.{Dtype.FLOAT32}":
        raise UnusableLogError(f"dtype {Dtype.FLOAT32}: calibration supports only 16-bit dtypes")
    if settings.method is None:
        raise UnusableLogError("the speculative configuration is missing: include the log from its first line")
    return _measured(log, settings, version, given)


def _measured(log: StartupLog, settings: LoggedSettings, version: str, given: Given) -> Measurement:
    facts, memory, tensor = valid_facts(_spec(settings, version, given)), log.memory, settings.tensor or 1
    plan = make_plan(facts, (NodeFacts("measured", given.product, tensor),), None)
    if not isinstance(plan, Plan):
        raise UnusableLogError(plan.message)
    available, beside, peak = memory.available_kv_bytes, memory.non_model_bytes, None
    if available is None:
        raise UnusableLogError("no line 'Available KV cache memory' found: use the log of an engine that started")
    budget, kind = plan.chosen.budget, engine_kind(facts.pair, given.product, tensor)
    try:
        kind = replace(kind, engine_version=version, runner=log.runner or kind.runner)
        entry = measured_entry(kind, budget, available)
    except calibration.CalibrationError as error:
        raise UnusableLogError(str(error)) from error
    if memory.requested_bytes is not None and memory.model_load_bytes is not None and beside is not None:
        # Versions differ in whether the logged peak activation includes the graph estimate; this difference is exact.
        peak = memory.requested_bytes - memory.model_load_bytes - beside - available
    terms = (
        Term("device total", budget.total_bytes, memory.total_bytes),
        Term("requested", budget.requested_bytes, memory.requested_bytes),
        Term("weights loaded", budget.weights_bytes + budget.adapters_bytes, memory.model_load_bytes),
        Term("state and non-torch", budget.state_bytes + budget.non_torch_bytes, beside),
        Term("activation and graphs charged", budget.activation_bytes + budget.cuda_graphs_bytes, peak),
        Term("left for the KV cache", budget.available_kv_bytes, available),
    )
    return Measurement(entry, terms, budget.kv_cache_tokens, memory.kv_cache_tokens)


def _spec(settings: LoggedSettings, version: str, given: Given) -> SpecDecodeDeploymentSpec:
    """Return the spec that would start this engine."""

    def model(name: str, quantization: str | None) -> Body:
        made = Quantization.FP8 if quantization in _ONLINE_FP8 else Quantization.AS_CHECKPOINT
        found: Body = {"model": name.strip("/"), "quantization": made.value}
        return {**found, "config": given.configs[name]} if name in given.configs else found

    utilization = settings.utilization or 0.92  # vLLM, config/cache.py CacheConfig
    percent = round(100 * utilization)
    if abs(100 * utilization - percent) > 1e-6:  # noqa: PLR2004  floating-point error
        raise UnusableLogError(f"gpu_memory_utilization {utilization}: must be a multiple of 0.01")
    body: Body = {
        "target": model(settings.model or "", settings.quantization),
        "parallelism": {"tensor": settings.tensor},
        "accelerator": {"products": [given.product], "perNode": settings.tensor},
        "serving": {
            "maxModelLen": settings.max_model_len,
            "maxNumSeqs": settings.max_num_seqs,
            "maxNumBatchedTokens": settings.max_num_batched_tokens,
            "gpuMemoryUtilizationPercent": percent,
            "enforceEager": bool(settings.enforce_eager),
            "kvCacheDtype": settings.kv_cache_dtype or KvCacheDtype.AUTO.value,
            **({"blockSize": settings.block_size} if settings.block_size else {}),
        },
        "engine": {"version": version},
    }
    if settings.method != Method.NONE.value:
        body["speculation"] = {"method": settings.method, "numSpeculativeTokens": settings.num_speculative_tokens}
        if settings.draft_model:
            body["speculation"]["draft"] = model(settings.draft_model, settings.draft_quantization)
    try:
        return SpecDecodeDeploymentSpec.parse(body)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        message = f"{place}: {shown(detail['input'])}: {detail['msg']}; memory of this engine cannot be estimated"
        raise UnusableLogError(message) from error


def measured_entry(kind: calibration.EngineKind, budget: Budget, reported_bytes: int) -> calibration.CalibrationEntry:
    """Return the calibration entry for reported KV cache memory, compared with the uncalibrated budget."""
    residual = budget.available_kv_bytes - reported_bytes
    if -residual > budget.estimated_bytes:
        raise calibration.CalibrationError(
            "residual_bytes",
            residual,
            f"KV cache memory exceeds the prediction by {format_gib(-residual)} GiB, more than all estimated terms "
            f"({format_gib(budget.estimated_bytes)} GiB), so this is another engine than the predicted one: "
            "check product, models, precisions and memory utilization",
        )
    return calibration.CalibrationEntry(**asdict(kind), residual_bytes=residual)


class UnusableObjectError(ValueError):
    """The object has no residual, or one that cannot be used. The message includes a fix."""


def measure_deployment(body: Body) -> Measurement:
    """Compare an object, as printed by ``kubectl get -o yaml``, with the estimate.

    The residual is calculated against the current uncalibrated estimate, because the operator may have planned with a
    calibration or another version of the estimate. Raises UnusableObjectError if the object has no usable residual,
    and InvalidSpecError if its spec is invalid.
    """
    spec, plan, observed = _parts(body)
    device = find_device(plan.product, spec.accelerator.memory_gib_per_gpu)
    if plan.product == CPU_PRODUCT or device is None:
        raise UnusableObjectError(
            f"status.plan.product: {plan.product}: calibration supports only GPUs with known memory"
        )
    facts = valid_facts(spec)
    if facts.options.spread != TENSOR_ONLY:
        raise UnusableObjectError("spec.parallelism: calibration supports only tensor parallelism")
    if facts.pair.limits.dtype_bytes != SIXTEEN_BIT_BYTES:
        raise UnusableObjectError(f"spec.serving.dtype: {spec.serving.dtype}: calibration supports only 16-bit dtypes")
    if not facts.pair.limits.has_own_graphs:
        message = "calibration supports only vLLM's default CUDA graphs"
        raise UnusableObjectError(f"spec.serving.cudagraphMode, maxCudagraphCaptureSize: {message}")
    try:
        facts = _as_planned(facts, plan)
        budget = estimate(facts.pair, device, plan.tensor)
        facts = facts.at(facts.pair.target_precision, facts.pair.draft_precision, budget.fewer_seqs)
    except ValueError as error:
        raise UnusableObjectError(f"status.plan: {error}") from error
    reported_bytes = plan.per_gpu.available_kv_bytes - (observed.kv_cache_residual_bytes or 0)
    try:
        entry = measured_entry(engine_kind(facts.pair, plan.product, plan.tensor), budget, reported_bytes)
    except calibration.CalibrationError as error:
        raise UnusableObjectError(f"status.observed: {error}") from error
    terms = (Term("left for the KV cache", budget.available_kv_bytes, reported_bytes),)
    return Measurement(entry, terms, budget.kv_cache_tokens, observed.kv_cache_tokens)


def _as_planned(facts: Facts, plan: PlanStatus) -> Facts:
    """Return the facts at the plan's precisions; raise ValueError if the spec has no checkpoint for one of them."""
    target = Precision(plan.target_quantization)
    draft = Precision(plan.draft_quantization) if plan.draft_quantization else None
    pair, available = facts.pair, facts.options.available
    problems = [checkpoint_problem("target", pair.target, target, available.target_precisions)]
    if pair.draft is not None and draft is not None:
        problems.append(checkpoint_problem("draft", pair.draft, draft, available.draft_precisions))
    for problem in filter(None, problems):
        raise ValueError(f"{problem}; if the spec changed, get the object again, because its plan is outdated")
    return facts.at(target, draft)


def _parts(body: Body) -> tuple[SpecDecodeDeploymentSpec, PlanStatus, ObservedStatus]:
    """Return spec, plan and observed status; raise UnusableObjectError if the status is older than the spec."""
    try:
        spec = SpecDecodeDeploymentSpec.parse(body.get("spec"), newer=True)
        status = SpecDecodeDeploymentStatus.parse(body.get("status") or {}, newer=True)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise UnusableObjectError(
            f"{place}: {detail['msg']}: export the object with kubectl get sdd NAME -o yaml"
        ) from error
    if spec.engine.replay is not None:
        raise UnusableObjectError(
            "spec.engine.replay: a replay engine loads no model: use an object with a real engine"
        )
    plan, observed = status.plan, status.observed
    if plan is None or observed is None or observed.kv_cache_residual_bytes is None:
        raise UnusableObjectError("status.observed.kvCacheResidualBytes is missing: wait until an engine serves")
    # Share and residual are written together. If the share does not match the plan, one of them is outdated.
    current = observed.kv_cache_residual == residual_share(plan.kv_cache_tokens, observed.kv_cache_tokens or 0)
    if mapping(body, "metadata").get("generation") != status.observed_generation or not current:
        raise UnusableObjectError("the status is older than the spec or the plan: get the object again in a minute")
    return spec, plan, observed


DEFAULT_SHAPES: Final = ("64x8192", "256x8192", "1024x8192")
"""Sequences x batched tokens, which determine persistent buffers and peak activation."""
_DEADLINE_S: Final = 1800.0
"""Long, because a large model compiles for many minutes on a cold start."""
_STOP_S: Final = 60.0
_SHOWN_CHARACTERS: Final = 2000


@dataclass(frozen=True)
class EngineRun:
    """An engine to start for measurement."""

    name: str
    command: tuple[str, ...]
    """Program and arguments."""
    max_num_seqs: int
    max_num_batched_tokens: int

    def start(self) -> str:
        """Start the engine, wait until it serves, stop it, and return its log.

        Raises RuntimeError with the end of the log if the engine exits early or does not serve in time.
        """
        # A compile cache changes memory use: start without one, like a new pod.
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            environment = os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": folder}
            with log.open("wb") as stream:
                # A new session, so that its workers can be stopped with it.
                process = subprocess.Popen(  # noqa: S603  the command is ours
                    self.command, stdout=stream, stderr=stream, env=environment, start_new_session=True
                )
            deadline_s = time.monotonic() + _DEADLINE_S
            try:
                while True:
                    code, text = process.poll(), log.read_text(encoding="utf-8", errors="replace")
                    if "Application startup complete" in text:
                        break
                    if code is not None or time.monotonic() > deadline_s:
                        why = f"did not serve within {_DEADLINE_S:.0f} s" if code is None else f"ended with {code}"
                        raise RuntimeError(f"{self.name}: vLLM {why}:\n{clip_start(text, _SHOWN_CHARACTERS)}")
                    time.sleep(0.5)
            finally:
                # SIGTERM first, then SIGKILL.
                for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
                    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, number)
                        process.wait(patience_s)
                process.wait()
            return log.read_text(encoding="utf-8", errors="replace")


def _runs_of(
    model: str, draft: str | None, shapes: Sequence[str], num_speculative_tokens: int, given: Given
) -> list[EngineRun]:
    """Return the runs for a model: each shape without speculation, with ngram, and with the draft if given."""
    program = shutil.which("vllm")
    if program is None:
        fail("vllm is not installed: run pip install '.[engine]' in a clone on the machine with the GPUs")
    common = ["--load-format", "dummy", "--tensor-parallel-size", str(given.tensor or 1)]
    common += ["--max-model-len", str(given.max_model_len)] if given.max_model_len else []
    speculations: list[dict[str, str | int]] = [{}, {"method": "ngram"}]
    if draft:
        speculations.append({"method": "draft_model", "model": draft})
    runs = []
    for shape in shapes or DEFAULT_SHAPES:
        found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", shape)
        if not found:
            fail(f"--shape {shape}: must be SEQUENCESxBATCHED_TOKENS, such as 256x8192")
        limits = ["--max-num-seqs", found[1], "--max-num-batched-tokens", found[2]]
        for speculation in speculations:
            command = [program, "serve", model, *common, *limits]
            if speculation:
                config = {**speculation, "num_speculative_tokens": num_speculative_tokens}
                command += ["--speculative-config", json.dumps(config)]
            name = f"{speculation.get('method', 'none')} {shape}"
            runs.append(EngineRun(name, tuple(command), int(found[1]), int(found[2])))
    return runs


def _of_deployments(files: list[str], configs: Mapping[str, dict[str, Any]]) -> list[calibration.CalibrationEntry]:
    reading = read_deployments(files)
    if reading.errors or not reading.documents:
        fail(str(reading.errors[0]) if reading.errors else f"{', '.join(files)}: contains no SpecDecodeDeployment")
    with ended(DocumentError):
        refuse_unused(configs, reading.documents)
    entries = []
    for document in reading.documents:
        spec = with_configs(document.body.get("spec"), configs)
        try:
            measurement = measure_deployment({**document.body, "spec": spec})
        except UnusableObjectError as error:
            fail(f"{document.name} ({document.place}): {error}")
        except InvalidSpecError as error:
            hint = "; or use --model-config ID=PATH" if error.reason == MODEL_UNKNOWN else ""
            fail(f"{document.name} ({document.place}): {error}{hint}")
        entries.append(_say(document.name, measurement))
    return entries


def _of_log(name: str, text: str, given: Given) -> calibration.CalibrationEntry:
    with ended(MalformedLogError, UnusableLogError, InvalidSpecError, at=f"{name}: "):
        return _say(name, measure(read_startup_log(text), given))


def _say(name: str, measurement: Measurement) -> calibration.CalibrationEntry:
    """Print a comparison; return its entry."""
    entry = measurement.entry
    precisions = " + ".join(filter(None, (entry.target_precision, entry.draft_precision)))
    tokens_a_step = f" K={entry.num_speculative_tokens}" if entry.num_speculative_tokens else ""
    engine = (
        f"{name}: {entry.model} in {precisions}, vLLM {entry.engine_version} ({entry.runner}) on {entry.tensor} x"
        f" {entry.product}, {entry.max_num_seqs} sequences, {entry.max_num_batched_tokens} batched tokens,"
        f" {entry.method}{tokens_a_step}"
    )
    lines = [
        engine,
        f"{'GiB per GPU':<30}{'predicted':>10}{'reported':>10}{'residual':>10}",
    ]
    for term, predicted, reported in measurement.terms:
        compared = f"{'-':>10}{'-':>10}"
        if reported is not None:
            compared = f"{reported / GIB:>10.2f}{(predicted - reported) / GIB:>+10.2f}"
        lines.append(f"{term:<30}{predicted / GIB:>10.2f}{compared}")
    tokens = measurement.reported_tokens
    said = "none" if tokens is None else f"{tokens:,}"
    say("\n".join([*lines, f"KV cache tokens: {measurement.predicted_tokens:,} predicted, {said} reported", ""]))
    return entry


def _write_entries(out: Path, entries: list[calibration.CalibrationEntry]) -> None:
    try:
        old = calibration.parse_calibration(read_text(str(out))) if out.exists() else calibration.Calibration()
        with replaced_whole(out) as stream:
            stream.write(calibration.serialize_calibration(old.with_entries(entries)))
    except DocumentError as error:
        fail(error)
    except calibration.CalibrationError as error:
        fail(f"{place_of(str(out))}: {error}")
    except OSError as error:
        fail(f"{place_of(str(out))}: {error.strerror}: use a writable file")


def calibrate_command(  # noqa: PLR0913  each is an option
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--append-to",
            HiddenName("--output"),
            HiddenName("-o"),
            metavar="FILE",
            help="Calibration file to which entries are added. It does not have to exist yet.",
        ),
    ],
    product: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            HiddenName("--product"),
            metavar="GPU",
            help="GPU: the value of the node label nvidia.com/gpu.product, such as NVIDIA-H200, "
            "or a name such as H200.",
        ),
    ] = None,
    from_deployment: Annotated[
        list[str] | None,
        typer.Option(
            help="Output of kubectl get sdd NAME -o yaml for an object with serving engines. May be repeated."
        ),
    ] = None,
    from_log: Annotated[
        list[Path] | None,
        typer.Option(help="Startup log of an engine, from its first line. Needs no GPU. May be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run vLLM with dummy weights of this model: a hub id, or a folder with config.json."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Also measure with this draft model: a hub id or a folder.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="K for the runs with --draft and with ngram.")] = 5,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Run with these limits: SEQUENCESxBATCHED_TOKENS, such as 256x8192. May be repeated."),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            "--tp",
            HiddenName("-tp"),
            HiddenName("--tensor"),
            HiddenName("--tensor-parallel-size"),
            min=1,
            help="GPUs per engine, if not in the log.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum sequence length. Overrides the log.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences per batch. Overrides the log.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per step. Overrides the log.")
    ] = None,
    engine_version: Annotated[str | None, typer.Option(help="vLLM version such as 0.32, if not in the log.")] = None,
    model_config: ModelConfigOption = None,
) -> None:
    """Compare memory that engines used with predictions, and add the result to a calibration file."""
    folders = [name for name in (model, draft) if name and (Path(name) / "config.json").is_file()]
    with ended(DocumentError):
        configs, _ = read_models([*(model_config or []), *(f"{name}={name}/config.json" for name in folders)])
    if [bool(from_log), bool(model), bool(from_deployment)].count(True) != 1:
        fail("set exactly one of --from-log FILE, --from-deployment FILE and --model MODEL")
    if from_deployment:
        entries = _of_deployments(from_deployment, configs)
    elif product is None:
        fail("--gpu is missing: logs do not name the GPU; set it, for example to H200")
    else:
        limits = (tensor, max_model_len, max_num_seqs, max_num_batched_tokens)
        given = Given(full_product(product), engine_version, *limits, configs)
        if model:
            entries = _of_runs(_runs_of(model, draft, shape or [], num_speculative_tokens, given), given, out)
        else:
            # Read all logs first, so that an unreadable one fails early.
            texts = [(place_of(str(file)), _log(file)) for file in from_log or []]
            entries = [_of_log(name, text, given) for name, text in texts]
    _write_entries(out, entries)
    say(f"{len(entries)} entries written to {out}")


def _of_runs(runs: list[EngineRun], given: Given, out: Path) -> list[calibration.CalibrationEntry]:
    entries: list[calibration.CalibrationEntry] = []
    for run in runs:
        say(f"starting {' '.join(run.command)}", err=True)
        shaped = replace(given, max_num_seqs=run.max_num_seqs, max_num_batched_tokens=run.max_num_batched_tokens)
        with ended(RuntimeError):
            text = run.start()
        entries.append(_of_log(run.name, text, shaped))
        _write_entries(out, entries)  # After each run, because a run takes minutes
    return entries


def _log(file: Path) -> str:
    """Return the beginning of a log, which contains the engine's start."""
    try:
        with open_to_read(str(file)) as stream:
            return stream.read(MAX_BYTES).decode(errors="replace")
    except DocumentError as error:
        fail(error)
    except OSError as error:
        fail(f"{place_of(str(file))}: {error.strerror}: use a readable file")
