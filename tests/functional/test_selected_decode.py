"""New tokens that attend to the blocks of a cache which their lists name, against a bool mask."""

from typing import Any

import pytest
import torch

from fastattn import (
    PagedLatentCache,
    decode_selected,
    reference,
    select_tokens,
    selected_attention,
)
from fastattn.testing import assert_within_budget
from fastattn.testing.decoding import fill
from fastattn.testing.inputs import draw, to_device

B, T, D = 2, 2, 16
LENGTHS = [37, 5]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("kind", "block_k", "H_s"),
    [
        ("int8", 8, 2),
        *(("pages-of-16", *x) for x in ((16, 1), (8, 1), (4, 2), (4, 4), (1, 1))),
    ],
)
def test_new_tokens_see_what_their_lists_name(
    kind: str, block_k: int, H_s: int, backend: str, device: str
) -> None:
    """Lists for all, a K/V head and a head; -1, twins, blocks ahead, cut off and out of range; of
    some lists the first entries count.
    """
    H_q, H_k = 4, 2
    k, v = draw(B, H_k, 37, D).to(device), draw(B, H_k, 37, D, seed=1).to(device)  # in 40 slots
    filled = fill(kind, k, v, torch.tensor(LENGTHS, dtype=torch.int32, device=device))
    k, v = filled.k, filled.v
    q = draw(B, H_q, T, D, seed=2).to(device)
    lists = torch.randint(-1, 40 // block_k + 1, (B, H_s, T, 5), generator=torch.manual_seed(0))
    own = (torch.tensor(LENGTHS)[:, None] - T + torch.arange(T)).div(block_k, rounding_mode="floor")
    lists[:, 0, :, 1], lists[:, 0, :, 4] = own, own
    lists[1, -1, 0] = -1
    counts = None if H_s == 1 else 5 - torch.arange(B * H_s * T).view(B, H_s, T) % 6
    given = to_device({"indices": lists, "counts": counts, "block_k": block_k}, device)
    how: dict[str, Any] = {"softcap": 2.0, "return_lse": True}
    o, lse = decode_selected(q, filled.view, **given, **how, backend=backend)
    for b, n in enumerate(LENGTHS):
        some = None if counts is None else counts[b : b + 1]
        mask = reference.selected_mask(lists[b : b + 1], (1, block_k), H_q, T, n, some)
        mask = (mask & torch.ones(T, n, dtype=torch.bool).tril(n - T)).to(device)
        call = [x[b : b + 1] for x in (q, k[:, :, :n], v[:, :, :n])]
        exact = [x.double() for x in call]
        ref = reference.attention(*exact, attn_mask=mask, **how)
        naive = reference.attention(*call, attn_mask=mask, **how)
        for name, x, y, z in zip(("o", "lse"), (o, lse), ref, naive, strict=True):
            assert_within_budget(name, x[b : b + 1], y, z)


def test_deepseek_s_choice_of_tokens_is_read_from_latents(device: str) -> None:
    """Tokens that an indexer chooses, absorbed queries, and a cache of latents in pages."""
    kv, q = draw(1, 1, 20, 40).to(device), draw(1, 4, 1, 40, seed=1).to(device)
    cache = PagedLatentCache(9, 4, 32, 8, device=device)
    cache.append([cache.allocate()], kv)
    q_index, k_index, w = draw(1, 3, 1, 8), draw(1, 1, 20, 8), draw(1, 3, 1)
    lists = select_tokens(*(x.to(device) for x in (q_index, k_index, w)), 6)
    o = decode_selected(q, cache, lists, block_k=1, scale=0.2)
    wanted = selected_attention(q, kv, kv[..., :32], lists, block=(1, 1), scale=0.2)
    torch.testing.assert_close(o, wanted)
