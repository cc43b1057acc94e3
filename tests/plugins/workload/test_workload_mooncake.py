"""plugins/workload/mooncake.py: what the tokens share is what the block ids share."""

import gzip
import hashlib
import json

import numpy as np
import pytest

from core.errors import ConfigError
from core.keys import page_keys
from plugins.workload.common import TRACES
from plugins.workload.mooncake import BLOB_IDS, Mooncake, read_mooncake


def distinct_prefixes(prompts, page_size):
    """Pages of all prompts, a cut last one too, and how many different ones by content and path:
    the others hit in an unbounded prefix cache."""
    pages = []
    for prompt in prompts:
        whole = len(prompt) // page_size * page_size
        keys = page_keys(prompt, page_size)
        if whole < len(prompt):
            tail = page_keys(prompt[whole:], len(prompt) - whole)
            keys = np.append(keys, tail if len(prompt) - whole > 1 else tail + np.uint64(1 << 40))
        place = np.arange(1, len(keys) + 1, dtype=np.uint64)
        mixed = (keys + place) * np.uint64(0x9E3779B97F4A7C15)
        pages.append(np.cumsum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))
    paths = np.concatenate(pages)
    return len(paths), len(np.unique(paths))


def pages_by_id(dataset, page_size, num):
    """The same two counts from the trace's block ids alone."""
    path = TRACES / "mooncake" / f"{dataset}_trace.jsonl.gz"
    sizes, references = {}, 0
    with gzip.open(path) as lines:
        for line in list(lines)[:num]:
            row = json.loads(line)
            for place, block in enumerate(row["hash_ids"]):
                pages = -(-min(512, row["input_length"] - 512 * place) // page_size)
                references += pages
                assert sizes.setdefault(block, pages) == pages
    return references, sum(sizes.values())


@pytest.mark.parametrize(
    ("dataset", "references", "distinct", "rate"),
    [("conversation", 288_500, 182_790, 0.3664), ("synthetic", 121_877, 43_924, 0.6396)],
)
def test_unbounded_cache_hits_the_published_share_of_blocks(dataset, references, distinct, rate):
    prompts = (r.prompt for r in Mooncake(dataset).requests(None, 1000, 0))
    found = distinct_prefixes(prompts, 512)
    assert found == (references, distinct)
    assert 1 - distinct / references == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize(
    ("dataset", "num", "vocab"), [("conversation", 400, 151_936), ("synthetic", 400, 1000)]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_small_pages_share_what_the_blocks_share(dataset, num, vocab, page_size):
    requests = Mooncake(dataset, num_requests=num).requests(None, vocab, 0)
    found = distinct_prefixes((r.prompt for r in requests), page_size)
    assert found == pages_by_id(dataset, page_size, num)


@pytest.mark.parametrize(
    ("dataset", "num", "prompt", "output", "end_s", "longest"),
    [
        ("conversation", 12_031, 144_793_823, 4_122_048, 3536.999, 2000),
        ("synthetic", 3_993, 61_194_628, 595_432, 1022.025, 893),
    ],
)
def test_trace_is_whole(dataset, num, prompt, output, end_s, longest):
    workload = Mooncake(dataset)
    requests = workload.requests(None, 49_152, 0)
    facts = {"requests": num, "prompt_tokens": prompt, "output_tokens": output}
    assert workload.describe().items() >= facts.items()
    assert len(requests) == num
    assert requests[-1].arrival_s == pytest.approx(end_s)
    assert requests[0].params.max_tokens == longest
    times = [r.arrival_s for r in requests[:500]]
    assert times == sorted(times)


def test_first_rows_are_those_of_the_file():
    first, second = Mooncake().requests(None, 49_152, 0)[:2]
    assert (len(first.prompt), first.forced_output) == (6758, 500)
    assert (len(second.prompt), second.forced_output) == (7322, 490)
    # blocks 0, 1, .. and 0, 14, ..: 512 tokens in common
    assert np.array_equal(first.prompt[:512], second.prompt[:512])
    assert (first.prompt[512:1024] != second.prompt[512:1024]).any()


@pytest.mark.parametrize("vocab", [64, 1000, 49_152, 151_936])
def test_tokens_stay_in_the_vocabulary_and_repeat(vocab):
    workload = Mooncake("synthetic", num_requests=60)
    first, again = workload.requests(None, vocab, 0), workload.requests(None, vocab, 9)
    assert max(int(r.prompt.max()) for r in first) < vocab
    assert min(int(r.prompt.min()) for r in first) >= 0
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, again, strict=True))


def test_clipped_prompt_is_the_beginning_of_the_whole_one():
    whole = Mooncake(num_requests=20).requests(None, 1000, 0)
    clipped = Mooncake(num_requests=20, max_prompt=2000, too_long="clip").requests(None, 1000, 0)
    for one, cut in zip(whole, clipped, strict=True):
        assert np.array_equal(cut.prompt, one.prompt[:2000])


def test_own_copy_is_known_by_its_git_blob_id(tmp_path, monkeypatch):
    line = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}
    content = (json.dumps(line) + "\n").encode()
    plain, packed = tmp_path / "mine.jsonl", tmp_path / "mine.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    message = rf"mine.jsonl must be b765599d1e08 \(toolagent\), got .*git blob {found}"
    with pytest.raises(ConfigError, match=message):
        Mooncake("toolagent", path=str(plain)).requests(None, 1000, 0)
    monkeypatch.setitem(BLOB_IDS, "toolagent", found[:12])
    for path in (plain, packed):
        (only,) = Mooncake("toolagent", path=str(path)).requests(None, 1000, 0)
        assert (only.request_id, len(only.prompt)) == ("mooncake_toolagent-0", 600)


def test_path_is_needed_for_what_is_not_shipped_and_refused_for_what_is(tmp_path):
    with pytest.raises(ConfigError, match=r"workload.path must be given: your copy of arxiv"):
        Mooncake("arxiv").requests(None, 1000, 0)
    with pytest.raises(ConfigError, match=r"workload.path must be null for synthetic"):
        Mooncake("synthetic", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"workload.path must be an existing file"):
        Mooncake("arxiv", path=str(tmp_path / "none")).requests(None, 1000, 0)


def test_tokens_beyond_the_blocks_of_a_prompt_are_its_own(tmp_path):
    rows = [{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [5]}] * 2
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace, blocks = read_mooncake(path, "short")
    prompt = blocks.contents(1000)(trace)
    assert [len(prompt(0)), len(prompt(1))] == [700, 700]
    assert np.array_equal(prompt(0)[:512], prompt(1)[:512])
    assert (prompt(0)[512:] != prompt(1)[512:]).any()
