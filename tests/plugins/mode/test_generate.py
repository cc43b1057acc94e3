"""plugins/mode/generate.py with a scripted executor that speaks bytes."""

from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.hookspecs import hookimpl
from plugins.executor.fake import Fake
from plugins.mode.generate import Generate
from tests.plugins.mode.mode_session import make_session


class Bytes:
    """Token = byte; 256 and above are special and have no text."""

    all_special_ids = (256, 257)

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [256] * add_special_tokens + list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool, **options: Any) -> str:
        assert options == {"clean_up_tokenization_spaces": False}
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return f"<{messages[0]['content']}>"


class Speaker(Fake):
    """Says `answer`, then the end token 257."""

    def __init__(self, answer: str, tokenizer: Any) -> None:
        super().__init__(vocab_size=258, max_model_len=512, end_token_ids=(257,), check=False)
        self.answer = [*answer.encode(), 257]
        self.tokenizer = tokenizer
        self.prompts: list[list[int]] = []

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        executor = super().build_executor(query=query)
        executor.tokenizer = self.tokenizer
        said = iter(self.answer)
        launch, result = executor.launch, executor._result

        def listened(one: Any) -> None:
            self.prompts.extend(setup.tokens.tolist() for setup in one.setups)
            launch(one)

        def spoken(one: Any, rows: Any, sampled: Any, tokens: Any) -> Any:
            tokens[:] = next(said)
            return result(one, rows, sampled, tokens)

        executor.launch, executor._result = listened, spoken
        return executor


def answer(folder: Path, text: str, mode: Generate, template: str | None = None) -> Any:
    speaker = Speaker(text, Bytes(template))
    return mode.run(make_session(folder, executor=speaker)), speaker


def test_answer_streams_whole_characters_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("plugins.mode.generate._show", shown.append)
    text = "né  한 end"
    summary, _ = answer(tmp_path, text, Generate("hi"))
    assert [piece for piece in shown if piece] == [*text, "\n"]
    assert summary["text"] == text
    assert summary["finish_reason"] == "stop"
    assert "output tokens (stop)" in capsys.readouterr().err


def test_only_the_answer_goes_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(tmp_path, "fine", Generate("hi"))
    assert capsys.readouterr().out == "fine\n"


def test_length_limit_cuts_a_character_to_one_replacement(tmp_path: Path) -> None:
    summary, _ = answer(tmp_path, "ab🙂", Generate("hi", max_tokens=4))
    assert summary["text"] == "ab\ufffd"
    assert (summary["output_tokens"], summary["finish_reason"]) == (4, "length")


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (None, None, [256, *b"hi"]),
        ("yes", None, [*b"<hi>"]),
        ("yes", True, [*b"<hi>"]),
        ("yes", False, [256, *b"hi"]),
    ],
)
def test_prompt_goes_through_the_template_if_there_is_one(
    tmp_path: Path, template: str | None, chat: bool | None, expected: list[int]
) -> None:
    _, speaker = answer(tmp_path, "x", Generate("hi", chat=chat), template)
    assert speaker.prompts == [expected]


def test_prompt_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool holds 24 pages"):
        answer(tmp_path, "x", Generate("h" * 400))


def test_what_generate_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model with a tokenizer"):
        Generate("hi").run(make_session(tmp_path))
    with pytest.raises(ConfigError, match=r"mode.chat must be false"):
        answer(tmp_path, "x", Generate("hi", chat=True))
    with pytest.raises(ConfigError, match=r"mode.prompt must be not empty, got ''"):
        Generate("")
