"""Which sequence a program works for, found on the device, so that no grid depends on the lengths of sequences.

A launch knows how many tokens and sequences there are, not how long each sequence is. Blocks of QUERIES tokens are laid
over the sequences one after another: sequence s begins at block query_start[s] // QUERIES + s and so has at least the
blocks it needs, and num_tokens // QUERIES + num_sequences + 1 blocks are enough for all of them. The tokens after the
last sequence (padding of a captured batch) count as one more sequence, which has no keys.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_CHUNK = tl.constexpr(256)  # offsets read at once; they are read by as many programs, so they lie in the cache


def num_query_blocks(num_tokens: int, num_sequences: int, queries: int) -> int:
    """Programs that cover every token, whatever the lengths of the sequences."""
    return num_tokens // queries + num_sequences + 1


@triton.jit
def sequence_of_block(query_start, num_sequences, block, QUERIES: tl.constexpr):
    """The sequence (num_sequences for the padding) to which a block of QUERIES tokens belongs."""
    count = 0
    for first in range(0, num_sequences + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        start = tl.load(query_start + index, mask=index <= num_sequences, other=0)
        begun = (index <= num_sequences) & (start // QUERIES + index <= block)
        count += tl.sum(begun.to(tl.int32))
    return count - 1


@triton.jit
def sequence_of_token(query_start, num_sequences, token):
    """The sequence (num_sequences for the padding) to which a token belongs."""
    count = 0
    for first in range(0, num_sequences + 1, _CHUNK):
        index = first + tl.arange(0, _CHUNK)
        start = tl.load(query_start + index, mask=index <= num_sequences, other=0)
        begun = (index <= num_sequences) & (start <= token)
        count += tl.sum(begun.to(tl.int32))
    return count - 1


@triton.jit
def block_range(query_start, num_sequences, num_tokens, sequence, block, QUERIES: tl.constexpr):
    """The tokens of a block: (first, one past the last of its sequence). The first may lie past the sequence."""
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1, mask=sequence < num_sequences, other=num_tokens)
    return start + (block - start // QUERIES - sequence) * QUERIES, end
