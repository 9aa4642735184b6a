"""Ed25519 signatures over a `.ait` file's manifest, for those who share files between machines.

Keys are PEM files as OpenSSL makes them:

    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingDependency, install_command


def sign(private_key: str | os.PathLike[str], message: bytes) -> bytes:
    """The signature (64 bytes) of a message with a private key, given as a PEM file's path.

    Raises CheckpointError if the file holds no Ed25519 private key without a password, MissingDependency without the
    package cryptography.
    """
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_private_key(Path(private_key).read_bytes(), password=None)
    except Exception as error:
        raise CheckpointError(f"cannot read the private key {private_key}: {error}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise CheckpointError(f"{private_key} must hold an Ed25519 key, but holds a {type(key).__name__}")
    signature: bytes = key.sign(message)
    return signature


def is_valid(public_key: str, signature: bytes, message: bytes) -> bool:
    """Whether a signature of the message is by the key, given as PEM text or a PEM file's path.

    Raises CheckpointError if it is no Ed25519 public key, MissingDependency without the package cryptography.
    """
    serialization, ed25519 = _cryptography()
    try:
        text = public_key.encode() if "-----BEGIN" in public_key else Path(public_key).read_bytes()
        key = serialization.load_pem_public_key(text)
    except Exception as error:
        raise CheckpointError(
            f"trust must be 'sha256:…' or an Ed25519 public key (PEM text, or a PEM file's path), but got "
            f"{public_key[:80]!r}: {error}"
        ) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise CheckpointError(f"trust must be an Ed25519 public key, but got a {type(key).__name__}")
    try:
        key.verify(signature, message)
    except Exception:
        return False
    return True


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingDependency("cryptography", "signing .ait files", install_command("signing")) from None
    return serialization, ed25519
