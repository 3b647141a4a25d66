"""Reads the record file of an offline W&B run, without W&B's own (removed) reader."""

from __future__ import annotations

import json
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Any]:
    """The records of a `.wandb` file, each checked against its checksum, up to one that is still being written."""
    data = path.read_bytes()
    if not data:
        return []
    assert data[:4] == b":W&B", "not a W&B record file"
    records, parts, at = [], b"", 7
    while at < len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        if at + HEADER.size > len(data):
            break
        checksum, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if at + length > len(data):
            break
        payload = data[at : at + length]
        at += length
        assert zlib.crc32(payload, zlib.crc32(bytes([kind]))) == checksum, "a record is damaged"
        parts = payload if kind in (FULL, FIRST) else parts + payload
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made at import
            record.ParseFromString(parts)
            records.append(record)
    return records


def read_finished_records(path: Path) -> list[Any]:
    """The records of a run that was finished: W&B's process writes the last ones a little after `finish` returns."""
    deadline = time.monotonic() + 60
    while True:
        records = read_records(path)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        assert time.monotonic() < deadline, f"{path} is not finished"
        time.sleep(0.01)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The logged rows of a finished run's `.wandb` file, in order."""
    rows = []
    for record in read_finished_records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows
