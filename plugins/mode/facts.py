"""What a server needs to know of an engine."""

from typing import Any

from core.engine import Engine
from plugins.shared.session import Session


def facts(session: Session, engine: Engine) -> dict[str, Any]:
    """See plugins.shared.server_protocol.ServerQuery."""
    executor, memory = engine.executor, engine.state.memory
    described = executor.describe()
    return {
        "model": str(described.get("model") or described["executor"]),
        "tokenizer": executor.tokenizer,
        "vocab_size": executor.vocab_size,
        "max_model_len": engine.state.max_model_len,
        "pool_tokens": memory.ledger.num_pages * memory.page_size,
        "policy": session.run.policy,
        "hooks": dict(session.run.hooks),
    }
