"""`specdecode import` takes the models and settings that vLLM would take, or asks: never others with exit 0."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.migration.convert import Adoption, adopt
from specdecode_operator.migration.shell import read_script
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import LLAMA_8B, LLAMA_70B, asked, engine

SMALL = "Qwen/Qwen3-0.6B"


def scripted(script: str, *arguments: str, **env: str) -> dict[str, Any]:
    """A Deployment whose engine is started by a shell script."""
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return engine(command=["bash", "-c", script], args=list(arguments) or None, env=variables)


def spec_of(adoption: Adoption) -> dict[str, Any]:
    """The spec of an import that leaves nothing open."""
    assert not adoption.decisions, adoption.decisions
    spec: dict[str, Any] = adoption.body["spec"]
    return spec


MODELS = {
    "by position and by flag": engine(LLAMA_8B, "--model", SMALL),
    "flag before the position": engine("--model", SMALL, "--port=8001", LLAMA_8B),
    "last of two flags": engine("--model", SMALL, "--model", LLAMA_8B),
    "before values of a flag that is gone": engine(LLAMA_8B, "--cuda-graph-sizes", "1", "2", "4"),
    "after a switch that is gone": engine("--use-v2-block-manager", LLAMA_8B),
    "in a script with comments": scripted(f"# vllm serve {SMALL}\nvllm serve {LLAMA_8B} # --model {SMALL}"),
    "in a subshell": scripted(f"(cd / && vllm serve {LLAMA_8B})"),
    "by a default": scripted("vllm serve ${MODEL:-" + LLAMA_8B + "}"),
    "by a variable and not its default": scripted("vllm serve ${MODEL:-" + SMALL + "}", MODEL=LLAMA_8B),
    "by a default for an empty variable": scripted("vllm serve ${MODEL:-" + LLAMA_8B + "}", MODEL=""),
    "an empty variable that may be empty": scripted("vllm serve ${EXTRA-" + SMALL + "} " + LLAMA_8B, EXTRA=""),
    "an empty variable is no word": scripted(f"vllm serve $EXTRA {LLAMA_8B}", EXTRA=""),
    "output to a file": scripted(f"vllm serve {LLAMA_8B} > /var/log/engine 2>&1"),
    "behind streams that are joined": scripted(f"vllm serve 2>&1 {LLAMA_8B}"),
    "after a command that is nothing": scripted(f"$NOTHING; vllm serve {LLAMA_8B}", NOTHING=""),
    "in a chain of commands": scripted(f"pip install x && M={LLAMA_8B} && vllm serve $M"),
    "after a change of folder": scripted(f"cd / && M={LLAMA_8B}\nvllm serve $M"),
    "a variable put together": scripted("O=meta-llama; vllm serve $O/Llama-3.1-8B-Instruct"),
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_the_model_is_that_of_vllm(body: dict[str, Any]) -> None:
    assert spec_of(adopt(body))["target"]["model"] == LLAMA_8B


def test_an_unquoted_variable_is_several_arguments() -> None:
    adoption = adopt(scripted(f"vllm serve {LLAMA_8B} $EXTRA_ARGS", EXTRA_ARGS="--seed 7  --max-num-seqs 64"))
    spec = spec_of(adoption)
    assert (spec["serving"]["maxNumSeqs"], spec["engine"]["extraArgs"]) == (64, ["--seed", "7"])


def test_variables_of_the_script_are_the_engine_s() -> None:
    script = (
        f"export A=1 B='x y'; A=2; X=$NOBODY curl localhost; C=3; export C; D=4\nE=$A$B env F=6 vllm serve {LLAMA_8B}"
    )
    env = spec_of(adopt(scripted(script)))["engine"]["env"]
    assert {each["name"]: each["value"] for each in env} == {"A": "2", "B": "x y", "C": "3", "E": "2x y", "F": "6"}


OPEN = {
    "an array": (scripted(f'ARGS=(--model {LLAMA_8B}); vllm serve "${{ARGS[@]}}"'), "${ARGS[@]}"),
    "a variable of the image": (scripted(f"vllm serve {LLAMA_8B} --max-num-seqs $SEQS"), "--max-num-seqs"),
    "a command's output": (scripted(f"vllm serve {LLAMA_8B} -tp $(nvidia-smi -L | wc -l)"), "--tensor-parallel-size"),
    "set in one branch": (
        scripted(f"M={LLAMA_8B}\nif [ -e /big ]; then\nM={LLAMA_70B}\nfi\nvllm serve $M"),
        "$M",
    ),
    "set in a loop": (scripted(f"M={LLAMA_8B}; for M in {LLAMA_70B}; do vllm serve $M; done"), "$M"),
    "read from a file": (scripted(f"M={LLAMA_8B}; read -r M < /model; vllm serve $M"), "$M"),
    "set if a program runs": (scripted(f"M={LLAMA_8B}; nvidia-smi && \n M={LLAMA_70B}\nvllm serve $M"), "$M"),
    "set unless set": (scripted(f'[ -n "$M" ] || M={LLAMA_8B}; vllm serve $M'), "$M"),
    "exported if a program runs": (
        scripted(f"nvidia-smi && export NCCL_DEBUG=INFO; vllm serve {LLAMA_8B}"),
        "spec.engine.env: NCCL_DEBUG",
    ),
    "set where a folder is missing": (scripted(f"cd /big || M={LLAMA_8B}; vllm serve $M"), "$M"),
    "exported where a folder is missing": (
        scripted(f"cd /big || export NCCL_DEBUG=INFO; vllm serve {LLAMA_8B}"),
        "spec.engine.env: NCCL_DEBUG",
    ),
    "set after a test": (scripted(f"M={LLAMA_8B}; [ -e /big ] && M={LLAMA_70B}; vllm serve $M"), "$M"),
    "exported from the container": (scripted(f"export VLLM_HOST_IP=$POD_IP; vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "given to the command": (scripted(f"VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "exported, then set anew": (
        scripted(f"export VLLM_HOST_IP=::1; VLLM_HOST_IP=$(hostname -i); vllm serve {LLAMA_8B}"),
        "VLLM_HOST_IP",
    ),
    "given to env": (scripted(f"env VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "a variable from elsewhere": (engine("--model", "$(MODEL)"), "--model"),
    "a file of arguments": (engine(LLAMA_8B, "--config", "/etc/vllm.yaml"), "--config /etc/vllm.yaml"),
    "two models": (engine(LLAMA_8B, SMALL), SMALL),
    "a flag that nobody knows": (engine("--all-new", "1", LLAMA_8B), "spec.target.model: nothing"),
    "two starts": (scripted(f"if [ -e /big ]; then vllm serve {LLAMA_70B}; else vllm serve {LLAMA_8B}; fi"), "once"),
    "a script of documents": (scripted(f"cat <<EOF > /x\nEOF\nvllm serve {LLAMA_8B}"), "here-document"),
}


@pytest.mark.parametrize(("body", "words"), OPEN.values(), ids=OPEN)
def test_what_only_the_container_knows_is_asked_for(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    assert words in asked(specdecode, write("d.yaml", body))
    printed = specdecode("import", "-f", write("d.yaml", body)).stdout
    assert "$" not in yaml.safe_dump(yaml.safe_load(printed)), "what is printed holds no variable"


def fetching(script: str, *models: str, env: str = "") -> dict[str, Any]:
    """A Deployment whose init container fetches its models by a script."""
    target, draft = models
    speculative = f'{{"model": "{draft}", "num_speculative_tokens": 5}}'
    mounts = [{"name": "weights", "mountPath": "/m"}]
    body = engine(target, "--speculative-config", speculative, volumeMounts=mounts)
    variables = [{"name": "DRAFT", "value": env}] if env else []
    fetch = {"name": "fetch", "command": ["bash", "-c"], "args": [script], "env": variables, "volumeMounts": mounts}
    body["spec"]["template"]["spec"] |= {
        "initContainers": [fetch],
        "volumes": [{"name": "weights", "emptyDir": {}}],
    }
    return body


BOTH = f"""
set -e
pip install -q huggingface_hub   # hf download nobody/nothing --local-dir /m/target
hf download --quiet {LLAMA_70B} --local-dir /m/target
hf download "$DRAFT" \\
  --local-dir=/m/draft --revision main
"""


def test_each_model_is_the_one_that_is_fetched_to_its_folder() -> None:
    spec = spec_of(adopt(fetching(BOTH, "/m/target", "/m/draft", env=LLAMA_8B)))
    assert spec["target"]["model"] == LLAMA_70B
    assert spec["speculation"]["draft"] == {"model": LLAMA_8B, "revision": "main"}


def test_a_download_that_does_not_say_its_model_is_asked_for() -> None:
    (decision,) = adopt(fetching(BOTH, "/m/target", "/m/draft")).decisions
    assert decision.field == "spec.speculation.draft.model"
    assert "$DRAFT" in decision.message


def speculating(**config: Any) -> Adoption:
    """The import of an engine with 64 requests at once that looks up 5 tokens, and more."""
    settings = {"method": "ngram", "num_speculative_tokens": 5, **config}
    return adopt(engine(LLAMA_8B, "--max-num-seqs=64", "--speculative-config", json.dumps(settings)))


def ranges_of(adoption: Adoption) -> list[tuple[int, int, int]]:
    """First, last and tokens of each range of an import that leaves nothing open."""
    ranges = spec_of(adoption)["speculation"]["numSpeculativeTokensByBatchSize"]
    return [(each["from"], each["to"], each["numSpeculativeTokens"]) for each in ranges]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ([[1, 16, 5], [17, 32, 0]], [(1, 16, 5), (17, 64, 0)]),
        ([[1, 4, 5], [17, 64, 2]], [(1, 16, 5), (17, 64, 2)]),
        ([[9, 64, 2], [1, 8, 5]], [(1, 8, 5), (9, 64, 2)]),
        ([[1, 16, 9], [17, 512, 1], [513, 1024, 0]], [(1, 16, 5), (17, 64, 1)]),
    ],
    ids=["past the end", "in a gap", "out of order", "beyond K and the requests"],
)
def test_a_range_goes_on_until_the_next_as_in_vllm(written: list[list[int]], meant: list[tuple[int, int, int]]) -> None:
    # vllm/v1/spec_decode/dynamic/utils.py, build_dynamic_sd_schedule_lookup
    for order in (1, -1):
        config = {"num_speculative_tokens_per_batch_size": written, "num_speculative_tokens": 5}
        assert ranges_of(speculating(**dict(list(config.items())[::order]))) == meant


@pytest.mark.parametrize(("limit", "first"), [(1, 1), (16, 16), (64, 64)])
def test_drafting_stops_from_so_many_requests_on(limit: int, first: int) -> None:
    assert ranges_of(speculating(disable_by_batch_size=limit)) == [(first, 64, 0)]


def test_a_limit_that_is_never_reached_needs_no_range() -> None:
    assert "numSpeculativeTokensByBatchSize" not in spec_of(speculating(disable_by_batch_size=65))["speculation"]


@pytest.mark.parametrize(
    "key", [{"use_heterogeneous_vocab": True}, {"kv_cache_dtype": "fp8"}, {"parallel_drafting": True}], ids=str
)
def test_a_key_that_drafts_otherwise_is_asked_for(key: dict[str, Any]) -> None:
    (decision,) = speculating(**key).decisions
    assert (decision.field, next(iter(key)) in decision.value) == ("spec.speculation", True)


@pytest.mark.parametrize(
    "key",
    [
        {"use_heterogeneous_vocab": False},
        {"kv_cache_dtype": None},
        {"max_model_len": None},
        {"acceptance_method": "typical"},
    ],
    ids=str,
)
def test_a_key_without_effect_is_told(key: dict[str, Any]) -> None:
    adoption = speculating(**key)
    assert not adoption.decisions
    assert any(next(iter(key)) in note.what for note in adoption.notes)


WORDS = {
    "a": ["a"],
    "'a  $X' \"b '$X'\"": ["a  $X", "b 'one two'"],
    '"a\\"b \\$X" \\$X': ['a"b $X', "$X"],
    "a$X.b": ["aone", "two.b"],
    '"" $E "$E" x': ["", "", "x"],
    "a\\\nb": ["ab"],
    "a#b #c": ["a#b"],
    "a >f 2> f b>>f c<f &>f d": ["a", "b", "c", "d"],
    "'>' '#' ';'": [">", "#", ";"],
    "a=b ${X}s $$X": ["one", "twos", "$$X"],
    '"$@" $1': ["p q", "r", "$1"],
}


@pytest.mark.parametrize(("text", "words"), WORDS.items(), ids=WORDS)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    (command,) = read_script(text, ["p q", "r"], {"X": "one two", "E": ""}).commands
    assert list(command.words) == words
