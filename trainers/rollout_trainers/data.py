"""Examples from files and data sets: JSON lines, parquet, and Hugging Face `datasets`.

Nothing is made of a row before a step asks for its example. Which examples a step takes is a pure function of the seed
and the step (`producer.select_examples`), so that a resumed run goes on where it was, without a place to save.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from rollout_trainers.types import Example, Prompt

Row = Mapping[str, Any]

# Names that reward functions are called with beside the columns.
RESERVED = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "finish_reasons",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)


class JsonLines(Sequence[Row]):
    """The rows of a file with one JSON object a line, read from the disk when they are asked for; empty lines are none.

    Raises `ValueError` with the line's number for one that is no object.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._places: list[tuple[int, int]] = []  # (offset, number) of each line
        with self._path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._places.append((offset, number))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        offset, number = self._places[index]
        with self._path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self._path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self._path}, line {number}: it must be a JSON object, and is {row!r}")
        return row


class Parquet(Sequence[Row]):
    """The rows of a parquet file, or of several as one table. It is read once, into Arrow's compact memory."""

    def __init__(self, *paths: str | Path) -> None:
        from pyarrow import concat_tables, parquet  # an optional part, of `datasets`

        self._table = concat_tables([parquet.read_table(path) for path in paths])

    def __len__(self) -> int:
        return self._table.num_rows

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self._table.slice(place, 1).to_pylist()[0]


def open_rows(source: str | Path, split: str = "train", subset: str | None = None) -> Sequence[Row]:
    """The rows of a .jsonl, .ndjson or .parquet file, of a folder that `datasets` has saved, or of a data set that
    `datasets.load_dataset` finds, of which `split` and `subset` choose a part.

    Raises `ValueError` for a file that is not there, or of another kind.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".ndjson", ".parquet"):
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        return Parquet(path) if path.suffix == ".parquet" else JsonLines(path)
    if path.is_file():
        raise ValueError(f"{path}: it must be a .jsonl, .ndjson or .parquet file")
    import datasets  # an optional part: only recipes that name a data set need it

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(path))
    else:
        loaded = datasets.load_dataset(str(source), subset)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(f"{source}: there is no split {split!r}, only {', '.join(map(repr, loaded))}")
        loaded = loaded[split]
    return loaded  # type: ignore[return-value] - it has a length, and rows by number


@dataclass(frozen=True, slots=True)
class Columns:
    """How a row becomes an example.

    `prompt` is the column with the prompt: text, messages, or token ids. With `chat` text becomes one user message;
    `system_prompt` goes before messages that have none. The other columns are the example's, some under other names:
    `rename={"solution": "answer"}`.
    """

    prompt: str = "prompt"
    chat: bool = True
    system_prompt: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)

    def prompt_of(self, row: Row) -> Prompt:
        """Raises `ValueError` for a row without a prompt."""
        if self.prompt not in row:
            raise ValueError(f"there is no column {self.prompt!r}, only {', '.join(map(repr, row))}")
        value = row[self.prompt]
        if isinstance(value, str) and value:
            if not self.chat:
                return value
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise ValueError(f"column {self.prompt!r} holds {value!r}: it must be text, messages, or token ids")
        if isinstance(value[0], Mapping):
            messages = [dict(message) for message in value]
            if self.system_prompt and messages[0].get("role") != "system":
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            return messages
        return list(value)

    def example(self, row: Row) -> Example:
        """Raises `ValueError` for a row without a prompt, and for a column that rewards could not be called with."""
        columns = {self.rename.get(name, name): value for name, value in row.items() if name != self.prompt}
        taken = RESERVED & columns.keys()
        if taken:
            raise ValueError(f"column {min(taken)!r} has the name of something else that rewards get: rename it")
        return Example(self.prompt_of(row), columns)


class Examples(Sequence[Example]):
    """The examples of some rows, each made when it is asked for."""

    def __init__(self, rows: Sequence[Row], columns: Columns, places: Sequence[int] | None = None) -> None:
        """`places` are the rows' numbers, in order; None: all."""
        self._rows = rows
        self._columns = columns
        self._places = range(len(rows)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Examples: ...

    def __getitem__(self, index: int | slice) -> Example | Examples:
        if isinstance(index, slice):
            return Examples(self._rows, self._columns, self._places[index])
        place = int(self._places[index])
        try:
            return self._columns.example(self._rows[place])
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from error

    def take(self, indices: Sequence[int]) -> Examples:
        """Those with these indices, in this order."""
        return Examples(self._rows, self._columns, [self._places[index] for index in indices])

    def distinct(self, other_than: Examples | None = None) -> Examples:
        """The first example of each prompt, and none with a prompt that is in `other_than`. Goes through all once."""
        seen = set() if other_than is None else set(map(other_than._key, other_than._places))
        places = []
        for place in self._places:
            key = self._key(place)
            if key not in seen:
                seen.add(key)
                places.append(place)
        return Examples(self._rows, self._columns, places)

    def _key(self, place: int) -> bytes:
        try:
            prompt = self._columns.prompt_of(self._rows[int(place)])
        except ValueError as error:
            raise ValueError(f"row {place}: {error}") from error
        return hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=16).digest()
