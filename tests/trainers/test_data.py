"""Examples from files and data sets: every row once, columns as rewards get them, mistakes named with their row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_trainers.config import TaskSection
from rollout_trainers.data import Columns, Examples, JsonLines, Parquet, open_rows
from rollout_trainers.tasks import make_task
from rollout_trainers.types import Example, Task

ROWS: list[dict[str, Any]] = [{"question": f"{i} + {i}?", "solution": str(2 * i), "level": i} for i in range(40)]
COLUMNS = Columns("question", rename={"solution": "answer"})


def write_json_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def sources(folder: Path) -> dict[str, str]:
    """The same rows in every form."""
    datasets = pytest.importorskip("datasets")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=7)
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "splits")
    return {
        "json lines": str(write_json_lines(folder / "rows.jsonl", ROWS)),
        "parquet": str(folder / "rows.parquet"),
        "a saved data set": str(folder / "saved"),
        "a saved data set with splits": str(folder / "splits"),
    }


def test_rows_are_the_same_from_every_kind_of_source(tmp_path: Path) -> None:
    for kind, source in sources(tmp_path).items():
        rows = open_rows(source)
        assert [dict(rows[i]) for i in range(len(rows))] == ROWS, kind
        examples = Examples(rows, COLUMNS)
        assert examples[3] == Example([{"role": "user", "content": "3 + 3?"}], {"answer": "6", "level": 3})
        assert [example.columns["level"] for example in examples[5:9]] == [5, 6, 7, 8]


def test_lines_of_any_length_and_script_are_read_where_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": text * count} for count, text in enumerate(("x", "ß", "你好", "\u2028a", "🦙", ""), 1)]
    lines = JsonLines(write_json_lines(tmp_path / "rows.jsonl", rows))
    assert [lines[i] for i in (5, 0, 3, 2, 4, 1, -1)] == [rows[i] for i in (5, 0, 3, 2, 4, 1, -1)]
    assert lines[1:4] == rows[1:4]


def test_prompts_are_text_messages_or_token_ids_with_a_system_message_where_there_is_none() -> None:
    chat = Columns(system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}]
    assert chat.prompt_of({"prompt": "a"}) == [system, {"role": "user", "content": "a"}]
    assert chat.prompt_of({"prompt": [{"role": "user", "content": "a"}]}) == [system, {"role": "user", "content": "a"}]
    assert chat.prompt_of({"prompt": own}) == own
    assert chat.prompt_of({"prompt": [5, 6]}) == [5, 6]
    assert Columns(chat=False).prompt_of({"prompt": "a"}) == "a"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "row 1: there is no column 'prompt', only 'question'"),
        ({"prompt": ""}, "row 1: column 'prompt' holds '': it must be text, messages, or token ids"),
        ({"prompt": 3}, "row 1: column 'prompt' holds 3"),
        ({"prompt": "a", "completions": 1}, "row 1: column 'completions' has the name of something else"),
    ],
)
def test_a_row_that_makes_no_example_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="row 1") as raised:
        Examples([{"prompt": "fine"}, row], Columns())[1]
    assert message in str(raised.value)


def test_a_source_that_is_not_there_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: there is no such file"):
        open_rows(tmp_path / "none.jsonl")
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"rows\.csv: it must be a \.jsonl, \.ndjson or \.parquet file"):
        open_rows(tmp_path / "rows.csv")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n{"a"\n')
    rows = open_rows(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: it must be a JSON object"):
        rows[1]
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: not valid JSON"):
        rows[2]


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = sources(tmp_path)["a saved data set with splits"]
    with pytest.raises(ValueError, match="there is no split 'test', only 'train'"):
        open_rows(source, "test")


def test_several_parquet_files_are_one_table(tmp_path: Path) -> None:
    sources(tmp_path)
    rows = Parquet(tmp_path / "rows.parquet", tmp_path / "rows.parquet")
    assert len(rows) == 80 and rows[41] == ROWS[1] == rows[-39]


def dataset_task(source: str, train_size: int = 20, eval_size: int = 10, seed: int = 0, **parameters: Any) -> Task:
    given = {"source": source, "prompt": "question", "rename": {"solution": "answer"}} | parameters
    return make_task(TaskSection("dataset", given, None, train_size, eval_size, seed))


def questions(examples: Sequence[Example]) -> list[str]:
    return [example.prompt[-1]["content"] for example in examples]  # type: ignore[index]


def test_a_data_set_is_a_task_whose_order_is_a_function_of_the_seed_whatever_the_file(tmp_path: Path) -> None:
    tasks = [dataset_task(source) for source in sources(tmp_path).values()]
    assert all(questions(task.train) == questions(tasks[0].train) for task in tasks)
    assert all(questions(task.evaluation) == questions(tasks[0].evaluation) for task in tasks)
    assert not set(questions(tasks[0].train)) & set(questions(tasks[0].evaluation))
    other = dataset_task(sources(tmp_path)["json lines"], seed=1)
    assert questions(other.train) != questions(tasks[0].train)


def test_no_prompt_is_there_twice_and_none_of_the_evaluation_is_trained_on(tmp_path: Path) -> None:
    train = write_json_lines(tmp_path / "train.jsonl", ROWS * 2)
    test = write_json_lines(tmp_path / "test.jsonl", ROWS[30:] * 3)
    task = dataset_task(str(train), 30, 10, evaluation_source=str(test))
    assert sorted(questions(task.train)) == sorted(row["question"] for row in ROWS[:30])
    assert sorted(questions(task.evaluation)) == sorted(row["question"] for row in ROWS[30:])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"promt": "question"}, "unknown name 'promt'; did you mean 'prompt'?"),
        ({"reward": "exact"}, "unknown name 'exact'; did you mean 'exact_answer'?"),
        ({"source": ""}, "task.parameters.source='' is not valid"),
        ({"rename": "abc"}, "task.parameters.rename='abc' is not valid: it must be new names"),
        ({"rename": {"solution": 3}}, "task.parameters.rename={'solution': 3} is not valid"),
        ({"prompt": "text"}, "row 0: there is no column 'text'"),
        ({"train_size": 35}, "task.train_size=35 is not valid"),
        ({"train_size": 1, "eval_size": 41}, "task.eval_size=41 is not valid"),
    ],
)
def test_mistakes_in_a_data_set_task_are_named(tmp_path: Path, parameters: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"source": str(write_json_lines(tmp_path / "rows.jsonl", ROWS))} | parameters
    with pytest.raises(ValueError, match=r"task\.|row") as raised:
        dataset_task(**given)
    assert message in str(raised.value)


def test_further_evaluation_sets_come_from_other_files_and_are_not_trained_on(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "train.jsonl", ROWS[:30])
    hard = write_json_lines(tmp_path / "hard.jsonl", ROWS[25:])
    task = dataset_task(str(source), 10, 5, evaluation_sets={"hard": {"source": str(hard)}})
    (name, examples), *others = task.further_evaluations.items()
    assert (name, len(examples), others) == ("hard", 5, [])
    prompts = {str(example.prompt) for example in examples}
    assert prompts <= {str([{"role": "user", "content": f"{i} + {i}?"}]) for i in range(25, 40)}
    assert prompts.isdisjoint(str(example.prompt) for example in [*task.train])
    for sets, message in (
        ({"hard": {}}, "evaluation_sets.hard={} is not valid: it must have a source"),
        ([1], r"evaluation_sets=\[1\] is not valid"),
        ({"hard": {"source": str(hard), "splt": "a"}}, "did you mean 'split'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset_task(str(source), 10, 5, evaluation_sets=sets)
