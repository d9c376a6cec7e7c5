"""What the trainer saw: a line every few seconds; at the end a table, a plot, and the figures for other programs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from atari.learner import Update
from atari.messages import Farewell, Trajectory

__all__ = ["Report", "Sample", "Traffic"]

RECENT = 50
"""Episodes that a mean return is taken over."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the trainer's links have carried so far, both ways."""

    messages: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A few seconds of the run, ending `at` seconds after the first trajectory. Rates are per second."""

    at: float
    steps_per_s: float
    episodes: int  # so far
    mean_return: float | None  # None before the first episode has ended
    messages_per_s: float
    megabytes_per_s: float
    version: int
    lag: float | None  # mean; None if nothing was trained on
    entropy: float | None

    def line(self) -> str:
        """On one line, of a width that stays."""
        return (
            f"{self.at:5.0f} s {self.steps_per_s:7.0f} steps/s {self.episodes:6d} episodes  return {_number(self.mean_return):>7} "
            f"{self.messages_per_s:6.1f} messages/s {self.megabytes_per_s:6.1f} MB/s  "
            f"version {self.version:4d}  lag {_number(self.lag):>4}  entropy {_number(self.entropy, 2):>4}"
        )


class Report:
    """Collects. The caller tells the time: seconds since the first trajectory.

    Attributes:
        samples: one per call of `sample`.
    """

    def __init__(self, game: str) -> None:
        self.samples: list[Sample] = []
        self._game = game
        self._steps = 0
        self._returns: list[tuple[float, float]] = []  # when, how much
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lags: list[tuple[float, int]] = []
        self._farewells: list[Farewell] = []
        self._last_update: Update | None = None
        # Where the last sample left off.
        self._seen = (0.0, 0, Traffic(0, 0), 0)

    def arrived(self, trajectory: Trajectory, at: float) -> None:
        """A trajectory came in."""
        self._steps += trajectory.actions.numel()
        self._recent.extend(trajectory.info.returns)
        self._returns += [(at, points) for points in trajectory.info.returns]

    def trained(self, update: Update, lags: list[int], at: float) -> None:
        """An update was made; `lags` says for each of its trajectories how many versions ago it had been begun."""
        self._last_update = update
        self._lags += [(at, lag) for lag in lags]

    def left(self, farewell: Farewell) -> None:
        """A rollout worker has sent everything."""
        self._farewells.append(farewell)

    def sample(self, at: float, traffic: Traffic) -> Sample:
        """Take stock of the time since the last call."""
        then, steps, before, lags = self._seen
        passed = max(at - then, 1e-9)
        self._seen = (at, self._steps, traffic, len(self._lags))
        update = self._last_update
        sample = Sample(
            at=at,
            steps_per_s=(self._steps - steps) / passed,
            episodes=len(self._returns),
            mean_return=fmean(self._recent) if self._recent else None,
            messages_per_s=(traffic.messages - before.messages) / passed,
            megabytes_per_s=(traffic.payload_bytes - before.payload_bytes) / passed / 1e6,
            version=update.version if update else 0,
            lag=fmean(lag for _, lag in self._lags[lags:]) if len(self._lags) > lags else None,
            entropy=update.entropy if update else None,
        )
        self.samples.append(sample)
        return sample

    def summary(self) -> dict[str, str | float | int | None]:
        """The whole run in figures."""
        (seconds, steps, traffic, _), update = self._seen, self._last_update
        returns = [points for _, points in self._returns]
        lasted = sum(farewell.lasted_s for farewell in self._farewells)
        waited = sum(farewell.waited_s for farewell in self._farewells)
        return {
            "game": self._game,
            "rollout workers": len(self._farewells),
            "seconds": round(seconds, 1),
            "steps": steps,
            "steps per second": round(steps / seconds, 1) if seconds else 0,
            "episodes": len(returns),
            f"mean return, first {RECENT}": _mean(returns[:RECENT]),
            f"mean return, last {RECENT}": _mean(returns[-RECENT:]),
            "best return": max(returns, default=None),
            "weight versions": update.version if update else 0,
            "swaps at the rollout workers": sum(farewell.swaps for farewell in self._farewells),
            "weight version lag, mean": _mean([lag for _, lag in self._lags]),
            "weight version lag, worst": max((lag for _, lag in self._lags), default=None),
            "rollouts waited for the trainer, %": round(100 * waited / lasted, 1) if lasted else 0,
            "messages": traffic.messages,
            "messages per second": round(traffic.messages / seconds, 1) if seconds else 0,
            "payload, MB": round(traffic.payload_bytes / 1e6, 1),
            "payload, MB per second": round(traffic.payload_bytes / seconds / 1e6, 1) if seconds else 0,
        }

    def table(self) -> str:
        """The summary as text."""
        rows = [(name, "-" if value is None else str(value)) for name, value in self.summary().items()]
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        rule = "-" * (left + right + 2)
        return "\n".join([rule, *(f"{name:<{left}}  {value:>{right}}" for name, value in rows), rule])

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write the plot and the figures; their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        plot, figures = folder / "async_rollout.png", folder / "async_rollout.json"
        content: Mapping[str, object] = {"summary": self.summary(), "samples": [asdict(sample) for sample in self.samples]}
        figures.write_text(json.dumps(content, indent=2) + "\n")
        self._plot(plot)
        return plot, figures

    def _plot(self, path: Path) -> None:
        import matplotlib  # here, because only the trainer needs it and it takes long

        matplotlib.use("Agg")  # no screen
        from matplotlib import pyplot

        figure, (top, middle, bottom) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 9), layout="constrained")
        top.plot([at for at, _ in self._returns], [points for _, points in self._returns], ".", color="0.7", label="one episode")
        known = [(sample.at, sample.mean_return) for sample in self.samples if sample.mean_return is not None]
        top.plot([at for at, _ in known], [mean for _, mean in known], color="C0", label=f"mean of the last {RECENT}")
        top.set(title=f"{self._game}: learned while played", ylabel="return")

        rates = self.samples[:-1] or self.samples  # the last is about the time after the games
        times = [sample.at for sample in rates]
        middle.plot(times, [sample.steps_per_s for sample in rates], color="C1", label="steps/s")
        middle.set(ylabel="steps per second", ylim=(0, None))
        payload = middle.twinx()
        payload.plot(times, [sample.megabytes_per_s for sample in rates], color="C2", label="MB/s")
        payload.set(ylabel="MB per second", ylim=(0, None))

        bottom.plot([at for at, _ in self._lags], [lag for _, lag in self._lags], ".", color="0.7", label="one trajectory")
        lags = [(sample.at, sample.lag) for sample in self.samples if sample.lag is not None]
        bottom.plot([at for at, _ in lags], [lag for _, lag in lags], color="C3", label="mean")
        bottom.set(xlabel="seconds", ylabel="weight versions behind", ylim=(0, None))

        top.legend(loc="upper left")
        bottom.legend(loc="upper left")
        lines = [*middle.get_lines(), *payload.get_lines()]
        middle.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
        figure.savefig(path, dpi=100)
        pyplot.close(figure)


def _mean(values: list[float] | list[int]) -> float | None:
    return round(fmean(values), 2) if values else None


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
