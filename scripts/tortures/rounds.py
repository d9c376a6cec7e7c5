"""Rounds of sudden death: two workers send each other all they can, one is killed in the middle, the other must be none the worse.

After each round the killed one's process is gone; the survivor has the descriptors that it had without a peer, no memory file open or
mapped, and an empty arena; the next life of the killed one exchanges messages with it. Over its life a survivor's own memory does not
grow. In the end there is nothing new in /dev/shm, and no process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from aiorlinf.testing.procfs import ours_in_shm, shm_names
from scripts.tortures.proc import Footprint, is_alive
from scripts.tortures.stage import Failed, Stage, VictimProcess, wait_until

__all__ = ["Outcome", "run_rounds"]

BLOCK = 25
"""So many times in a row the same one is killed, so that the survivor's life is long enough to show what adds up."""

LONGEST_STORM_S = 0.4
SETTLE_S = 10.0
SLACK_BYTES = 32 << 20
"""What a survivor's own memory may vary by between the halves of its life: the C library does not give back all that was freed."""

CONFIG = {"cluster": {"collective": {"shared_memory": {"max_bytes": 256 << 20, "segment_bytes": 32 << 20}}}}


@dataclass
class Outcome:
    """What the rounds were like.

    Attributes:
        rounds: that were played.
        killed: by address, how often.
        counts: messages sent, received, lost.
        wrong: what was found, each with its round.
        settle_s: by round, how long the survivor took until everything was back.
        return_s: by round, how long until the next life had exchanged its first messages.
        growth: by survivor's life, bytes of its own memory that it had more in the second half of it.
        longest_life: rounds that one survivor lived through.
    """

    rounds: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    settle_s: list[float] = field(default_factory=list)
    return_s: list[float] = field(default_factory=list)
    growth: list[int] = field(default_factory=list)
    longest_life: int = 0


class Life:
    """What is known of a worker's life: its footprint without a peer, and its own memory after each round that it survived."""

    def __init__(self, victim: VictimProcess) -> None:
        self.victim = victim
        victim.ask("calm")
        self.alone: Footprint = victim.footprint()
        self.own: list[int] = []


def run_rounds(rounds: int, seed: int, *, say: bool = False) -> Outcome:
    """Play them. Raises Failed if the two cannot go on."""
    choice = random.Random(seed)
    outcome = Outcome()
    names = shm_names()
    with Stage.open(CONFIG) as stage:
        lives = {address: Life(stage.start(address)) for address in ("a:0", "b:0")}
        verify(lives, choice.randrange(1 << 30))
        for number in range(rounds):
            doomed = ("a:0", "b:0")[number // BLOCK % 2]
            play(stage, lives, doomed, choice, number, outcome)
            outcome.rounds += 1
            if say and (number + 1) % BLOCK == 0:
                print(f"{number + 1} of {rounds} rounds, {len(outcome.wrong)} things wrong", flush=True)
        for life in lives.values():
            close_life(life, outcome)
        pids = [victim.pid for victim in stage.alive]
    outcome.wrong += [f"{name} is left in /dev/shm" for name in ours_in_shm(shm_names() - names)]
    outcome.wrong += [f"process {pid} is left" for pid in pids if not wait_until(lambda pid=pid: not is_alive(pid), SETTLE_S)]
    return outcome


def play(stage: Stage, lives: dict[str, Life], doomed: str, choice: random.Random, number: int, outcome: Outcome) -> None:
    """One round."""
    survivor = "b:0" if doomed == "a:0" else "a:0"
    killed, alive = lives[doomed], lives[survivor]
    killed.victim.tell("storm", survivor, choice.randrange(1 << 30))
    alive.victim.tell("storm", doomed, choice.randrange(1 << 30))
    time.sleep(choice.uniform(0, LONGEST_STORM_S))
    stage.kill(killed.victim)
    begin = time.monotonic()
    outcome.killed[doomed] += 1
    close_life(killed, outcome)
    outcome.counts.update(alive.victim.answer())
    if not wait_until(lambda: not what_is_off(alive), SETTLE_S):
        outcome.wrong += [f"round {number}: {alive.victim} has {text}" for text in what_is_off(alive)]
    outcome.settle_s.append(time.monotonic() - begin)
    if is_alive(killed.victim.pid):
        outcome.wrong.append(f"round {number}: {killed.victim} is still there")
    alive.own.append(alive.victim.footprint().own)
    outcome.longest_life = max(outcome.longest_life, len(alive.own))
    lives[doomed] = Life(stage.start(doomed))
    begin = time.monotonic()
    verify(lives, choice.randrange(1 << 30))
    outcome.return_s.append(time.monotonic() - begin)


def verify(lives: dict[str, Life], seed: int) -> None:
    """They exchange messages, and look at every byte."""
    for address, life in lives.items():
        life.victim.tell("verify", "b:0" if address == "a:0" else "a:0", seed)
    for life in lives.values():
        life.victim.answer()


def what_is_off(life: Life) -> list[str]:
    """In what a survivor differs from what it was without a peer, its own memory left aside."""
    left = life.victim.ask("calm")
    try:
        now = life.victim.footprint()
    except OSError as error:
        raise Failed(f"{life.victim} is gone: {error}") from error
    off = [f"{count} {what}" for what, count in left.items() if count]
    if now.descriptors != life.alone.descriptors:
        off.append(f"{now.descriptors} descriptors instead of {life.alone.descriptors}")
    if now.memory_files:
        off.append(f"{now.memory_files} memory files open")
    if now.mapped:
        off.append(f"{now.mapped} bytes of memory files mapped")
    return off


def close_life(life: Life, outcome: Outcome) -> None:
    """It is over, or the run: did its own memory grow over the rounds that it survived?"""
    half = len(life.own) // 2
    if half < 3:
        return
    growth = int(statistics.median(life.own[half:]) - statistics.median(life.own[1:half]))
    outcome.growth.append(growth)
    if growth > SLACK_BYTES:
        outcome.wrong.append(f"{life.victim} had {growth} bytes more of its own in the second half of its {len(life.own)} rounds")
