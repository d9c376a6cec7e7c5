"""Figures of workers and jobs, for Prometheus, OpenTelemetry, or whatever else takes them."""

from __future__ import annotations

__all__: list[str] = []
