"""Mode generate: answer one prompt, text streaming to the terminal."""

import sys
from typing import Any

import numpy as np

from core.build import build_engine
from core.config import require
from core.engine import Engine
from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.shared.metrics import e2e_s, ttft_s
from plugins.shared.session import Session
from plugins.shared.tokens import TokenTable

REQUEST_ID = "prompt"


class Generate:
    """chat: send the prompt as a user message through the tokenizer's chat template; null = if
    there is one.

    max_tokens, temperature, top_k, top_p, seed: as in core.request.SamplingParams. Only the answer
    goes to standard output; a line of figures goes to standard error.
    """

    def __init__(
        self,
        prompt: str,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        chat: bool | None = None,
    ) -> None:
        require(prompt != "", "mode.prompt", "not empty", prompt)
        require(max_tokens >= 1, "mode.max_tokens", ">= 1", max_tokens)
        self.prompt = prompt
        self.chat = chat
        self.params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )

    def run(self, session: Session) -> dict[str, Any]:
        """Stream the answer; returns text, token counts, finish reason and latencies.

        Raises ConfigError without a tokenizer, or if the prompt does not fit.
        """
        engine = build_engine(
            session.hooks,
            session.engine,
            session.run.seed,
            session.clock,
            session.device,
            session.progress,
        )
        try:
            return self._answer(engine, session)
        finally:
            engine.close()

    def _answer(self, engine: Engine, session: Session) -> dict[str, Any]:
        tokenizer = engine.executor.tokenizer
        if tokenizer is None:
            raise ConfigError("mode generate needs a model with a tokenizer, and this one has none")
        ids = np.array(self._prompt_ids(tokenizer), np.int32)
        arrival_s = session.clock.now()
        engine.submit(Request(REQUEST_ID, ids, self.params, arrival_s=arrival_s))
        decoder = TokenTable(tokenizer).decoder(True, ids.tolist())
        pieces = []
        while engine.has_work:
            event = engine.step()
            for token in event.token_ids.tolist() if event else ():
                pieces.append(decoder.push(token))
                _show(pieces[-1])
        pieces.append(decoder.flush())
        _show(pieces[-1] + "\n")
        return self._summary(engine, session, "".join(pieces))

    def _prompt_ids(self, tokenizer: Any) -> list[int]:
        has_template = bool(tokenizer.chat_template)
        if self.chat and not has_template:
            raise ConfigError("mode.chat must be false for a tokenizer without a chat template")
        if not has_template or self.chat is False:
            return list(tokenizer(self.prompt)["input_ids"])
        message = [{"role": "user", "content": self.prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _summary(self, engine: Engine, session: Session, text: str) -> dict[str, Any]:
        record = engine.records[REQUEST_ID]
        if record.error:
            raise ConfigError(record.error)
        first, whole, count = ttft_s(record), e2e_s(record), record.output_tokens
        sys.stderr.write(
            f"{record.prompt_tokens} prompt tokens, {count} output tokens ({record.finish_reason}),"
            f" first after {first or 0:.2f} s, {count / whole if whole else 0:.1f} tokens/s\n"
        )
        return {
            "name": session.run.name,
            "mode": "generate",
            "text": text,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": count,
            "finish_reason": record.finish_reason,
            "ttft_s": first,
            "e2e_s": whole,
        }


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
