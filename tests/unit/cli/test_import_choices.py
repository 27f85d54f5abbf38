"""`specdecode import` takes the models and settings that vLLM would take, or asks: never others with exit 0."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.importing.convert import Migration
from specdecode_operator.importing.server_command import ScriptError, read_script
from specdecode_operator.importing.spec_builder import MigrationError
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import INVALID, LLAMA_8B, LLAMA_70B, asked, engine

SMALL = "Qwen/Qwen3-0.6B"


def scripted(script: str, *arguments: str, **env: str) -> dict[str, Any]:
    """A Deployment whose engine is started by a shell script."""
    variables = [{"name": name, "value": value} for name, value in env.items()]
    return engine(command=["bash", "-c", script], args=list(arguments) or None, env=variables)


def spec_of(migration: Migration) -> dict[str, Any]:
    """The spec of an import that leaves nothing open."""
    assert not migration.decisions, migration.decisions
    spec: dict[str, Any] = migration.body["spec"]
    return spec


MODELS = {
    "by position and by flag": engine(LLAMA_8B, "--model", SMALL),
    "flag before the position": engine("--model", SMALL, "--port=8001", LLAMA_8B),
    "last of two flags": engine("--model", SMALL, "--model", LLAMA_8B),
    "before values of a flag that is gone": engine(LLAMA_8B, "--cuda-graph-sizes", "1", "2", "4"),
    "after a switch that is gone": engine("--use-v2-block-manager", LLAMA_8B),
    "in a script with comments": scripted(f"# vllm serve {SMALL}\nvllm serve {LLAMA_8B} # --model {SMALL}"),
    "an empty variable is no word": scripted(f"vllm serve $EXTRA {LLAMA_8B}", EXTRA=""),
    "after a command that is nothing": scripted(f"$NOTHING; vllm serve {LLAMA_8B}", NOTHING=""),
    "after settings of the shell": scripted(f"set -euo pipefail; ulimit -n 65535\necho go\nexec vllm serve {LLAMA_8B}"),
    "a variable put together": scripted("O=meta-llama; vllm serve $O/Llama-3.1-8B-Instruct"),
}


@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_the_model_is_that_of_vllm(body: dict[str, Any]) -> None:
    assert spec_of(migrate(body))["target"]["model"] == LLAMA_8B


def test_an_unquoted_variable_is_several_arguments() -> None:
    migration = migrate(scripted(f"vllm serve {LLAMA_8B} $EXTRA_ARGS", EXTRA_ARGS="--seed 7  --max-num-seqs 64"))
    spec = spec_of(migration)
    assert (spec["serving"]["maxNumSeqs"], spec["engine"]["extraArgs"]) == (64, ["--seed", "7"])


def test_variables_of_the_script_are_the_engine_s() -> None:
    script = f"export A=1 B='x y'; A=2; C=3; export C; D=4; G=7\nE=$A$B env F=6 vllm serve {LLAMA_8B}"
    env = spec_of(migrate(scripted(script, G="1")))["engine"]["env"]
    found = {each["name"]: each["value"] for each in env}
    # G is the container's, and so exported already; D is the script's own.
    assert found == {"A": "2", "B": "x y", "C": "3", "E": "2x y", "F": "6", "G": "7"}


def test_assignments_of_one_command_see_each_other() -> None:
    assert read_script("A=1 B=$A run", {"A": "0"})[0].env == {"A": "1", "B": "1"}
    assert read_script("A=1 B=$A\nrun $B", {"A": "0"})[0].words == ("run", "1")
    assert read_script("export A=1 B=$A; run $B", {"A": "0"})[0].words == ("run", "0"), "export reads its words first"


def test_a_variable_s_value_may_name_the_variables_above_it() -> None:
    env = [{"name": "BASE", "value": "/x"}, {"name": "DIR", "value": "$(BASE)/$(GONE)/$$"}]
    found = spec_of(migrate(engine(LLAMA_8B, "--download-dir=$(BASE)", env=env)))["engine"]["env"]
    assert found == [{"name": "DIR", "value": "/x/$(GONE)/$"}]


@pytest.mark.parametrize(
    ("written", "argument", "env"),
    [("$(FLAVOR)", "vllm", []), ("$$(FLAVOR)", "$(FLAVOR)", [{"name": "FLAVOR", "value": "vllm"}])],
    ids=["a variable", "its name as text"],
)
def test_only_variables_that_are_part_of_the_arguments_are_left_out(
    written: str, argument: str, env: list[dict[str, str]]
) -> None:
    body = engine(LLAMA_8B, f"--generation-config={written}", env=[{"name": "FLAVOR", "value": "vllm"}])
    found = spec_of(migrate(body))["engine"]
    assert (found["extraArgs"], found.get("env", [])) == ([f"--generation-config={argument}"], env)


OPEN = {
    "a variable of the image": (scripted(f"vllm serve {LLAMA_8B} --max-num-seqs $SEQS"), "--max-num-seqs"),
    "a variable from elsewhere": (engine("--model", "$(MODEL)"), "--model"),
    "set to what is unknown": (scripted(f"M={LLAMA_8B}; M=$OTHER; vllm serve $M"), "$M"),
    "exported from the container": (scripted(f"export VLLM_HOST_IP=$POD_IP; vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "given to the command": (scripted(f"VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "given to env": (scripted(f"env VLLM_HOST_IP=$POD_IP vllm serve {LLAMA_8B}"), "VLLM_HOST_IP"),
    "another command": (scripted(f"pip install x\nvllm serve {LLAMA_8B}"), "args: pip install: only the server is"),
    "two other commands": (
        scripted(f"cd /m; hf download {SMALL}; vllm serve {LLAMA_8B}"),
        "cd; hf download:",
    ),
    "read from elsewhere": (scripted(f"M={LLAMA_8B}; . /env.sh; vllm serve $M"), "args: .: only the server is"),
    "two starts": (scripted(f"vllm serve {LLAMA_70B}; vllm serve {LLAMA_8B}"), "once"),
    "a program that starts it": (scripted(f"nohup vllm serve {LLAMA_8B}"), "nohup vllm: "),
    "a file of arguments": (engine(LLAMA_8B, "--config", "/etc/vllm.yaml"), "--config /etc/vllm.yaml"),
    "two models": (engine(LLAMA_8B, SMALL), SMALL),
    "a secret in single quotes": (
        engine(
            command=["sh", "-c", f"vllm serve {LLAMA_8B} --chat-template '$(KEY)'"],
            args=None,
            env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        ),
        "--chat-template: has its value only in the running container",
    ),
    "a secret in a variable": (
        engine(
            env=[
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "URL", "value": "https://x/$(KEY)"},
            ]
        ),
        "spec.engine.env: URL: holds a variable",
    ),
    "a flag that nobody knows": (engine("--all-new", "1", LLAMA_8B), "spec.target.model: is missing"),
}
BEYOND = {
    "a command's output": (f"vllm serve {LLAMA_8B} -tp $(nvidia-smi -L | wc -l)", "a substitution"),
    "backquotes in double quotes": (f'vllm serve "`cat /model`" {LLAMA_8B}', "a substitution"),
    "a default": ("vllm serve ${MODEL:-" + LLAMA_8B + "}", "a substitution"),
    "arguments of the script": ('vllm serve "$@"', "a substitution"),
    "an array": (f'ARGS=(--model {LLAMA_8B}); vllm serve "${{ARGS[@]}}"', "a substitution"),
    "an array that nobody reads": (f"ARGS=(--port 1); vllm serve {LLAMA_8B}", "an array"),
    "a subshell": (f"(vllm serve {LLAMA_8B})", "a subshell"),
    "a function": (f"f() {{ vllm serve {LLAMA_8B}; }}; f", "a function"),
    "a group": (f"{{ vllm serve {LLAMA_8B}; }}", "a group"),
    "if": (f"M={LLAMA_8B}\nif [ -e /big ]; then\nM={LLAMA_70B}\nfi\nvllm serve $M", "a condition"),
    "case": (f"case x in\nvllm serve {LLAMA_8B}", "a condition"),
    "and": (f"nvidia-smi && vllm serve {LLAMA_8B}", "a condition"),
    "or": (f"cd /big || M={LLAMA_8B}; vllm serve $M", "a condition"),
    "for": (f"M={LLAMA_8B}; for M in {LLAMA_70B}; do vllm serve $M; done", "a loop"),
    "until": (f"until curl localhost\ndo sleep 1\ndone\nvllm serve {LLAMA_8B}", "a loop"),
    "a pipe": (f"vllm serve {LLAMA_8B} | tee /log", "a pipe"),
    "in the background": (f"watch & vllm serve {LLAMA_8B}", "in the background"),
    "a file": (f"vllm serve {LLAMA_8B} > /var/log/engine", "a redirection"),
    "streams that are joined": (f"vllm serve {LLAMA_8B} 2>&1", "a redirection"),
    "a variable from a file": (f"read -r M < /model; vllm serve {LLAMA_8B}", "a redirection"),
    "a here-document": (f"cat <<EOF\nEOF\nvllm serve {LLAMA_8B}", "a here-document"),
    "a pattern": (f"vllm serve {LLAMA_8B} --allowed-origins *", "a pattern"),
    "an open quote": (f"vllm serve {LLAMA_8B} 'x", "an open quote"),
}
"""What a shell can do and import does not follow."""


@pytest.mark.parametrize(("script", "what"), BEYOND.values(), ids=BEYOND)
def test_a_script_that_does_more_is_a_question(
    specdecode: Specdecode, write: WriteObject, script: str, what: str
) -> None:
    result = specdecode("import", "-f", write("d.yaml", scripted(script)))
    assert (result.exit_code, result.stdout) == (INVALID, ""), "nothing is guessed"
    assert result.stderr.startswith("error: spec.template.spec.containers[0].args: ")
    assert what in result.stderr
    assert "exec vllm serve MODEL" in result.stderr, "what to write instead"


@pytest.mark.parametrize(
    "script",
    [
        f"vllm serve {LLAMA_8B} --chat-template '`|&;<>()$(x) *?{{}}'",
        f'vllm serve {LLAMA_8B} --chat-template "|&;<>() *?{{}} \\$(x) it\'s"',
        f"vllm serve {LLAMA_8B} --chat-template a\\&b\\|c # && that's $(all) `it` is",
        f"# if it's <big>\nvllm serve {LLAMA_8B} --chat-template '\nif x\n' \\\n  --seed 1",
    ],
)
def test_signs_in_quotes_and_comments_are_text(script: str) -> None:
    assert "--chat-template" in spec_of(migrate(scripted(script)))["engine"]["extraArgs"]


@pytest.mark.parametrize(
    ("script", "where"),
    [
        ("--api-key SEKRET | cat", "line 1, |"),
        ('--api-key "a b SEKRET" | cat', "line 1, |"),
        ("--api-key \\\n  SEKRET \\\n | tee /log", "line 3, |"),
        ("--header 'Authorization: Bearer SEKRET'\nif true; then", "line 2, if"),
        ("--api-key 'SEKRET", "the script"),
    ],
)
def test_a_question_about_a_script_shows_no_word_of_it(script: str, where: str) -> None:
    with pytest.raises(MigrationError) as caught:
        migrate(scripted(f"vllm serve {LLAMA_8B} {script}"))
    assert caught.value.problem.value == where
    assert "SEKRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ("hf auth login --token SEKRET", "hf auth"),
        ("wandb login SEKRET", "wandb login"),
        ("git clone https://user:SEKRET@host/x", "git clone"),
        ("readonly T=SEKRET", "readonly"),
        ("mysql -pSEKRET", "mysql"),
        ("printf sekret", "printf"),
        ("'Authorization: Bearer SEKRET'", "…"),
    ],
)
def test_a_command_beside_the_server_shows_none_of_its_words(other: str, shown: str) -> None:
    migration = migrate(scripted(f"echo sekret; {other}; vllm serve {LLAMA_8B}"))
    (decision,) = migration.decisions
    assert decision.value == shown
    assert "sekret" not in str(migration).lower()


LONG = {
    "a word": f"{'token' * 8000}!",
    "blanks": f"x{' ' * 60_000}",
    "lines that go on": f"x{chr(92)}\n" + "\\\n" * 20_000,
    "lines that go on with blanks": "key=x" + " \\\n" * 20_000,
    "open variables": "$(" * 30_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_script_is_read_to_its_end(text: str) -> None:
    with pytest.raises(MigrationError) as caught:
        migrate(scripted(f"vllm serve {LLAMA_8B} {text} | cat"))
    assert "holds a " in str(caught.value)


def test_a_script_that_is_too_long_is_refused() -> None:
    with pytest.raises(MigrationError, match="holds more than 65536 characters"):
        migrate(scripted(f"vllm serve {LLAMA_8B} {'x' * 65_536}"))
    with pytest.raises(MigrationError, match="holds more than 65536 characters"):
        migrate(scripted(f"A=xx; {'A=$A$A; ' * 20} vllm serve {LLAMA_8B}"))


@pytest.mark.parametrize("sign", "\ue000\ue001\ue002\ue003\ue004\ue005")
def test_characters_that_mean_syntax_in_here_are_refused(sign: str) -> None:
    for body in (scripted(f"vllm serve {LLAMA_8B}{sign}"), scripted(f"vllm serve {LLAMA_8B} $X", X=sign)):
        with pytest.raises(MigrationError, match="private characters"):
            migrate(body)


def test_a_token_that_a_script_exports_is_asked_for_and_never_printed() -> None:
    migration = migrate(scripted(f"export HF_TOKEN=hf_secret; vllm serve {LLAMA_8B}"))
    (decision,) = migration.decisions
    assert decision.field == "spec.models.hubTokenSecret"
    assert "hf_secret" not in str(migration)


def test_a_sidecar_may_run_any_script() -> None:
    body = engine(LLAMA_8B)
    sidecar = {"name": "logs", "image": "busybox", "command": ["sh", "-c", "while true; do cat /log | nc x 1; done"]}
    body["spec"]["template"]["spec"]["containers"].insert(0, sidecar)
    (kept,) = spec_of(migrate(body))["podTemplate"]["spec"]["containers"]
    assert kept == sidecar
    sidecar["command"][2] = f"while true; do vllm serve {SMALL}; done"
    with pytest.raises(MigrationError, match="a loop"):
        migrate(body)


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
    spec = spec_of(migrate(fetching(BOTH, "/m/target", "/m/draft", env=LLAMA_8B)))
    assert spec["target"]["model"] == LLAMA_70B
    assert spec["speculation"]["draft"] == {"model": LLAMA_8B, "revision": "main"}


def test_a_download_that_does_not_say_its_model_is_asked_for() -> None:
    (decision,) = migrate(fetching(BOTH, "/m/target", "/m/draft")).decisions
    assert decision.field == "spec.speculation.draft.model"
    assert "$DRAFT" in decision.message


def speculating(**config: Any) -> Migration:
    """The import of an engine with 64 requests at once that looks up 5 tokens, and more."""
    settings = {"method": "ngram", "num_speculative_tokens": 5, **config}
    return migrate(engine(LLAMA_8B, "--max-num-seqs=64", "--speculative-config", json.dumps(settings)))


def ranges_of(migration: Migration) -> list[tuple[int, int, int]]:
    """First, last and tokens of each range of an import that leaves nothing open."""
    ranges = spec_of(migration)["speculation"]["numSpeculativeTokensByBatchSize"]
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


def test_a_way_to_sample_that_the_field_lacks_is_asked_for() -> None:
    (decision,) = speculating(draft_sample_method=["greedy"]).decisions
    assert (decision.field, "draft_sample_method" in decision.value) == ("spec.speculation.draftSampling", True)
    assert "greedy" in decision.message


@pytest.mark.parametrize("key", ["tensor_parallel_size", "synthetic_acceptance_length"])
def test_a_key_that_vllm_or_the_operator_refuses_is_asked_for(key: str) -> None:
    (decision,) = speculating(**{key: 2}).decisions
    assert key in decision.value


@pytest.mark.parametrize(
    "key",
    [
        {"use_heterogeneous_vocab": False},
        {"parallel_drafting": True},
        {"kv_cache_dtype": None},
        {"max_model_len": None},
        {"acceptance_method": "typical"},
    ],
    ids=str,
)
def test_a_key_without_effect_is_told(key: dict[str, Any]) -> None:
    migration = speculating(**key)
    assert not migration.decisions
    assert any(next(iter(key)) in setting.name for setting in migration.settings)


@pytest.mark.parametrize(
    ("share", "percent", "remark"),
    [
        ("0.29", 29, ""),
        ("0.855", 85, "rounded down"),
        ("0.8599", 85, "rounded down"),
        ("0.57", 57, ""),
        ("8.5e-1", 85, ""),
    ],
)
def test_a_share_of_the_memory_becomes_whole_percent_rounded_down(share: str, percent: int, remark: str) -> None:
    migration = migrate(engine(LLAMA_8B, "--gpu-memory-utilization", share))
    assert spec_of(migration)["serving"]["gpuMemoryUtilizationPercent"] == percent
    (setting,) = (each for each in migration.settings if "--gpu-memory-utilization" in each.name)
    assert (remark in setting.result, "rounded" in setting.result) == (True, bool(remark))


@pytest.mark.parametrize(("port", "kept"), [(1023, None), (1024, 1024), (1, None)])
def test_a_port_is_kept_if_it_needs_no_root(port: int, kept: int | None) -> None:
    spec = spec_of(migrate(engine(LLAMA_8B, "--port", str(port))))
    assert spec.get("serving", {}).get("port") == kept


WORDS = {
    "a": ["a"],
    "'a  $X' \"b '$X'\"": ["a  $X", "b 'one two'"],
    '"a\\"b \\$X" \\$X': ['a"b $X', "$X"],
    "a$X.b": ["aone", "two.b"],
    '"" $E "$E" x': ["", "", "x"],
    '""$E $E"$E" x$E': ["", "", "x"],
    "a\\\nb": ["ab"],
    "a#b #c": ["a#b"],
    "a\\ #b \\;#c \\\n#d": ["a #b", ";#c"],
    "a\\\n\\\n#b \\\n\\\n c": ["a#b", "c"],
    "\\\n# b\n a \\\n \\\n # c": ["a"],
    "'>' '#' ';' ';'": [">", "#", ";", ";"],
    "a=b ${X}s $XX": ["one", "twos", "$XX"],
}


@pytest.mark.parametrize(("text", "words"), WORDS.items(), ids=WORDS)
def test_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    (command,) = read_script(text, {"X": "one two", "E": ""})
    assert list(command.words) == words
    assert command.unknown == ({"$XX"} if "$XX" in words else set())


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(ScriptError, match="a pipe"):
        read_script("a | b", {})
