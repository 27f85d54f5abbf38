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
"""First lines of cosign's private keys; the second is from cosign 1."""

_MOST_SCRYPT_BLOCKS: Final = 2**21
"""Limit of N * r * p, in blocks of 128 bytes. Cosign uses a quarter of that, 64 MiB."""

_KEY_BYTES: Final = 32


class UnreadableKeyError(Exception):
    """A key that cannot be decrypted; the message follows the file name."""


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
    """Return whether a file has a private key in cosign's format."""
    return any(mark in pem for mark in _MARKS)


def decrypted(pem: bytes, password: bytes) -> bytes:
    """Return the private key of a file, in DER.

    Raises
    ------
    UnreadableKeyError
        If the format is unknown, or the password is wrong.
    """
    from nacl.exceptions import CryptoError  # noqa: PLC0415  only needed for such keys
    from nacl.secret import SecretBox  # noqa: PLC0415

    try:
        lines = [each for each in pem.split(b"\n") if each.strip() and not each.startswith(b"-----")]
        key = msgspec.json.decode(base64.b64decode(b"".join(lines), validate=False), type=_Encrypted)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise UnreadableKeyError("is not a complete key of cosign generate-key-pair") from error
    parameters = key.kdf.params
    if (key.kdf.name, key.cipher.name) != ("scrypt", "nacl/secretbox"):
        names = json.dumps([key.kdf.name, key.cipher.name])
        raise UnreadableKeyError(f"is encrypted with {names}: use scrypt and nacl/secretbox, as cosign does")
    if parameters.n * parameters.r * parameters.p > _MOST_SCRYPT_BLOCKS:
        raise UnreadableKeyError("needs more memory to decrypt than a key of cosign: create it again")
    try:
        derived = Scrypt(key.kdf.salt, _KEY_BYTES, parameters.n, parameters.r, parameters.p).derive(password)
        return SecretBox(derived).decrypt(key.ciphertext, key.cipher.nonce)
    except (CryptoError, OverflowError, ValueError) as error:
        raise UnreadableKeyError("cannot be decrypted with this password") from error


_FIX: Final = (
    "create one with cosign generate-key-pair, or openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256"
)
_IF_ANY: Final = "set --signing-key-password-file to the file with its password, only if it has one"


class KeyFormatError(Exception):
    """A key that cannot be used; the message follows the file name."""


class PublicKey:
    """Public key that verifies signatures of its private key."""

    def __init__(self, key: ec.EllipticCurvePublicKey) -> None:
        self._key = key
        fingerprint = b64encode(ssh_key_fingerprint(key, SHA256())).decode().rstrip("=")
        self.id = f"SHA256:{fingerprint}"
        """Key ID in the format of cosign, which ignores signatures with another ID; ssh-keygen -l also prints it.

        Source: github.com/secure-systems-lab/go-securesystemslib, dsse/verify.go and SHA256KeyID.
        """

    @classmethod
    def read(cls, pem: bytes) -> "PublicKey":
        """Return the key of a file such as cosign.pub.

        Raises
        ------
        KeyFormatError
            If it is not a public key on P-256.
        """
        try:
            key = load_pem_public_key(pem)
        except (ValueError, UnsupportedAlgorithm) as error:
            what = "is a private key" if b"PRIVATE KEY" in pem else "is not a public key in PEM"
            fix = "use the public key: cosign.pub, or the output of openssl pkey -pubout"
            raise KeyFormatError(f"{what}: {fix}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise KeyFormatError("is not an ECDSA key on P-256: use the public key of the signing key")
        return cls(key)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether the private key of this key signed the message."""
        try:
            self._key.verify(signature, message, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """Private key that signs attestations, and its public key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, former: tuple[PublicKey, ...] = ()) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())
        self.former = former
        """Public keys of earlier signing keys: their attestations are signed again."""

    @classmethod
    def read(cls, pem: bytes, password: bytes | None = None, former: tuple[PublicKey, ...] = ()) -> "SigningKey":
        """Return the key of a file such as cosign.key, or of any PEM; omit the password if it has none.

        Raises
        ------
        KeyFormatError
            If it is not a private key on P-256, or the password is wrong.
        """
        try:
            if is_of_cosign(pem):
                # Without a password, cosign encrypts with an empty one.
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
                raise KeyFormatError(f"cannot be decrypted with this password: {_IF_ANY}") from error
            raise KeyFormatError(f"is not a private key in PEM: {_FIX}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise KeyFormatError(f"is not an ECDSA key on P-256: {_FIX}")
        return cls(key, former)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message."""
        return self._key.sign(message, ec.ECDSA(SHA256()))
