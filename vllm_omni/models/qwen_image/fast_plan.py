"""Where tokens go in the fast step, and the token-count buckets that CUDA graphs are made for.

A bucket has room for more tokens than a batch has. The tokens that fill it up are segments of their
own, so that nobody sees them; nothing that a request's tokens read depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_omni.layers.attention import Segments
from vllm_omni.models.qwen_image.transformer import PackPlan

MIN_BUCKET_TEXT = 128  # tokens; up to there only weights are waited for, and fp8 needs as many
MIN_BUCKET_SEGMENTS = 4
MIN_BUCKET_LEN = 512
MAX_BUCKET_LEN = 2048  # longer segments gain more from a kernel of their own than from a graph


@dataclass(frozen=True, eq=False)
class FastPlan:
    """`PackPlan`, with everything about attention in segment order, long segments first."""

    image_rows: Tensor  # [N_img] row of each image token
    text_rows: Tensor  # [N_txt] row of each text token
    rope: Tensor  # [N, head_dim / 2, 2] float32, in segment order
    to_segments: Tensor  # [N] segment order, as indices into (text tokens, image tokens)
    from_segments: Tensor  # [N] its inverse
    segments: Segments
    segment_rows: list[int]  # row of each segment, those that fill up left out
    text_lens: list[int]  # of each row
    image_lens: list[int]
    is_filled: bool  # it is that of a bucket, and may have segments of no row

    @property
    def num_image_tokens(self) -> int:
        return self.image_rows.shape[0]

    @property
    def num_text_tokens(self) -> int:
        return self.text_rows.shape[0]

    def tensors(self) -> list[Tensor]:
        """All that a captured step reads."""
        return [
            self.image_rows,
            self.text_rows,
            self.rope,
            self.to_segments,
            self.from_segments,
            self.segments.starts,
        ]


@dataclass(frozen=True)
class Bucket:
    """The shapes of a captured step; any mix of requests that fits can run in it."""

    num_image_tokens: int
    num_text_tokens: int
    num_segments: int
    max_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_image_tokens + self.num_text_tokens


def make_fast_plan(plan: PackPlan, min_text: int = 0, min_image: int = 0) -> FastPlan:
    """The same packing, by default without a token too many.

    Args:
        min_text: tokens that there have to be; those that are missing are filled up.
        min_image: the same.
    """
    num_text, num_image = max(sum(plan.text_lens), min_text), max(sum(plan.image_lens), min_image)
    missing = [num_text - sum(plan.text_lens), num_image - sum(plan.image_lens)]
    return _make(plan, num_image, num_text, [length for length in missing if length], None)


def find_bucket(plan: PackPlan, max_tokens: int) -> Bucket | None:
    """The smallest one that a batch fits into; None: it is too large to gain from a graph."""
    num_image = _round_up(sum(plan.image_lens), ((2048, 256), (1 << 30, 512)))
    num_text = max(sum(plan.text_lens), MIN_BUCKET_TEXT)
    num_text = _round_up(num_text, ((256, 64), (1024, 128), (1 << 30, 256)))
    max_len = _power_of_two(max(plan.segment_lens), MIN_BUCKET_LEN)
    if num_image + num_text > max_tokens or max_len > MAX_BUCKET_LEN:
        return None
    num_filling = num_image + num_text - sum(plan.segment_lens)
    num_segments = len(plan.segment_lens) + -(-num_filling // max_len)
    return Bucket(num_image, num_text, _power_of_two(num_segments, MIN_BUCKET_SEGMENTS), max_len)


def fill_bucket(plan: PackPlan, bucket: Bucket) -> FastPlan:
    """The packing with as many tokens and segments as the bucket has."""
    num_filling = bucket.num_tokens - sum(plan.segment_lens)
    full, rest = divmod(num_filling, bucket.max_len)
    filling = [bucket.max_len] * full + [rest] * (rest > 0)
    unused = bucket.num_segments - len(plan.segment_lens) - len(filling)
    return _make(
        plan,
        bucket.num_image_tokens,
        bucket.num_text_tokens,
        (*filling, *[0] * unused),
        bucket.max_len,
    )


def _make(
    plan: PackPlan, num_image: int, num_text: int, filling: Sequence[int], max_len: int | None
) -> FastPlan:
    """filling: the lengths of segments that no row has."""
    device = plan.image_rows.device
    rows = sorted(range(len(plan.segment_lens)), key=lambda row: -plan.segment_lens[row])
    text_ids = torch.arange(sum(plan.text_lens)).split(plan.text_lens)
    image_ids = torch.arange(num_text, num_text + sum(plan.image_lens)).split(plan.image_lens)
    to_segments = torch.cat(
        [ids for row in rows for ids in (text_ids[row], image_ids[row])]
        + [
            torch.arange(sum(plan.text_lens), num_text),
            torch.arange(num_text + sum(plan.image_lens), num_text + num_image),
        ]
    )
    rope = torch.cat((fill_up(plan.text_rope, num_text), fill_up(plan.image_rope, num_image)))
    to_device = to_segments.to(device)
    lens = [plan.segment_lens[row] for row in rows] + list(filling)
    return FastPlan(
        image_rows=fill_up(plan.image_rows, num_image),
        text_rows=fill_up(plan.text_rows, num_text),
        rope=rope[to_device],
        to_segments=to_device,
        from_segments=torch.argsort(to_segments).to(device),
        segments=Segments.make(lens, device, max_len),
        segment_rows=rows,
        text_lens=plan.text_lens,
        image_lens=plan.image_lens,
        is_filled=max_len is not None,
    )


def fill_up(tensor: Tensor, length: int) -> Tensor:
    """With zeros behind it, to as many rows."""
    missing = length - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def _round_up(number: int, steps: Sequence[tuple[int, int]]) -> int:
    """To a multiple of what belongs to the first limit that is not exceeded."""
    step = next(step for limit, step in steps if number <= limit)
    return -(-number // step) * step


def _power_of_two(number: int, low: int) -> int:
    return max(low, 1 << (number - 1).bit_length())
