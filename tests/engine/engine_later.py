"""What vLLM refuses only after its configuration was built: in a worker, in the scheduler, or for each request.

Runs in the engine's Python. Each function gets a whole configuration and calls
the engine's own check, with as little around it as the check reads.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any


def schedule(config: Any) -> None:
    """The scheduler's own: K by the number of running requests."""
    build = import_module("vllm.v1.spec_decode.dynamic.utils").build_dynamic_sd_schedule_lookup
    speculative = config.speculative_config
    build(
        speculative.num_speculative_tokens_per_batch_size,
        config.scheduler_config.max_num_seqs,
        speculative.num_speculative_tokens,
    )


def shorter_draft(config: Any) -> None:
    """Model runner V1's own: a proposer that is asked for fewer tokens than usual."""
    length = config.speculative_config.num_speculative_tokens
    proposer = import_module("vllm.v1.spec_decode.ngram_proposer_gpu").NgramProposerGPU
    try:
        proposer.propose(SimpleNamespace(k=length), length - 1, None, None, None, None)
    except AssertionError as error:
        raise ValueError("no other length") from error


def block_size(config: Any) -> None:
    """The workers' choice of a kernel for the blocks of the KV cache."""
    on_cpu = import_module("vllm.platforms").current_platform.is_cpu()
    module, name = ("cpu_attn", "CPUAttentionBackend") if on_cpu else ("flash_attn", "FlashAttentionBackend")
    backend = getattr(import_module(f"vllm.v1.attention.backends.{module}"), name)
    choose = import_module("vllm.v1.worker.utils").select_common_block_size
    choose(config.cache_config.block_size, [backend])


def graph_sizes(config: Any) -> None:
    """The runner's choice of the sizes to capture; both runners come by here."""
    support = import_module("vllm.v1.attention.backend").AttentionCGSupport
    config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support.ALWAYS,
        None,
        1 + config.speculative_config.num_speculative_tokens,
        use_v2_model_runner=config.use_v2_model_runner,
    )


def state_blocks(config: Any) -> None:
    """The runner's own: a block of 308 for the states of each request that may run."""
    support = import_module("vllm.v1.attention.backend").AttentionCGSupport
    config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support.ALWAYS,
        None,
        1,
        use_v2_model_runner=config.use_v2_model_runner,
        kv_cache_config=SimpleNamespace(has_mamba_layers=True, num_blocks=308),
        max_num_reqs=config.scheduler_config.max_num_seqs,
    )


def largest_item(config: Any) -> None:
    """The scheduler's own: an item of 2,496 tokens, of a model for which no step may cut one."""
    compute = import_module("vllm.v1.core.encoder_cache_manager").compute_mm_encoder_budget
    compute(config.scheduler_config, {"image": 280, "video": 2496})


def logits_processors(config: Any) -> None:
    """Model runner V1's own: processors that the configuration names."""
    build = import_module("vllm.v1.sample.logits_processor").build_logitsprocs
    build(config, "cpu", False, False, tuple(config.model_config.logits_processors))


def rejection_sampler(config: Any) -> None:
    """Model runner V1's own: what checks drafted tokens."""
    device = import_module("torch").device("cpu")
    sampler = import_module("vllm.v1.sample.rejection_sampler").RejectionSampler
    sampler(SimpleNamespace(logprobs_mode="raw_logprobs"), config.speculative_config, device)


def request(config: Any) -> None:
    """A request that says nothing of sampling."""
    parameters = import_module("vllm.sampling_params").SamplingParams
    defaults = config.model_config.get_diff_sampling_param()
    parameters(**defaults)._validate_spec_decode(config.speculative_config)


def draft_split(config: Any) -> None:
    """Model runner V1's own: the split of a draft model."""
    _draft_model(config)._raise_if_draft_tp_mismatch()


def draft_positions(config: Any) -> None:
    """Model runner V1's own: positions of a draft model."""
    _draft_model(config)._raise_if_mrope()


def _draft_model(config: Any) -> Any:
    proposer = import_module("vllm.v1.spec_decode.draft_model").DraftModelProposer
    drafter = proposer.__new__(proposer)
    drafter.__dict__ |= vars(
        SimpleNamespace(
            speculative_config=config.speculative_config,
            draft_model_config=config.speculative_config.draft_model_config,
        )
    )
    return drafter


def inner_states(config: Any) -> None:
    """The runner's own: a target that hands out hidden states of inner layers."""
    registry = import_module("vllm.model_executor.models.registry").ModelRegistry
    utils = import_module("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
    model, _ = registry.resolve_model_cls(config.model_config.architectures, config.model_config)
    try:
        utils.set_eagle3_aux_hidden_state_layers(model, config.speculative_config)
    except RuntimeError as error:
        if "Expected model instance" not in str(error):  # the check after this one: nothing is loaded here
            raise


CHECKS = {
    check.__name__: check
    for check in (
        schedule,
        shorter_draft,
        block_size,
        graph_sizes,
        state_blocks,
        largest_item,
        logits_processors,
        rejection_sampler,
        request,
        draft_split,
        draft_positions,
        inner_states,
    )
}
