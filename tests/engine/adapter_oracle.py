"""Ask the installed vLLM how many bytes it reserves for LoRA adapters; runs in the engine's Python.

Reads a JSON list of cases from standard input, in the words of run_oracle.py with flags of adapters in ``argv``, and
writes the answers as a JSON list to the file named by the first argument: for each stage the bytes of the matrices, and
of the tables of indices.

Models are built on the meta device, and vLLM's own manager wraps their layers. Only the checks of expert kernels are
left out: a kernel is chosen after weights are loaded.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from dump_engine_flags import serve_parser
from oracle_models import Stage, last_words
from sizing_oracle import arguments, build_stage, size_bytes
from vllm import envs, lora
from vllm.config import set_current_vllm_config
from vllm.lora import model_manager
from vllm.lora.layers import fused_moe
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.punica_wrapper import punica_gpu

MATRICES = (
    *("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked"),
    *("w2_lora_a_stacked", "w2_lora_b_stacked", "adapter_enabled", "sharded_to_full_mapping_gpu"),
)
EXPERTS = fused_moe.FusedMoEWithLoRA


def without_kernel(self: Any, base_layer: Any) -> None:
    """Stand in for the constructor of a layer of experts, without what reads its kernel."""
    BaseLayerWithLoRA.__init__(self)
    self.base_layer, self.moe_config = base_layer, base_layer.moe_config
    self._shared_experts = base_layer._shared_experts
    parallel = self.moe_config.moe_parallel_config
    self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
    self.device = torch.device("meta")
    self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
    self.enable_moe_shared_loras = False


def kernel_tables() -> Any:
    """Return the class of the kernels' tables, whose package needs Triton for the kernels beside it."""
    path = Path(lora.__file__).parent / "ops/triton_ops/lora_kernel_metadata.py"
    spec = spec_from_file_location("lora_kernel_metadata", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.LoRAKernelMeta


punica_gpu.LoRAKernelMeta = kernel_tables()
EXPERTS.__init__ = without_kernel
EXPERTS.set_mapping = BaseLayerWithLoRA.set_mapping


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors of a tuple."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def adapted(stage: Stage) -> Any:
    """Return vLLM's manager after it has wrapped the layers of a stage."""
    config = stage.config
    scheduler = config.scheduler_config
    with set_current_vllm_config(config), torch.device("meta"):
        return model_manager.LoRAModelManager(
            stage.target,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.get_vocab_size(),
            config.lora_config,
            torch.device("meta"),
            config,
        )


def matrices(layer: BaseLayerWithLoRA) -> Iterator[torch.Tensor]:
    """Yield what a layer allocates. Experts also list views of their matrices by the names of other layers."""
    names = MATRICES[2:] if isinstance(layer, EXPERTS) else MATRICES
    for name in names:
        yield from tensors_of(getattr(layer, name, None))


def table_bytes(manager: Any) -> int:
    """Return the bytes of the tables of indices on the device."""
    config = manager.lora_config
    wrapper = punica_gpu.PunicaWrapperGPU(
        manager.vllm_tokens, max_batches=manager.max_num_seqs, device=torch.device("meta"), lora_config=config
    )
    own = [value for value in vars(wrapper).values() if isinstance(value, torch.Tensor)]
    metas = [vars(wrapper.token_mapping_meta), vars(wrapper.prompt_mapping_meta)]
    own += [value for meta in metas for name, value in meta.items() if not name.endswith("_cpu")]
    return size_bytes(value for value in own if isinstance(value, torch.Tensor))


def describe(stage: Stage) -> dict[str, Any]:
    """Return the bytes of a stage, and of its layers by the last part of their names."""
    manager = adapted(stage)
    layers = {id(layer): (name, layer) for name, layer in stage.target.named_modules(remove_duplicate=False)}
    found: dict[str, int] = {}
    for name, layer in layers.values():
        if isinstance(layer, BaseLayerWithLoRA):
            kind = name.rpartition(".")[2]
            found[kind] = found.get(kind, 0) + size_bytes(matrices(layer))
    manager.vllm_tokens = stage.config.scheduler_config.max_num_batched_tokens
    return {"by_module": found, "table_bytes": table_bytes(manager)}


def main() -> None:
    """Answer every case; a failing one says why."""
    assert not envs.VLLM_LORA_ENABLE_DUAL_STREAM
    parser, answers = serve_parser(), []
    for case in json.load(sys.stdin):
        given: dict[str, Any] = {"id": case["id"]}
        try:
            with tempfile.TemporaryDirectory() as folder:
                argv = arguments(case, Path(folder))
                given["stages"] = [
                    describe(build_stage(parser, case, argv, index)) for index in range(case.get("pp", 1))
                ]
        except Exception:  # noqa: BLE001 (any error is the answer)
            given["error"] = last_words()
        answers.append(given)
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
