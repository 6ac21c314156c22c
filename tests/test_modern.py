"""The GPT of today: what each of its parts promises."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_course.models.gpt import GPT, SHAPES
from ddp_course.models.modern import GroupedAttention, ModernGPT, SwiGLU, rotated


def test_a_product_of_turned_vectors_depends_on_their_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    turned = lambda x, position: rotated(x, torch.tensor([position]))
    product = lambda at, before: (turned(query, at) * turned(key, before)).sum()
    torch.testing.assert_close(product(9, 5), product(104, 100))
    assert abs(product(9, 5) - product(9, 6)) > 1e-3
    torch.testing.assert_close(turned(query, 7).norm(), query.norm())


def test_heads_of_a_group_share_keys_and_values():
    layer = GroupedAttention(16, heads=4, groups=2, dropout=0.0)
    assert layer.key.weight.shape == layer.value.weight.shape == (8, 16)
    with pytest.raises(ValueError, match="3 heads do not suit"):
        GroupedAttention(16, heads=3, groups=1, dropout=0.0)
    with pytest.raises(ValueError, match="or 3 groups"):
        GroupedAttention(16, heads=4, groups=3, dropout=0.0)


def test_the_gated_mlp_is_as_large_as_the_other():
    for width in (128, 768):
        [gpt2, gated] = (
            4 * width * width * 2,
            sum(p.numel() for p in SwiGLU(width).parameters()),
        )
        assert abs(gated / gpt2 - 1) < 0.13


@pytest.mark.parametrize("kind", [GPT, ModernGPT])
def test_operations_are_counted_and_parts_compute_the_whole(kind):
    network = kind(**SHAPES["small"])
    tokens = torch.randint(256, (1, network.context))
    with FlopCounterMode(display=False) as counter:
        network(tokens, tokens).backward()
    vectors = sum(p.numel() for p in network.parameters() if p.dim() == 1)
    width = network.token_embedding.weight.shape[1]
    # attention recomputes its weights in backward: a sixth more of its operations
    again = 2 * len(network.blocks) * width * network.context
    expected = network.flops_per_token() - 6 * vectors + again
    assert counter.get_total_flops() == expected * tokens.numel()
    x = tokens
    for part in network.parts():
        x = part(x)
    torch.testing.assert_close(x, network(tokens))
