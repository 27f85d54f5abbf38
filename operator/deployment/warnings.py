"""Write the warnings and notes on a spec with which an engine does start.

A warning names a setting that the author can change; a note explains a consequence of the chosen settings.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.api.deployment import Expose, ReplayMode, Serving, SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import ServedModel
from specdecode_operator.deployment.adapter_checks import adapter_notes
from specdecode_operator.deployment.engine_settings import served_names
from specdecode_operator.deployment.expose import MODEL_NAME_HEADER
from specdecode_operator.deployment.live_recorder import live_recorder_blocked
from specdecode_operator.deployment.model_checks import GETS_LONGER, class_doubts, runs_on_v1, schedule_notes
from specdecode_operator.deployment.models.checkpoints import config_of, stored_weights
from specdecode_operator.deployment.models.model_locations import (
    NOTHING_ASSUMED,
    KnownModels,
    assumption_of,
    fetched_models,
    hub_environment,
    model_source,
)
from specdecode_operator.deployment.request_lengths import schedule_doubts
from specdecode_operator.deployment.spec_facts import Facts, platform_of
from specdecode_operator.enums import (
    METHODS_OF_FREE_LENGTH,
    SIXTEEN_BIT_BYTES,
    CudagraphMode,
    Knowledge,
    Method,
    Platform,
    Precision,
)
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.arithmetic import MIB, format_gib
from specdecode_operator.sizing.catalogue import is_gated, is_known_name, is_variant, made_for, published_heads
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device, memory_coefficients
from specdecode_operator.sizing.families.draft_heads import ASSISTANTS
from specdecode_operator.sizing.families.estimated import MORE_IN_FILES, SCALE_TOLERANCE_PERCENT
from specdecode_operator.sizing.geometry import DeltaNet, LatentAttention, computed_in, stretched_length
from specdecode_operator.sizing.memory.kv_cache import whole_cache
from specdecode_operator.sizing.pair import Pair, longest_sequence
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.version_rules import sizing_facts
from specdecode_operator.sizing.weights import checkpoint_disagreement, weight_bytes
from specdecode_operator.vllm.environment import ALLOW_LONG_VARIABLE, allows_longer
from specdecode_operator.vllm.extra_args_parser import options
from specdecode_operator.vllm.extra_args_rules import unknown_flags
from specdecode_operator.vllm.hf_overrides import positions_of
from specdecode_operator.vllm.kv_transfer import KV_TRANSFER, split_transfer
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile
from specdecode_operator.vllm.speculative_config import unknown_keys
from specdecode_operator.vllm.versions import split_reference, version_of_image

_COUNTED_AS_USUAL: Final = (CudagraphMode.PIECEWISE, CudagraphMode.FULL, CudagraphMode.FULL_DECODE_ONLY)
_UNCOUNTED_FLAGS: Final = (
    *("--cpu-offload-gb", "--offload-group-size"),
    *("--enable-lora", "--enable-tower-connector-lora", "--specialize-active-lora", "--enable-moe-shared-loras"),
    "--lora-dtype",
    *("--enable-mixed-moe-lora-format", "--enable-eplb", "--enable-dbo", "--kv-transfer-config"),
    *("--mm-encoder-tp-mode", "--mm-ipc-gpu-memory-gb"),
    *("--disable-hybrid-kv-cache-manager", "--kv-cache-dtype-skip-layers"),
    *("--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-cache-mode"),
)
_LEAST_STEP_TOKENS: Final = 2048  # vllm/config/scheduler.py, DEFAULT_MAX_NUM_BATCHED_TOKENS
_ROPE_KEYS: Final = re.compile('"rope_(parameters|scaling)"')
# Keys of config.json that differ between tokenizers. Not the end-of-text token, because instruction tuning changes it.
_TOKENIZER_KEYS: Final = ("bos_token_id", "tokenizer_class")


def plan_warnings(facts: Facts, known: KnownModels, tensor: int) -> list[str]:
    """Return a sentence for each setting that has no effect or makes figures uncertain.

    ``facts`` are at the precisions that the plan chose, and ``tensor`` is its tensor parallelism.
    """
    return [
        *_replay_warnings(facts),
        *_recorder_warnings(facts),
        *map(str, spec_doubts(facts.spec, facts.profile)),
        *map(str, size_doubts(facts)),
        *map(str, schedule_doubts(facts)),
        *map(str, class_doubts(facts.spec, facts.pair, facts.profile)),
        *_estimated_warnings(facts),
        *_assumed_warnings(facts),
        *_scale_warnings(facts),
        *_checkpoint_warnings(facts, known),
        *_rope_warnings(facts, known),
        *_length_warnings(facts, tensor),
        *_draft_length_warnings(facts),
        *_asked_warnings(facts),
        *_lookup_warnings(facts),
        *_sampling_warnings(facts),
        *_unknown_flag_warnings(facts),
        *_tokenizer_warnings(facts, known),
        *_other_target_warnings(facts.pair),
        *_split_warnings(facts),
    ]


def plan_notes(facts: Facts) -> list[str]:
    """Return a sentence for each consequence of the chosen settings that a user should know."""
    return [
        *_engine_notes(facts),
        *schedule_notes(facts.spec, facts.profile, facts.pair),
        *_uncounted_notes(facts),
        *adapter_notes(facts),
        *filter(None, [lossy_answers(facts), _https_note(facts), _split_note(facts)]),
        *_model_name_notes(facts.spec),
    ]


def _https_note(facts: Facts) -> str | None:
    """Return that a gateway needs another object because engines serve HTTPS; None if it does not."""
    expose = facts.spec.expose
    if expose == Expose() or facts.spec.serving.tls_secret is None:
        return None
    if expose.inference_pool is None:
        field, backend, picker = "httpRoute", "Service", ""
    else:
        field, backend, picker = "inferencePool", "InferencePool", ". Its endpoint picker must scrape metrics by HTTPS"
    return (
        f"expose.{field}: the engines serve HTTPS (serving.tlsSecret), so the gateway needs a BackendTLSPolicy for the"
        f" {backend}, which the operator does not create{picker}"
    )


def _model_name_notes(spec: SpecDecodeDeploymentSpec) -> Iterator[str]:
    """Yield a note for each model name that a route matches and the engines do not serve."""
    route, names = spec.expose.http_route, (*served_names(spec), *(each.name for each in spec.adapters))
    for number, match in enumerate([] if route is None else route.matches):
        for header in match.headers:
            if header.name.lower() == MODEL_NAME_HEADER.lower() and header.value not in names:
                yield (
                    f"expose.httpRoute.matches[{number}]: matches model {header.value}, but the engines only serve"
                    f" {', '.join(names)} and answer other names with status 404: correct the value of {header.name},"
                    " or add the name to serving.servedModelNames"
                )


def _replay_warnings(facts: Facts) -> Iterator[str]:
    if facts.replay is None or facts.replay.mode is ReplayMode.EMULATED:
        return
    engine = facts.spec.engine
    unused = [name for name, given in (("extraArgs", engine.extra_args), ("env", engine.env)) if given]
    if unused:
        fields = " and ".join(f"engine.{name}" for name in unused)
        yield f"a replay ignores {fields}"


def _recorder_warnings(facts: Facts) -> Iterator[str]:
    """Yield why engines carry no recorder although the spec wants one; that a replay has none is documented."""
    engine, blocked = facts.spec.engine, live_recorder_blocked(facts.spec)
    if engine.recorder and engine.replay is None and blocked:
        yield f"engine.recorder: live captures are not possible: {blocked}"


def spec_doubts(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> list[Problem]:
    """Return the warnings that need no facts about the models: which vLLM runs, and settings that are likely wrong."""
    untested = untested_version(spec, profile)
    return [
        *([] if untested is None else [untested]),
        *_image_doubts(spec, profile),
        *_share_doubts(spec),
        *_split_doubts(spec, profile),
    ]


def _image_doubts(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> Iterator[Problem]:
    version, image = profile.version, spec.engine.image
    if image is None:
        return
    tag = split_reference(image)[1]
    if "@" not in image and not any(character.isdigit() for character in tag):
        message = f"the tag {tag} may point to another image at any time; use a tag with a version, or a digest"
        yield Problem("spec.engine.image", image, message)
    named = version_of_image(image)
    if named not in (None, version):
        message = (
            f"is vLLM {named} by its name, but is launched and sized as engine.version {version}; set engine.version to"
            f' "{named}", unless the name is misleading'
        )
        yield Problem("spec.engine.image", image, message)


def token_doubts(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    """Yield the gated models that pods would download without a token; planning does not download."""
    reaches_hub = spec.models.volume is None and spec.engine.replay is None
    if not reaches_hub or spec.models.hub_token_secret is not None or hub_environment(spec):
        return
    for field, model in fetched_models(spec).items():
        if is_gated(model.model):
            message = (
                "is gated on the Hugging Face Hub; set spec.models.hubTokenSecret to the token of an account that has"
                " access, or use a copy on a volume (spec.models.volume)"
            )
            yield Problem(f"{field}.model", model.model, message)


def _share_doubts(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    percent = spec.serving.gpu_memory_utilization_percent
    if percent == 1 and platform_of(spec) is Platform.GPU:
        usual = Serving.model_fields["gpu_memory_utilization_percent"].default
        message = f"is 1 %, which looks like a fraction; write {usual}, the default, or another share in percent"
        yield Problem("spec.serving.gpuMemoryUtilizationPercent", str(percent), message)


def size_doubts(facts: Facts) -> Iterator[Problem]:
    """Yield that a draft is as large as its target or larger, so that it cannot make the target faster."""
    pair = facts.pair
    if pair.draft is None or pair.draft_precision is None or facts.replay is not None:
        return
    target = weight_bytes(pair.target, pair.target_precision, Split(1))
    draft = weight_bytes(pair.draft, pair.draft_precision, Split(1))
    if draft >= target:
        message = (
            f"has {format_gib(draft)} GiB of weights, and its target {pair.target.name} has {format_gib(target)} GiB;"
            " use a draft that is smaller than the target"
        )
        yield Problem("spec.speculation.draft.model", pair.draft.name, message)


def untested_version(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> Problem | None:
    """Return a warning if the version is newer than all known versions."""
    if profile.tested:
        return None
    newest = KNOWN_VERSIONS[-1]
    more = format_gib(memory_coefficients().unknown_version_margin_bytes)
    margin = "" if platform_of(spec) is Platform.CPU else f", with {more} GiB more margin on each GPU"
    message = (
        f"is untested, so it is launched and sized as {newest}, the newest vLLM that this operator supports{margin};"
        f' set "{newest}", or watch the first start'
    )
    return Problem("spec.engine.version", profile.version, message)


def _estimated_warnings(facts: Facts) -> Iterator[str]:
    for field, _, model in facts.models():
        if model.knowledge is not Knowledge.ESTIMATED:
            continue
        role = field.removeprefix("speculation.")
        lacks = model.architecture if model.estimated_because == "architectures" else f"its {model.estimated_because}"
        why = f"sizing does not implement {lacks}"
        if model.estimated_because == MORE_IN_FILES:
            why = "its files hold more than its config.json describes"
        counted = "the bytes in its files" if model.stored else "only the shapes in its config.json"
        wider = "and the plan keeps a wider margin"
        yield f"the {role} {model.name} is estimated: {why}; weights follow from {counted}, {wider}"
        yield from (f"the {role} {model.name}: {doubt}" for doubt in model.doubts)


def _assumed_warnings(facts: Facts) -> Iterator[str]:
    """Yield a warning for each model with assumed sizes: they are not checked, and not used if sizing is exact."""
    for field, served, model in facts.models():
        if (given := assumption_of(served)) == NOTHING_ASSUMED:
            continue
        if model.knowledge is Knowledge.EXACT:
            cache = whole_cache(model)
            known = weight_bytes(model, model.checkpoint_precision or Precision.BF16, Split(1))
            pairs = []
            if given.weights_bytes is not None:
                pairs.append(f"weights {format_gib(known)} GiB instead of {format_gib(given.weights_bytes)}")
            if given.kv_bytes_per_token is not None:
                pairs.append(f"KV cache {cache.token_bytes:,} bytes per token instead of {given.kv_bytes_per_token:,}")
            if given.state_bytes_per_request is not None:
                instead = given.state_bytes_per_request // MIB
                pairs.append(f"states {cache.state_bytes / MIB:.0f} MiB per request instead of {instead}")
            compared = ", ".join(pairs)
            yield f"{field}.assume is not used, because sizing is exact for {model.name}: {compared}; remove it"
        else:
            weights, states = given.weights_bytes, given.state_bytes_per_request
            told = (
                None if weights is None else f"weights {format_gib(weights)} GiB",
                None if given.kv_bytes_per_token is None else f"KV cache {given.kv_bytes_per_token:,} bytes a token",
                None if states is None else f"states {states // MIB} MiB a request",
            )
            numbers = ", ".join(filter(None, told))
            yield f"{field}.assume: sizes of {model.name} use unverified values: {numbers}"
    target = facts.pair.target
    if facts.method is Method.DSPARK and facts.pair.draft is None and target.is_made_up:
        yield (
            f"spec.target.assume: the plan counts the DSpark stages of {target.name} only if weightsGiB and"
            " kvBytesPerToken include them: check both values"
        )


def _scale_warnings(facts: Facts) -> Iterator[str]:
    for field, served, model in facts.models():
        if model.estimated_because == MORE_IN_FILES or assumption_of(served).weights_bytes is not None:
            continue
        in_files, by_shape = model.layer_scale
        larger, smaller = max(in_files, by_shape), min(in_files, by_shape)
        if larger * 100 > smaller * (100 + SCALE_TOLERANCE_PERCENT):
            yield (
                f"{field}: layers of {model.name} take {format_gib(in_files)} GiB in its files and about"
                f" {format_gib(by_shape)} GiB by its config.json, more than {SCALE_TOLERANCE_PERCENT} % apart: the plan"
                " counts the files; check that both belong to this model, and write its facts file again"
            )


def _checkpoint_warnings(facts: Facts, known: KnownModels) -> Iterator[str]:
    for _, served, model in facts.models():
        stored = stored_weights(known.get(model_source(facts.spec, served)))
        is_known = model.knowledge is Knowledge.EXACT or model.estimated_because == MORE_IN_FILES
        # Files do not depend on the type that the engine computes in.
        if stored is not None and is_known:
            yield from filter(None, [checkpoint_disagreement(computed_in(model, SIXTEEN_BIT_BYTES), stored)])


def _rope_warnings(facts: Facts, known: KnownModels) -> Iterator[str]:
    target, asked = facts.spec.target, facts.spec.target.rope_scaling
    if asked is None:
        return
    own = positions_of(_config(facts, target, known))
    kind = own.get("rope_type", own.get("type"))
    original = own.get("original_max_position_embeddings")
    same = (kind, own.get("factor")) == (asked.type, float(asked.factor)) and original in (
        None,
        asked.original_max_position_embeddings,
    )
    if kind not in (None, "default", "mrope") and not same:
        yield (
            f"target.ropeScaling {asked.type.value} replaces the rope scaling {kind} of"
            f" {target.model}'s own config.json, so outputs differ at every length; remove it, unless this is intended"
        )


def _length_warnings(facts: Facts, tensor: int) -> Iterator[str]:
    asked, version = facts.spec.parallelism.draft_tensor, facts.profile.version
    if asked not in (None, tensor):
        yield (
            f"parallelism.draftTensor {asked} has no effect: vLLM {version} splits the draft like the "
            f"target, over {tensor} GPUs, and the plan counts it so"
        )
    # vLLM serves a length beyond the model's own if a variable allows it (config/model.py).
    target, wanted = facts.pair.target, facts.pair.limits.max_model_len
    longest = longest_sequence(target, version)
    if wanted <= longest or not allows_longer(facts.spec.engine.env):
        return
    # From 0.30 on, vLLM does not count the factor of YaRN in its own limit.
    stretched = stretched_length(target.max_position_embeddings, target.ropes, multiplies_yarn=True)
    known = f"outputs beyond {max(longest, stretched)} tokens are wrong"
    if wanted <= stretched:
        known = f"its YaRN extends to {stretched} tokens, which vLLM {version} does not count"
    yield (
        f"serving.maxModelLen {wanted} exceeds the {longest} tokens of {target.name}; {ALLOW_LONG_VARIABLE} lets vLLM"
        f" start, but {known}"
    )


def _draft_length_warnings(facts: Facts) -> Iterator[str]:
    """Yield a warning if a draft supports a shorter context; the target's overrides do not apply to it.

    Overrides: vllm/config/speculative.py. V1 drafts for no request while one sequence is too long
    (v1/worker/gpu_model_runner.py, _input_fits_in_drafter). V2 continues up to the target's length
    (v1/worker/gpu/spec_decode/speculator.py, draft_max_seq_len); from 0.33 on, it limits all sequences to the draft's
    length (config/vllm.py, _limit_max_model_len_to_draft).
    """
    pair, draft, wanted = facts.pair, facts.pair.draft, facts.pair.limits.max_model_len
    if facts.method is Method.MTP and _ROPE_KEYS.search(pair.target.told_config):
        yield (
            f"the MTP layers of {pair.target.name} do not get its extended rope, because vLLM reads them from the"
            " unchanged checkpoint; acceptance beyond the model's own length is low"
        )
    if draft is None or facts.method in GETS_LONGER:
        return
    longest = longest_sequence(draft, pair.limits.engine_version)
    if wanted <= longest:
        return
    on_v1 = runs_on_v1(facts.spec, pair)
    then = (
        "drafts for no request while one is longer"
        if on_v1
        else "drafts beyond that with positions unknown to the draft"
    )
    if not on_v1 and facts.profile.ends_with_draft:
        then = f"lowers max_model_len to {longest} and rejects longer requests"
    yield (
        f"{draft.name} supports at most {longest} tokens, but sequences may have {wanted}: vLLM"
        f" {facts.profile.version} {then}; set serving.maxModelLen to {longest}, or choose a draft with a longer"
        " context"
    )


def _lookup_warnings(facts: Facts) -> Iterator[str]:
    """Yield a warning about lookups for models whose states vLLM does not restore (vllm-project/vllm#39273, #56077)."""
    target = facts.pair.target
    if facts.method not in (Method.NGRAM, Method.NGRAM_GPU, Method.SUFFIX) or facts.replay is not None:
        return
    if not any(isinstance(mixer, DeltaNet) for layer, _ in target.distinct_layers for mixer in layer.mixers):
        return
    instead = ", or use method mtp, for which it has layers" if target.mtp_layers else ""
    yield (
        f"outputs of {target.name} with method {facts.method} may be corrupted, tool calls above all: vLLM does not"
        " restore the states of its gated delta net after rejected drafts (vllm-project/vllm#39273, #56077, open);"
        f" compare the outputs with method none{instead}"
    )


def _sampling_warnings(facts: Facts) -> Iterator[str]:
    if lost := lost_sampling(facts):
        yield lost


def lost_sampling(facts: Facts) -> str | None:
    """Return a warning if speculation of these engines is correct only for greedy requests."""
    speculates = facts.method is not Method.NONE and facts.replay is None
    if not (speculates and facts.on_cpu and facts.profile.loses_sampling_on_cpu):
        return None
    return (
        f"speculation on a CPU: vLLM {facts.profile.version} answers correctly only if all requests set temperature 0"
        ' (vllm-project/vllm#55005, documentation: "Temperatures on a CPU")'
    )


def _asked_warnings(facts: Facts) -> Iterator[str]:
    pair, draft = facts.pair, facts.spec.speculation.draft if facts.spec.speculation else None
    asked = draft.max_model_len if draft else None
    # Only model runner V1 drafts for shorter sequences than the target's, and serves longer ones.
    if asked is not None and asked < pair.limits.max_model_len and not runs_on_v1(facts.spec, pair):
        ends = facts.method is Method.DRAFT_MODEL and facts.profile.ends_with_draft
        then = f"lowers max_model_len to {asked} and rejects longer requests" if ends else "drafts at every length"
        what = f"is not applied: vLLM {facts.profile.version} {then}; remove it"
        yield f"speculation.draft.maxModelLen {asked} {what}"
    accelerator = facts.spec.accelerator
    known = ", ".join(product for product in accelerator.products if find_device(product) is not None)
    if known and accelerator.memory_gib_per_gpu is not None:
        yield f"{MEMORY_FIELD} {accelerator.memory_gib_per_gpu} is ignored: the memory of {known} is known; remove it"


def _engine_notes(facts: Facts) -> Iterator[str]:
    package, limits = facts.profile.method_packages.get(facts.method), facts.pair.limits
    mode = facts.spec.serving.cudagraph_mode
    if package is not None:
        yield f"the engine image must contain {package}, or vLLM rejects method {facts.method} at startup"
    if mode in _COUNTED_AS_USUAL:
        yield f"CUDA graphs are counted as in mode FULL_AND_PIECEWISE; {mode} takes at most as much"
    is_latent = any(isinstance(each, LatentAttention) for each in facts.pair.target.attentions)
    if facts.on_cpu and facts.replay is None and is_latent:
        # vllm/platforms/cpu.py, check_and_update_config, sets this for its own kernel.
        where = "on a CPU without AMX" if sizing_facts(limits.engine_version)["latent_attention_on_amx"] else "on CPU"
        tokens = max(limits.max_model_len, _LEAST_STEP_TOKENS)
        yield (
            f"latent attention {where}: vLLM {facts.profile.version} ignores serving.blockSize and"
            f" serving.maxNumBatchedTokens, uses blocks of 16 tokens and steps of {tokens}, prefills whole prompts and"
            " caches no prefixes"
        )
    asked, served = facts.spec.serving.max_num_seqs, limits.max_num_seqs
    if served < asked:
        # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes.
        yield (
            f"serving.maxNumSeqs is {served} instead of the default {asked}: vLLM captures FULL CUDA graphs of a model"
            " with states only if the KV cache has a block for each request; to raise it, set it explicitly, add memory"
            " or set serving.cudagraphMode to PIECEWISE"
        )


def _unknown_flag_warnings(facts: Facts) -> Iterator[str]:
    for name in unknown_flags(facts.spec.engine.extra_args, facts.profile):
        yield f"engine.extraArgs has {name}, which vLLM {facts.profile.known_as} does not know: passed on, not counted"
    for key in unknown_keys(_extra_config(facts), facts.profile):
        version = facts.profile.known_as
        yield f"speculation.extraConfig has {key}, which vLLM {version} does not know: passed on, not counted"


def _uncounted_notes(facts: Facts) -> Iterator[str]:
    if facts.pair.adaptive_verification and facts.replay is None:
        # vllm/v1/core/sched/scheduler.py counts what was scheduled, verified or not.
        yield (
            "with speculation.adaptiveVerification, acceptance reads low, because unverified tokens count as not"
            " accepted; compare mean acceptance length and goodput instead"
        )
    asked = options(facts.spec.engine.extra_args, facts.profile)
    given = {option.flag.name for option in asked if not option.negated}
    compare = "check status.observed.kvCacheResidual when the engine serves"
    for flag in _UNCOUNTED_FLAGS:
        if flag in given:
            yield f"engine.extraArgs has {flag}, which the plan does not count, so free memory differs; {compare}"
    further = _extra_config(facts)
    keys = ", ".join(sorted(further.keys() - set(unknown_keys(further, facts.profile))))
    if keys:
        what = "which the plan does not count, so free memory may differ"
        yield f"speculation.extraConfig has {keys}, {what}; {compare}"


def _extra_config(facts: Facts) -> Mapping[str, Any]:
    return (facts.spec.speculation.extra_config if facts.spec.speculation else None) or {}


def lossy_answers(facts: Facts) -> str | None:
    """Return a warning if outputs may differ from the target's, as in vllm/config/speculative.py."""
    if not facts.pair.checks_by_entropy or facts.replay is not None:
        return None
    return (
        f"with speculation.rejectionSampling fly, outputs differ from {facts.spec.target.model}, as"
        " speculation.lossy allows: some accepted tokens would have been rejected by it; compare the output quality,"
        " and use block if it suffers"
    )


def _tokenizer_warnings(facts: Facts, known: KnownModels) -> Iterator[str]:
    spec = facts.spec
    draft = spec.speculation.draft if spec.speculation else None
    if draft is None or facts.method is not Method.DRAFT_MODEL or facts.pair.maps_vocabulary:
        return
    of_target, of_draft = _config(facts, spec.target, known), _config(facts, draft, known)
    differing = [
        f"{key} {of_draft[key]} instead of {of_target[key]}"
        for key in _TOKENIZER_KEYS
        if None not in (of_target.get(key), of_draft.get(key)) and of_target[key] != of_draft[key]
    ]
    if differing:
        yield (
            f"{draft.model} may have another tokenizer than {spec.target.model} ({', '.join(differing)}); if so, "
            "almost no proposed token is accepted, unless speculation.useHeterogeneousVocab is true"
        )


def _other_target_warnings(pair: Pair) -> Iterator[str]:
    targets = made_for(pair.draft) if pair.draft else ()
    if pair.draft is None or not targets or not is_known_name(pair.target.name):
        return
    if any(is_variant(pair.target.name, target) for target in targets):
        return
    others = [head.head for head in published_heads() if any(is_variant(pair.target.name, of) for of in head.targets)]
    instead = f"known for this target: {', '.join(others[:3])}" if others else "name a head that was made for it"
    yield (
        f"draft head {pair.draft.name} was made for {' and '.join(targets)}, not for {pair.target.name}: vLLM serves "
        f"it, but few proposed tokens will be accepted; {instead}"
    )


_STALE_MTP: Final = ("0.28", "0.29", "0.30")
"""Versions without _prefill_backoff for several MTP layers (kv_connector/v1/nixl/base_scheduler.py)."""
_SPLIT_PAGE: Final = '(documentation: "Prefill/decode split")'


def _split_warnings(facts: Facts) -> Iterator[str]:
    """Yield the known faults of vLLM with speculation in a prefill/decode split."""
    transfer = split_transfer(facts.spec.engine.extra_args, facts.profile)
    if transfer is None or not transfer.is_nixl or facts.replay is not None:
        return
    draft = facts.pair.draft
    if facts.method is Method.MTP and draft is not None and draft.architecture.startswith(ASSISTANTS):
        yield (
            f"{transfer.connector} does not transfer the KV cache of the draft {draft.name}, so the decode side drafts"
            f" without the prompt and few proposed tokens are accepted (vllm-project/vllm#54926, open) {_SPLIT_PAGE}"
        )
    if (
        facts.pair.prediction_modules > 1
        and facts.pair.num_speculative_tokens > 1
        and facts.profile.version in _STALE_MTP
    ):
        yield (
            f"with {transfer.connector}, vLLM {facts.profile.version} leaves unverified tokens in the KV cache of the"
            " last MTP layers, so fewer proposed tokens are accepted; use vLLM 0.31 or newer (vllm-project/vllm#55055)"
            f" {_SPLIT_PAGE}"
        )


def _split_doubts(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> Iterator[Problem]:
    """Yield the known fault of a method in a prefill/decode split, whatever its models."""
    transfer = split_transfer(spec.engine.extra_args, profile)
    dspark = spec.speculation is not None and spec.speculation.method is Method.DSPARK
    if transfer is not None and transfer.is_nixl and dspark:
        message = (
            f"is reported to fail on Hopper GPUs with {transfer.connector}: different numbers of KV layers if only the"
            " decode side drafts, a crash at the first request if both do (vllm-project/vllm#48221, open)"
            f" {_SPLIT_PAGE}"
        )
        yield Problem("spec.speculation.method", Method.DSPARK.value, message)


def _split_note(facts: Facts) -> str | None:
    transfer = split_transfer(facts.spec.engine.extra_args, facts.profile)
    if transfer is None or facts.method in {Method.NONE, *METHODS_OF_FREE_LENGTH} or facts.replay is not None:
        return None
    return (
        f"this engine is one side of a prefill/decode split ({KV_TRANSFER} {transfer.connector}), and the plan counts"
        " it alone: the other side needs the same method, draft and KV cache types, and also holds the draft and its"
        f" KV cache {_SPLIT_PAGE}"
    )


def _config(facts: Facts, model: ServedModel, known: KnownModels) -> Mapping[str, Any]:
    return config_of(model, known.get(model_source(facts.spec, model))) or {}
