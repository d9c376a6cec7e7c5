"""The job's configuration: frozen records, loaded strictly from YAML or a mapping.

A section is a frozen dataclass whose fields are made with `option`; the loader reads nothing but the dataclasses, so a new section
or key is one more field. Unknown keys, wrong types and values out of range are a `ConfigError` that names the key's full path.
"""

from __future__ import annotations

from aiorlinf.config.collective import CollectiveConfig, SharedMemoryConfig, TensorBufferPoolConfig, TensorCompressionConfig
from aiorlinf.config.emulation import BandwidthGroupConfig, DelayPairConfig, NetEmulationConfig
from aiorlinf.config.job import ClusterConfig, JobConfig
from aiorlinf.config.loading import config_errors, load_config, read_config_file
from aiorlinf.config.members import address_ranges
from aiorlinf.config.network import NetworkConfig, TlsConfig
from aiorlinf.config.options import option, required, variant
from aiorlinf.config.plain import config_to_dict, option_docs
from aiorlinf.config.topology import TopologyConfig, WorkerLabelsConfig

__all__ = [
    "BandwidthGroupConfig",
    "ClusterConfig",
    "CollectiveConfig",
    "DelayPairConfig",
    "JobConfig",
    "NetEmulationConfig",
    "NetworkConfig",
    "SharedMemoryConfig",
    "TensorBufferPoolConfig",
    "TensorCompressionConfig",
    "TlsConfig",
    "TopologyConfig",
    "WorkerLabelsConfig",
    "address_ranges",
    "config_errors",
    "config_to_dict",
    "load_config",
    "option",
    "option_docs",
    "read_config_file",
    "required",
    "variant",
]
