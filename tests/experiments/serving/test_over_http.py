"""What a client of over_http counts in the bytes that it read."""

import json

import pytest

from experiments.serving.over_http import token_counts
from experiments.serving.stream_client import unchunked

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = "data: [DONE]\n\n"


def chunk(text: str) -> bytes:
    body = text.encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(text: str) -> str:
    return f"data: {json.dumps({'id': 'a', 'choices': [{'index': 0, 'text': text}]})}\n\n"


def test_unchunked_joins_chunks_up_to_the_empty_one():
    body = b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\nnot of the body"
    assert unchunked(body) == b"abc0123456789"


def test_unchunked_keeps_line_ends_within_a_chunk():
    assert unchunked(b"6\r\na\r\nb\r\n\r\n0\r\n\r\n") == b"a\r\nb\r\n"


def test_unchunked_takes_what_there_is_of_a_body_cut_short():
    assert unchunked(b"3\r\nabc\r\n5\r\nde") == b"abcde"
    assert unchunked(b"") == b""


def test_counts_are_one_for_each_event_with_text():
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    parts = [event("17 "), event("4 "), event("8 "), event(""), usage, DONE]
    assert token_counts(OK + b"".join(map(chunk, parts)) + END) == [1, 1, 1]


def test_tokens_that_share_an_event_are_counted_together():
    parts = [event("17 "), event("4 8 15 "), event("16 23 "), DONE]
    assert token_counts(OK + b"".join(map(chunk, parts)) + END) == [1, 3, 2]


def test_events_are_told_apart_whatever_the_chunks_of_http():
    whole = (event("17 ") + event("4 8 ") + DONE).encode()
    for size in (1, 7, len(whole)):
        pieces = (whole[at : at + size].decode() for at in range(0, len(whole), size))
        assert token_counts(OK + b"".join(map(chunk, pieces)) + END) == [1, 2]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_refusal_is_an_error_that_shows_it(status):
    body = b'{"error":{"message":"too many waiting requests"}}'
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with pytest.raises(RuntimeError, match="too many waiting requests"):
        token_counts(head + body)


@pytest.mark.parametrize("events", [(), ("17 ",), ("17 ", "4 ")])
def test_an_answer_that_ends_before_done_is_an_error(events):
    body = b"".join(chunk(event(text)) for text in events)
    for end in (b"", END):
        with pytest.raises(RuntimeError, match="not whole"):
            token_counts(OK + body + end)


def test_an_answer_cut_within_an_event_is_an_error():
    whole = OK + chunk(event("17 ")) + chunk(event("4 "))
    for cut in range(len(OK), len(whole)):
        with pytest.raises(RuntimeError, match="not whole"):
            token_counts(whole[:cut])
