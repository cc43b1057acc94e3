"""Reads what an offline run of wandb left: the records that `wandb sync` would send.

The file is a log of LevelDB's form (blocks of 32 KiB; records with checksum, length, type) behind
a header of 7 bytes; each record is a protobuf message of wandb's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

HEADER = b":W&B"
HEADER_BYTES, BLOCK_BYTES, HEAD_BYTES = 7, 32 * 1024, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(folder: Path) -> list[Any]:
    """All records of a run's folder (offline-run-...), in order. Ends wandb's service first, which
    may still be writing after a run's finish."""
    wandb.teardown()
    (file,) = folder.glob("run-*.wandb")
    found = []
    for data in _messages(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def of_kind(found: list[Any], kind: str) -> list[Any]:
    """The contents of records of one type: run, history, summary, config, files, exit, ..."""
    return [getattr(one, kind) for one in found if one.WhichOneof("record_type") == kind]


def _messages(data: bytes) -> Iterator[bytes]:
    assert data[:4] == HEADER, f"not a run of wandb: {data[:4]!r}"
    whole, at = b"", HEADER_BYTES
    while at + HEAD_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEAD_BYTES:  # too little room for a head: padding
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = data[at + HEAD_BYTES : at + HEAD_BYTES + size], at + HEAD_BYTES + size
        assert len(part) == size, "the log is cut short"
        assert kind in (FULL, FIRST, MIDDLE, LAST), f"no type of a record: {kind}"
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole
