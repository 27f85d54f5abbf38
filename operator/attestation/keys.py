"""ECDSA P-256 keys of attestations: PEM, and cosign's encrypted private keys (scrypt, secretbox)."""

import base64
import binascii
import json
from base64 import b64encode
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_pem_private_key,
    load_pem_public_key,
    ssh_key_fingerprint,
)

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


_FIX: Final = (
    "make one with cosign generate-key-pair, or openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256"
)
_IF_ANY: Final = "--signing-key-password-file names the file with its password, and only where it has one"


class KeyFormatError(Exception):
    """A key that cannot be used, in words that follow its file's name."""


class PublicKey:
    """What says whether a signature is of its private key."""

    def __init__(self, key: ec.EllipticCurvePublicKey) -> None:
        self._key = key
        fingerprint = b64encode(ssh_key_fingerprint(key, SHA256())).decode().rstrip("=")
        self.id = f"SHA256:{fingerprint}"
        """What tells one key from another, as cosign wants it: it passes over signatures with another one.

        github.com/secure-systems-lab/go-securesystemslib, dsse/verify.go and SHA256KeyID; ssh-keygen -l prints it, too.
        """

    @classmethod
    def read(cls, pem: bytes) -> "PublicKey":
        """Return the key of a file such as cosign.pub.

        Raises
        ------
        KeyFormatError
            When it is something else.
        """
        try:
            key = load_pem_public_key(pem)
        except (ValueError, UnsupportedAlgorithm) as error:
            what = "is a private key" if b"PRIVATE KEY" in pem else "is no public key in PEM"
            fix = "give its public one, as cosign.pub or openssl pkey -pubout have it"
            raise KeyFormatError(f"{what}: {fix}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise KeyFormatError("is no ECDSA key on P-256, with which attestations are signed: give that one")
        return cls(key)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether a signature is of this key's owner, over this message."""
        try:
            self._key.verify(signature, message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """What signs, and the public key to it."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, former: tuple[PublicKey, ...] = ()) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())
        self.former = former
        """Those that signed before: what they signed is signed anew."""

    @classmethod
    def read(cls, pem: bytes, password: bytes | None = None, former: tuple[PublicKey, ...] = ()) -> "SigningKey":
        """Return the key of a file such as cosign.key, or of any PEM; without a password where that has none.

        Raises
        ------
        KeyFormatError
            When it is something else, or the password is another one.
        """
        try:
            if is_of_cosign(pem):
                # Cosign encrypts with an empty one where it is given none.
                key = load_der_private_key(decrypted(pem, password or b""), None)
            else:
                key = load_pem_private_key(pem, password)
        except UnreadableKeyError as error:
            raise KeyFormatError(f"{error}: {_IF_ANY}") from error
        except TypeError as error:
            why = "has a password" if password is None else "has no password"
            raise KeyFormatError(f"{why}: {_IF_ANY}") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            if b"ENCRYPTED PRIVATE KEY" in pem:
                raise KeyFormatError(f"does not open with this password: {_IF_ANY}") from error
            raise KeyFormatError(f"is no private key in PEM: {_FIX}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise KeyFormatError(f"is no ECDSA key on P-256: {_FIX}")
        return cls(key, former)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        return self._key.sign(message, ec.ECDSA(SHA256()))
