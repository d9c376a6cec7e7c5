"""A script for torch.distributed, as it was: rank 0 learns, the others play. Beside it is what became of it, `after.py`.

torchrun --nproc-per-node 3 examples/torch_distributed/before.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 3


def main() -> None:
    """Everybody does the same number of rounds, in step: nobody may be late, be early, or leave."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    for number in range(ROUNDS):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        if rank > 0:
            observations = torch.full((5, 4), float(rank + number))
            dist.send(torch.tensor(observations.shape), dst=0)  # the learner cannot know the shape
            dist.send(observations, dst=0)
            dist.gather_object({"rank": rank, "return": model(observations).sum().item()}, dst=0)
        else:
            batch = []
            for player in range(1, size):
                shape = torch.empty(2, dtype=torch.int64)
                dist.recv(shape, src=player)
                observations = torch.empty(*shape)
                dist.recv(observations, src=player)
                batch.append(observations)
            reports: list[Any] = [None] * size
            dist.gather_object(None, reports, dst=0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * torch.cat(batch).mean())
            print(f"round {number}: {len(torch.cat(batch))} observations, returns {[round(report['return'], 3) for report in reports[1:]]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
