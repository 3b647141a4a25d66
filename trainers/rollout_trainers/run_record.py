"""`run.json`: what a run's folder is, for whoever finds it: a resumed run, an export, people.

`status` is "unfinished" from the run's first moment on, and "finished" only once its trained model stands in `model/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_trainers.durable import write_text

RUN_FILE = "run.json"


def write_record(directory: Path, record: Mapping[str, Any], is_finished: bool) -> None:
    """Replaces the record of the run in `directory`."""
    status = "finished" if is_finished else "unfinished"
    text = json.dumps({"status": status, **record}, indent=2, ensure_ascii=False, default=str)
    write_text(directory / RUN_FILE, text + "\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """The record of the run in `directory`; None where there is none."""
    path = directory / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
