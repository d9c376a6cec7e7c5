"""What looks random is passed over; one sample that gets smaller is enough to try."""

from __future__ import annotations

import pytest
import torch

from aiorlinf.codec.sampling import SAMPLE, SAMPLED_FROM, all_random, looks_random
from tests.codec.material import CODECS, MIB, dense, make_codec, random_bytes, view_of


@pytest.mark.parametrize("name", CODECS)
def test_only_what_is_random_nearly_everywhere_looks_random(name: str) -> None:
    context = make_codec(name).context()
    scratch = memoryview(bytearray(SAMPLE))

    def looks(tensor: torch.Tensor) -> bool:
        return looks_random(context, view_of(tensor), scratch)

    assert looks(random_bytes(SAMPLED_FROM))
    assert looks(random_bytes(2 * MIB + 13))
    assert not looks(dense(SAMPLED_FROM))
    assert not looks(torch.zeros(MIB, dtype=torch.uint8))
    for place in range(4):
        mixed = random_bytes(MIB)
        start = place * (MIB - SAMPLE) // 3
        mixed[start : start + SAMPLE] = 0
        assert not looks(mixed)


def test_weights_are_random_to_lz4_and_not_to_zstd() -> None:
    weights = torch.randn(SAMPLED_FROM // 4, generator=torch.Generator().manual_seed(1)).view(torch.uint8)
    scratch = memoryview(bytearray(SAMPLE))
    assert looks_random(make_codec("lz4").context(), view_of(weights), scratch)
    assert not looks_random(make_codec("zstd").context(), view_of(weights), scratch)


@pytest.mark.parametrize("name", CODECS)
def test_a_message_is_called_random_only_if_a_quick_look_can_tell_of_all_of_it(name: str) -> None:
    context = make_codec(name).context()

    def random(*tensors: torch.Tensor) -> bool:
        return all_random(context, [view_of(tensor) for tensor in tensors])

    noise = random_bytes(SAMPLED_FROM)
    assert random(noise)
    assert random(noise, random_bytes(MIB), noise, noise)
    assert not random()
    assert not random(noise, dense(SAMPLED_FROM))
    assert not random(noise, noise[1:])
    assert random(*[noise] * 8)
    assert not random(*[noise] * 9)
