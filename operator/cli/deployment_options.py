"""Options that describe a SpecDecodeDeployment, for `plan` without YAML and for `init`."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.deployment_rules import NAME_MAX_LENGTH
from specdecode_operator.cli.input_files import Document, Reading, read_deployments
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.enums import Method
from specdecode_operator.sizing.catalogue import drafts_by
from specdecode_operator.sizing.devices import product_of_memory
from specdecode_operator.sizing.estimate_fields import CaseError, find_named_gpu
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile

_FOREIGN: Final = re.compile(r"[^a-z0-9]+")
"""What a name of an object cannot hold."""


@dataclass(frozen=True)
class Description:
    """What options say of a deployment; None where they say nothing."""

    model: str | None = None
    draft: str | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    gpus: tuple[str, ...] = ()
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    max_model_len: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    engine_version: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no option was given."""
        return self == Description()

    @property
    def products(self) -> tuple[str, ...]:
        """GPU products, those included that only their memory names."""
        return tuple(_product(gpu) for gpu in self.gpus)

    @property
    def by_memory(self) -> str | None:
        """The first GPU that only its memory names; None where there is none."""
        return next((gpu for gpu in self.gpus if product_of_memory(gpu)), None)

    def document(self, name: str | None = None, namespace: str | None = None) -> Document:
        """Return the object that is described, with nothing in it that was not asked for.

        Its name is that of the target, if none is given.
        """
        if self.model is None:
            raise DocumentError("--model: is missing: name the target, or a file with -f")
        metadata = {"name": name or _name_of(self.model)} | ({"namespace": namespace} if namespace else {})
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": self._spec()}
        return Document("the options", body)

    def _spec(self) -> dict[str, Any]:
        parts = {
            "target": {"model": self.model, "quantization": self.quantization},
            "speculation": self._speculation(),
            "parallelism": {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data},
            # Nobody can ask a cluster for a GPU by its memory.
            "accelerator": {"product": None if self.by_memory else (list(self.products) or None)},
            "serving": {"maxModelLen": self.max_model_len, "kvCacheDtype": self.kv_cache_dtype},
            "engine": {"version": self.engine_version, "image": _likely_image(self.engine_version)},
        }
        said = {name: {key: each for key, each in part.items() if each is not None} for name, part in parts.items()}
        return {name: part for name, part in said.items() if part}

    def _speculation(self) -> dict[str, Any]:
        if (self.method, self.draft, self.num_speculative_tokens) == (None, None, None):
            return {}
        return {
            "method": self.method or drafts_by(self.draft or "") or str(Method.DRAFT_MODEL),
            "numSpeculativeTokens": self.num_speculative_tokens,
            "draft": None if self.draft is None else {"model": self.draft},
        }


def described_or_read(description: Description, files: Sequence[str]) -> Reading:
    """Return the object that options describe, or those of the files where no option describes one."""
    if description.is_empty or (files and description == Description(gpus=description.gpus)):
        return read_deployments(files)
    if files:
        why = f"--model: {description.model or 'nothing'}: {files[0]} is named, too: name files, or describe one object"
        return Reading((), (DocumentError(why),))
    try:
        return Reading((description.document(),), ())
    except DocumentError as error:
        return Reading((), (error,))


def _likely_image(version: str | None) -> str | None:
    with suppress(UnknownEngineVersionError):
        if version is not None and not find_profile(version).tested:
            return f"docker.io/vllm/vllm-openai:v{version}.0"
    return None


def _name_of(model: str) -> str:
    name = _FOREIGN.sub("-", model.rpartition("/")[2].lower())
    # A Service has its name, which begins with a letter.
    name = name.strip("-") if name.strip("-")[:1].isalpha() else f"model-{name}"
    return name[:NAME_MAX_LENGTH].strip("-")


def _product(gpu: str) -> str:
    try:
        return product_of_memory(gpu) or find_named_gpu(gpu).product
    except CaseError as error:
        named = str(error).replace("or give gpu_total_gib", "or its memory as CUDA reports it, such as 48GiB")
        raise DocumentError(f"--{named}") from error
