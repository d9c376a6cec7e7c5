"""A trainer without asyncio: its loop runs in a thread, and what it waits for comes in while it computes.

    aiorlinf run --workers rollout=2,trainer=1 examples/synchronous_trainer.py

Operations begin when they are called. So the trainer asks for the next batch before it works on this one, and lets the weights of this
update go out while it works on the next.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch

import aiorlinf

ROLLOUTS = ["rollout:0", "rollout:1"]
UPDATES = 20
TRUE_WEIGHTS = torch.tensor([[2.0], [-1.0], [0.5]])


def train() -> None:
    """Plain synchronous code. `with` waits until the worker has joined, and in the end until everything has gone out."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with aiorlinf.init(loop="thread") as comm:
        coming = [comm.recv(rollout) for rollout in ROLLOUTS]
        for update in range(UPDATES):
            batches = [work.wait(timeout=60) for work in coming]
            last = update == UPDATES - 1
            if not last:
                coming = [comm.recv(rollout) for rollout in ROLLOUTS]
            inputs, targets = (torch.cat([batch[name] for batch in batches]) for name in ("inputs", "targets"))
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            # A copy, for the optimizer changes these tensors while they may still be on their way.
            news = None if last else {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            for rollout in ROLLOUTS:
                comm.send(news, rollout)
    error = float((model.weight.detach().T - TRUE_WEIGHTS).abs().max())
    print(f"after {UPDATES} updates the weights are {'close' if error < 0.5 else f'off by {error}'}")


async def roll_out() -> None:
    """The other side may be of any kind; here it is a coroutine."""
    weights: dict[str, Any] | None = {}
    async with aiorlinf.init() as comm:
        while weights is not None:
            inputs = torch.randn(64, 3)
            await comm.send({"inputs": inputs, "targets": inputs @ TRUE_WEIGHTS}, "trainer:0")
            weights = await comm.recv("trainer:0")


def main() -> None:
    """Which side this is, `aiorlinf run` says in the environment."""
    if os.environ["AIORLINF_ADDRESS"] == "trainer:0":
        train()
    else:
        asyncio.run(roll_out())


if __name__ == "__main__":
    main()
