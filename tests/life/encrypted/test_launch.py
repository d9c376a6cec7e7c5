"""A job that is launched with TLS in its configuration."""

from __future__ import annotations

from pathlib import Path

import aiorlinf
from tests.life.certificates import Authority

PROGRAM = """
import asyncio, os
import aiorlinf

async def main():
    async with aiorlinf.init() as comm:
        if comm.address == "a:0":
            await comm.send(os.environ["AIORLINF_TLS_CA"], "b:0")
        else:
            assert await comm.recv("a:0", timeout=20) == comm.config.cluster.network.tls.ca

asyncio.run(main())
"""


def test_its_workers_are_given_what_they_need(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    files = Authority(tmp_path / "authority").files("worker")
    result = aiorlinf.launch(str(script), "a=1,b=1", config={"cluster": {"network": {"tls": files}}})
    assert set(result.returncodes.values()) == {0}, result
