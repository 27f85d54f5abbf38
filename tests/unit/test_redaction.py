"""What is masked, what is not, and how texts are shortened."""

import pytest

from specdecode_operator.problems import printable
from specdecode_operator.redaction import HIDDEN, after_cut, before_cut, clip, clip_start, redact
from tests.support.secret_forms import FORMS, HUB_TOKEN, SecretForm

LIMIT = 120
FILLER = "the engine did not start and its log says why "
ELLIPSIS = "…"


def filler(length: int) -> str:
    """Words of a total length that end with a space."""
    return (FILLER * (length // len(FILLER) + 1))[: max(length - 1, 0)] + " " * min(length, 1)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
class TestSecretForm:
    def test_secret_is_masked(self, form: SecretForm) -> None:
        masked = redact(f"before {form.text} after")
        assert form.leaks_in(masked) is None
        assert HIDDEN in masked
        assert masked.startswith("before ")
        assert redact(masked) == masked

    def test_secret_is_masked_in_a_one_line_message(self, form: SecretForm) -> None:
        assert form.leaks_in(printable(f"before {form.text} after")) is None
        assert form.leaks_in(printable(" ".join(form.text.split()))) is None

    def test_clip_leaks_no_part_of_a_secret(self, form: SecretForm) -> None:
        for length in range(max(LIMIT - len(form.text) - 8, 0), LIMIT + 8):
            before, after = (filler(length), " and more" * 20) if length % 2 else ("x" * (length - 1) + " ", "x" * 99)
            short = clip(before + form.text + after, LIMIT)
            assert len(short) <= LIMIT
            assert form.leaks_in(short) is None, (length, short)
            assert clip(short, LIMIT) == short

    def test_clip_start_leaks_no_part_of_a_secret(self, form: SecretForm) -> None:
        for length in range(max(LIMIT - len(form.text) - 8, 0), LIMIT + 8):
            short = clip_start("more and " * 20 + form.text + " " + filler(length), LIMIT)
            assert len(short) <= LIMIT
            assert form.leaks_in(short) is None, (length, short)

    def test_text_already_cut_elsewhere_leaks_no_part_of_a_secret(self, form: SecretForm) -> None:
        for text in (f"a {form.text} then it ended for good", f"a\n{form.text}\nthen it ended for good"):
            for at in range(len(text)):
                assert form.leaks_in(after_cut(text[at:])) is None, text[at:]
                assert form.leaks_in(before_cut(text[:at])) is None, text[:at]


@pytest.mark.parametrize(
    "text",
    [
        "registry.example.com:5000/team/engine:0.33@sha256:" + "9f8e7d6c" * 8,
        "docker://registry:5000/team/engine@sha256:" + "9f8e7d6c" * 8,
        "pod llama-7d9f8c6b5-x2k4q (uid 0d5f3c1e-8b7a-4c2d-9e6f-1a2b3c4d5e6f) is gone",
        "meta-llama/Llama-3.1-70B-Instruct at commit " + "0123456789abcdef" * 2 + "01234567",
        "NVIDIA-H100-80GB-HBM3: 4.4 GiB per GPU",
        "max_num_batched_tokens=8192, num_speculative_tokens: 5, --max-num-batched-tokens 8192",
        "the draft's eos_token='<|im_end|>' differs from the target's pad_token: <|endoftext|>",
        "token: 151643 is outside of the vocabulary",
        "hf_token=None, token: null, password=, api_key: ''",
        "password: <unset>, hf_token: [], api_key: {}, password=[redacted], token: <|endoftext|>, secret: [151643, 2]",
        "password: {{ .Values.password }}, api_key: {'secretKeyRef': {'name': 'hub'}}, hf_token: {secretKeyRef: hub}",
        "hf_token [type=string_type], api_key: <class 'str'>, password: …, hub_token: ********",
        "references non-existent secret key: api-token",
        "couldn't find key token in Secret team/hub",
        'MountVolume.SetUp failed for volume "hub": secret "hub-2" not found',
        "spec.serving.tlsSecret: web-tls: names no Secret of type kubernetes.io/tls",
        "spec.models.hubTokenSecret: is missing: name a Secret and its key",
        "the password: must not be empty; --api-key is not given; HF_TOKEN: is not set",
        "--api-key-variable: VLLM_API_KEY: is not set",
        "spec.engine.extraArgs: --password: vLLM 0.33 has no such flag; did you mean --port?",
        "--api-key: vLLM 0.17 does not have this flag yet; --hf-token: vLLM 0.33 no longer has this flag",
        "--password $PASSWORD --token $(TOKEN) --api-key ${KEY} token=/var/run/secrets/token",
        "http://127.0.0.1:8000/metrics, http://[::1]:8000/x, https://HOST:PORT/x",
        "http://llama.team.svc:8000: timed out",
        "s3://bucket/model@main, git+ssh://git@host/engines",
        "hf_overrides.num_hidden_layers, hf_transfer, hf_text_config and hf_quantizer",
        "basic settings; Basic authentication is off; a bearer token is needed",
        "ValueError: To serve at least one request with the model's max seq len (4194304), 8.0 GiB KV cache is needed",
        "tokenizer: Qwen/Qwen3-32B, task-0123456789abcdef0123, disk-9f8e7d6c5b4a39281706",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redact(text) == text
    assert printable(text) == text


@pytest.mark.parametrize(
    "text",
    ["--password: vLLM0.33", "password: vLLM swordfish", "password='vLLM has it'", "--api-key vLLM --port 8000"],
)
def test_secret_containing_vllm_is_masked(text: str) -> None:
    assert "vLLM" not in redact(text)


class TestClip:
    def test_short_text_is_unchanged(self) -> None:
        assert clip("a b", 3) == "a b"
        assert clip("", 3) == ""

    def test_clip_cuts_a_long_text_after_a_whole_word(self) -> None:
        assert clip("the engine did not start", 16) == f"the engine did{ELLIPSIS}"
        assert clip("the engine did not start", 18) == f"the engine did{ELLIPSIS}"
        assert clip("the engine did not start", 19) == f"the engine did not{ELLIPSIS}"

    def test_a_long_word_is_cut(self) -> None:
        assert clip("x" * 200, LIMIT) == "x" * (LIMIT - 1) + ELLIPSIS
        assert clip("a " + "x" * 200, LIMIT) == "a " + "x" * (LIMIT - 3) + ELLIPSIS

    @pytest.mark.parametrize("limit", [0, 1, 2])
    def test_result_is_within_even_a_tiny_limit(self, limit: int) -> None:
        assert len(clip("the engine", limit)) <= limit
        assert len(clip_start("the engine", limit)) <= limit

    def test_clip_start_cuts_before_a_whole_word(self) -> None:
        assert clip_start("the engine did not start", 10) == f"{ELLIPSIS}not start"
        assert clip_start("x" * 200, 10) == ELLIPSIS + "x" * 9
        assert clip_start("a\nb", 10) == "a\nb"

    def test_text_that_fits_once_masked_is_not_cut(self) -> None:
        assert clip(f"401 for {'x' * 8} {HUB_TOKEN}", 40) == f"401 for xxxxxxxx {HIDDEN}"

    @pytest.mark.parametrize("length", [100, 1000, 8000])
    def test_secret_that_ends_far_beyond_the_limit_is_masked(self, length: int) -> None:
        """A password in a URL is known by the sign behind it."""
        password = ("Sw0rdf1sh" * length)[:length]
        text = f"cannot reach postgres://admin:{password}@db:5432/x after three attempts"
        assert clip(text, LIMIT) == f"cannot reach postgres://{HIDDEN}@db:5432/x after three attempts"

    @pytest.mark.parametrize("name", ["password in a URL", "token of GitHub"])
    @pytest.mark.parametrize("where", range(65_536 - 60, 65_536 + 2))
    def test_secret_at_the_input_bound_is_not_leaked(self, where: int, name: str) -> None:
        """Masks may leave so little of a text that its end is shown."""
        form = FORMS[name]
        key = f"-----BEGIN PRIVATE KEY-----\n{'QUJD' * ((where - 60) // 4)}\n-----END PRIVATE KEY----- "
        assert form.leaks_in(clip(key.ljust(where) + form.text, 300)) is None
        assert form.leaks_in(clip_start(form.text + key.rjust(where), 300)) is None

    def test_very_long_word_is_cut_to_the_limit(self) -> None:
        assert clip("a " + "x" * 100_000, 300).startswith("a xxx")
        assert len(clip("x" * 1_000_000, 300)) == 300


@pytest.mark.parametrize(
    "part",
    [
        "://a:", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "password", "password=",
        "password: [", "[ ", "(<{",
        "token=a", "secret='", 'password=\\"a', "--api-key", "-a", "-", "%3a%2f%2f%3a", "http://a:", "hf_", "eyJ",
        "name: TOKEN value ", "input_value=", "basic aaaaaaa", "cookie: a=", "[?&;]token", "A", "\\", " ", "\x1b[0",
        "bearer ", "a",
    ],
)  # fmt: skip
def test_long_texts_are_redacted_in_linear_time(part: str) -> None:
    """None of them would end within minutes if its time grew with the square of its length."""
    text = part * (50_000 // len(part))
    for each in (text, f"{text} password token key -----end input_value= value", f"password={text}"):
        assert redact(each) is not None


def test_input_value_shortened_by_pydantic_is_removed() -> None:
    half = f"input_value={{'hub': '{HUB_TOKEN[:9]}...{HUB_TOKEN[-20:]}'}}, input_type=dict"
    assert redact(f"[type=x, {half}]") == f"[type=x, input_value={ELLIPSIS}, input_type=dict]"
