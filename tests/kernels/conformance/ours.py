"""The project's own kernels that the normal suite takes through the kit, in its quick form.

As on the command line: `module:function`, or a class, with its arguments where it needs some. A
name that cannot be imported fails the collection."""

import torch

KERNELS = (
    "kernels.torch_reference:paged_decode",
    "kernels.torch_reference:paged_extend",
    "kernels.split_kv:SplitKV",
    'kernels.split_kv:SplitKV(splits="invariant")',
    "kernels.flat_indices:FlatIndices",
    "kernels.shared_prefix:SharedPrefix(min_prefix_tokens=16, min_saved_bytes=0)",
    "kernels.extend:extend",
    "kernels.extend_dense:extend",
    "kernels.invariant:InvariantDecode(split_tokens=64)",
    "kernels.invariant:InvariantExtend(split_tokens=64)",
)
if not torch.cuda.is_available():  # the kit runs natively where there is a device: these cannot
    KERNELS += ("kernels.torch_invariant:decode", "kernels.torch_invariant:extend")
