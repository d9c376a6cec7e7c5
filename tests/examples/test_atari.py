"""The parts of the example: the games, playing, learning, and the report."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from atari.games import SIZE, STACK, Games, rom_name
from atari.learner import DISCOUNT, TRACE_DECAY, Learner, Update, vtrace
from atari.messages import Farewell, Trajectory, TrajectoryInfo, Weights
from atari.player import Player
from atari.policy import Policy
from atari.report import Report, Traffic

import aiorlinf

__all__: list[str] = []


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the example: for such small tensors several threads are slower, on a busy machine a hundred times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def games() -> Games:
    return Games("pong", 2, seed=3)


@pytest.fixture
def player(games: Games) -> Iterator[Player]:
    player = Player("rollout:0", games, seed=5)
    player.take(Weights(7, 0, Policy(games.actions).state_dict()))
    yield player
    player.close()


@pytest.mark.parametrize("name", ["RoadRunner", "ALE/RoadRunner-v5", "road_runner"])
def test_a_game_has_several_names(name: str) -> None:
    assert rom_name(name) == "road_runner"


def test_an_unknown_game_is_told_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no game 'Pang'; there are .*, pong, "):
        rom_name("Pang")


def test_frames_are_grey_small_and_stacked_with_the_newest_last(games: Games) -> None:
    assert (games.frames.dtype, games.frames.shape) == (torch.uint8, (2, STACK, SIZE, SIZE))
    noop = torch.zeros(2, dtype=torch.int64)
    step = games.step(noop)
    for _ in range(STACK + 1):
        before = games.frames
        kept = before.clone()
        step = games.step(noop)
        assert torch.equal(games.frames[:, :-1], before[:, 1:])
        assert torch.equal(before, kept)  # the emulators do not write to it again
    assert float(games.frames.float().std()) > 1
    assert (step.rewards.dtype, step.ended.dtype) == (torch.float32, torch.bool)


def test_the_same_seed_is_the_same_game(games: Games) -> None:
    again = Games("pong", 2, seed=3)
    actions = torch.tensor([2, 3])
    for _ in range(10):
        games.step(actions)
        again.step(actions)
    assert torch.equal(games.frames, again.frames)


@pytest.mark.asyncio
async def test_a_trajectory_tells_what_was_played(player: Player, games: Games) -> None:
    trajectory = await player.play(3)
    assert trajectory.frames.shape == (4, 2, STACK, SIZE, SIZE)
    assert torch.equal(trajectory.frames[3], games.frames)
    assert [tensor.shape for tensor in (trajectory.actions, trajectory.rewards, trajectory.log_probs, trajectory.masks)] == [(3, 2)] * 4
    assert bool((trajectory.log_probs < 0).all())
    assert bool((trajectory.masks == 1).all())
    assert trajectory.info == TrajectoryInfo("rollout:0", [0, 1], 7, 7, [])
    assert player.steps == 6
    following = await player.play(1)
    assert torch.equal(following.frames[0], trajectory.frames[3])


@pytest.mark.asyncio
async def test_new_weights_are_taken_between_two_steps_and_the_latest_wins(player: Player, games: Games) -> None:
    playing = asyncio.create_task(player.play(50))
    while player.steps == 0:
        await asyncio.sleep(0.001)
    state = Policy(games.actions).state_dict()
    player.take(Weights(8, 0, state))
    player.take(Weights(9, 0, state))
    trajectory = await playing
    assert (trajectory.info.first_version, trajectory.info.last_version, player.swaps) == (7, 9, 2)


@pytest.mark.asyncio
async def test_episodes_that_end_are_masked_and_their_returns_told() -> None:
    games = Games("road_runner", 2, seed=0)
    player = Player("rollout:0", games, seed=0)
    player.take(Weights(0, 0, Policy(games.actions).state_dict()))
    trajectory = await player.play(400)
    ended = int((trajectory.masks == 0).sum())
    player.close()
    assert ended > 0
    assert len(trajectory.info.returns) == ended
    assert sum(trajectory.info.returns) <= float(trajectory.rewards.sum())  # the rest belongs to episodes under way


def test_on_the_players_own_policy_the_advantages_are_those_of_gae() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(6, 3, generator=generator), torch.randn(7, 3, generator=generator)
    masks = (torch.rand(6, 3, generator=generator) > 0.3).float()
    targets, advantages = vtrace(rewards, masks, values, torch.ones(6, 3))
    for env in range(3):
        for start in range(6):
            expected, weight = 0.0, 1.0
            for time in range(start, 6):
                mask = float(masks[time, env])
                error = rewards[time, env] + DISCOUNT * mask * values[time + 1, env] - values[time, env]
                expected += weight * float(error)
                weight *= DISCOUNT * TRACE_DECAY * mask
            assert float(advantages[start, env]) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(targets, values[:-1] + advantages)


def test_what_the_policy_of_now_would_not_do_teaches_nothing_and_what_it_likes_more_no_more_than_once() -> None:
    rewards, masks, values = torch.ones(2, 1), torch.ones(2, 1), torch.zeros(3, 1)
    _, plain = vtrace(rewards, masks, values, torch.ones(2, 1))
    _, never = vtrace(rewards, masks, values, torch.tensor([[0.0], [1.0]]))
    _, often = vtrace(rewards, masks, values, torch.full((2, 1), 50.0))
    assert float(never[0]) == 0
    assert torch.equal(never[1], plain[1])
    assert torch.equal(often, plain)


def made_up_trajectory(length: int = 8, envs: int = 4) -> Trajectory:
    """In which action 0 is always rewarded and action 1 punished."""
    generator = torch.Generator().manual_seed(1)
    actions = torch.randint(2, (length, envs), generator=generator)
    return Trajectory(
        frames=torch.randint(256, (length + 1, envs, STACK, SIZE, SIZE), generator=generator, dtype=torch.uint8),
        actions=actions,
        rewards=100.0 - 200.0 * actions,
        log_probs=torch.full((length, envs), 0.5).log(),
        masks=torch.zeros(length, envs),  # only the reward itself counts
        info=TrajectoryInfo("rollout:1", list(range(envs)), 0, 0, [1.5]),
    )


def test_learning_makes_the_rewarded_action_likelier() -> None:
    learner = Learner(actions=2, seed=0)
    trajectories = [made_up_trajectory(), made_up_trajectory()]
    updates = [learner.update(trajectories) for _ in range(6)]
    assert [update.version for update in updates] == [1, 2, 3, 4, 5, 6]
    assert learner.version == 6
    assert updates[-1].entropy < updates[0].entropy
    policy = Policy(2)
    policy.load_state_dict(learner.snapshot())
    log_probs, _ = policy(trajectories[0].frames[0])
    assert bool((log_probs[:, 0] > log_probs[:, 1]).all())


def test_a_snapshot_is_not_written_to_by_the_next_update() -> None:
    learner = Learner(actions=2, seed=0)
    snapshot = learner.snapshot()
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    learner.update([made_up_trajectory()])
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in learner.snapshot().items())


@pytest.mark.asyncio
@pytest.mark.parametrize("envs", [1, 32])  # within a frame, and with a payload of its own
async def test_a_trajectory_arrives_as_it_was_sent(envs: int) -> None:
    sent = made_up_trajectory(envs=envs)
    async with aiorlinf.init("trainer:0") as comm:
        sending = comm.send(sent, "trainer:0")
        sender, received = await anext(comm.inbox())
        await sending
    assert sender == "trainer:0"
    assert type(received) is Trajectory
    assert received.info == sent.info
    for name in (field.name for field in fields(Trajectory) if field.name != "info"):
        assert torch.equal(getattr(received, name), getattr(sent, name)), name
        assert getattr(received, name).dtype == getattr(sent, name).dtype


@pytest.mark.allow_leaks("descriptors", reason="matplotlib keeps its fonts open")
def test_the_report(tmp_path: Path) -> None:
    report = Report("pong")
    empty = report.sample(1.0, Traffic(0, 0))
    assert (empty.mean_return, empty.lag, empty.entropy) == (None, None, None)
    report.arrived(made_up_trajectory(), 2.0)
    report.trained(Update(1, 0.1, 0.2, 0.69), [0, 3], 2.5)
    report.left(Farewell(steps=32, swaps=4, lasted_s=2.0, waited_s=0.5))
    sample = report.sample(3.0, Traffic(6, 4_000_000))
    assert (sample.steps_per_s, sample.messages_per_s, sample.megabytes_per_s) == (16.0, 3.0, 2.0)
    assert (sample.episodes, sample.mean_return, sample.lag, sample.version) == (1, 1.5, 1.5, 1)
    assert len(sample.line()) == len(empty.line())

    plot, figures = report.save(tmp_path / "new" / "folder")
    assert plot.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    assert len(content["samples"]) == 2
    assert content["summary"]["rollouts waited for the trainer, %"] == 25.0
    assert re.search(r"^mean return, first 50 +1\.5$", report.table(), re.MULTILINE)
