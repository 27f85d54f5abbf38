"""The keys of attestations: ECDSA on P-256, in PEM, as cosign writes its public ones."""

from base64 import b64encode
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_pem_private_key,
    load_pem_public_key,
    ssh_key_fingerprint,
)

from specdecode_operator.attestation.cosign_key import UnreadableKeyError, decrypted, is_of_cosign

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
