"""Any other causal language model, run through transformers' attention interface.

The model's attention modules call a registered function instead of their own kernel; it hands q, k
and v to the executor's `attend`. Packed tokens go in as a batch of one with explicit positions; no
mask is built.

`attend` knows a scale and a window. Whatever else a model asks of its attention (soft capping,
sinks, position biases, other head sizes for v than for k) is refused by name. A dry run on two
packed sequences, compared with the model's own attention on each alone, finds what the arguments do
not show: layers that never call the interface, and models that do not take packed positions. N
packed tokens, H heads, D head_dim.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from core.errors import ConfigError
from plugins.model.checkpoint import listed
from plugins.model.facts import ModelFacts
from plugins.model.spec import FAMILIES
from plugins.shared.model_protocols import Attend, KVTarget

INTERFACE = "tritium"
# Arguments of transformers' attention functions that change the result and that `attend` has no
# place for.
REFUSED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "alibi", "head_mask")
PROBE_LENGTHS = (7, 5)
# Mean difference to the model's own attention, relative to the mean logit: rounding stays far
# below, a wrong mask or position far above. float16 rounds to 3 digits, bfloat16 to 2.
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(slots=True)
class _Call:
    """What one layer asked of the attention function in the dry run."""

    module: Any
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    window: int | None
    refused: tuple[str, ...]


class _Binding:
    """Leads from a model's attention modules to the executor's `attend` of the running step."""

    def __init__(self) -> None:
        self.attend: Attend | None = None
        self.calls: list[_Call] | None = None  # filled in the dry run only


class TransformersModel:
    """A model_protocols.Model around a transformers model, with its device and dtype."""

    def __init__(self, model: Any, facts: ModelFacts) -> None:
        """Binds `model` and proves it on a dry run. Raises ConfigError naming the architecture and
        why it cannot run."""
        from transformers import AttentionInterface

        AttentionInterface.register(INTERFACE, _attention)
        self.model = model.eval()
        self.facts = facts
        self.name = facts.name
        self.vocab_size = facts.vocab_size
        self.max_model_len = facts.max_model_len
        self.end_token_ids = facts.end_token_ids
        self.dtype = model.dtype
        self.device = model.device
        self._binding = _Binding()
        parameters = inspect.signature(model.forward).parameters
        _require(model, "position_ids" in parameters, "it takes no position_ids")
        self._keeps_rows = "logits_to_keep" in parameters
        for module in model.modules():
            module.tritium_binding = self._binding
        calls = self._prove()
        self.num_layers = len(calls)
        self.num_q_heads, self.head_dim = calls[0].q_shape[1], calls[0].q_shape[3]
        self.num_kv_heads = calls[0].k_shape[1]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer, loaded on first use."""
        return self.facts.load_tokenizer()

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor
    ) -> Tensor:
        """See model_protocols.Model. `attend` gets transposed views: the last dimension is
        contiguous."""
        self._binding.attend = attend
        try:
            keep = {"logits_to_keep": logits_rows} if self._keeps_rows else {}
            out = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keep
            )
        finally:
            self._binding.attend = None
        logits: Tensor = out.logits[0, :, : self.vocab_size]
        return logits if self._keeps_rows else logits[logits_rows]

    @torch.inference_mode()
    def _prove(self) -> list[_Call]:
        """Run two packed sequences through `attend` and each alone through the model's own
        attention."""
        lengths = torch.tensor(PROBE_LENGTHS)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (int(lengths.sum()),), generator=generator)
        ids = ids.to(self.device)
        positions = torch.cat([torch.arange(n) for n in PROBE_LENGTHS]).to(self.device)
        own = [
            self.model(input_ids=part[None], use_cache=False).logits[0, :, : self.vocab_size]
            for part in torch.split(ids, list(PROBE_LENGTHS))
        ]
        self.model.set_attn_implementation(INTERFACE)
        calls: list[_Call] = []
        self._binding.calls = calls
        owner = torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)
        rows = torch.arange(len(ids), device=self.device)
        try:
            logits = self.forward(ids, positions, _DenseAttend(owner, positions), rows)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            _check_calls(self.model, calls)  # the likelier reason, if it shows there
            raise ConfigError(f"{type(self.model).__name__} cannot run: {error}") from error
        self._binding.calls = None
        _check_calls(self.model, calls)
        for index, call in enumerate(calls):
            call.module.tritium_layer = index
        reference = torch.cat(own).float()
        difference = (logits - reference).abs().mean() / reference.abs().mean()
        _require(
            self.model,
            bool(difference <= PROBE_TOLERANCE[self.dtype]),
            f"packed sequences differ from its own attention by {difference:.1e} of a mean logit",
        )
        return calls


class _DenseAttend:
    """An `attend` over the packed tokens alone, for sequences that start in this very pass."""

    def __init__(self, owner: Tensor, positions: Tensor) -> None:
        self._same = owner[:, None] == owner[None, :]
        self._distance = positions[:, None] - positions[None, :]

    def target(self, layer: int) -> KVTarget:
        raise NotImplementedError("transformers models never ask")

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        pass  # no later pass looks back

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        seen = self._same & (self._distance >= 0)
        if window is not None:
            seen &= self._distance < window
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale).transpose(0, 1)


def refuse_by_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a config already shows that this fallback cannot run."""
    name = (config.get("architectures") or [config.get("model_type", "the model")])[0]
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{name} cannot run: it is an encoder-decoder; {_COVERED}")
    if config.get("quantization_config"):
        raise ConfigError(f"{name} cannot run: its weights are quantised; {_COVERED}")


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """A folder's checkpoint as a transformers model on the CPU. Raises ConfigError for an unknown
    architecture and for missing, unused or misshapen tensors."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (ValueError, KeyError, ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be loaded through transformers: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in report[kind]):
            raise ConfigError(f"{folder}: {kind} must be empty, got {listed(names)}")
    return model


def random_model(config: Mapping[str, Any], dtype: torch.dtype, seed: int) -> Any:
    """A transformers model of a config's values with seeded random weights, on the CPU."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        parsed = transformers.AutoConfig.for_model(str(config.get("model_type")), **values)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return auto.from_config(parsed, dtype=dtype)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model_type {config.get('model_type')!r} cannot be built: {error}"
        ) from error


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of transformers' signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q, k, v [1, H, N, D] in, [1, N, H, D] out."""
    binding: _Binding = module.tritium_binding
    if binding.calls is not None:
        refused = tuple(name for name in REFUSED_ARGUMENTS if kwargs.get(name) is not None)
        q_shape, k_shape, v_shape = (tuple(x.shape) for x in (query, key, value))
        binding.calls.append(_Call(module, q_shape, k_shape, v_shape, sliding_window, refused))
        if refused or query.shape[-1] != value.shape[-1]:
            # `attend` cannot compute this; any values do, since the call itself is refused after
            # the run.
            return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
        layer = len(binding.calls) - 1
    else:
        layer = module.tritium_layer
    assert binding.attend is not None, "the attention interface was called outside forward"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    binding.attend.store(layer, k, v)
    return binding.attend(layer, q, k, v, scale, sliding_window)[None], None


_COVERED = (
    f"the decoder covers {', '.join(FAMILIES)}; others need causal attention in every layer "
    "through transformers' attention interface, with nothing but a scale and a window"
)


def _check_calls(model: Any, calls: list[_Call]) -> None:
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    distinct = len({id(call.module) for call in calls})
    _require(
        model,
        len(calls) == distinct == layers,
        f"{len(calls)} attention calls came from {distinct} modules, not one from each of its "
        f"{layers} layers",
    )
    first = calls[0]
    for call in calls:
        _require(model, not call.refused, f"its attention uses {', '.join(call.refused)}")
        _require(
            model,
            call.q_shape[-1] == call.k_shape[-1] == call.v_shape[-1],
            f"q, k, v have head sizes {call.q_shape[-1]}, {call.k_shape[-1]}, {call.v_shape[-1]}",
        )
        same = call.q_shape == first.q_shape and call.k_shape == call.v_shape == first.k_shape
        _require(model, same, "its layers have different numbers or sizes of heads")
    _check_windows(model, config, calls)


def _check_windows(model: Any, config: Any, calls: list[_Call]) -> None:
    """A window that a config announces must reach the attention function: a mask alone is not seen
    here."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    default = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [default] * len(calls)
    for kind, call in zip(types, calls, strict=True):
        expected = {"full_attention": None, "sliding_attention": window}
        _require(model, kind in expected, f"it has layers of type {kind}")
        _require(
            model,
            call.window == expected[kind],
            f"a {kind} layer must pass sliding_window={expected[kind]}, it passes {call.window}",
        )


def _require(model: Any, holds: bool, reason: str) -> None:
    if not holds:
        raise ConfigError(f"{type(model).__name__} cannot run: {reason}; {_COVERED}")
