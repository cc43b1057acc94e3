"""Prompts of agent sessions: whose blocks are whose."""

import numpy as np
from numpy.typing import NDArray

from plugins.workload.agent_trace import BLOCK_TOKENS, AgentSession, Call
from plugins.workload.common import Ids
from plugins.workload.contents import BlockTokens


class AgentPrompts:
    """Token ids of every call of `sessions`.

    A session's block ids are its own. share_system: but the whole blocks of its tool definitions
    are those of every session with as many tokens of them, and the blocks of its system prompt
    those of every session with as many of both; the trace does not record it, equal lengths are
    taken for equal text. What a prompt has beyond its whole blocks is its own.
    """

    def __init__(self, sessions: list[AgentSession], share_system: bool, vocab_size: int) -> None:
        self._maps: dict[str, tuple[NDArray[np.int64], int]] = {}
        common: dict[tuple[int, ...], int] = {}
        total = 0
        for session in sessions if share_system else ():
            for key, count in _common_parts(session):
                if key not in common:
                    common[key], total = total, total + count
        for session in sessions:
            parts = _common_parts(session) if share_system else ()
            shared = [np.arange(count) + common[key] for key, count in parts]
            leading = np.concatenate([*shared, np.empty(0, np.int64)]).astype(np.int64)
            largest = max(
                (first + count for call in session.calls() for first, count in call.blocks),
                default=0,
            )
            self._maps[session.name] = leading, total
            total += largest
        self._own = total
        last = max(call.number for session in sessions for call in session.calls())
        self._tokens = BlockTokens(total + last + 1, BLOCK_TOKENS, vocab_size)

    def prompt(self, session: str, call: Call) -> Ids:
        """The prompt of a call of the session of that name, int32 [prompt_tokens]."""
        leading, offset = self._maps[session]
        local = call.ids()
        ids = local + offset
        shared = (local >= 1) & (local <= len(leading))
        ids[shared] = leading[local[shared] - 1]
        wanted = -(-call.prompt_tokens // BLOCK_TOKENS)
        own = np.full(max(0, wanted - len(ids)), self._own + call.number)
        return self._tokens.expand(np.append(ids[:wanted], own), call.prompt_tokens)


def _common_parts(session: AgentSession) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(what makes it equal, blocks) of the tool definitions and of the system prompt after them."""
    tools, both = session.tool_blocks, session.system_blocks
    return (
        ((session.tool_tokens,), tools),
        ((session.tool_tokens, session.system_tokens), both - tools),
    )
