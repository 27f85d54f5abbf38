"""No secret that stands in a server as plain text is printed, in whatever place."""

from typing import Any

import pytest

from specdecode_operator.cli.importing import report_lines
from specdecode_operator.importing.convert import Migration
from specdecode_operator.importing.spec_builder import MigrationError, without_secrets
from tests.support.migrations import migrate
from tests.unit.cli.conftest import Specdecode, WriteObject
from tests.unit.cli.old_deployments import LLAMA_8B, engine, with_pod

SECRET = "hf_ABCDEFGHIJKLMNOPQRSTUVWXYZ0123"
PASSWORD = "correct-horse"
ADDRESS = f"https://ada:{PASSWORD}@proxy.example.com:3128"


def env(**variables: str) -> dict[str, Any]:
    return engine(LLAMA_8B, env=[{"name": name, "value": value} for name, value in variables.items()])


def sidecar(**container: Any) -> dict[str, Any]:
    body = engine()
    body["spec"]["template"]["spec"]["containers"].append({"name": "s", "image": "s:1", **container})
    return body


SERVERS = {
    "a key of a cloud": env(AWS_SECRET_ACCESS_KEY=PASSWORD),
    "a password": env(DB_PASSWORD=PASSWORD),
    "a token by its look": env(EXTRA=SECRET),
    "a password in an address": env(HTTPS_PROXY=ADDRESS),
    "an argument": engine(LLAMA_8B, "--otlp-traces-endpoint", ADDRESS),
    "an argument that nobody knows": engine(LLAMA_8B, f"--all-new={SECRET}"),
    "a header": engine(LLAMA_8B, "--default-chat-template-kwargs", f'{{"a": "Bearer {SECRET}"}}'),
    "JSON of speculation": engine(
        LLAMA_8B, "-sc", f'{{"method": "ngram", "num_speculative_tokens": 2, "x": "{SECRET}"}}'
    ),
    "a key in JSON": engine(
        LLAMA_8B, "--model-loader-extra-config", f'{{"aws_secret_access_key": "{PASSWORD}", "concurrency": 8}}'
    ),
    "a key of JSON that is written with dots": engine(
        LLAMA_8B, f"--kv-transfer-config.kv_connector_extra_config.password={PASSWORD}"
    ),
    "a key that speculation has not": engine(
        LLAMA_8B, "-sc", f'{{"method": "ngram", "num_speculative_tokens": 2, "api_key": "{PASSWORD}"}}'
    ),
    "a short word for a password": env(DB_PASS=PASSWORD, DB_PWD=PASSWORD),
    "a word within a name": env(API_SECRET_V2=PASSWORD),
    "a numbered token": env(TOKEN_2=PASSWORD, SIGNING_KEY=PASSWORD),
    "the value behind a flag of a sidecar": sidecar(args=["--redis-password", PASSWORD]),
    "the value behind a flag of a script": sidecar(command=["sh", "-c", f"proxy --password '{PASSWORD}' --port 1"]),
    "the value behind a flag of a probe": sidecar(
        livenessProbe={"exec": {"command": ["check", "--api-key", PASSWORD]}}
    ),
    "broken JSON": engine(LLAMA_8B, "-sc", f"{{{SECRET}"),
    "a variable of a sidecar": sidecar(env=[{"name": "API_KEY", "value": PASSWORD}]),
    "an argument of a sidecar": sidecar(args=["--token", SECRET]),
    "an init container": with_pod(initContainers=[{"name": "i", "env": [{"name": "TOKEN", "value": PASSWORD}]}]),
    "an image": engine(image=f"{SECRET}/vllm-openai:v0.33.0"),
    "the model's address": engine(f"s3://ada:{PASSWORD}@bucket/llama"),
}


def printed(migration: Migration) -> str:
    return "\n".join((str(migration.body), *report_lines(migration, "x")))


@pytest.mark.parametrize("body", SERVERS.values(), ids=SERVERS)
def test_plain_text_secret_is_a_decision_and_not_printed(body: dict[str, Any]) -> None:
    migration = migrate(body)
    assert migration.decisions
    assert SECRET not in printed(migration)
    assert PASSWORD not in printed(migration)


ERRORS = {
    "containers that are text": with_pod(containers=SECRET),
    "args that are text": engine(args=SECRET),
    "a server that is none": engine(image=f"nginx:{SECRET}", command=["nginx"]),
    "a size": {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "x"},
        "spec": {"leaderWorkerTemplate": {"size": SECRET}},
    },
}


@pytest.mark.parametrize("body", ERRORS.values(), ids=ERRORS)
def test_errors_show_no_secret(body: dict[str, Any]) -> None:
    with pytest.raises(MigrationError) as refused:
        migrate(body)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve {LLAMA_8B} --api-key {SECRET}",
        f"HF_TOKEN={PASSWORD} vllm serve {LLAMA_8B}",
        f"export OPENAI_API_KEY={PASSWORD}\nvllm serve {LLAMA_8B}",
        f"docker run -e HF_TOKEN={PASSWORD} --gpus all vllm/vllm-openai:v0.33.0 {LLAMA_8B}",
        f"docker run -e WANDB_API_KEY={PASSWORD} --gpus all vllm/vllm-openai:v0.33.0 {LLAMA_8B}",
        f"docker run --made-up {SECRET} --gpus all vllm/vllm-openai:v0.33.0 {LLAMA_8B}",
        f"docker login -p {PASSWORD}\ndocker run --gpus all vllm/vllm-openai:v0.33.0 {LLAMA_8B} --api-key {PASSWORD}",
    ],
)
def test_command_line_secrets_are_not_printed(specdecode: Specdecode, write: WriteObject, text: str) -> None:
    result = specdecode("import", "-f", write("run.sh", text))
    assert result.exit_code == 2
    assert SECRET not in result.output
    assert PASSWORD not in result.output


@pytest.mark.parametrize(
    "argument",
    [
        '--hf-overrides={"eos_token": "</s>", "password": null}',
        "--override-generation-config.token=7",
        "--made-up.password=$(PASSWORD)",
        "--made-up.private_key=/etc/keys/tls.key",
    ],
)
def test_argument_similar_to_a_secret_is_kept(argument: str) -> None:
    assert without_secrets(argument) == argument


@pytest.mark.parametrize(
    "args",
    [
        ["--password", "$(PASSWORD)"],
        ["--token", "/var/run/token"],
        ["--token", "--port", "1"],
        ["--password-file", "file"],
        ['proxy --password $PASSWORD --api-key "$KEY" --token </run/token'],
    ],
)
def test_secret_flag_without_a_plain_text_value_is_kept(args: list[str]) -> None:
    migration = migrate(sidecar(args=args))
    assert not migration.decisions
    assert migration.body["spec"]["podTemplate"]["spec"]["containers"][-1]["args"] == args


@pytest.mark.parametrize(
    "name", ["VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "TOKENIZERS_PARALLELISM", "KEY_LENGTH", "NCCL_NET", "SECRET_FILE"]
)
def test_harmless_variable_with_a_secret_word_in_its_name_is_kept(name: str) -> None:
    migration = migrate(env(**{name: "7"}))
    assert not migration.decisions
    assert migration.body["spec"]["engine"]["env"] == [{"name": name, "value": "7"}]
