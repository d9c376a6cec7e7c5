"""Rollouts of a language model: token ids, masks and log-probabilities go through a balanced channel to the trainers.

    aiorlinf run --workers rollout=2,trainer=2 examples/llm_rollouts.py

Responses differ in length, and what costs a trainer time is tokens. So each sample weighs as many as it has, the channel gives the next one
to the trainer that has the fewest tokens before it, and a trainer takes as many samples at once as fill its batch of tokens.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import aiorlinf

VOCABULARY, PROMPT, LONGEST = 100, 8, 120
SAMPLES = 40
"""Of each rollout worker."""
BATCH_TOKENS = 512


@dataclass
class Sample:
    """One prompt with its response."""

    token_ids: torch.Tensor  # int64, the prompt's and then the response's
    response_mask: torch.Tensor  # bool: which of them the model chose
    log_probs: torch.Tensor  # float32, of those, under the weights that chose them
    reward: float
    prompt: str


class Model(torch.nn.Module):
    """Stands for a language model: the next token depends on the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(token_ids))
        return logits


@torch.no_grad()
def generate(model: Model, number: int) -> Sample:
    """One response of any length; in a thread, for a real model takes its time."""
    random = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (PROMPT,), generator=random).tolist()
    log_probs = []
    for _ in range(int(torch.randint(4, LONGEST, (), generator=random))):
        distribution = model(torch.tensor(tokens[-1])).log_softmax(-1)
        tokens.append(int(torch.multinomial(distribution.exp(), 1, generator=random)))
        log_probs.append(distribution[tokens[-1]])
    token_ids = torch.tensor(tokens)
    mask = torch.arange(len(tokens)) >= PROMPT
    return Sample(token_ids, mask, torch.stack(log_probs), float(token_ids[mask].double().mean()), f"prompt {number}")


def loss_of(model: Model, batch: list[Sample]) -> torch.Tensor:
    """REINFORCE with importance weights, over the tokens that the model chose."""
    ids = pad_sequence([sample.token_ids for sample in batch], batch_first=True)
    mask = pad_sequence([sample.response_mask for sample in batch], batch_first=True)[:, 1:]
    now = -cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")[mask]
    then = torch.cat([sample.log_probs for sample in batch])
    advantages = torch.cat([torch.full_like(sample.log_probs, sample.reward) for sample in batch])
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return -((now - then).exp() * advantages).mean()


async def roll_out(channel: aiorlinf.Channel[Sample], first: int) -> None:
    """Generate and put; `maxsize` of the channel keeps this from running too far ahead."""
    model = Model()
    for number in range(first, first + SAMPLES):
        sample = await asyncio.to_thread(generate, model, number)
        await channel.put(sample, weight=len(sample.token_ids))


async def train(channel: aiorlinf.Channel[Sample]) -> None:
    """Learn until all rollout workers have closed the channel and nothing is left in it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = tokens = 0
    while True:
        try:
            batch = await channel.get_batch(target_weight=BATCH_TOKENS)
        except aiorlinf.errors.ChannelClosed:
            break
        loss = await asyncio.to_thread(loss_of, model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        samples += len(batch)
        tokens += sum(len(sample.token_ids) for sample in batch)
    print(f"trained on {samples} samples with {tokens} tokens")


async def main() -> None:
    """One worker: who makes the channel, who puts and who gets."""
    workers = dict(part.split("=") for part in os.environ["AIORLINF_WORKERS"].split(","))
    async with aiorlinf.init() as comm:
        is_trainer = comm.address.group == "trainer"
        channel: aiorlinf.Channel[Sample] = await comm.create_channel(
            "samples",
            maxsize=64,
            policy="shortest_queue",
            producers=int(workers["rollout"]),  # the stream ends when so many have come and all have closed
            producer=not is_trainer,
            consumer=is_trainer,
        )
        async with channel:
            if is_trainer:
                await train(channel)
            else:
                await roll_out(channel, first=SAMPLES * comm.address.rank)


if __name__ == "__main__":
    asyncio.run(main())
