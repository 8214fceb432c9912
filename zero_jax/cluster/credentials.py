"""Mutual TLS between the processes of a run: certificates for JAX's coordination service."""

import os

import jax

from zero_jax.releases import MUTUAL_TLS

FILES = ("jax_mtls_ca_file", "jax_mtls_cert_file", "jax_mtls_key_file")


def check() -> None:
    """Checks the certificate files, before any process waits for another.

    They are JAX's own settings, by environment variable (JAX_MTLS_CA_FILE) or `jax.config.update`.
    A release of JAX without them would ignore the variables and send everything in plain text.

    Raises:
      ValueError: this release of JAX has no mutual TLS, one of the three files is not given, or one
        can't be read.
    """
    if not MUTUAL_TLS:
        for name in FILES:
            if os.environ.get(name.upper()):
                raise ValueError(
                    f"`{name.upper()}` needs jax 0.12 or later for mutual TLS, and this is "
                    f"{jax.__version__}: install jax 0.12 (Python 3.12), or unset the variable"
                )
        return
    files = {name: jax.config.values[name] for name in FILES}
    if not any(files.values()):
        return
    for name, path in files.items():
        if not path:
            raise ValueError(
                f"`{name}` is not given, and mutual TLS needs all three files: set "
                f"{', '.join(n.upper() for n in FILES)}"
            )
        try:
            with open(path, "rb") as file:
                begins = file.read(1 << 20)
        except OSError as error:
            raise ValueError(
                f"`{name}`={path!r} can't be read: {error.strerror}. Give a PEM file with read "
                "permission"
            ) from error
        if b"-----BEGIN " not in begins:
            raise ValueError(f"`{name}`={path!r} is not a PEM file: convert it with `openssl`")
