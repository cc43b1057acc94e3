"""What of a model sets the least time of a step."""

from plugins.shared.model_protocols import Model


def model_shape(model: Model) -> dict[str, int] | None:
    """Heads, head_dim, and numbers of weights: in the matrix products of all layers and in the
    output head; of a cut model, of this rank's part. None for a model that lists no weights, or
    whose layers do not see all tokens."""
    weights, spec = getattr(model, "weights", None), getattr(model, "spec", None)
    if weights is None or spec is None:
        return None
    if any(window is not None and window < model.max_model_len for window in spec.windows):
        return None
    return {
        "num_layers": model.num_layers,
        "num_q_heads": model.num_q_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "layer_weights": sum(one.numel() for layer in weights.layers for one in layer.matrices),
        "head_weights": min(model.vocab_size, len(weights.head)) * weights.head.shape[1],
    }
