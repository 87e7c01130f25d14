"""The kernels of a step are counted without a card."""

from __future__ import annotations

import pytest

from benchmarks import kernels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.long
def test_launches_of_a_tiny_step_are_those_of_plain_pytorch() -> None:
    ours, plain = kernels.ours("tiny", 1), kernels.plain("tiny")
    attention = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert ours[attention] == plain[attention] == 2
    by_class = [
        sum(times for name, times in seen.items() if kernels.class_of(name) == "products") for seen in (ours, plain)
    ]
    # 4 of each block and the head, three times.
    assert by_class == [27, 27]
    assert sum("triton" in name for name in ours) > 5


def test_a_fused_update_is_launched_once_for_320_chunks() -> None:
    assert kernels._updates([65536 * 320]) == 1
    assert kernels._updates([65536 * 320, 1]) == 2
    assert kernels._updates([1] * 37) == 2
