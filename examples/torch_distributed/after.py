"""What became of `before.py`: the same rounds, the same numbers, on aiorlinf. Each line that moved says what it was.

    aiorlinf run --workers worker=3 examples/torch_distributed/after.py

Nothing is in step any more for the sake of the library: a slow player holds up only who waits for it, and one that dies is an error
(`PeerLost`) and not a hang. Under torchrun, a worker without an address is `worker:RANK`.
"""

from __future__ import annotations

import asyncio

import torch

import aiorlinf

ROUNDS = 3


async def main() -> None:
    """One worker."""
    async with aiorlinf.init() as comm:  # init_process_group ... destroy_process_group
        rank = comm.address.rank  # get_rank()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        for number in range(ROUNDS):
            # broadcast of each parameter: any object, and here into the tensors that are there.
            await comm.broadcast(model.state_dict(), into=model)
            if rank > 0:
                observations = torch.full((5, 4), float(rank + number))
                # send of the shape, send of the tensor: one object, whatever is in it.
                await comm.send(observations, "worker:0")
                await comm.gather({"rank": rank, "return": model(observations).sum().item()})  # gather_object
            else:
                reports = comm.gather(None)  # begins now, and is done when all have come
                # recv of the shape, recv of the tensor: all players at once, in whatever order they come.
                players = [peer.address for peer in await comm.peers()]  # get_world_size()
                batch = await aiorlinf.wait_all([comm.recv(player) for player in players])
                returns = [round(report["return"], 3) for report in await reports or [] if report]
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.01 * torch.cat(batch).mean())
                print(f"round {number}: {len(torch.cat(batch))} observations, returns {returns}")


if __name__ == "__main__":
    asyncio.run(main())
