"""Parse vLLM arguments as its parser does, and map flags and variables of older versions.

Covers aliases, prefixes, underscores, `=` and dotted paths.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.importing.server_command import ServerCommand
from specdecode_operator.importing.spec_builder import HOLDS_ANYWAY, SpecBuilder
from specdecode_operator.problems import shown, some_of
from specdecode_operator.untrusted import UnreadableTextError, parse_json
from specdecode_operator.vllm.profiles import EngineProfile, Flag


@dataclass(frozen=True)
class OlderSetting:
    """Successor of one setting: ``now``, or ``gone``; if neither is set, a person decides."""

    now: str = ""
    """The flag, the key of its JSON value, or the variable that says the same."""
    gone: str = ""
    """Why nothing is lost without it."""
    ask: str = ""
    """What a person can write instead."""
    now_of_one: str = ""
    """The flag that says the same as a single value; ``now`` if this is empty."""
    value: str | None = None
    """The value of its successor; its own value if this is None."""
    takes: str = "1"
    """How many values follow a flag: 0, 1, ? (0 or 1) or +."""
    default: tuple[str, ...] = ()
    """Values that mean the same as leaving it out."""
    allowed: tuple[str, ...] = ()
    """Values that its successor takes; any if this is empty."""

    def said_now(self, values: Sequence[str]) -> list[str]:
        """Return the words of the successor with these values; none if it has no successor for them."""
        given = list(values) if self.value is None else [self.value]
        if not self.now or (self.allowed and (not given or given[0] not in self.allowed)):
            return []
        return [self.now_of_one if self.now_of_one and len(given) == 1 else self.now, *given]


def _gone(why: str, takes: str = "1") -> OlderSetting:
    return OlderSetting(gone=why, takes=takes)


def _ask(what: str, takes: str = "1", default: tuple[str, ...] = ()) -> OlderSetting:
    return OlderSetting(ask=what, takes=takes, default=default)


def _switch(now: str, value: str) -> OlderSetting:
    return OlderSetting(now=now, value=value, takes="0")


_BACKENDS: Final = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
_SCHEDULER: Final = "the scheduler needs no such setting any more: answers stay the same"
_RAY: Final = "the operator starts the processes of a replica without Ray"
TYPICAL: Final = "typical acceptance is gone: rejection sampling keeps the target's own distribution"
_LORA: Final = (
    "no vLLM that the operator launches serves such adapters: make adapters without it, or keep the Deployment"
)
_SCALES: Final = "an FP8 KV cache has its scales from the checkpoint now, or 1.0: take one that has them, or remove it"
_OTHER_HARDWARE: Final = "is for other hardware than NVIDIA GPUs and CPUs"

FLAGS: Final[Mapping[str, OlderSetting]] = {
    "--chat-template-text-format": OlderSetting(now="--chat-template-content-format"),
    "--cuda-graph-sizes": OlderSetting(
        now="--cudagraph-capture-sizes", now_of_one="--max-cudagraph-capture-size", takes="+"
    ),
    "--disable-mm-preprocessor-cache": _switch("--mm-processor-cache-gb", "0"),
    "--enable-mamba-fine-grained-prefix-cache": OlderSetting(now="--enable-mamba-shared-prefix-checkpoint", takes="0"),
    "--enable-multimodal-encoder-data-parallel": _switch("--mm-encoder-tp-mode", "data"),
    "--eplb-log-balancedness": _switch("--eplb-config.log_balancedness", "true"),
    "--eplb-step-interval": OlderSetting(now="--eplb-config.step_interval"),
    "--eplb-window-size": OlderSetting(now="--eplb-config.window_size"),
    "--guided-decoding-backend": OlderSetting(
        now="--structured-outputs-config.backend", default=("auto",), allowed=_BACKENDS
    ),
    "--guided-decoding-disable-additional-properties": _switch(
        "--structured-outputs-config.disable_additional_properties", "true"
    ),
    "--guided-decoding-disable-any-whitespace": _switch("--structured-outputs-config.disable_any_whitespace", "true"),
    "--num-redundant-experts": OlderSetting(now="--eplb-config.num_redundant_experts"),
    "--override-pooler-config": OlderSetting(now="--pooler-config"),
    "--rope-scaling": OlderSetting(now="--hf-overrides.rope_parameters"),
    "--calculate-kv-scales": _ask(_SCALES, "0"),
    "--device": _ask("only NVIDIA GPUs and CPUs are planned for: keep the Deployment", default=("auto", "cuda", "cpu")),
    "--enable-bf16x3-router-gemm": _ask(
        "experts are chosen in another precision without it: accept that, and remove it", "0"
    ),
    **dict.fromkeys(("--enable-lora-bias", "--enable-prompt-adapter"), _ask(_LORA, "0")),
    **dict.fromkeys(("--long-lora-scaling-factors", "--prompt-adapters"), _ask(_LORA, "+")),
    **dict.fromkeys(("--max-prompt-adapter-token", "--max-prompt-adapters"), _ask(_LORA)),
    "--lora-extra-vocab-size": _ask(_LORA, default=("0",)),
    "--override-attention-dtype": _ask(
        "attention is computed in the model's own precision: accept that, and remove it"
    ),
    "--quantization-param-path": _ask(_SCALES),
    "--rope-theta": _ask(
        "without it the model's answers are others: say the same by"
        ' --hf-overrides \'{"rope_parameters": {"rope_theta": …}}\', and import again'
    ),
    "--task": _ask("say by --runner or --convert what it is for, and import again", default=("auto", "generate")),
    "--disable-async-output-proc": _gone(_SCHEDULER, "0"),
    "--disable-frontend-multiprocessing": _gone("the API server is a process of its own in any case", "0"),
    "--disable-log-requests": _gone("requests are not logged unless --enable-log-requests is given", "0"),
    "--disable-logprobs-during-spec-decoding": _gone("log probabilities come with drafted tokens, too", "?"),
    "--enable-reasoning": _gone("--reasoning-parser alone turns reasoning on", "0"),
    **dict.fromkeys(("--engine-use-ray", "--worker-use-ray"), _gone(_RAY, "0")),
    "--guided-decoding-disable-fallback": _gone("a backend that is named stands alone", "0"),
    **dict.fromkeys(
        ("--max-context-len-to-capture", "--max-seq-len-to-capture"), _gone("CUDA graphs do not go by lengths any more")
    ),
    **dict.fromkeys(
        (
            "--max-long-partial-prefills", "--max-num-partial-prefills", "--num-scheduler-steps",
            "--scheduler-delay-factor",
        ),
        _gone(_SCHEDULER),
    ),
    "--multi-step-stream-outputs": _gone(_SCHEDULER, "?"),
    "--num-lookahead-slots": _gone("slots follow from the number of proposed tokens"),
    "--override-neuron-config": _gone(_OTHER_HARDWARE),
    "--preemption-mode": _gone("a request that had to wait is computed anew"),
    **dict.fromkeys(
        (
            "--spec-decoding-acceptance-method", "--typical-acceptance-sampler-posterior-alpha",
            "--typical-acceptance-sampler-posterior-threshold",
        ),
        _gone(TYPICAL),
    ),
    "--speculative-disable-mqa-scorer": _gone("drafted tokens are scored in one step in any case", "0"),
    "--swap-space": _gone("a request that had to wait is computed anew: nothing is swapped"),
    **dict.fromkeys(
        ("--tokenizer-pool-extra-config", "--tokenizer-pool-size", "--tokenizer-pool-type"),
        _gone("tokenizers run beside the engine now"),
    ),
    "--use-gpu-for-pooling-score": _gone("is for models that pool, which do not draft", "0"),
    "--use-v2-block-manager": _gone("there is one block manager now", "0"),
}  # fmt: skip

_ATTENTION: Final = "--attention-config"
_KERNELS: Final = (
    "vLLM chooses its kernels by itself: say by --moe-backend or --linear-backend which it shall take, or remove it"
)

VARIABLES: Final[Mapping[str, OlderSetting]] = {
    "VLLM_ALL2ALL_BACKEND": OlderSetting(now="--all2all-backend"),
    "VLLM_ATTENTION_BACKEND": OlderSetting(
        now="--attention-backend",
        ask="vLLM has the flag --attention-backend for it now, with other names: write that, or remove it",
        allowed=(
            "CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA",
            "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA",
        ),
    ),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": _gone("nothing in vLLM reads it any more"),
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": OlderSetting(now=f"{_ATTENTION}.disable_flashinfer_q_quantization"),
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": OlderSetting(
        now=f"{_ATTENTION}.flash_attn_max_num_splits_for_cuda_graph"
    ),
    "VLLM_FLASH_ATTN_VERSION": OlderSetting(now=f"{_ATTENTION}.flash_attn_version"),
    "VLLM_KIMI_K3_GEMM_RS": OlderSetting(now="VLLM_ENABLE_GEMM_RS"),
    "VLLM_LOGITS_PROCESSOR_THREADS": _gone(_SCHEDULER),
    "VLLM_MM_HASHER_ALGORITHM": OlderSetting(now="--mm-hasher-algorithm"),
    "VLLM_MM_INPUT_CACHE_GIB": OlderSetting(now="--mm-processor-cache-gb"),
    "VLLM_NIXL_EP_MAX_NUM_RANKS": _ask("vLLM has --elastic-ep-max-dp-size for it now: write that, or remove it"),
    "VLLM_NO_DEPRECATION_WARNING": _gone("it only kept a warning back"),
    "VLLM_PLE_CPU_OFFLOAD": _ask("vLLM has the flag --engram-config for it now: write that, or remove it"),
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": OlderSetting(now="--prefix-cache-retention-interval"),
    "VLLM_RPC_TIMEOUT": _gone("there is no such limit any more"),
    "VLLM_TEST_FORCE_FP8_MARLIN": _ask(_KERNELS, default=("0", "false")),
    "VLLM_TORCH_PROFILER_DIR": _ask("vLLM has the flag --profiler-config for it now: write that, or remove it"),
    "VLLM_TRITON_ATTN_USE_TD": OlderSetting(now="VLLM_TRITON_USE_TD"),
    "VLLM_USE_RAY_COMPILED_DAG": _gone(_RAY),
    "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": _gone(_RAY),
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM": _gone(_RAY),
    "VLLM_USE_RAY_SPMD_WORKER": _gone(_RAY),
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": _gone(_RAY),
    "VLLM_USE_RAY_WRAPPED_PP_COMM": _gone(_RAY),
    "VLLM_USE_TRITON_FLASH_ATTN": _gone(_OTHER_HARDWARE),
    "VLLM_USE_TRTLLM_ATTENTION": OlderSetting(now=f"{_ATTENTION}.use_trtllm_attention"),
    "VLLM_USE_V1": _gone("there is only one engine now"),
    "VLLM_V0_USE_OUTLINES_CACHE": OlderSetting(now="VLLM_V1_USE_OUTLINES_CACHE"),
}  # fmt: skip

_OF_OTHERS: Final = ("VLLM_ROCM_", "VLLM_XPU_", "VLLM_TPU_", "VLLM_XLA_", "VLLM_HPU_", "VLLM_NEURON_")
_READ_UNLISTED: Final = frozenset({"VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_SNAPSHOT_TIMEOUT_S"})
"""Variables that vLLM reads although its own list lacks them."""


def older_variable(name: str, version: str, known: frozenset[str]) -> OlderSetting | None:
    """Return the successor of a variable of vLLM; None if the version reads it, or if it is not vLLM's."""
    if not name.startswith("VLLM_") or name in known or name in _READ_UNLISTED:
        return None
    if name.startswith(_OF_OTHERS):
        return _gone(_OTHER_HARDWARE)
    return VARIABLES.get(name) or _ask(
        f"vLLM {version} does not read it: find out what says the same now, or remove it from the Deployment"
    )


SECRET_FLAGS: Final = frozenset({"--api-key", "--hf-token"})
"""Flags whose value belongs into a Secret."""

_SEVERAL: Final = frozenset({"", "--model", "--middleware"})
"""Flags that may be repeated, and the model, for which vLLM has its own order."""

_OF_GROUPS: Final = frozenset({"--node-rank", "--master-addr", "--master-port"})
_WORDS_OF_SWITCHES: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class Argument:
    """One argument of a server, with its values."""

    name: str
    """Long name of the flag; as written if no known version has it, and empty for the model."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    path: tuple[str, ...] = ()
    negated: bool = False
    """Whether it was written as ``--no-…``, or as the ``--disable-…`` of an ``--enable-…``."""
    known: bool = True

    @property
    def text(self) -> str:
        """The argument as it was written."""
        return " ".join(self.words)

    @property
    def value(self) -> str:
        """Its first value; empty if it has none."""
        return self.values[0] if self.values else ""

    @property
    def shown(self) -> str:
        """The flag for messages, without its value, which may be a secret."""
        return ".".join((self.name, *self.path)) if self.name else self.words[0]


def read_arguments(words: Sequence[str], profile: EngineProfile) -> list[Argument]:
    """Return the arguments of a server one by one; the model, given by position, has no name."""
    given, rest = [], list(words)
    while rest:
        if rest[0].startswith("-"):
            found, taken = _read(rest, profile)
        else:
            found, taken = Argument("", (rest[0],), (rest[0],)), 1
        given.append(found)
        rest = rest[taken:]
    return given


def _read(words: Sequence[str], profile: EngineProfile) -> tuple[Argument, int]:
    spelled, equals, value = words[0].partition("=")
    name, _, dotted = spelled.partition(".")
    if name.startswith("-O"):
        level = tuple(words[: 2 if words[0] == "-O" else 1])
        return Argument("-O", (), level), len(level)
    if name.startswith("--"):
        name = name.replace("_", "-")
    path = tuple(part.replace("-", "_") for part in dotted.split(".")) if dotted else ()
    flag = _flag(name, profile)
    if equals:
        values: tuple[str, ...] = (value,)
    else:
        values = tuple(words[1:2]) if path else _values(flag, name, words[1:], profile)
    written = tuple(words[: 1 if equals else 1 + len(values)])
    if flag is None:
        return Argument(name, values, written, path, known=False), len(written)
    given = Argument(flag.name, values, written, path, flag.is_undone_by(name))
    return (_switched(given, flag) if flag.values == "0" and values and not path else given), len(written)


def _switched(given: Argument, flag: Flag) -> Argument:
    """Rewrite a switch that has a word for on or off."""
    on = _WORDS_OF_SWITCHES.get(given.value.lower())
    if on is None:
        return given
    # Without a name for off, off has no words.
    off = tuple(name for name in flag.aliases if flag.is_undone_by(name))[:1]
    return replace(given, values=(), words=(flag.name,) if on != given.negated else off, negated=on == given.negated)


def _flag(name: str, profile: EngineProfile) -> Flag | None:
    # From 0.33 on, --disable-log-requests is a spelling of the default.
    known = profile.flags.get(name)
    if known and not (name in FLAGS and known.is_undone_by(name)):
        return known
    if name in profile.removed_flags or name in FLAGS or not name.startswith("--"):
        return None
    candidates = {profile.flags[known].name for known in profile.flags if known.startswith(name)}
    return profile.flags[candidates.pop()] if len(candidates) == 1 else None


def _values(flag: Flag | None, name: str, follows: Sequence[str], profile: EngineProfile) -> tuple[str, ...]:
    ends = (
        count
        for count, word in enumerate(follows)
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit()
    )
    most = next(ends, len(follows))
    if flag is None:
        # An unknown flag takes all words after it: better no model than a wrong one.
        is_old = name in profile.removed_flags or name.startswith("--spec")
        takes = FLAGS[name].takes if name in FLAGS else "1" if is_old else "+"
        return tuple(follows[: {"0": 0, "1": min(most, 1), "?": min(most, 1)}.get(takes, most)])
    if flag.values == "1":
        # The parser takes JSON and numbers that begin with a dash, too.
        return tuple(follows[:1])
    if flag.values == "0":
        return tuple(follows[:1]) if follows and follows[0].lower() in _WORDS_OF_SWITCHES else ()
    return tuple(follows[: {"?": min(most, 1)}.get(flag.values, most)])


def ask_for_unknown(command: ServerCommand, arguments: Iterable[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments whose values are in the source or in a Secret; ask for the others."""
    message = (
        "has its value only in the running container: write the value out, or put its ConfigMap into the same file,"
        " then import again"
    )
    known = []
    for given in arguments:
        if command.unknown.isdisjoint(given.words) or given.name in SECRET_FLAGS:
            known.append(given)
        else:
            builder.unsaid.add(given.name)
            builder.decide("spec.engine.extraArgs", given.shown, message)
    for name in sorted(name for name, value in command.env.items() if value is None):
        builder.decide("spec.engine.env", name, message)
    return known


def say_as_now(arguments: Iterable[Argument], builder: SpecBuilder, profile: EngineProfile) -> list[Argument]:
    """Replace arguments of older versions with their successors; without one, report why nothing is lost, or ask."""
    current = []
    for given in arguments:
        older = None if given.known else FLAGS.get(given.name)
        if not given.words:
            builder.own(f"{given.name} false", HOLDS_ANYWAY)
        elif older is None:
            current.append(given)
        elif (successor := _successor(given, older, builder, profile)) is not None:
            current.append(successor)
    return current


def _successor(given: Argument, older: OlderSetting, builder: SpecBuilder, profile: EngineProfile) -> Argument | None:
    words = older.said_now(given.values)
    if words:
        words[0] = ".".join((words[0], *given.path))
    if given.values and given.value in older.default:
        builder.own(given.text, HOLDS_ANYWAY)
    elif older.gone:
        builder.drop(given.shown, older.gone)
    elif not words or words[0].partition(".")[0] not in profile.flags:
        known = ", ".join(older.allowed)
        message = older.ask or f"vLLM {profile.version} knows {known}: write one of them, and import again"
        builder.decide("spec.engine.extraArgs", given.shown, message)
    else:
        builder.own(given.shown, f"vLLM {profile.version} calls it {words[0]}")
        return _read(words, profile)[0]
    return None


def last_of_each(arguments: Sequence[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments that count, and report those that do not.

    Of a repeated flag, vLLM's parser takes the last. It joins the dotted paths under one spelling of a flag into one
    JSON value and appends these values, in the order in which the spellings first appear. They replace a whole JSON
    value of that flag wherever it stands, and the paths under an earlier spelling (vllm/utils/argparse_utils.py,
    parse_args).
    """
    kept: list[Argument] = []
    spelling = dict(list(dict.fromkeys((given.name, _spelled(given)) for given in arguments if given.path)))
    later: set[tuple[str, tuple[str, ...]]] = set()
    for given in reversed(arguments):
        same = (given.name, given.path)
        in_force = spelling.get(given.name)
        if given.path and _spelled(given) != in_force:
            other = ".".join((_spelled(given), *given.path))
            builder.drop(other, f"vLLM takes the paths under one spelling of a flag, which is {in_force} here")
            continue
        if given.name not in _SEVERAL and same in later:
            builder.drop(given.shown, "is said again behind it, and vLLM takes what is said last")
        elif given.name not in _SEVERAL and not given.path and in_force is not None:
            builder.drop(given.shown, _replaced(given, in_force, arguments))
        else:
            kept.append(given)
        later.add(same)
    return kept[::-1]


def _spelled(given: Argument) -> str:
    spelled = given.words[0].partition("=")[0].partition(".")[0]
    return spelled.replace("_", "-") if spelled.startswith("--") else spelled


def _replaced(whole: Argument, spelled: str, arguments: Iterable[Argument]) -> str:
    why = f"vLLM takes {spelled}.… in its place, wherever they stand"
    again = {given.path[0] for given in arguments if given.path and given.name == whole.name}
    try:
        value = parse_json(whole.value)
    except UnreadableTextError:
        return why
    lost = [shown(key) for key in value if key not in again] if isinstance(value, dict) else []
    return f"{why}; lost with it: {some_of(lost)}" if lost else why


def without_group(arguments: Iterable[Argument], nodes: int, builder: SpecBuilder) -> list[Argument]:
    """Remove the arguments by which the pods of one server find each other."""
    kept = []
    for given in arguments:
        if nodes > 1 and (given.name in _OF_GROUPS or (given.name, given.value) == ("--nnodes", str(nodes))):
            builder.own(given.shown, "the operator writes it where a replica needs several nodes")
        else:
            kept.append(given)
    return kept
