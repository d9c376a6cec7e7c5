"""Real torchrun: workers find each other with nothing but its environment, beside DDP on the default group, after a restart, too."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiorlinf
from aiorlinf.errors import RendezvousError, UsageError
from aiorlinf.rendezvous.torchrun import Board, Torchrun, address_of_rank, torchrun_of
from tests import peers
from tests.namespaces import Host, two_hosts

PROGRAM = Path(__file__).with_name("torchrun_program.py")

ENVIRONMENT = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_environment_is_read_as_it_is() -> None:
    found = torchrun_of(ENVIRONMENT)
    assert found == Torchrun(3, 8, 2, "node-0", 29500, "run", 2)
    assert found.job == "torchrun-run-2"


@pytest.mark.parametrize(
    "change", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": ""}, {"MASTER_PORT": ""}]
)
def test_where_there_is_nothing_to_find(change: Mapping[str, str]) -> None:
    assert torchrun_of({**ENVIRONMENT, **change}) is None
    assert torchrun_of({}) is None


def test_what_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='many' in the environment is no number"):
        torchrun_of({**ENVIRONMENT, "WORLD_SIZE": "many"})


def test_ranks_have_the_names_that_the_environment_gives() -> None:
    assert address_of_rank({"RANK": "3", "WORLD_SIZE": "8"}) == ("worker:3", tuple(f"worker:{rank}" for rank in range(8)))
    assert address_of_rank({"RANK": "3"})[0] == "worker:3"
    names = ("trainer:0", "rollout:0", "rollout:1")
    for size in ({"WORLD_SIZE": "3"}, {}):
        assert address_of_rank({"RANK": "2", "AIORLINF_WORKERS": "trainer=1, rollout=2", **size}) == ("rollout:1", names)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0", "AIORLINF_WORKERS": "trainer"}, "AIORLINF_WORKERS='trainer' in the environment"),
        ({"RANK": "0", "AIORLINF_WORKERS": "trainer=-1"}, "AIORLINF_WORKERS='trainer=-1' in the environment"),
        ({"RANK": "1", "AIORLINF_WORKERS": "trainer=1"}, "names 1 workers, but this is rank 1 of 0"),
        ({"RANK": "0", "WORLD_SIZE": "3", "AIORLINF_WORKERS": "a=1,b=1"}, "names 2 workers, but this is rank 0 of 3"),
        ({"RANK": "first"}, "RANK='first' in the environment is no number"),
    ],
)
def test_names_that_make_no_sense(environment: Mapping[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        address_of_rank(environment)


def test_where_rank_0_listens() -> None:
    assert Torchrun(0, 2, 2, "node-0", 1, "x", 0).where_to_listen() == "127.0.0.1"
    assert Torchrun(0, 4, 2, "127.0.0.1", 1, "x", 0).where_to_listen() == "0.0.0.0", "loopback is not reached from elsewhere"
    assert Torchrun(0, 4, 2, "192.0.2.77", 1, "x", 0).where_to_listen() == "0.0.0.0"
    assert Torchrun(0, 4, 2, "no.such.host.invalid", 1, "x", 0).where_to_listen() == "0.0.0.0"


def test_a_store_that_is_not_there() -> None:
    with pytest.raises(RendezvousError, match="torchrun's store cannot be reached"):
        Board(Torchrun(1, 2, 2, "127.0.0.1", 9, "x", 0), 1.0)


def run_torchrun(*arguments: str) -> tuple[Any, str]:
    """What rank 0 printed, and all the rest."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIORLINF_")}
    env |= {"PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1", "PYTHONASYNCIODEBUG": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(lines[-1]) if lines else None, done.stderr


@pytest.mark.timeout(110)
def test_a_restart_makes_new_lives() -> None:
    told, log = run_torchrun(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1", str(PROGRAM), "--fail"
    )
    assert "as expected: gather" in log, "rank 0 saw rank 1 die"
    assert [part[:2] for part in told["parts"]] == [["worker:0", 2], ["worker:1", 2]], "new lives"
    assert {part[2][-2:] for part in told["parts"]} == {"-1"}
    assert told["links"][1] == {"worker:0": "shm"}


# ---- beside the default process group


def _train(pipe: peers.Pipe) -> Any:
    """A script as it is found everywhere, with three lines more."""
    dist.init_process_group("gloo")  # from the environment that torchrun makes
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(200, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = nn.Linear(200, 200)  # of a rollout, say
    with aiorlinf.init(backend="auto") as comm:
        for step in range(3):
            model(torch.randn(4, 200)).sum().backward()
            optimizer.step()
            reducing = dist.all_reduce(torch.ones(1000), async_op=True)
            comm.broadcast(model.module.state_dict(), root=0, into=policy, timeout=20).wait()
            rows = comm.gather({"rank": rank, "rows": torch.full((rank + 1, 3), step)}, root="worker:0", timeout=20).wait()
            assert reducing is not None
            reducing.wait()
            if rank:
                assert torch.equal(policy.weight, model.module.weight)
            else:
                assert rows is not None
                assert [row["rows"].shape[0] for row in rows] == list(range(1, size + 1))
        moved = comm.broadcast(torch.full((3,), rank + 5.0), root=1, timeout=20).wait()
    assert dist.group.WORLD is world
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item(), moved.tolist()


def _keep_store(pipe: peers.Pipe) -> None:
    """As torchrun's agent does."""
    distributed: Any = dist
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.say(store.port)
    pipe.hear(None)


@pytest.mark.asyncio
async def test_beside_ddp_on_the_default_process_group() -> None:
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(peers.process(_keep_store))
        env = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(await agent.hear())}
        members = [stack.enter_context(peers.process(_train, env={**env, "RANK": str(rank)})) for rank in range(2)]
        assert [await member.result() for member in members] == [(2.0, [6.0] * 3)] * 2


def _train_sharded(pipe: peers.Pipe) -> Any:
    """The weights are sharded over the default group; the trainer's rank 0 has all of them for a moment, and gives them to a rollout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    with aiorlinf.init(backend="auto") as comm:
        policy = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 10))
        if rank == 2:  # the rollout, which is not in the process group
            for _ in range(2):
                comm.broadcast(None, root=0, into=policy, timeout=20).wait()
            return [parameter.sum().item() for parameter in policy.parameters()]
        dist.init_process_group("gloo", world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        for layer in policy:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        whole: dict[str, torch.Tensor] = {}
        for _ in range(2):
            policy(torch.randn(4, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = {name: tensor.full_tensor() for name, tensor in policy.state_dict().items()}
            comm.broadcast(whole if rank == 0 else None, root=0, timeout=20).wait()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        dist.destroy_process_group()
        return [tensor.sum().item() for tensor in whole.values()]


@pytest.mark.asyncio
async def test_beside_fsdp() -> None:
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(peers.process(_keep_store))
        env = {**ENVIRONMENT, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(await agent.hear())}
        members = [stack.enter_context(peers.process(_train_sharded, env={**env, "RANK": str(rank)})) for rank in range(3)]
        first, second, rollout = [await member.result() for member in members]
    assert first == second == rollout


# ---- two nodes


def _node(pipe: peers.Pipe, rank: int, endpoint: str) -> Any:
    return run_torchrun(
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--rdzv-id", "two", "--local-addr", endpoint.partition(":")[0] if rank == 0 else "10.77.0.2", str(PROGRAM)),
    )[0]


@pytest.mark.timeout(110)
def test_two_nodes() -> None:
    with two_hosts() as (a, b):
        endpoint = f"{a.address}:29500"
        with node(a, b, 0, endpoint) as first, node(b, a, 1, endpoint) as second:
            found = [told for told in (first.wait_result(100.0), second.wait_result(100.0)) if told is not None]
    (told,) = found
    assert [part[:2] for part in told["parts"]] == [["worker:0", 1], ["worker:1", 1]]
    assert told["links"][1]["worker:0"] in ("gloo", "stream")


def node(host: Host, other: Host, rank: int, endpoint: str) -> Any:
    hosts = f"{host.address} {host.name}\n{other.address} {other.name}\n"
    return peers.process(_node, rank, endpoint, prepare=host.enter(hosts))
