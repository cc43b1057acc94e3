"""Launches that nobody asked for, computed before the first request: what they compile, load and
allocate no request waits for."""

import numpy as np

from core.launch import Launch, PoolLayout


def warm_up_chunks(layout: PoolLayout, max_model_len: int) -> list[tuple[int, int]]:
    """First position and length of chunks for a device whose kernels are compiled when they are
    first used: attention has one each for short chunks, for long ones, and for long ones behind a
    cached prefix."""
    longest = min(max_model_len, layout.max_pages * layout.page_size)
    return [
        (first, count)
        for first, count in ((0, 32), (0, 512), (512, 512))
        if count <= layout.max_num_batched_tokens and first + count <= longest
    ]


def warm_up_launch(first: int, count: int) -> Launch:
    """Tokens of row 0 from position `first` on, stored on the reserved page; it samples nothing."""
    return Launch(
        launch_id=-1,
        row_ids=np.zeros(1, np.int32),
        first_positions=np.full(1, first, np.int32),
        num_tokens=np.full(1, count, np.int32),
        token_ids=np.zeros(count, np.int32),
        feedback=np.zeros(1, np.bool_),
        samples=np.zeros(1, np.bool_),
        num_decode_rows=int(count == 1),
        table_updates=np.empty((0, 3), np.int32),
        setups=(),
    )
