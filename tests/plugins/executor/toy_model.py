"""A tiny attention model for executor tests, and the queries that build on it."""

import torch

from core.config import EngineConfig
from core.queries import ExecutorQuery
from kernels.torch_reference import paged_decode, paged_extend
from plugins.attention.paged import PagedAttention
from plugins.shared.clocks import RealClock
from plugins.shared.model_protocols import AttentionQuery


class ToyModel:
    """model_protocols.Model: two attention layers (the second with a window), random weights,
    fp32. The head has more rows than the vocabulary; the padding's logits are the largest."""

    name = "toy"
    num_layers, num_q_heads, num_kv_heads, head_dim = 2, 4, 2, 8
    vocab_size, padded_vocab_size = 50, 64
    max_model_len = 512
    end_token_ids = (7,)
    dtype = torch.float32
    tokenizer = None
    windows = (None, 9)

    def __init__(self, seed=0, device="cpu"):
        self.device = torch.device(device)
        random = torch.Generator().manual_seed(seed)

        def weights(*shape):
            return (torch.randn(*shape, generator=random) / shape[-1] ** 0.5).to(device)

        self.width = self.num_q_heads * self.head_dim
        self.embedding = weights(self.padded_vocab_size, self.width) * 6
        self.qkv = [
            weights((self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim, self.width)
            for _ in range(self.num_layers)
        ]
        self.out = [weights(self.width, self.width) for _ in range(self.num_layers)]
        self.head = weights(self.padded_vocab_size, self.width) * 3

    def forward(self, token_ids, positions, attend, logits_rows):
        angles = positions[:, None] / 50.0 ** (
            torch.arange(self.width, device=self.device) / self.width
        )
        hidden = self.embedding[token_ids] + torch.sin(angles)
        for layer in range(self.num_layers):
            normed = torch.nn.functional.layer_norm(hidden, (self.width,))
            heads = (normed @ self.qkv[layer].T).view(len(token_ids), -1, self.head_dim)
            q, k, v = heads.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], 1)
            attend.store(layer, k, v)
            mixed = attend(layer, q, k, v, self.head_dim**-0.5, self.windows[layer])
            hidden = hidden + mixed.reshape(len(token_ids), -1) @ self.out[layer].T
        logits = torch.nn.functional.layer_norm(hidden[logits_rows], (self.width,)) @ self.head.T
        logits[:, self.vocab_size :] = 1e9
        return logits

    def dense_logits(self, tokens):
        """Logits [len(tokens), vocab_size] of one sequence, without a cache."""

        class Dense:
            def store(self, layer, k, v):
                pass

            def __call__(self, layer, q, k, v, scale, window):
                return attend(q, k, v, scale, window)

        def attend(q, k, v, scale, window):
            group = self.num_q_heads // self.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("thd,chd->htc", q, k) * scale
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (distance < 0) | (distance >= (window or len(q)))
            return torch.einsum(
                "htc,chd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v
            )

        ids = torch.tensor(tokens)
        rows = torch.arange(len(tokens))
        return self.forward(ids, rows, Dense(), rows)[:, : self.vocab_size]

    def greedy(self, prompt, num_tokens):
        """The reference continuation of a prompt."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def executor_query(model=None, clock=None):
    plugin = PagedAttention(paged_decode, paged_extend)
    return ExecutorQuery(
        engine=EngineConfig(),
        seed=0,
        clock=clock or RealClock(),
        model=lambda: model or ToyModel(),
        attention=lambda query: plugin.build_attention(query),
    )


def attention_query(**changes):
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    facts |= {"kv_dtype": changes.get("dtype", "float32"), "page_size": 16, "device": "cpu"}
    return AttentionQuery(**(facts | changes))
