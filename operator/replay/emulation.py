"""Run vLLM as an emulated engine: model folders without weights, arguments, plugins and its process.

The made-up tokenizer splits English text into about twice as many tokens as a model's own.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from types import FrameType
from typing import Any, Final

from specdecode_operator.capture.files.config_hash import gpu_label
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.models.checkpoints import config_of
from specdecode_operator.enums import Platform
from specdecode_operator.replay.emulated.engine_model import KEY
from specdecode_operator.replay.model_file import FittedModel
from specdecode_operator.sizing.memory.kv_cache import cache_layout, cache_pages
from specdecode_operator.sizing.memory.kv_pages import CacheKind, LayerRun, Page, kv_rules
from specdecode_operator.sizing.pair import Pair
from specdecode_operator.sizing.plan import CPU_PRODUCT
from specdecode_operator.version import __version__
from specdecode_operator.vllm.arguments import ARGUMENTS, COMPILATION_CONFIG
from specdecode_operator.vllm.plugin_bundle import RECORDER, PluginBundle
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import EngineSettings

BEGIN: Final = 0
END: Final = 1
"""Tokens that begin and end a text."""

_SPECIAL: Final = ("<s>", "</s>")
_TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _SPECIAL[BEGIN],
    "eos_token": _SPECIAL[END],
    "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
}

_BYTE_LEVEL: Final[dict[str, Any]] = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}


def tokenizer_json(vocabulary: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json with at most this many tokens."""
    # Each byte is a letter: itself if it is visible, else one from U+0100 on.
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    letters = [*_SPECIAL, *(chr(byte if byte in seen else next(others)) for byte in range(256))]
    # Byte-level tokenizers write U+0120 for a space.
    pairs = [*product(ascii_lowercase, repeat=2), *product("\u0120", ascii_lowercase)]
    merges = pairs[: max(0, vocabulary - len(letters))]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "special": True, **flags} for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL | {"add_prefix_space": False},
        "post_processor": None,
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def text_tokens(tokenizer: dict[str, Any]) -> tuple[int, int]:
    """Return the first and the last token that is a pair of letters, or a small letter if there are no pairs."""
    model = tokenizer["model"]
    if model["merges"]:
        return len(model["vocab"]) - len(model["merges"]), len(model["vocab"]) - 1
    return model["vocab"]["a"], model["vocab"]["z"]


_OF_A_TOKENIZER: Final = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "tekken.json"),
    *("chat_template*", "generation_config.json"),
)
"""Files of a model's repository that hold its tokenizer, and the tokens that end a text."""

_USUAL_TEXT: Final = (300, 1000)
"""Token ids of a text: in published vocabularies these are pieces of words, and do not end a text."""


def write_model_folder(
    folder: Path, config: Mapping[str, Any], tokenizer: Path | None, *, is_draft: bool = False
) -> tuple[int, int]:
    """Write the folder of a model; return the first and the last token of the text that it generates.

    ``tokenizer`` is a folder with the files of a tokenizer; None for a made-up one. A draft keeps its architecture.
    """
    folder.mkdir(parents=True)
    # These describe how weights are stored, and require kernels and code that are not needed.
    left_out = ("quantization_config", "compression_config", "auto_map")
    kept = {
        name: value for name, value in (config if is_draft else text_config(config)).items() if name not in left_out
    }
    vocabulary = int(kept.get("vocab_size") or _USUAL_TEXT[1] + 1)
    if tokenizer is not None:
        for path in tokenizer_files(tokenizer):
            shutil.copy(path, folder / path.name)
        text = min(_USUAL_TEXT[0], vocabulary - 1), min(_USUAL_TEXT[1], vocabulary - 1)
    else:
        made = tokenizer_json(vocabulary)
        ends = {"bos_token_id": BEGIN, "eos_token_id": END}
        kept |= ends | ({"pad_token_id": END} if "pad_token_id" in kept else {})
        _write(folder / "tokenizer.json", made)
        _write(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)
        _write(folder / "generation_config.json", ends)
        text = text_tokens(made)
    _write(folder / "config.json", kept)
    return text


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer in a folder; empty if there is no tokenizer."""
    found = [path for pattern in _OF_A_TOKENIZER for path in sorted(folder.glob(pattern)) if path.is_file()]
    return found if any(path.name.startswith(("tokenizer.", "vocab", "tekken.json")) for path in found) else []


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a config.json: images and audio need processors that are missing."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    outer_names = [
        str(each).replace("ForConditionalGeneration", "ForCausalLM") for each in config.get("architectures", ())
    ]
    names = inner.get("architectures") or outer_names
    outer = {name: config[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in config}
    return {**outer, **inner, "architectures": names}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


PACKAGE: Final = "specdecode_emulated"

PLUGIN: Final = PluginBundle(
    package=PACKAGE,
    version=__version__,
    sources=Path(__file__).parent / "emulated",
    entry_points=f"[vllm.platform_plugins]\n{PACKAGE} = {PACKAGE}.plugin:platform\n",
)

_LEFT_OUT: Final = frozenset({
    "--host",
    "--port",
    "--quantization",
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--enforce-eager",
    f"{COMPILATION_CONFIG}.cudagraph_mode",
    "--max-cudagraph-capture-size",
    "--enable-expert-parallel",
    "--distributed-executor-backend",
})  # fmt: skip
"""Flags for weights, kernels and processes that an emulated engine lacks, and those that it sets itself."""


class NotEmulatedError(Exception):
    """A deployment or model that cannot be emulated: the reason and the fix, in one line."""


@dataclass(frozen=True)
class Emulation:
    """An engine to emulate."""

    settings: EngineSettings
    profile: EngineProfile
    target_config: Mapping[str, Any]
    draft_config: Mapping[str, Any] | None  # None if no model drafts
    layers: Sequence[dict[str, Any]]  # cache of each layer on a rank, as `CachedLayers`
    num_blocks: int  # of the KV cache, as planned
    kv_cache_bytes: int  # on each rank
    gpu: str  # product of the plan, or CPU
    model: FittedModel

    def with_blocks(self, num_blocks: int | None) -> "Emulation":
        """Return the emulation with a KV cache of this many blocks; None for the planned number."""
        if num_blocks is None:
            return self
        return replace(self, num_blocks=num_blocks, kv_cache_bytes=self.kv_cache_bytes // self.num_blocks * num_blocks)

    def plugin_settings(self, text: tuple[int, int], seed: int) -> dict[str, Any]:
        """Return the settings of the plugin."""
        return {
            "step_time": self.model.step_time,
            "acceptance": self.model.acceptance,
            "layers": list(self.layers),
            "kv_cache_bytes": self.kv_cache_bytes,
            "text": list(text),
            "seed": seed,
            "gpu": self.gpu,
        }

    def arguments(self, target: Path, draft: Path | None, settings_file: Path) -> list[str]:
        """Return the arguments of `vllm serve` without its address; ``settings_file`` is the plugin's."""
        speculation = self.settings.speculation
        if speculation is not None:
            own = str(draft) if draft is not None else None
            # Model runner V1 rejects adaptive verification, which the recorded acceptance includes already.
            spec = speculation.spec.model_copy(update={"adaptive_verification": None})
            speculation = replace(speculation, spec=spec, draft_model=own, draft_online_quantization=None)
        settings = replace(self.settings, speculation=speculation)
        line = [str(target)]
        for argument in ARGUMENTS:
            values = None if argument.flag in _LEFT_OUT else argument.values(settings, self.profile)
            if values is not None:
                line += [argument.flag, *values]
        line += ["--num-gpu-blocks-override", str(self.num_blocks)]
        line += ["--load-format", "dummy", "--enforce-eager"]
        # vLLM's CPU platform never schedules asynchronously; the emulated platform behaves like a GPU.
        line += ["--no-async-scheduling"] if settings.platform is Platform.CPU else []
        line += ["--distributed-executor-backend", f"{PACKAGE}.executor.EmulatedExecutor"]
        return [*line, "--additional-config", json.dumps({KEY: str(settings_file)}), *settings.extra_args]


def emulation(launch: Launch, model: FittedModel) -> Emulation:
    """Return the emulation of an engine of a plan, with a model that was fitted to a capture."""
    row = launch.plan.chosen
    facts = launch.facts.at(*row.served)
    if row.split.pipeline > 1:
        raise NotEmulatedError(
            f"spec.parallelism.pipeline: {row.split.pipeline}: several stages are not emulated: use 1"
        )
    if row.split.data > 1:
        raise NotEmulatedError(f"spec.parallelism.data: {row.split.data}: several replicas are not emulated: use 1")
    if model.step_time is None:
        raise NotEmulatedError(
            "the model has no step_time, because no capture has the content of each step: fit it to one without a"
            " sample, or of an engine with --enable-logging-iteration-details (engine.extraArgs)"
        )
    if facts.pair.num_speculative_tokens and model.acceptance is None:
        raise NotEmulatedError("the model has no acceptance: fit it to a capture of an engine that speculates")
    speculation = facts.spec.speculation
    draft = speculation.draft if speculation is not None else None
    target_config = config_of(facts.spec.target, None)
    draft_config = config_of(draft, None) if draft is not None else None
    if target_config is None or (draft is not None and draft_config is None):
        raise NotEmulatedError("the config.json files of target and draft are needed: name them with --model-config")
    settings = engine_settings(facts.spec, facts.pair, row.tensor)
    settings = replace(settings, serving=settings.serving.model_copy(update={"tls_secret": None}), group=None)
    grouping = cache_layout(facts.pair, row.split)[0]
    return Emulation(
        settings=settings,
        profile=facts.profile,
        target_config=target_config,
        draft_config=draft_config,
        layers=[_kept(run, page, facts.pair) for run, page in cache_pages(facts.pair, row.tensor)],
        num_blocks=row.budget.num_blocks,
        kv_cache_bytes=row.budget.num_blocks * grouping.bytes_per_block,
        gpu=row.product,
        model=model,
    )


def transfer_warnings(emulated: Emulation, tensor: int, product: str) -> list[str]:
    """Return the differences between the fitted engine and the planned one, each in one line."""
    origin, acceptance = emulated.model.origin, emulated.model.acceptance
    # A trace has the short name or cpu, a plan the product's label or CPU.
    gpu = None if origin.gpu is None else gpu_label(origin.gpu)
    planned = "cpu" if product == CPU_PRODUCT else gpu_label(product)
    fitted = {"GPU": (gpu, planned), "tensor parallelism": (origin.tp, tensor)}
    found = [
        f"the model was fitted on {what} {seen}, but the plan has {wanted}: step times apply to {seen}"
        for what, (seen, wanted) in fitted.items()
        if seen is not None and seen != wanted
    ]
    speculation = emulated.settings.speculation
    if speculation is not None and acceptance is not None:
        width, seen_width = speculation.num_speculative_tokens, acceptance["num_speculative_tokens"]
        if width > seen_width:
            found.append(
                f"the model was fitted on K {seen_width}, but the plan has {width}: positions after {seen_width} were"
                " not measured, and use the acceptance of the last one"
            )
    return found


def _kept(run: LayerRun, page: Page, pair: Pair) -> dict[str, Any]:
    layer, rules = run.layer, kv_rules(pair.limits.engine_version)
    kept = {
        "count": int(run.count),
        "kind": layer.kind.value,
        "of_draft": layer.of_draft,
        "page_bytes": page.page_bytes,
    }
    if layer.kind is CacheKind.STATE:
        speculated = pair.num_speculative_tokens * layer.state_bytes_per_speculated_token
        return kept | {
            "state_bytes": layer.state_bytes + speculated,
            "exports_checkpoint": layer.exports_checkpoint or (layer.delta_rule and rules.exports_delta_states),
        }
    return kept | {
        "block_size": page.block_size,
        "token_bytes": layer.token_bytes,
        "head_width": layer.head_width,
        "element_bytes": layer.element_bytes,
        "reach_tokens": layer.reach_tokens,
    }


@dataclass(frozen=True)
class EngineFolder:
    """Files of an engine."""

    plugins: Path  # goes on PYTHONPATH
    reports: Path  # of the plugin, about its steps
    arguments: list[str]  # of `vllm serve`, without its address


def write_engine_folder(
    folder: Path, emulated: Emulation, *, tokenizer: Path | None = None, seed: int = 0, tells_steps: bool = False
) -> EngineFolder:
    """Write models without weights, the plugins, including the recorder, and their settings."""
    plugins, reports = folder / "plugins", folder / "told"
    reports.mkdir(parents=True)
    PLUGIN.write(plugins)
    RECORDER.write(plugins)
    text = write_model_folder(folder / "target", emulated.target_config, tokenizer)
    draft = None
    if emulated.draft_config is not None:
        draft = folder / "draft"
        write_model_folder(draft, emulated.draft_config, tokenizer, is_draft=True)
    settings, where = folder / "settings.json", {"folder": str(reports), "tells_steps": tells_steps}
    settings.write_text(json.dumps(emulated.plugin_settings(text, seed) | where), encoding="utf-8")
    return EngineFolder(plugins, reports, emulated.arguments(folder / "target", draft, settings))


_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Idle compute threads would take the cores of those that schedule and serve.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_UNSET: Final = ("VLLM_TARGET_DEVICE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER")
"""Variables that keep vLLM from detecting its platform, or let it size the cache itself."""


@dataclass(frozen=True)
class EngineEnvironment:
    """An interpreter with vLLM installed, or with a folder of packages that has it."""

    python: Path
    packages: Path | None = None

    @classmethod
    def at(cls, place: Path | None) -> "EngineEnvironment":
        """Return the environment of a python executable or a folder of packages; None for this interpreter."""
        if place is None:
            return cls(Path(sys.executable))
        return cls(Path(sys.executable), place) if place.is_dir() else cls(place)

    def version(self) -> str:
        """Return the version of its vLLM, or raise NotEmulatedError."""
        look = "import importlib.metadata as m, importlib.util as u; print(u.find_spec('vllm') and m.version('vllm'))"
        try:
            done = subprocess.run(  # noqa: S603  the user names the executable
                [self.python, "-c", look],
                env=self.variables((), {}),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotEmulatedError(f"--engine {self.python}: cannot be run: name the python that has vLLM") from error
        version = done.stdout.strip()
        if done.returncode or not version[:1].isdigit():
            place = self.packages or self.python
            raise NotEmulatedError(f"--engine {place}: has no vLLM: name a python, or a package folder, that has it")
        return version

    def variables(self, plugins: Sequence[Path], more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a process with these plugin folders."""
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        if "VLLM_PLUGINS" in inherited:  # the list of all plugins that vLLM may load
            listed = [inherited["VLLM_PLUGINS"], PLUGIN.package, RECORDER.package]
            inherited["VLLM_PLUGINS"] = ",".join(filter(None, listed))
        # The plugins come first, so that no package of the environment shadows them.
        path = [*plugins, *([self.packages] if self.packages else []), inherited.get("PYTHONPATH")]
        return {**inherited, **_VARIABLES, **more, "PYTHONPATH": os.pathsep.join(str(each) for each in path if each)}

    def serve(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run vLLM's server until it ends, and forward signals to it; return its exit status."""
        command = [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
        process = subprocess.Popen(command, env=dict(variables), start_new_session=True)  # noqa: S603  as above

        def forward(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_START: Final = """\
import json, os, sys

TOLD = json.loads({told!r})
for name in TOLD["unset"]:
    os.environ.pop(name, None)
paths = [TOLD["plugins"], os.environ.get("PYTHONPATH")]
os.environ.update(TOLD["variables"], PYTHONPATH=os.pathsep.join(filter(None, paths)))
command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *TOLD["arguments"], *sys.argv[1:]]
os.execv(sys.executable, command)
"""


def start_script(plugins: Path, arguments: Sequence[str]) -> str:
    """Return a program that becomes vLLM's server with plugins and arguments, without any of our packages."""
    settings = {"plugins": str(plugins.resolve()), "arguments": list(arguments)}
    return _START.format(told=json.dumps(settings | {"variables": _VARIABLES, "unset": _UNSET}))


def free_port(host: str) -> int:
    """Return an unused port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
