"""DSSE envelopes: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md."""

import base64
import binascii
from typing import Final

import msgspec

from specdecode_operator.attestation.keys import PublicKey, SigningKey
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.problems import shown

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MOST_BYTES: Final = 192 * 1024
"""Of an envelope: a ConfigMap with four of them takes no more than etcd does."""


class UnverifiedError(Exception):
    """An attestation that does not hold, in one line."""


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload_type: str
    payload: str
    signatures: tuple[_Signature, ...]


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return what a signature is over: the protocol's PAE."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sealed(payload: bytes, key: SigningKey) -> str:
    """Return the envelope of a payload, signed."""
    signature = _Signature(_encoded(key.sign(signed_bytes(payload))), key.public.id)
    return msgspec.json.encode(_Envelope(PAYLOAD_TYPE, _encoded(payload), (signature,))).decode()


def opened(text: str | bytes, *keys: PublicKey) -> bytes:
    """Return the payload of an envelope that the owner of one of these keys signed.

    Raises
    ------
    UnverifiedError
        When it is no such envelope: nothing that it says may be believed then.
    """
    try:
        envelope = msgspec.convert(parse_json(text, MOST_BYTES), _Envelope)
    except (UnreadableTextError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is no DSSE envelope: {error}") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UnverifiedError(f"payloadType is not {PAYLOAD_TYPE}: it is no in-toto statement")
    if len(envelope.signatures) != 1:
        raise UnverifiedError(f"has {len(envelope.signatures)} signatures: the operator writes one")
    [signature] = envelope.signatures
    # A hint, which an envelope need not have.
    hinted = [each for each in keys if signature.keyid in ("", each.id)]
    if not hinted:
        given = " or ".join(each.id for each in keys)
        raise UnverifiedError(f"was signed with another key: {given} is given, {shown(signature.keyid)} signed")
    payload, signed = _decoded("payload", envelope.payload), _decoded("signature", signature.sig)
    if not any(each.verifies(signed, signed_bytes(payload)) for each in hinted):
        raise UnverifiedError("the signature is not of this key, or what is signed was changed")
    return payload


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(name: str, text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnverifiedError(f"{name} is no base64") from error
    if _encoded(content) != text:
        raise UnverifiedError(f"{name} is base64 that can be written in another way")
    return content
