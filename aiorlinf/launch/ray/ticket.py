"""What a process of Ray is told so that it can join a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiorlinf.launch.ray.needs import node_labels

__all__ = ["Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """One worker's place in a job.

    Attributes:
        address: its own.
        manager: ``host:port`` of the manager.
        token: the job's secret.
        workers: who belongs to the job, as ``rollout=2,trainer=1``; empty if that is not known.
        labels: on top of the node's.
        env: further variables.
    """

    address: str
    manager: str
    token: str = field(repr=False)
    workers: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """All variables, with the labels of the node that this process runs on."""
        given = dict(part.partition("=")[::2] for part in environ.get("AIORLINF_LABELS", "").split(",") if part)
        labels = {**node_labels(), **given, **self.labels}
        found = {
            **self.env,
            "AIORLINF_ADDRESS": self.address,
            "AIORLINF_MANAGER": self.manager,
            "AIORLINF_TOKEN": self.token,
            "AIORLINF_LABELS": ",".join(f"{name}={value}" for name, value in labels.items()),
        }
        if self.workers:
            found["AIORLINF_WORKERS"] = self.workers
        if "rack" in self.labels:
            found["AIORLINF_RACK"] = self.labels["rack"]  # which would go before the label
        return found

    def take(self) -> None:
        """Put it into the environment of this process, which Ray has started for this worker alone."""
        os.environ.update(self.variables())
