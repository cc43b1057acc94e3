"""An executor over the kernels that serves varied launches, and the forms that Triton would compile
for them. Nothing is compiled or run, on a CPU in a process without the interpreter:

    python -m tests.kernels.variant_launches"""

import json
import sys
from collections import Counter
from unittest.mock import patch

import numpy as np
import torch

from core.config import EngineConfig
from core.queries import ExecutorQuery, ModelQuery
from core.request import SamplingParams
from kernels import extend_dense
from kernels.compiled import record_keys
from kernels.fused import FusedOps, FusedPaging
from kernels.fused_sampling import FusedSampling
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from plugins.attention.paged import PagedBackend
from plugins.executor.torch_executor import TorchExecutor
from plugins.executor.warm_up import warm_up_decodes, warm_up_launches
from plugins.model.loader import HuggingFaceModel
from plugins.shared.clocks import RealClock
from tests.plugins.executor.launch_driver import GREEDY, Driver

ROWS, TOKENS, SMS = 300, 1 << 16, 132
MODEL = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 8192,
}  # fmt: skip
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, logit_bias={3: 1.0, 7: -2.0}),
    SamplingParams(logprobs=3, min_tokens=2),
    SamplingParams(prompt_logprobs=2),
]


class AnyDevice(FusedOps):
    def check(self, device, dtype, head_dim):
        pass


class FirstToken(FusedSampling):
    """What is recorded is not computed: a draw is token 0."""

    def draw(self, logits, columns):
        return super().draw(logits, columns).zero_()


def linear(x, weight, bias=None):
    return x.new_zeros(*x.shape[:-1], len(weight))


def executor(decode, shared):
    loader = HuggingFaceModel(None, "dummy", "bfloat16", None, MODEL, "decoder", AnyDevice())
    query = ExecutorQuery(
        engine=EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=4096),
        seed=0,
        clock=RealClock(),
        model=lambda: loader.build_model(ModelQuery(device="cpu", seed=0, progress=False)),
        attention=lambda query: PagedBackend("any", decode, extend_dense.extend, query, shared),
    )
    model = query.model()
    return TorchExecutor(model, model.dtype, query, (1.0, 1.0), FusedPaging(), FirstToken(), "off")


def serve(driver, rng):
    """Launches of 1 to 300 rows: decode, short and long chunks, behind prefixes and not, mixed."""
    for count in (1, 2, 3, 16, 17, 64, 65, 130, 133, 300):
        for row in range(count):
            params = PARAMS[int(rng.integers(len(PARAMS)))] if count % 2 else GREEDY
            driver.start(row, rng.integers(1, 999, 8), params, ends=(5,))
        driver.step(*((row, 8) for row in range(count)))
        driver.step(*((row, 1) for row in range(count)))
        driver.step(*((row, 1) for row in range(count // 2 + 1)))
        for row in range(count):
            driver.release(row)
    for size in (2, 31, 128, 511, 512, 513, 2047):
        for decoding in (0, 1, 2, 37):
            for row in range(decoding):
                driver.start(row, rng.integers(1, 999, 16), PARAMS[row % len(PARAMS)])
            if decoding:
                driver.step(*((row, 16) for row in range(decoding)))
            driver.start(100, rng.integers(1, 999, 3 * size), PARAMS[size % len(PARAMS)])
            driver.start(101, rng.integers(1, 999, size + 1), GREEDY)
            ones = [(row, 1) for row in range(decoding)]
            driver.step(*ones, (100, size))
            driver.step(*ones, (100, size), (101, size))
            driver.step(*ones, (100, size))
            for row in (*range(decoding), 100, 101):
                driver.release(row)


def start_up(driver):
    """What the executor launches at start on a GPU without graphs."""
    engine, sharing = driver.executor, driver.executor._state.sharing
    engine._run(warm_up_launches(driver.layout, engine.max_model_len))
    if sharing is not None:
        sharing.forced = True
        engine._run(warm_up_decodes(driver.layout))
        sharing.forced = False


def forms(decode, shared=None):
    """Forms of each kernel while requests are served, and kernels that start-up met in fewer.
    shared: for steps that share a prefix, as every one does in a second round."""
    with (
        record_keys() as recorded,
        patch("kernels.split_kv.num_sms", lambda *_, **__: SMS),
        patch("kernels.shared_prefix.num_sms", lambda *_, **__: SMS),
        patch("kernels.extend_dense._compiles", lambda *_: True),
        patch("torch.nn.functional.linear", linear),
    ):
        driver = Driver(executor(decode, shared), num_rows=ROWS, num_tokens=TOKENS)
        start_up(driver)
        met = set(recorded)
        recorded.clear()
        serve(driver, np.random.default_rng(0))
        if shared is not None:
            driver.executor._state.sharing.forced = True
            serve(driver, np.random.default_rng(0))
    served = set(recorded)
    return {
        "forms": Counter(kernel for kernel, _ in served),
        "not_met": sorted({kernel for kernel, _ in served - met}),
    }


def main():
    torch.set_num_threads(1)
    prefix = SharedPrefix(min_saved_bytes=0)
    kernels = {
        "split_kv": (SplitKV(),),
        "shared_prefix": (prefix,),
        "cascade": (SplitKV(), prefix),
    }
    json.dump({name: forms(*both) for name, both in kernels.items()}, sys.stdout)


if __name__ == "__main__":
    main()
