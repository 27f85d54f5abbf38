"""Convert servers of other projects to specs for the plan, and messages about these specs to fields of the servers.

The spec is only for sizing. It has vLLM's defaults, not the operator's, and omits settings that need no GPU memory.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.enums import KvCacheDtype, Platform
from specdecode_operator.importing.convert import find_server, take_server
from specdecode_operator.importing.engine_container import differing_defaults
from specdecode_operator.importing.pod_template import values_of_label
from specdecode_operator.importing.prefill_decode import PAGE, Side
from specdecode_operator.importing.runtimes import ACCELERATOR_TYPE
from specdecode_operator.importing.spec_builder import MigrationError, Object, SpecBuilder, Workload, withhold_secrets
from specdecode_operator.problems import Problem, shown, some_of
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.estimate_fields import CaseError, find_named_gpu
from specdecode_operator.sizing.plan import Change
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.arguments import ARGUMENTS, SPECULATIVE_OPTION
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS
from specdecode_operator.vllm.versions import version_of_image

_PRODUCT_LABELS: Final = ("cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name", ACCELERATOR_TYPE)
"""Other labels that name a GPU: of GKE, Karpenter and Ray."""

_SIZED: Final = (
    *("target", "speculation", "adapters", "adapterSlots", "parallelism", "accelerator", "serving", "engine"),
    *("replicas", "models"),
)
"""Parts of a spec that a plan reads, or needs to be valid."""
_NOT_SIZED: Final = re.compile(
    r"spec\.(podTemplate|models|replicas|engine\.env|adapters\[\d+\]\.model|serving\.(apiKeySecret|tlsSecret)"
    r"|transformer|explainer|tracing|scaling|router|template\.metadata)\b"
)
"""Fields of settings that take no GPU memory, so that a plan can leave them out without a note."""

_FLAGS: Final[Mapping[str, str]] = {
    **{
        key.field.removeprefix("spec."): f"{SPECULATIVE_OPTION} {key.key}"
        for key in reversed(SPECULATIVE_KEYS)
        if key.key != "parallel_drafting"
    },
    **{
        each.field.removeprefix("spec."): each.flag
        for each in ARGUMENTS
        if each.field and each.field.count(".") > 1 and each.field != "spec.serving.tlsSecret"
    },
    "target.model": "--model",
    "target.revision": "--revision",
    "speculation": SPECULATIVE_OPTION,
    "speculation.draft.revision": f"{SPECULATIVE_OPTION} revision",
    "accelerator.products": f"the node label {PRODUCT_LABEL}",
    "engine.version": "the version of vLLM",
    "engine.extraArgs": "the server",
    "engine.env": "the server",
    "replicas": "replicas",
}
"""Flag or phrase for each field of a spec in messages."""
_FIELD: Final = re.compile(
    r"\b(?:spec\.)?(" + "|".join(re.escape(each) for each in sorted(_FLAGS, key=len, reverse=True)) + r")\b(?![.\w])"
)
_CPU_CACHE_GIB: Final = 4
_CPU_CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"
_ASSUMED: Final = frozenset(
    {"spec.engine.version", "spec.engine.image", "spec.target.model", "spec.accelerator.kvCacheGiB"}
)
"""Decisions of an import for which the plan makes an assumption."""
_PLACEHOLDER: Final = {"persistentVolumeClaim": {"claimName": "models"}}
"""Stands for the place of a model that is not on the hub."""

_SIZED_OF_ADAPTER: Final = ("name", "rank", "targetModules")
_ADAPTER: Final = "adapter"
"""Stands for the place of an adapter, which does not change its size."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_MOST_REPLICAS: Final = 1000
_OF_STATUS: Final = "; check status.observed.kvCacheResidual when the engine serves"
"""End of notes that only apply to our own objects."""
_TOKEN: Final = {"name": "token", "key": "token"}
_UNREAD: Final = "could not be read, so the plan does not count it"


@dataclass(frozen=True)
class ForeignServer:
    """One server of an object of another project."""

    kind: str
    name: str
    where: str
    """Field of its container, or of the part of the object that describes it."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Its settings as the spec of a SpecDecodeDeployment."""
    error: Problem | None = None
    """Why it cannot be read; None if it can."""
    unread: tuple[Problem, ...] = ()
    """Settings that are not in the spec although they may change the plan."""
    warnings: tuple[Problem, ...] = ()
    """Assumptions of the plan, and settings that contradict each other."""
    notes: tuple[Problem, ...] = ()
    """Remarks that need no change."""
    assumed_version: str | None = None
    """Version of vLLM that is assumed because the image tag has none; None if it has one."""
    side: Side | None = None
    """Its side of a prefill/decode split; None if it serves both phases."""
    origins: Mapping[str, str] = field(default_factory=dict)
    flag_fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def names_gpu(self) -> bool:
        """Whether the object names its GPU product, or needs none."""
        accelerator = mapping(self.spec, "accelerator")
        return bool(accelerator.get("products")) or accelerator.get("type") == "CPU" or self.error is not None

    def in_its_fields(self, problem: Problem) -> Problem:
        """Return a problem of the spec with the field and the value of the object."""
        path = problem.field.removeprefix("spec.")
        message = self.in_flags(problem.message)
        known = [each for each in self.origins if path == each or path.startswith(f"{each}.")]
        known += [each for each in self.origins if each.startswith(f"{path}.")]
        if not problem.field.startswith("spec."):
            return replace(problem, message=message)
        if (variable := re.match(r"engine\.env\[(\d{1,4})\]", path)) is not None:
            listed = objects(mapping(self.spec, "engine"), "env")
            name = name_of(listed[int(variable[1])]) if int(variable[1]) < len(listed) else "env"
            return Problem(f"{self.where}.env", f"{name} {problem.value}", message)
        if path.startswith("engine.extraArgs"):
            return Problem(f"{self.where}.args", problem.value, message)
        if not known:
            flag = _FLAGS.get(path)
            if flag is None:
                return Problem(self.where, f"{path} {problem.value}", message)
            return Problem(self._field(flag), f"{flag} {problem.value} (default)", message)
        origin = self.origins[known[0]]
        value = problem.value.strip('"')
        return Problem(self._field(origin), origin if value in origin else f"{origin} {value}", message)

    def _field(self, origin: str) -> str:
        """Return the field of a setting such as ``--max-model-len 8192`` or ``image NAME``."""
        first = origin.partition(" ")[0]
        if first.startswith("-"):
            return self.flag_fields.get(first.partition("=")[0].replace("_", "-"), f"{self.where}.args")
        if first in {"model", "draft", "revision"}:
            flag = "" if first == "model" else SPECULATIVE_OPTION if first == "draft" else "--revision"
            return self.flag_fields.get(flag, f"{self.where}.args")
        part = {"image": "image", "env": "env", "resources": "resources"}.get(first)
        return f"{self.where}.{part}" if part else self.where

    def in_flags(self, text: str) -> str:
        """Return a text with the flags of vLLM in place of fields of the spec."""
        return _FIELD.sub(lambda found: _FLAGS[found[1]], text.replace(_OF_STATUS, ""))

    def flag_change(self, change: Change) -> Change:
        """Return a change of a field as a change of a flag."""
        value = change.value
        if change.field == "serving.gpuMemoryUtilizationPercent" and isinstance(value, int):
            value = f"{value / 100:.2f}"
        return Change(_FLAGS.get(change.field, change.field), value)


def read_server(workload: Workload, kind: str, engine_version: str | None = None) -> ForeignServer:
    """Return the server of an object as a spec for sizing, or why it cannot be read."""
    try:
        where, container, _ = find_server(workload)
        return _read(replace(workload, says_gpus=False), kind, where, str(container.get("image") or ""), engine_version)
    except MigrationError as error:
        return ForeignServer(kind, workload.name, workload.where, error=error.problem)


def _read(workload: Workload, kind: str, where: str, image: str, engine_version: str | None) -> ForeignServer:
    builder = SpecBuilder(decisions=[*workload.remarks.decisions])
    platform, gpus, side = take_server(workload, engine_version, {}, builder)
    replicas = workload.spec.get("replicas")
    if type(replicas) is int and 0 <= replicas <= _MOST_REPLICAS:
        builder.set("replicas", replicas)
    _name_product(workload.pod, builder)
    model_field = workload.flag_fields.get("", f"{where}.args")
    assumed = _take_version(image, engine_version, builder, platform)
    warnings = _model_warnings(model_field, builder)
    if platform is Platform.CPU and builder.get("accelerator.kvCacheGiB") is None:
        builder.set("accelerator.kvCacheGiB", _CPU_CACHE_GIB)
        message = f"the plan assumes {_CPU_CACHE_GIB} GiB of KV cache"
        warnings.append(Problem(f"{where}.env", f"no {_CPU_CACHE}", message))
    tokens = builder.get("serving.maxNumBatchedTokens")
    for path, (theirs, _) in differing_defaults(builder, platform).items():
        # vLLM lowers its own default of requests, never a number that was set.
        lower = path == "serving.maxNumSeqs" and isinstance(tokens, int) and 0 < tokens < theirs
        builder.set(path, tokens if lower else theirs)
    ranks = [builder.get(f"parallelism.{key}") or 1 for key in ("tensor", "pipeline", "data")]
    if platform is Platform.GPU and gpus and all(isinstance(each, int) for each in ranks):
        used = ranks[0] * ranks[1] * ranks[2]
        if used > gpus:
            message = f"the arguments use {used} GPUs, more than the pods of a replica have; request {used} per replica"
            warnings.append(Problem(f"{where}.resources", f"{GPU_RESOURCE} {gpus}", message))
    fp8 = next(filter(_is_fp8_cache, builder.decisions), None)
    if fp8 is not None:
        builder.take("--kv-cache-dtype", "serving.kvCacheDtype", KvCacheDtype.FP8.value)
        warnings.append(Problem(f"{where}.args", fp8.value, f"is sized as {KvCacheDtype.FP8}"))
    if isinstance(adapters := builder.get("adapters"), list):
        sized = ({key: each[key] for key in _SIZED_OF_ADAPTER if key in each} for each in adapters)
        builder.set("adapters", [{**each, "model": _ADAPTER} for each in sized])
    withhold_secrets(builder)
    unread = [
        each
        for each in builder.decisions
        if each is not fp8 and not _NOT_SIZED.match(each.field) and each.field not in _ASSUMED
    ]
    server = ForeignServer(
        kind=kind,
        name=workload.name,
        where=where,
        spec={key: builder.spec[key] for key in _SIZED if key in builder.spec},
        warnings=tuple(warnings),
        notes=tuple(_notes(where, image, assumed, side)),
        assumed_version=assumed,
        side=side,
        origins=dict(builder.origins),
        flag_fields=workload.flag_fields,
    )
    return replace(server, unread=tuple(_unread(server, each) for each in unread))


def _is_fp8_cache(decision: Problem) -> bool:
    """Return whether a decision is about an FP8 type of the KV cache without a value of the field."""
    return re.match(r"--kv[-_]cache[-_]dtype[ =]fp8", decision.value) is not None


def _unread(server: ForeignServer, decision: Problem) -> Problem:
    """Return a decision of an import as a setting that the plan does not count."""
    known = server.in_its_fields(replace(decision, message=_UNREAD))
    # The value of a decision is the setting as written.
    in_spec = decision.field.removeprefix("spec.").partition(".")[0] in {*_SIZED, "podTemplate"}
    flag = re.match(r"--[a-z0-9-]+", decision.value)
    where = server.flag_fields.get(flag[0], f"{server.where}.args") if flag else known.field
    return Problem(where if in_spec else decision.field, decision.value, _UNREAD)


def _name_product(pod: Object, builder: SpecBuilder) -> None:
    """Take the GPU product from the labels and tolerations that usually name it."""
    if builder.get("accelerator.products"):
        return
    for label in _PRODUCT_LABELS:
        source, values = values_of_label(pod, label)
        products = list(filter(None, map(_product_of, values)))
        if products and len(products) == len(values):
            builder.take(f"{source} {label}", "accelerator.products", products)
            return
    tolerated = [each.get("value") for each in objects(pod, "tolerations") if each.get("key") == PRODUCT_LABEL]
    if tolerated and all(isinstance(each, str) and each for each in tolerated):
        builder.take(f"toleration {PRODUCT_LABEL}", "accelerator.products", list(dict.fromkeys(tolerated)))


def _product_of(value: str) -> str | None:
    """Return the product that a value such as ``nvidia-h100-80gb`` means; None if it is not clear."""
    try:
        return find_named_gpu(value.removeprefix("nvidia-").replace("-", " ")).product
    except CaseError:
        return None


def _take_version(image: str, wanted: str | None, builder: SpecBuilder, platform: Platform) -> str | None:
    """Set the version of vLLM, and return it if it is assumed; sizing on GPUs does not need the image."""
    builder.spec.get("engine", {}).pop("image", None)
    named = version_of_image(image)
    version = wanted or builder.get("engine.version") or (named if named in KNOWN_VERSIONS else KNOWN_VERSIONS[-1])
    builder.set("engine.version", version)
    if platform is Platform.CPU:
        builder.set("engine.image", f"vllm/vllm-openai-cpu:v{version}.0")
    return None if wanted is not None or named == version else str(version)


def _notes(where: str, image: str, assumed: str | None, side: Side | None) -> Iterator[Problem]:
    if assumed is not None:
        message = f"has no supported version of vLLM in its tag, so it is sized as {assumed}; set --engine-version"
        yield (
            Problem(f"{where}.image", shown(image), message)
            if image
            else Problem(where, "no image", f"sized as vLLM {assumed}; set --engine-version")
        )
    if side is not None:
        message = f"this server is {side.phrase} of a prefill/decode split, and is planned separately ({PAGE})"
        yield Problem(side.field, side.value, message)


def _model_warnings(field: str, builder: SpecBuilder) -> list[Problem]:
    """Size a model on a volume as the Hub ID that clients use, and replace other places with a placeholder."""
    model, warnings = builder.get("target.model"), list[Problem]()
    if not isinstance(model, str):
        return []
    served = builder.get("serving.servedModelNames")
    names = [each for each in (served if isinstance(served, list) else []) if isinstance(each, str)]
    on_volume = builder.get("models.volume") is not None or _is_place(model)
    known = next(filter(find_entry, names), None) or (next(filter(_HUB_ID.fullmatch, names), None))
    draft = builder.get("speculation.draft.model")
    if find_entry(model) is None and on_volume and known is not None:
        message = f"is on a volume: sized as {shown(known)}, the name that clients use"
        warnings.append(Problem(field, shown(builder.origins.get("target.model", model)), message))
        builder.set("target.model", known)
        model = known
    placed = builder.get("models.volume") is not None and (model != known or draft is not None)
    for path, each in (("target.model", model), ("speculation.draft.model", draft)):
        if isinstance(each, str) and _is_place(each):
            builder.set(path, re.sub(r"^[a-z0-9+]*:?/+|^\./|^~/", "", each) or each)
            placed = True
    # Sizing only asks whether the hub has the model, and whether a download has a token.
    builder.set("models", {"volume": _PLACEHOLDER} if placed else {"hubTokenSecret": _TOKEN})
    return warnings


def _is_place(model: str) -> bool:
    return "://" in model or model.startswith(("/", "./", "~"))


def other_objects(names: Sequence[str]) -> str:
    """Return a note on the objects that run no vLLM server."""
    counted = {name: names.count(name) for name in names}
    return some_of([f"{count} {name}" if count > 1 else name for name, count in counted.items()], 4)
