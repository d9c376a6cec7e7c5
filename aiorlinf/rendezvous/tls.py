"""TLS for the connections between workers and with the manager: both sides show a certificate that the job's own authority signed.

It encrypts, and keeps out whoever has no certificate; that both sides belong to the job is still proved by the token, inside. So names in
certificates do not matter, and one certificate may serve all workers.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from aiorlinf.config import NetworkConfig
from aiorlinf.errors import ConfigError

__all__ = ["SERVER_NAME", "TLS_VARIABLES", "Tls", "tls_of"]

TLS_VARIABLES = {"cert": "AIORLINF_TLS_CERT", "key": "AIORLINF_TLS_KEY", "ca": "AIORLINF_TLS_CA"}
"""They go before the configuration: where the files are on this host, and all that a worker has before it reaches the manager."""

SERVER_NAME = "aiorlinf"


@dataclass(frozen=True)
class Tls:
    """What one process uses.

    Attributes:
        files: paths of cert, key and ca.
        server, client: for connections that come, and those that are made.
    """

    files: Mapping[str, str]
    server: ssl.SSLContext
    client: ssl.SSLContext

    def env(self) -> dict[str, str]:
        """Environment variables for a child process that shall use the same files."""
        return {TLS_VARIABLES[name]: path for name, path in self.files.items()}


def tls_of(network: NetworkConfig | None, environ: Mapping[str, str] = os.environ) -> Tls | None:
    """What the environment or the configuration asks for; None for no TLS.

    Raises:
        ConfigError: a file cannot be read or does not fit the others, or only some are named.
    """
    files = {name: environ[variable] for name, variable in TLS_VARIABLES.items() if environ.get(variable)}
    where = "AIORLINF_TLS_"
    if not files:
        section = None if network is None else network.tls
        if section is None or section.ca is None or section.cert is None or section.key is None:
            return None
        files = {"cert": section.cert, "key": section.key, "ca": section.ca}
        where = "cluster.network.tls."
    if len(files) != len(TLS_VARIABLES):
        missing = ", ".join(variable for name, variable in TLS_VARIABLES.items() if name not in files)
        raise ConfigError("", f"the environment names only some of the files that TLS needs; {missing} is missing")
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # see the module
        context.verify_mode = ssl.CERT_REQUIRED
        name = "ca"
        try:
            context.load_verify_locations(files["ca"])
            name = "cert"
            context.load_cert_chain(files["cert"], files["key"])
        except (OSError, ssl.SSLError) as error:
            hint = "each is a PEM file; the key belongs to the certificate, which the authority (ca) has signed"
            raise ConfigError(f"{where}{name}", f"{files[name]} cannot be used: {error}", hint=hint) from error
        contexts.append(context)
    return Tls(files, *contexts)
