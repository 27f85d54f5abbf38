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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import ObservedStatus, PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cli.input_files import read_deployments, read_model_configs, refuse_unused, with_configs
from specdecode_operator.cli.options import ModelConfigOption, fail
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
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.calibration import (
    Calibration,
    CalibrationEntry,
    CalibrationError,
    EngineKind,
    parse_calibration,
    serialize_calibration,
)
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.estimate_fields import full_product
from specdecode_operator.sizing.kernel_support import checkpoint_problem
from specdecode_operator.sizing.memory.budget import Budget, engine_kind, estimate
from specdecode_operator.sizing.pair import TENSOR_ONLY
from specdecode_operator.sizing.plan import CPU_PRODUCT, Plan
from specdecode_operator.untrusted import MAX_BYTES
from specdecode_operator.vllm.startup_log import (
    LoggedMemory,
    LoggedSettings,
    MalformedLogError,
    StartupLog,
    read_startup_log,
)

_ONLINE_FP8: Final = ("fp8", "fp8_per_tensor", "fp8_per_channel", "online")
"""Values of --quantization that make FP8 while loading (vLLM, quantization/online)."""


class UnusableLogError(ValueError):
    """A log that cannot be compared: something is missing, or it is of an engine that is not sized."""


@dataclass(frozen=True)
class Given:
    """What the user adds to a log, because no log says it, or this one does not; it wins over the log."""

    product: str
    """GPU product as its node label says; no log names it."""
    engine_version: str | None = None
    tensor: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    configs: Mapping[str, Body] = field(default_factory=dict)
    """Content of config.json by model, as the log names the models."""


@dataclass(frozen=True)
class Term:
    """One term, predicted and as the engine reports it, in bytes of one GPU; None where its log does not say."""

    name: str
    predicted_bytes: int
    reported_bytes: int | None


@dataclass(frozen=True)
class Measurement:
    """What one engine shows: predicted against reported, and its line of the calibration file."""

    entry: CalibrationEntry
    terms: tuple[Term, ...]
    predicted_tokens: int
    reported_tokens: int | None


def measure(log: StartupLog, given: Given) -> Measurement:
    """Return what a log shows against the prediction for the same engine."""
    settings, version = _completed(log, given)
    facts = valid_facts(_spec(settings, version, given))
    tensor = settings.tensor or 1
    plan = make_plan(facts, (NodeFacts("measured", given.product, tensor),), None)
    if not isinstance(plan, Plan):
        raise UnusableLogError(plan.message)
    available = log.memory.available_kv_bytes
    if available is None:
        raise UnusableLogError("it has no line 'Available KV cache memory': the engine did not come so far")
    budget = plan.chosen.budget
    kind = engine_kind(facts.pair, given.product, tensor)
    kind = replace(kind, engine_version=version, runner=log.runner or kind.runner)
    try:
        entry = measured_entry(kind, budget, available)
    except CalibrationError as error:
        raise UnusableLogError(str(error)) from error
    return Measurement(entry, _terms(budget, log.memory), budget.kv_cache_tokens, log.memory.kv_cache_tokens)


def measured_entry(kind: EngineKind, budget: Budget, reported_bytes: int) -> CalibrationEntry:
    """Return the entry of an engine that reported so much for the KV cache, against its uncalibrated budget."""
    residual = budget.available_kv_bytes - reported_bytes
    if -residual > budget.estimated_bytes:
        raise CalibrationError(
            "residual_bytes",
            residual,
            f"the engine had {format_gib(-residual)} GiB more for the KV cache than predicted, but all that is "
            f"estimated takes {format_gib(budget.estimated_bytes)} GiB: it was not the engine that was predicted; "
            "check product, models, precisions and memory utilization",
        )
    return CalibrationEntry(**asdict(kind), residual_bytes=residual)


def _completed(log: StartupLog, given: Given) -> tuple[LoggedSettings, str]:
    logged = log.settings
    settings = replace(
        logged,
        tensor=given.tensor or logged.tensor or 1,
        max_model_len=given.max_model_len or logged.max_model_len,
        max_num_seqs=given.max_num_seqs or logged.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens or logged.max_num_batched_tokens,
    )
    version = given.engine_version or log.version
    needed = {
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--engine-version": version,
    }
    missing = [option for option, value in needed.items() if value is None]
    if settings.model is None or version is None or missing:
        absent = [*missing, *(["the line 'Initializing a V1 LLM engine'"] if settings.model is None else [])]
        raise UnusableLogError(f"it does not say all that decides the memory: add {', '.join(absent)}")
    if (settings.pipeline or 1) > 1:
        raise UnusableLogError(f"pipeline_parallel_size {settings.pipeline}: only tensor parallelism is calibrated")
    if settings.dtype == f"torch.{Dtype.FLOAT32}":
        raise UnusableLogError(f"dtype {Dtype.FLOAT32}: only engines in 16 bits are calibrated")
    if settings.method is None:
        raise UnusableLogError("it does not say whether the engine speculates: give the log from its first line on")
    return settings, version


def _spec(settings: LoggedSettings, version: str, given: Given) -> SpecDecodeDeploymentSpec:
    utilization = settings.utilization or 0.92  # vLLM, config/cache.py CacheConfig
    serving = {
        "maxModelLen": settings.max_model_len,
        "maxNumSeqs": settings.max_num_seqs,
        "maxNumBatchedTokens": settings.max_num_batched_tokens,
        "memoryUtilizationPercent": _percent(utilization),
        "enforceEager": bool(settings.enforce_eager),
        "kvCacheDtype": settings.kv_cache_dtype or KvCacheDtype.AUTO.value,
        **({"blockSize": settings.block_size} if settings.block_size else {}),
    }
    body: Body = {
        "target": _model(settings.model or "", settings.quantization, given),
        "parallelism": {"tensor": settings.tensor},
        "accelerator": {"product": [given.product], "perNode": settings.tensor},
        "serving": serving,
        "engine": {"version": version},
    }
    if settings.method != Method.NONE.value:
        body["speculation"] = _speculation(settings, given)
    try:
        return SpecDecodeDeploymentSpec.parse(body)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        message = f"{place}: {shown(detail['input'])}: {detail['msg']}; this engine cannot be sized"
        raise UnusableLogError(message) from error


def _speculation(settings: LoggedSettings, given: Given) -> Body:
    speculation: Body = {"method": settings.method, "numSpeculativeTokens": settings.num_speculative_tokens}
    if settings.draft_model:
        speculation["draft"] = _model(settings.draft_model, settings.draft_quantization, given)
    return speculation


def _model(name: str, quantization: str | None, given: Given) -> Body:
    made = Quantization.FP8 if quantization in _ONLINE_FP8 else Quantization.AS_CHECKPOINT
    model: Body = {"model": name.strip("/"), "quantization": made.value}
    config = given.configs.get(name)
    return model if config is None else {**model, "config": config}


def _percent(utilization: float) -> int:
    percent = round(100 * utilization)
    if abs(100 * utilization - percent) > 1e-6:  # noqa: PLR2004  what a float of two decimals may be off by
        raise UnusableLogError(f"gpu_memory_utilization {utilization}: only whole percents are sized")
    return percent


def _terms(budget: Budget, memory: LoggedMemory) -> tuple[Term, ...]:
    beside, available = memory.non_model_bytes, memory.available_kv_bytes
    peak = None
    if None not in (memory.requested_bytes, memory.model_load_bytes, beside, available):
        # What is printed as peak activation has the graph estimate in it or not, by version: the rest is exact.
        taken = (memory.model_load_bytes or 0) + (beside or 0) + (available or 0)
        peak = (memory.requested_bytes or 0) - taken
    return (
        Term("device total", budget.total_bytes, memory.total_bytes),
        Term("requested", budget.requested_bytes, memory.requested_bytes),
        Term("weights loaded", budget.weights_bytes, memory.model_load_bytes),
        Term("state and non-torch", budget.state_bytes + budget.non_torch_bytes, beside),
        Term("activation and graphs charged", budget.activation_bytes + budget.cuda_graphs_bytes, peak),
        Term("left for the KV cache", budget.available_kv_bytes, available),
    )


class UnusableObjectError(ValueError):
    """An object that shows no residual, or one that cannot be used; the text says what to do."""


def measure_deployment(body: Body) -> Measurement:
    """Return what an object as ``kubectl get -o yaml`` prints it shows of the estimates.

    The operator may have planned with a calibration already, or be of another
    version than this: so the residual is counted anew against the estimate
    of today without one.
    """
    spec, plan, observed = _parts(body)
    device = find_device(plan.product, spec.accelerator.memory_gib_per_gpu)
    if plan.product == CPU_PRODUCT or device is None:
        raise UnusableObjectError(f"status.plan.product: {plan.product}: only GPUs whose memory is known are estimated")
    facts = valid_facts(spec)
    if facts.options.spread != TENSOR_ONLY:
        raise UnusableObjectError("spec.parallelism: only engines with tensor parallelism alone are calibrated")
    if facts.pair.limits.dtype_bytes != SIXTEEN_BIT_BYTES:
        raise UnusableObjectError(f"spec.serving.dtype: {spec.serving.dtype}: only engines in 16 bits are calibrated")
    if not facts.pair.limits.has_own_graphs:
        message = "only engines with vLLM's own CUDA graphs are calibrated"
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
    except CalibrationError as error:
        raise UnusableObjectError(f"status.observed: {error}") from error
    terms = (Term("left for the KV cache", budget.available_kv_bytes, reported_bytes),)
    return Measurement(entry, terms, budget.kv_cache_tokens, observed.kv_cache_tokens)


def _as_planned(facts: Facts, plan: PlanStatus) -> Facts:
    target = Precision(plan.target_quantization)
    draft = Precision(plan.draft_quantization) if plan.draft_quantization else None
    pair, available = facts.pair, facts.options.available
    problems = [checkpoint_problem("target", pair.target, target, available.target_precisions)]
    if pair.draft is not None and draft is not None:
        problems.append(checkpoint_problem("draft", pair.draft, draft, available.draft_precisions))
    for problem in filter(None, problems):
        raise ValueError(f"{problem}; or get the object again: its plan is of another spec")
    return facts.at(target, draft)


def _parts(body: Body) -> tuple[SpecDecodeDeploymentSpec, PlanStatus, ObservedStatus]:
    try:
        spec = SpecDecodeDeploymentSpec.parse(body.get("spec"), newer=True)
        status = SpecDecodeDeploymentStatus.parse(body.get("status") or {}, newer=True)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise UnusableObjectError(f"{place}: {detail['msg']}: write it with kubectl get sdd NAME -o yaml") from error
    if spec.engine.replay is not None:
        raise UnusableObjectError("spec.engine.replay: only engines that run a model show what memory it takes")
    plan, observed = status.plan, status.observed
    if plan is None or observed is None or observed.kv_cache_residual_bytes is None:
        raise UnusableObjectError("has no status.observed.kvCacheResidualBytes: wait until an engine of it serves")
    metadata = body.get("metadata")
    generation = metadata.get("generation") if isinstance(metadata, dict) else None
    # The share is written with the residual: where it is not that of the plan, one of the two is older.
    current = observed.kv_cache_residual == residual_share(plan.kv_cache_tokens, observed.kv_cache_tokens or 0)
    if generation != status.observed_generation or not current:
        raise UnusableObjectError("its status is older than its spec or its plan: get it again in a minute")
    return spec, plan, observed


DEFAULT_SHAPES: Final = ("64x8192", "256x8192", "1024x8192")
"""Sequences x batched tokens: what the persistent buffers and the activation peak grow with."""

_SERVES: Final = "Application startup complete"
_SHAPE: Final = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})")
_DEADLINE_S: Final = 1800.0
"""A cold start of a large model compiles for many minutes."""

_STOP_S: Final = 60.0
_SHOWN_CHARACTERS: Final = 2000
_POLL_S: Final = 0.5


@dataclass(frozen=True)
class EngineRun:
    """One start of an engine."""

    name: str
    command: tuple[str, ...]
    """Program and arguments."""
    max_num_seqs: int
    max_num_batched_tokens: int

    def settle(self, given: Given) -> Given:
        """Return what is given with the shape of this run."""
        return replace(given, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    def start(self) -> str:
        """Start it, wait until it serves, end it, and return its log."""
        # The compile cache makes two starts differ: every run begins without one, as a new pod does.
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            environment = os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": folder}
            with log.open("wb") as stream:
                # A session of its own, so that its workers can be ended with it.
                process = subprocess.Popen(  # noqa: S603  the command is ours
                    self.command, stdout=stream, stderr=stream, env=environment, start_new_session=True
                )
            try:
                self._wait(process, log)
            finally:
                _end(process)
            return log.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while True:
            ended = process.poll() is not None
            text = log.read_text(encoding="utf-8", errors="replace")
            if _SERVES in text:
                return
            if ended or time.monotonic() > deadline_s:
                why = f"ended with {process.returncode}" if ended else f"did not serve within {_DEADLINE_S:.0f} s"
                raise RuntimeError(f"{self.name}: vLLM {why}:\n{clip_start(text, _SHOWN_CHARACTERS)}")
            time.sleep(_POLL_S)


def runs_of(
    model: str, draft: str | None, shapes: Sequence[str], num_speculative_tokens: int, given: Given
) -> list[EngineRun]:
    """Return the runs that measure a model: each shape without speculation, with ngram, and with the draft."""
    program = shutil.which("vllm")
    if program is None:
        raise ValueError("vllm is not installed here: pip install '.[engine]' in a clone, where the GPUs are")
    common = ["--load-format", "dummy", "--tensor-parallel-size", str(given.tensor or 1)]
    common += ["--max-model-len", str(given.max_model_len)] if given.max_model_len else []
    speculations: list[dict[str, str | int] | None] = [None, {"method": "ngram"}]
    if draft:
        speculations.append({"method": "draft_model", "model": draft})
    runs = []
    for sequences, tokens in map(_shape, shapes or DEFAULT_SHAPES):
        for speculation in speculations:
            command = [program, "serve", model, *common]
            command += ["--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(tokens)]
            method = speculation["method"] if speculation else "none"
            if speculation:
                config = {**speculation, "num_speculative_tokens": num_speculative_tokens}
                command += ["--speculative-config", json.dumps(config)]
            runs.append(EngineRun(f"{method} {sequences}x{tokens}", tuple(command), sequences, tokens))
    return runs


def _shape(text: str) -> tuple[int, int]:
    found = _SHAPE.fullmatch(text)
    if not found:
        raise ValueError(f"--shape {text}: must be SEQUENCESxBATCHED_TOKENS, such as 256x8192")
    return int(found[1]), int(found[2])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an engine and its workers: gently, then not."""
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


_GIB: Final = 2**30


def of_deployments(files: list[str], configs: Mapping[str, dict[str, Any]]) -> list[CalibrationEntry]:
    """Print the comparison of each object and return their entries."""
    reading = read_deployments(files)
    if reading.errors or not reading.documents:
        fail(str(reading.errors[0]) if reading.errors else f"{', '.join(files)}: holds no SpecDecodeDeployment")
    try:
        refuse_unused(configs, reading.documents)
    except DocumentError as error:
        fail(error)
    entries = []
    for document in reading.documents:
        try:
            measurement = measure_deployment(
                {**document.body, "spec": with_configs(document.body.get("spec"), configs)}
            )
        except UnusableObjectError as error:
            fail(f"{document.name} ({document.place}): {error}")
        except InvalidSpecError as error:
            hint = "; or use --model-config ID=PATH" if error.reason == MODEL_UNKNOWN else ""
            fail(f"{document.name} ({document.place}): {error}{hint}")
        say("\n".join(_table(document.name, measurement)))
        entries.append(measurement.entry)
    return entries


def of_logs(files: list[Path], given: Given) -> list[CalibrationEntry]:
    """Print the comparison of each log, once all could be read, and return their entries."""
    logs = [(place_of(str(file)), _log(file)) for file in files]
    return [_measured(name, text, given) for name, text in logs]


def of_runs(runs: list[EngineRun], given: Given, out: Path) -> list[CalibrationEntry]:
    """Print the comparison of each run and return their entries; each is kept at once, for runs take minutes."""
    entries: list[CalibrationEntry] = []
    for run in runs:
        say(f"starting {' '.join(run.command)}", err=True)
        try:
            entries.append(_measured(run.name, run.start(), run.settle(given)))
        except RuntimeError as error:
            fail(error)
        write_entries(out, entries)
    return entries


def _measured(name: str, text: str, given: Given) -> CalibrationEntry:
    try:
        measurement = measure(read_startup_log(text), given)
    except (MalformedLogError, UnusableLogError, InvalidSpecError) as error:
        fail(f"{name}: {error}")
    say("\n".join(_table(name, measurement)))
    return measurement.entry


def _table(name: str, measurement: Measurement) -> list[str]:
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
        f"{'GiB on each GPU':<30}{'predicted':>10}{'reported':>10}{'residual':>10}",
    ]
    for term in measurement.terms:
        reported = term.reported_bytes
        residual = None if reported is None else term.predicted_bytes - reported
        lines.append(f"{term.name:<30}{_gib(term.predicted_bytes)}{_gib(reported)}{_gib(residual, sign='+')}")
    tokens = measurement.reported_tokens
    said = "not said" if tokens is None else f"{tokens:,}"
    return [*lines, f"KV cache tokens: {measurement.predicted_tokens:,} predicted, {said} reported", ""]


def _gib(size_bytes: int | None, sign: str = "") -> str:
    return f"{'-':>10}" if size_bytes is None else f"{size_bytes / _GIB:>{sign}10.2f}"


def write_entries(out: Path, entries: list[CalibrationEntry]) -> None:
    """Add entries to the file; it is replaced whole, so that an interruption leaves the old one."""
    try:
        old = parse_calibration(read_text(str(out))) if out.exists() else Calibration()
        with replaced_whole(out) as stream:
            stream.write(serialize_calibration(old.with_entries(entries)))
    except DocumentError as error:
        fail(error)
    except CalibrationError as error:
        fail(f"{place_of(str(out))}: {error}")
    except OSError as error:
        fail(f"{place_of(str(out))}: {error.strerror}: name a file that can be written")


def _log(file: Path) -> str:
    try:
        with open_to_read(str(file)) as stream:
            return stream.read(MAX_BYTES).decode(errors="replace")
    except DocumentError as error:
        fail(error)
    except OSError as error:
        fail(f"{place_of(str(file))}: {error.strerror}: name a file that can be read")


_PRODUCT_HELP: Final = "GPU as the node label nvidia.com/gpu.product has it, such as NVIDIA-H200, or H200."
_LOG_HELP: Final = "Log of an engine's start, from its first line on; needs no GPU. May be repeated."
_DEPLOYMENT_HELP: Final = "Output of kubectl get sdd NAME -o yaml, of an object whose engines serve. May be repeated."
_MODEL_HELP: Final = "Run vLLM with dummy weights of this model: hub id, or a folder with its config.json."
_DRAFT_HELP: Final = "Also measure with this draft model: hub id or folder."
_SHAPE_HELP: Final = "Run with SEQUENCESxBATCHED_TOKENS, such as 256x8192. May be repeated."


def calibrate_command(  # noqa: PLR0913  each is an option
    *,
    out: Annotated[Path, typer.Option("--output", "-o", help="Calibration file; entries are added to it.")],
    product: Annotated[str | None, typer.Option(help=_PRODUCT_HELP)] = None,
    from_deployment: Annotated[list[str] | None, typer.Option(help=_DEPLOYMENT_HELP)] = None,
    from_log: Annotated[list[Path] | None, typer.Option(help=_LOG_HELP)] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    draft: Annotated[str | None, typer.Option(help=_DRAFT_HELP)] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="K with --draft and ngram.")] = 5,
    shape: Annotated[list[str] | None, typer.Option(help=_SHAPE_HELP)] = None,
    tensor: Annotated[int | None, typer.Option(min=1, help="GPUs of one engine, where the log does not say.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Where the log does not say.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="As 0.32, where the log does not say.")] = None,
    model_config: ModelConfigOption = None,
) -> None:
    """Compare what engines took with what was predicted, term by term, and add it to a calibration file."""
    # Sizing takes longer to load than the rest of the command line.

    folders = [name for name in (model, draft) if name and (Path(name) / "config.json").is_file()]
    try:
        configs = read_model_configs([*(model_config or []), *(f"{name}={name}/config.json" for name in folders)])
    except DocumentError as error:
        fail(error)
    if [bool(from_log), bool(model), bool(from_deployment)].count(True) != 1:
        fail("give one of --from-log FILE, --from-deployment FILE, and --model MODEL to run vLLM here")
    if from_deployment:
        entries = of_deployments(from_deployment, configs)
    elif product is None:
        fail("--product is missing: no log names the GPU")
    else:
        given = Given(
            product=full_product(product),
            engine_version=engine_version,
            tensor=tensor,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            configs=configs,
        )
        if model:
            try:
                runs = runs_of(model, draft, shape or [], num_speculative_tokens, given)
            except ValueError as error:
                fail(error)
            entries = of_runs(runs, given, out)
        else:
            entries = of_logs(from_log or [], given)
    write_entries(out, entries)
    say(f"{len(entries)} entries written to {out}")
