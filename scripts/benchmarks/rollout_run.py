"""One run of ``scripts/bench rollout``: ``python -m scripts.benchmarks.rollout_run MODULE OPTIONS``; prints its figures as JSON."""

from __future__ import annotations

import importlib
import json
import sys

from scripts.benchmarks.rollout_job import Figures, Job

__all__ = ["main"]


def main() -> None:
    """Run the transport's job."""
    module, options = sys.argv[1:]
    figures: Figures = importlib.import_module(f"scripts.benchmarks.{module}").run(Job(**json.loads(options)))
    print(json.dumps(figures.to_json()))


if __name__ == "__main__":
    main()
