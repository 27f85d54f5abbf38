"""Options that describe a SpecDecodeDeployment, for `plan` without YAML and for `init`."""

import re
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from math import isclose
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from specdecode_operator.cli import completion
from specdecode_operator.cli.options import HiddenName, VersionOption
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.enums import Method
from specdecode_operator.sizing.catalogue import drafts_by
from specdecode_operator.sizing.devices import product_of_memory
from specdecode_operator.sizing.estimate_fields import CaseError, find_named_gpu

if TYPE_CHECKING:
    from specdecode_operator.cli.input_files import Document

_PANELS: Final = {
    "Model": ("file", "batch", "model", "quantization", "model_config", "facts", "hub"),
    "Speculation": ("draft", "method", "num_speculative_tokens"),
    "Hardware": ("gpu", "nodes", "tp", "pp", "dp", "calibration", "read_rate", "download_rate"),
    "Engine": (
        "engine_version",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "allow_pod_template",
    ),
    "Output": ("explain", "matrix", "strict", "output", "out", "plot", "name", "namespace"),
}
"""Options of commands that take a description, by help panel and in help order."""


@dataclass(frozen=True)
class Description:
    """The options that describe a deployment."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            autocompletion=completion.models,
            help="Target model, such as meta-llama/Llama-3.1-70B-Instruct. Replaces the file.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="MODEL", autocompletion=completion.models, help="Draft model or draft head."),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            autocompletion=completion.methods,
            help="Speculation method. Defaults to the known method of --draft, otherwise to draft_model.",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", "-K", help="K: draft tokens per step.", show_default=False),
    ] = None
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            autocompletion=completion.gpus,
            help="GPU: a name such as H200, a product label, or a memory size such as 48GiB. May be repeated.",
        ),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            HiddenName("-tp"),
            HiddenName("--tensor-parallel-size"),
            help="Tensor parallelism. Defaults to the smallest that fits.",
        ),
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(
            "--pp", HiddenName("-pp"), HiddenName("--pipeline-parallel-size"), help="Pipeline stages. Defaults to 1."
        ),
    ] = None
    dp: Annotated[
        int | None,
        typer.Option(
            "--dp",
            HiddenName("-dp"),
            HiddenName("--data-parallel-size"),
            help="Data-parallel ranks per replica. Defaults to 1.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", help="Maximum sequence length in tokens. Defaults to the model's own."),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Maximum number of requests per batch. Defaults to 256.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-utilization",
            min=0.01,
            max=1,
            help="Share of each GPU's memory that the engine may use, in steps of 0.01. Defaults to 0.92.",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            autocompletion=completion.precisions,
            help="Quantization of the target: BF16, FP8, … Defaults to the checkpoint's.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-dtype",
            autocompletion=completion.cache_dtypes,
            help="Data type of the KV cache: auto, bfloat16, fp8, …",
        ),
    ] = None
    engine_version: VersionOption = None

    @property
    def is_empty(self) -> bool:
        """Whether no option is set."""
        return self == Description()

    @property
    def products(self) -> tuple[str, ...]:
        """GPU products, including pseudo-products for memory sizes such as 48GiB."""
        try:
            return tuple(product_of_memory(gpu) or find_named_gpu(gpu).product for gpu in self.gpu or ())
        except CaseError as error:
            named = str(error).replace("give gpu_total_gib", "give its memory as CUDA reports it, such as 48GiB")
            raise DocumentError(f"--{named}") from error

    @property
    def memory_percent(self) -> int | None:
        """Share of each GPU's memory that the engine may use, in percent."""
        if self.gpu_memory_utilization is None:
            return None
        percent = round(100 * self.gpu_memory_utilization)
        if not isclose(percent, 100 * self.gpu_memory_utilization):
            steps = "must be a multiple of 0.01, because manifests use whole percents"
            raise DocumentError(f"--gpu-memory-utilization: {self.gpu_memory_utilization}: {steps}")
        return percent

    @property
    def by_memory(self) -> str | None:
        """The first --gpu that is a memory size; None if all are products."""
        return next((gpu for gpu in self.gpu or () if product_of_memory(gpu)), None)

    def document(self, name: str | None = None, namespace: str | None = None) -> "Document":
        """Return the described object, with only the fields that are set. It is named after the target by default."""
        # A batch has no objects, and importing the kinds takes longer than sizing 1,000 lines.
        from specdecode_operator.api.base import API_VERSION  # noqa: PLC0415
        from specdecode_operator.api.deployment import KIND  # noqa: PLC0415
        from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH  # noqa: PLC0415
        from specdecode_operator.cli.input_files import THE_OPTIONS, Document  # noqa: PLC0415
        from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile  # noqa: PLC0415

        if self.model is None:
            raise DocumentError("--model is missing: set the target model, or pass a file with -f")
        image = None
        with suppress(UnknownEngineVersionError):
            # An untested version needs an explicit image: use vLLM's usual name.
            if self.engine_version is not None and not find_profile(self.engine_version).tested:
                image = f"docker.io/vllm/vllm-openai:v{self.engine_version}.0"
        speculation: dict[str, Any] = {}
        if (self.method, self.draft, self.num_speculative_tokens) != (None, None, None):
            speculation = {
                "method": str(self.method or drafts_by(self.draft or "") or Method.DRAFT_MODEL),
                "numSpeculativeTokens": self.num_speculative_tokens,
                "draft": None if self.draft is None else {"model": self.draft},
            }
        parts = {
            "target": {"model": self.model, "quantization": self.quantization},
            "speculation": speculation,
            "parallelism": {"tensor": self.tp, "pipeline": self.pp, "data": self.dp},
            # A manifest cannot request a GPU by its memory.
            "accelerator": {"products": None if self.by_memory else (list(self.products) or None)},
            "serving": {
                "maxModelLen": self.max_model_len,
                "maxNumSeqs": self.max_num_seqs,
                "gpuMemoryUtilizationPercent": self.memory_percent,
                "kvCacheDtype": self.kv_cache_dtype,
            },
            "engine": {"version": self.engine_version, "image": image},
        }
        said = {name: {key: each for key, each in part.items() if each is not None} for name, part in parts.items()}
        spec = {name: part for name, part in said.items() if part}
        if not name:
            # The last part of the model id, such as llama-3-1-70b-instruct. A Service name starts with a letter.
            name = re.sub(r"[^a-z0-9]+", "-", self.model.rpartition("/")[2].lower())
            name = name.strip("-") if name.strip("-")[:1].isalpha() else f"model-{name}"
            name = name[:NAME_MAX_LENGTH].strip("-")
        metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
        return Document(THE_OPTIONS, {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})


def with_description(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``description`` with the options of a Description, in their help panels."""
    hints, names = get_type_hints(Description, include_extras=True), [each.name for each in fields(Description)]
    kind, parameters = Parameter.KEYWORD_ONLY, list[Parameter]()
    for each in signature(command).parameters.values():
        given = [Parameter(name, kind, default=None, annotation=hints[name]) for name in names]
        parameters += given if each.name == "description" else [each]
    order = [name for panel in _PANELS.values() for name in panel]
    parameters = sorted(
        map(_in_panel, parameters), key=lambda each: order.index(each.name) if each.name in order else -1
    )

    def run(**options: Any) -> None:
        description = Description(**{name: options.pop(name) for name in names})
        command(**options, description=description)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _in_panel(parameter: Parameter) -> Parameter:
    panel = next((panel for panel, names in _PANELS.items() if parameter.name in names), None)
    if panel is None:
        return parameter
    # Copy it: other commands have the same option without a panel.
    option = copy(parameter.annotation.__metadata__[0])
    option.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, option])
