"""The whole configuration, made of its sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from aiorlinf.config.collective import CollectiveConfig
from aiorlinf.config.emulation import NetEmulationConfig
from aiorlinf.config.network import NetworkConfig
from aiorlinf.config.topology import TopologyConfig

__all__ = ["ClusterConfig", "JobConfig"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Everything the workers of one job share."""

    collective: CollectiveConfig = dataclasses.field(default_factory=CollectiveConfig)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    net_emulation: NetEmulationConfig = dataclasses.field(default_factory=lambda: NetEmulationConfig(enabled=False))
    topology: TopologyConfig = dataclasses.field(default_factory=TopologyConfig)


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The whole configuration of one job."""

    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
