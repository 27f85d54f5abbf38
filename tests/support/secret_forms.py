"""Known forms of secrets, each in the words of a program that prints one."""

from dataclasses import dataclass
from typing import Final

SHORTEST_LEAK: Final = 6
"""Characters of a secret that no message may show.

Five in a row are in ordinary words by chance, and leave a token of 34 random letters as hard to guess as before. A
check for fewer would also find the ``hf_`` and ``eyJ`` by which readers know what was masked.
"""

HUB_TOKEN: Final = "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"
PASSWORD: Final = "Zq7vWx9pLk3m"
_BASE64_LINE: Final = "Qm9uZ2JpdHNUaGF0QXJlUmFuZG9tRW5vdWdoVG9CZUFLZXlPaw"


@dataclass(frozen=True)
class SecretForm:
    """A secret within its form. ``text`` holds it once."""

    text: str
    secret: str

    def leaks_in(self, message: str) -> str | None:
        """Return the first part of the secret that a message shows; None if it shows none that matters."""
        parts = (self.secret[at : at + SHORTEST_LEAK] for at in range(len(self.secret) - SHORTEST_LEAK + 1))
        return next((part for part in parts if part in message), None)


def _form(text: str, secret: str) -> SecretForm:
    return SecretForm(text.format(secret), secret)


_JWT: Final = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06YSJ9.Kx8LmWq2Zt5vBn7c"
_PEM: Final = f"{_BASE64_LINE}\n{_BASE64_LINE[::-1]}\nWn4kTz8r=="

FORMS: Final[dict[str, SecretForm]] = {
    "token of the hub": _form("{}", HUB_TOKEN),
    "token in a URL": _form("https://{}@huggingface.co/a/b", HUB_TOKEN),
    "password in a URL": _form("https://ada:{}@proxy.example.com:3128/x", PASSWORD),
    "password with a slash": _form("postgres://ada:{}@db/engines", "Zq7v/Wx9pLk3m"),
    "password with an at sign": _form("https://ada:{}@proxy.example.com", "Zq7v@Wx9pLk3m"),
    "password without a user": _form("redis://:{}@cache:6379/0", PASSWORD),
    "URL that is percent-encoded": _form("?next=https%3A%2F%2Fada%3A{}%40proxy", PASSWORD),
    "URL in JSON": _form("https:\\/\\/ada:{}@proxy\\/x", PASSWORD),
    "bearer": _form("Authorization: Bearer {}", "Zq7vWx9pLk3mTn5hRb2d"),
    "bearer in a dict": _form("{{'Authorization': 'Bearer {}'}}", "Zq7vWx9pLk3mTn5hRb2d"),
    "basic": _form("authorization: Basic {}", "YWRhOlpxN3ZXeDlwTGszbQ=="),
    "authorization of another scheme": _form("Authorization: token {}", PASSWORD),
    "header of a key": _form("X-Api-Key: {}", PASSWORD),
    "key of a provider": _form("{}", "sk-proj-Zq7vWx9pLk3mTn5hRb2dKc8f"),
    "variable": _form("VLLM_API_KEY={}", PASSWORD),
    "variable of the hub": _form("HUGGING_FACE_HUB_TOKEN={}", "ZqWxvLkTnRbKcMf"),
    "variable of a pod": _form('{{"name":"HF_TOKEN","value":"{}"}}', PASSWORD),
    "option": _form("--api-key {}", PASSWORD),
    "option in a list": _form("['serve', '--api-key', '{}']", PASSWORD),
    "arguments of vLLM": _form("{{'api_key': ['{}'], 'port': 1}}", PASSWORD),
    "access key of AWS": _form("{}", "AKIAZQ7VWX9PLK3MTN5H"),
    "secret key of AWS": _form("aws_secret_access_key={}", "Zq7vWx9pLk3mTn5hRb2dKc8f/Yg4jHs6aDw1eXzQ"),
    "presigned by S3": _form(
        "https://b.s3/x?X-Amz-Expires=60&X-Amz-Signature={}&a=1", "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
    ),
    "session of S3": _form("https://b.s3/x?X-Amz-Security-Token={}&a=1", "Zq7vWx9pLk3mTn5hRb2dKc8f%2FYg4jHs6"),
    "credential of S3": _form("https://b.s3/x?X-Amz-Credential={}%2F20260101", "AKIAZQ7VWX9PLK3MTN5H"),
    "presigned by GCS": _form("https://s.gcs/x?X-Goog-Signature={}", "9f8e7d6c5b4a39281706f5e4d3c2b1a0"),
    "SAS of Azure": _form("https://a.blob/x?sv=2024&sig={}&se=1", "Zq7vWx9pLk3mTn5hRb2d%2BKc8f%3D"),
    "token of GitHub": _form("{}", "ghp_Zq7vWx9pLk3mTn5hRb2dKc8fYg4jHs6aDw1e"),
    "new token of GitHub": _form("{}", "github_pat_11ABCDEFG0Zq7vWx9pLk3m_Tn5hRb2dKc8fYg4j"),
    "token of GitLab": _form("{}", "glpat-Zq7vWx9pLk3mTn5hRb2d"),
    "token of a service account": _form("{}", _JWT),
    "private key": _form("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", _PEM),
    "private key in JSON": _form(
        "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----", _PEM.replace("\n", "\\n")
    ),
    "DSN": _form("host=db user=ada password={} dbname=x", PASSWORD),
    "password": _form("password: {}", "swordfishes"),
    "password in JSON": _form('{{"password": "{}", "user": "ada"}}', "Zq7v Wx9p, Lk3m"),
    "password in escaped JSON": _form('{{\\"password\\": \\"{}\\", \\"user\\": 1}}', PASSWORD),
    "password in square brackets": _form("password: [{}]", PASSWORD),
    "password in angle brackets": _form("password=<{}>", PASSWORD),
    "password behind a brace": _form("password: {{{}", PASSWORD),
    "password in brackets and quotes": _form("{{'password': ['<{}>']}}", PASSWORD),
    "password in brackets in a URL": _form("https://ada:<{}>@proxy.example.com", PASSWORD),
    "option in brackets": _form("--api-key [[{}]]", PASSWORD),
    "token in brackets": _form("token: [ {} ]", PASSWORD),
    "header in brackets": _form("Authorization: <{}>", PASSWORD),
    "token": _form("token: {}", PASSWORD),
    "token behind an escape": _form("failed\\n{}", HUB_TOKEN),
    "registry": _form('{{"auths":{{"r.io":{{"auth":"{}"}}}}}}', "YWRhOlpxN3ZXeDlwTGszbQ=="),
    "cookie": _form("Cookie: session={}; a=b", PASSWORD),
    "colours": _form("\x1b[31m{}\x1b[0m", HUB_TOKEN),
}
