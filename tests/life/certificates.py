"""Certificates of an authority, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["Authority"]


class Authority:
    """Signs certificates; its files lie in a folder of their own. Skips the test where there is no openssl command."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl command")
        folder.mkdir()
        self.folder = folder
        self.ca = str(folder / "ca.pem")
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=a test's authority"),
        )

    def files(self, name: str) -> dict[str, str]:
        """A certificate, its key and ours: the configuration's section."""
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-out", f"{name}.pem"),
        )
        return {"cert": str(self.folder / f"{name}.pem"), "key": str(self.folder / f"{name}.key"), "ca": self.ca}

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)
