"""Private keys as `cosign generate-key-pair` writes them: scrypt and NaCl's secretbox, in JSON, in PEM.

github.com/secure-systems-lab/go-securesystemslib, encrypted/encrypted.go
"""

import base64
import binascii
import json
from typing import Final

import msgspec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

_MARKS: Final = (b"BEGIN ENCRYPTED SIGSTORE PRIVATE KEY", b"BEGIN ENCRYPTED COSIGN PRIVATE KEY")
"""The latter is that of cosign 1."""

_MOST_SCRYPT_BLOCKS: Final = 2**21
"""N times r times p, of 128 bytes each. Cosign takes a quarter of that, 64 MiB."""

_KEY_BYTES: Final = 32


class UnreadableKeyError(Exception):
    """A key that does not open, in words that follow its file's name."""


class _Parameters(msgspec.Struct, frozen=True):
    n: int = msgspec.field(name="N")
    r: int
    p: int


class _Kdf(msgspec.Struct, frozen=True):
    name: str
    params: _Parameters
    salt: bytes


class _Cipher(msgspec.Struct, frozen=True):
    name: str
    nonce: bytes


class _Encrypted(msgspec.Struct, frozen=True):
    kdf: _Kdf
    cipher: _Cipher
    ciphertext: bytes


def is_of_cosign(pem: bytes) -> bool:
    """Whether a file has a key in this form."""
    return any(mark in pem for mark in _MARKS)


def decrypted(pem: bytes, password: bytes) -> bytes:
    """Return the private key of a file, in DER.

    Raises
    ------
    UnreadableKeyError
        When it is of no known form, or the password is another one.
    """
    from nacl.exceptions import CryptoError  # noqa: PLC0415  only who signs with such a key needs it
    from nacl.secret import SecretBox  # noqa: PLC0415

    try:
        lines = [each for each in pem.split(b"\n") if each.strip() and not each.startswith(b"-----")]
        key = msgspec.json.decode(base64.b64decode(b"".join(lines), validate=False), type=_Encrypted)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise UnreadableKeyError("is no key that cosign generate-key-pair wrote, or a part of one") from error
    parameters = key.kdf.params
    if (key.kdf.name, key.cipher.name) != ("scrypt", "nacl/secretbox"):
        names = json.dumps([key.kdf.name, key.cipher.name])
        raise UnreadableKeyError(f"is encrypted by {names}: cosign does it by scrypt and nacl/secretbox")
    if parameters.n * parameters.r * parameters.p > _MOST_SCRYPT_BLOCKS:
        raise UnreadableKeyError("asks for more memory than cosign does: make it anew")
    try:
        derived = Scrypt(key.kdf.salt, _KEY_BYTES, parameters.n, parameters.r, parameters.p).derive(password)
        return SecretBox(derived).decrypt(key.ciphertext, key.cipher.nonce)
    except (CryptoError, OverflowError, ValueError) as error:
        raise UnreadableKeyError("does not open with this password") from error
