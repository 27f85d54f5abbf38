"""Build targets and drafts as the engine's workers do, on the meta device; runs in the engine's Python."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_h100
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash_utils
from vllm.v1.worker.gpu.spec_decode.dspark import utils as dspark_utils
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils
from vllm.v1.worker.gpu.spec_decode.gemma4 import speculator as gemma4_speculator

V2_DRAFTERS = "vllm.v1.worker.gpu.spec_decode"
DRAFTERS = (
    (f"{V2_DRAFTERS}.standalone_ar", "speculator", "StandaloneARSpeculator"),  # from 0.32 on
    (f"{V2_DRAFTERS}.draft_model", "speculator", "PlainDraftModelSpeculator"),  # 0.31
    ("vllm.v1.spec_decode", "draft_model", "DraftModelProposer"),  # of model runner V1, which served them before
)
"""What loads a draft model, by package, module and class: the first that a version has."""

DRAFTER_MODULE, DRAFTER = next(
    (import_module(f"{package}.{module}"), name) for package, module, name in DRAFTERS if find_spec(package)
)


class Group:
    """Stands in for a process group: it knows its size and our place in it."""

    device_communicator = None
    mq_broadcaster = None
    use_custom_op_call = False
    first_rank = 0

    def __init__(self, world_size: int, rank: int) -> None:
        """Make a group of which we are one."""
        self.world_size, self.rank_in_group, self.local_rank, self.rank = world_size, rank, rank, rank
        self.ranks = list(range(world_size))
        self.last_rank = world_size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world_size - 1
        self.cpu_group = self.device_group = self

    def size(self) -> int:
        """Return the members."""
        return self.world_size

    def all_gather(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return our own part."""
        return tensor

    all_reduce = all_gather


@dataclass
class Stage:
    """One pipeline stage as built: its configuration, models and KV cache specs."""

    config: Any
    target: Any
    draft: Any = None
    draft_shared: Any = None
    draft_error: str | None = None
    draft_names: set[str] = field(default_factory=set)
    specs: dict[str, Any] = field(default_factory=dict)


def set_groups(case: dict[str, Any], stage: int) -> None:
    """Become tensor rank 0 of a pipeline stage."""
    tensor, pipeline = case.get("tp", 1), case.get("pp", 1)
    sizes = {"_WORLD": (tensor * pipeline, stage * tensor), "_TP": (tensor, 0), "_PP": (pipeline, stage)}
    expert = tensor if case.get("ep") else 1
    for name in ("_DP", "_EP", "_DCP", "_PCP", "_EPLB"):
        sizes[name] = (expert if name == "_EP" else 1, 0)
    for name, (world_size, rank) in sizes.items():
        setattr(parallel_state, name, Group(world_size, rank))


def build_model(vllm_config: Any, model_config: Any = None, prefix: str = "", **_: Any) -> Any:
    """Return a model on the meta device: stands in for vLLM's get_model, which also loads weights."""
    model_config = model_config or vllm_config.model_config
    with (
        set_current_vllm_config(vllm_config, prefix=prefix),
        set_default_torch_dtype(model_config.dtype),
        torch.device("meta"),
        fake_h100.MetaForCuda(),
    ):
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)


def build_draft(stage: Stage) -> None:
    """Build the drafter with vLLM's own functions, which take from the target what is shared.

    They run on a meta model without a checkpoint, which would say whether the
    head brings an embedding and an output head: it is taken to share those
    that have the target's shape.
    """
    loader = draft_loader(stage)
    if loader is None:
        return

    def remember(*args: Any, **kwargs: Any) -> Any:
        stage.draft = build_model(*args, **kwargs)
        stage.draft_shared = own_parameters(stage.draft, None)
        return stage.draft

    for module in (eagle_utils, dflash_utils, gemma4_speculator, DRAFTER_MODULE):
        module.get_model = remember
        module._should_share = same_shape
    try:
        with set_current_vllm_config(stage.config), fake_h100.MetaForCuda():
            loader(remember)
    except Exception:
        if stage.draft is None:
            raise
        stage.draft_error = last_words()


def same_shape(_: Any, __: str, own: Any, target: Any) -> bool:
    """Decide whether a draft can use the target's table in the place of its own."""
    if own is None or target is None:
        return own is None
    return bool(own.weight.shape == target.weight.shape)


def draft_loader(stage: Stage) -> Callable[[Any], Any] | None:
    """Return what loads the draft of a method; None for methods without weights."""
    config, speculative = stage.config, stage.config.speculative_config
    method = speculative.method
    if method in ("eagle", "eagle3", "mtp"):
        is_assistant = speculative.use_gemma4_mtp()
        return lambda _: load_assistant(stage) if is_assistant else eagle_utils.load_eagle_model(stage.target, config)
    is_xpress = getattr(speculative, "is_xpress", None)
    if method == "dspark" or (is_xpress and is_xpress()):
        return lambda build: load_dspark(build, stage)
    if method == "dflash":
        return lambda _: dflash_utils.load_dflash_model(stage.target, config)
    if method == "draft_model":
        return lambda _: load_draft_model(stage)
    if method == "medusa":
        return lambda build: build(vllm_config=config, model_config=speculative.draft_model_config)
    return None


def load_draft_model(stage: Stage) -> Any:
    """Build it with the drafter's own method, of an object that holds no more than that reads."""
    kind = getattr(DRAFTER_MODULE, DRAFTER)
    drafter = kind.__new__(kind)
    drafter.vllm_config, drafter.speculative_config = stage.config, stage.config.speculative_config
    drafter.draft_model_config = drafter.speculative_config.draft_model_config
    if hasattr(drafter, "load_draft_model"):
        return drafter.load_draft_model(stage.target, set())
    return drafter._get_model()


def load_assistant(stage: Stage) -> Any:
    """Build it with the drafter's own method, which shares the target's cache and embedding with it."""
    kind = gemma4_speculator.Gemma4Speculator
    drafter = kind.__new__(kind)
    drafter.vllm_config, drafter.speculative_config = stage.config, stage.config.speculative_config
    names = {name for name in stage.config.compilation_config.static_forward_context if ".layers." in name}
    return drafter.load_draft_model(stage.target, names)


def load_dspark(build: Callable[..., Any], stage: Stage) -> Any:
    """Build it with vLLM's own function, which looks up what builds a model each time."""
    model_loader.get_model = build
    return dspark_utils.load_dspark_model(stage.target, stage.config)


def own_parameters(model: Any, other: Any) -> dict[str, Any]:
    """Return the parameters of a model that the other does not hold too."""
    held = {id(parameter) for parameter in other.parameters()} if other is not None else set()
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in held}


def last_words() -> str:
    """Return the error being handled and where it came from."""
    error = sys.exc_info()[1]
    frames = traceback.extract_tb(sys.exc_info()[2])[-6:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:600]} [{where}]"
