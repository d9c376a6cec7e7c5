"""The job's registry: who lives where, the job's configuration, news of deaths."""

from __future__ import annotations

__all__: list[str] = []
