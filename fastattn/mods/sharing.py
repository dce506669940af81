"""Masks of sequences with shared parts: prefixes, trees, noised blocks, images in a text.

    shared_prefix       tree, parents            block_diffusion(4, 2): 4 noised
    [-1 -1 0 0 1 1]     0 - 1 - 2, 0 - 3         tokens, then 4 clean ones
    1 0 0 0 0 0         1 0 0 0                  1 1 0 0 0 0 0 0
    1 1 0 0 0 0         1 1 0 0                  1 1 0 0 0 0 0 0
    1 1 1 0 0 0         1 1 1 0                  0 0 1 1 1 1 0 0
    1 1 1 1 0 0         1 0 0 1                  0 0 1 1 1 1 0 0
    1 1 0 0 1 0                                  0 0 0 0 1 1 0 0
    1 1 0 0 1 1                                  ...

At 2 x 512 tokens and blocks of 64, block_diffusion(512, 64) visits 72 of 256 blocks.
"""

from typing import Any

import triton
import triton.language as tl

from .compose import bind


@triton.jit
def shared_prefix(b, h, q_pos, k_pos, branches):
    """`mask_mod`, causal: answers to one prompt in a row; each sees the prompt and itself.

    mod_tensors (branches,): int32 [T], the token's answer, or -1 in the prompt.
    """
    branch = tl.load(branches + k_pos)
    return (k_pos <= q_pos) & ((branch < 0) | (branch == tl.load(branches + q_pos)))


@triton.jit
def tree(b, h, q_pos, k_pos, tin, tout):
    """`mask_mod`: a token sees its ancestors in a tree, and itself.

    mod_tensors (tin, tout): int32 [T], times at which a depth-first walk enters and leaves a token:
    key j is an ancestor of query i if tin[j] <= tin[i] < tout[j].
    """
    at = tl.load(tin + q_pos)
    return (tl.load(tin + k_pos) <= at) & (at < tl.load(tout + k_pos))


@triton.jit
def block_diffusion_rule(b, h, q_pos, k_pos, length, block):
    q_noised, k_noised = q_pos < length, k_pos < length
    q_block, k_block = q_pos % length // block, k_pos % length // block
    own = (q_noised == k_noised) & (q_block == k_block)
    before = (k_noised == 0) & ((k_block < q_block) | ((q_noised == 0) & (k_block == q_block)))
    return own | before


def block_diffusion(length: int, block: int) -> Any:
    """A `mask_mod` to train block diffusion (BD3-LM): length noised tokens, then the clean ones.

    Noised and clean blocks see themselves and the earlier clean blocks.
    """
    return bind(block_diffusion_rule, length, block)


@triton.jit
def flamingo(b, h, q_pos, k_pos, images, length):
    """`mask_mod` of cross-attention: a token of a text sees the last image before it.

    mod_tensors (images, length): int32 [T_q], the last image's number, -1 = none; int32 [1], tokens
    per image. The first query's position is 0: pass query_offset=0.
    """
    return tl.load(images + q_pos) == k_pos // tl.load(length)
