"""What the rounds found. Pure."""

from __future__ import annotations

from typing import Any

from scripts.benchmarks.contender import Metrics
from scripts.benchmarks.plan import Case, Row
from scripts.benchmarks.summary import ratios

__all__ = ["Results"]


class Results:
    """Metrics by case, measurement and round, and the reasons for what is missing."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], dict[int, Metrics]] = {}
        self.skipped: dict[str, str] = {}
        """Contender to the reason why none of it was measured."""
        self.broken: dict[str, str] = {}
        """Contender to the text of the failure that kept it from starting or opening."""
        self.failed: dict[tuple[str, str, str], str] = {}
        """Measurement to the text of its last failure; earlier rounds keep their figures."""

    def add(self, case: Case, contender: str, variant: str, index: int, metrics: Metrics) -> None:
        self.found.setdefault((case.name, contender, variant), {})[index] = metrics

    def values(self, case: Case, row: Row) -> dict[int, float]:
        """The row's figure in each round that has one."""
        return {index: metrics[row.metric] for index, metrics in self.found.get((case.name, *row.measurement), {}).items()}

    def ratios(self, case: Case, row: Row, baseline: Row) -> list[float]:
        return ratios(self.values(case, row), self.values(case, baseline))

    def why_not(self, case: Case, row: Row) -> str:
        """One line on why the row has no figures."""
        if row.contender in self.skipped:
            return f"skipped: {self.skipped[row.contender]}"
        failure = self.broken.get(row.contender) or self.failed.get((case.name, *row.measurement), "")
        last = failure.strip().splitlines()[-1] if failure.strip() else "no round was finished"
        return f"FAILED: {last}".replace("|", "\\|")

    @property
    def complete(self) -> bool:
        """Nothing failed; what was skipped on purpose does not count."""
        return not self.failed and not self.broken

    def to_json(self) -> dict[str, Any]:
        return {
            "measurements": [
                {"case": case, "contender": contender, "variant": variant, "rounds": [rounds[index] for index in sorted(rounds)]}
                for (case, contender, variant), rounds in self.found.items()
            ],
            "skipped": self.skipped,
            "broken": self.broken,
            "failed": {"/".join(key): text for key, text in self.failed.items()},
        }
