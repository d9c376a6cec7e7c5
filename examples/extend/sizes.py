"""A load-balance policy: heavy items go to consumers that have room for them. What to do with it, the README says."""

from collections.abc import Sequence

import aiorlinf
from aiorlinf.channel.records import Consumer, ItemInfo


class LongToLarge(aiorlinf.LoadBalancePolicy):
    """Heavy items go to consumers that call themselves large, others to whoever has least to do."""

    def __init__(self, heavy: float = 1000) -> None:
        self.heavy = heavy

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        able: Sequence[int] = range(len(consumers))
        if item.weight >= self.heavy:
            able = [index for index in able if consumers[index].labels.get("size") == "large"] or able
        return min(able, key=lambda index: (consumers[index].pending_weight, consumers[index].pending_items))
