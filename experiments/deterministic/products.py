"""The matrix products and the attention of a decoder layer by the batch-invariant kernels, beside
the kernels that the default mode takes.

    python -m experiments.deterministic.products --model qwen3_0_6b --out products.jsonl   # a GPU

Medians in microseconds of one launch with a cold L2 cache. First every product is compared bit for
bit between all tiles and with fewer rows; a time of a wrong kernel is not printed."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import yaml
from torch import Tensor

from kernels.declare import Rows
from kernels.extend_dense import extend
from kernels.invariant import InvariantConfig, InvariantDecode, InvariantExtend
from kernels.launch import num_sms
from kernels.matmul import CONFIGS, default_config, matmul
from kernels.split_kv import SplitKV

ROOT = Path(__file__).resolve().parents[2]
DTYPE = torch.bfloat16
PAGE = 16

Line = dict[str, Any]


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--rows", type=_numbers, default=[1, 16, 64, 128, 256, 2048, 8192])
    parser.add_argument("--decode", type=_pairs, default=[(64, 1024), (256, 704), (8, 32768)])
    parser.add_argument("--extend", type=_pairs, default=[(2048, 2048), (8192, 8192), (512, 8192)])
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    arguments = parser.parse_args()
    file = ROOT / "conf" / "model" / f"{arguments.model}.yaml"
    shape = yaml.safe_load(file.read_text(encoding="utf-8"))["config"]
    lines = []
    for line in chain(_products(shape, arguments.rows), _attention(shape, arguments)):
        lines.append({"model": arguments.model, "device": torch.cuda.get_device_name()} | line)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    if arguments.out is not None:
        with open(arguments.out, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)


def _products(shape: dict[str, int], rows: list[int]) -> Iterator[Line]:
    hidden, inner, q_heads = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_dim = shape.get("head_dim") or hidden // q_heads
    width = head_dim * (q_heads + 2 * shape["num_key_value_heads"])
    sizes = {
        "qkv": (hidden, width),
        "o": (head_dim * q_heads, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, shape["vocab_size"]),
    }
    for name, (depth, columns) in sizes.items():
        weight = torch.randn(columns, depth, device="cuda", dtype=DTYPE) * depth**-0.5
        x = torch.randn(max(rows), depth, device="cuda", dtype=DTYPE)
        _compare(name, x, weight)
        for count in rows if name != "head" else [one for one in rows if one <= 1024]:
            part = x[:count].clone()
            config = default_config(DTYPE, count, columns, num_sms(x.device, on_cpu=1))
            times = {str(index): _time(matmul, part, weight, None, one)
                     for index, one in enumerate(CONFIGS)}  # fmt: skip
            ours = times[str(CONFIGS.index(config))]
            yield {
                "product": name,
                "rows": count,
                "depth": depth,
                "columns": columns,
                "library_us": _time(F.linear, part, weight),
                "ours_us": ours,
                "tflops": round(2e-6 * count * depth * columns / ours, 1),
                "tb_s": round(2e-6 * (depth * columns + count * (depth + columns)) / ours, 3),
                "chosen": CONFIGS.index(config),
                "by_tile_us": times,
            }


def _compare(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise RuntimeError where a row's bits depend on its batch or the tile."""
    x = x[:300]
    whole = matmul(x, weight)
    for config in CONFIGS:
        if not torch.equal(matmul(x, weight, None, config), whole):
            raise RuntimeError(f"{name}: {config} gives other bits")
    for count in (1, 2, 17, 64, 65, 128, 129, 256):
        if not torch.equal(matmul(x[-count:].clone(), weight), whole[-count:]):
            raise RuntimeError(f"{name}: {count} rows give other bits")
    error = (whole.float() - F.linear(x, weight).float()).abs().max().item()
    if error > 0.1:
        raise RuntimeError(f"{name}: off by {error} from the library's product")


def _attention(shape: dict[str, int], arguments: argparse.Namespace) -> Iterator[Line]:
    q_heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = q_heads, kv_heads, shape.get("head_dim") or shape["hidden_size"] // q_heads
    for count, context in arguments.decode:
        case = _case([context] * count, [1] * count, sizes, shape)
        kernels = {f"stages_{n}": InvariantDecode(config=InvariantConfig(num_stages=n))
                   for n in (2, 3, 4)}  # fmt: skip
        times = _times({"default": SplitKV(), **kernels}, *case, count=5)
        yield {"attention": "decode", "rows": count, "context": context, "us": times}
    for new, context in arguments.extend:
        case = _case([context], [new], sizes, shape)
        kernels = {f"stages_{n}": InvariantExtend(config=InvariantConfig(num_stages=n))
                   for n in (2, 3)}  # fmt: skip
        times = _times({"default": extend, **kernels}, *case, count=6)
        yield {"attention": "extend", "new": new, "context": context, "us": times}


def _times(
    kernels: Mapping[str, Any], tensors: tuple[Tensor, ...], rows: Rows, count: int
) -> dict[str, float | None]:
    """Microseconds by kernel, each with its plan made before; None where a configuration needs more
    than the device has. count: tensors that the kernels take."""
    scale = tensors[0].shape[2] ** -0.5
    times: dict[str, float | None] = {}
    for name, kernel in kernels.items():
        call = partial(kernel, *tensors[:count], scale, plan=kernel.plan(rows))
        try:
            times[name] = _time(call)
        except triton.runtime.errors.OutOfResources:
            times[name] = None
    return times


def _case(
    contexts: list[int], new: list[int], sizes: tuple[int, int, int], shape: dict[str, int]
) -> tuple[tuple[Tensor, ...], Rows]:
    """Rows over shuffled pages, block table as wide as the model's longest sequence."""
    q_heads, kv_heads, head_dim = sizes
    pages = [-(-context // PAGE) for context in contexts]
    total = 1 + sum(pages)
    q = torch.randn(sum(new), q_heads, head_dim, device="cuda", dtype=DTYPE)
    k, v = (
        torch.randn(total, PAGE, kv_heads, head_dim, device="cuda", dtype=DTYPE) for _ in range(2)
    )
    order = torch.randperm(total - 1, device="cuda").int() + 1
    table = torch.zeros(
        len(contexts), shape["max_position_embeddings"] // PAGE, dtype=torch.int32, device="cuda"
    )
    for row, (part, count) in enumerate(zip(order.split(pages), pages, strict=True)):
        table[row, :count] = part
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, *new]).cumsum(0).to("cuda", torch.int32)
    rows = Rows(table, lens, starts, contexts, new, PAGE, q_heads, kv_heads, head_dim)
    return (q, k, v, table, lens, starts), rows


def _time(call: Callable[..., Any], *arguments: Any) -> float:
    """Median microseconds."""
    found = triton.testing.do_bench(
        lambda: call(*arguments), warmup=5, rep=20, return_mode="median"
    )
    return round(1000 * found, 2)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _pairs(text: str) -> list[tuple[int, int]]:
    """ "64x1024,8x32768" as pairs."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(first), int(second)) for first, second in pairs]


if __name__ == "__main__":
    main()
