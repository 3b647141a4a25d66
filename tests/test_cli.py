"""The command `rollout`: what each subcommand prints, and that a user's fault is one sentence with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.cli import COMMANDS, main
from rollout.commands import bench, doctor
from rollout.models.pretrained import SMOLLM2

ROOT = Path(__file__).resolve().parent.parent
SMALL_ENGINE = ["--kv-cache-memory", "4MiB", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(vocab_size=131, tokenizer=True))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    requests = [
        {"prompt_token_ids": [5, 6, 7, 8 + i], "max_tokens": 3 + i, "temperature": 1.0, "seed": i} for i in range(4)
    ]
    path = tmp_path / "little.json"
    path.write_text(json.dumps({"name": "little", "ignore_eos": True, "requests": requests}))
    return path


def run_in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def one_sentence(text: str) -> str:
    """The error's line, after checking that nothing else was printed."""
    lines = [line for line in text.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert "Traceback" not in text
    return lines[0]


def test_the_help_of_every_command_loads_no_torch() -> None:
    program = (
        "import sys; from rollout.cli import COMMANDS, build_parser\n"
        "for name in COMMANDS: build_parser(name).format_help()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_without_a_command_it_shows_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"rollout {command}" in capsys.readouterr().out


def test_the_doctor_reports_this_machine() -> None:
    done = run_in_process("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == ["machine", "kernels", "openmp", "packages", "models"]
    assert report["packages"]["torch"].startswith("2.")
    assert report["openmp"]["runtimes"] == "one, as it should be"
    assert report["kernels"]
    assert SMOLLM2 in report["models"]


def test_the_doctor_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"machine", "kernels", "openmp", "packages", "models"} <= set(lines)


def test_the_doctor_names_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package-anywhere"))
    assert dict(doctor.packages())["no-such-package-anywhere"] == "not installed"


def test_generate_prints_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", model, "--prompt", "hello", "--max-tokens", "5", "--temperature", "0", *SMALL_ENGINE]
    assert main([*arguments, "--ignore-eos"]) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--ignore-eos"]) == 0
    assert capsys.readouterr().out == first
    assert first.strip()


def test_generate_prints_json_that_replays(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", model, "--prompt", "one", "--prompt", "two", "-n", "3", "--max-tokens", "6", "--json"]
    assert main([*arguments, "--seed", "7", "--ignore-eos", *SMALL_ENGINE]) == 0
    captured = capsys.readouterr().out
    lines = [json.loads(line) for line in captured.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    for line in lines:
        assert [sample["sample_index"] for sample in line["outputs"]] == [0, 1, 2]
        for sample in line["outputs"]:
            assert sample["seed"] == 7
            assert sample["finish_reason"] == "length"
            arrays = ("token_ids", "raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
            assert [len(sample[name]) for name in arrays] == [6] * len(arrays)
            assert all(value <= 0 for value in sample["sampled_logprobs"])
    assert main([*arguments, "--seed", "7", "--ignore-eos", *SMALL_ENGINE]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["outputs"] for line in again] == [line["outputs"] for line in lines]


def test_generate_applies_the_chat_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    arguments = ["generate", model, "--chat", "--system", "be kind", "--prompt", "hi", "--max-tokens", "2", "--json"]
    assert main([*arguments, *SMALL_ENGINE]) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    text = AutoTokenizer.from_pretrained(model).decode(ids)
    expected = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


def test_generate_reads_prompts_from_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert main(["generate", model, "--prompts-file", str(file), "--max-tokens", "2", "--json", *SMALL_ENGINE]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_bench_prints_one_line_a_workload(model: str, workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, str(workload), str(workload), "--startup", *SMALL_ENGINE]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["workload"] for line in lines] == ["startup", "little", "little"]
    for line in lines:
        assert list(line) == ["engine", "workload", "tokens", "seconds", "tokens_per_second"]
        assert line["engine"] == "rollout"
        assert line["seconds"] > 0
    assert [line["tokens"] for line in lines] == [1, 3 + 4 + 5 + 6, 3 + 4 + 5 + 6]


def test_generate_speculates_where_it_is_told_to(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", model, "--prompt", "hello hello hello", "--max-tokens", "20", "--temperature", "0"]
    arguments += ["--json", "--ignore-eos", *SMALL_ENGINE]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert main([*arguments, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']) == 0
    assert capsys.readouterr().out == plain


def test_bench_reports_what_was_guessed_and_guesses_no_sample_that_it_has_seen(
    model: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"method": "suffix", "only_if_faster": False}
    assert main(["bench", model, str(workload), "--speculative-config", json.dumps(config), *SMALL_ENGINE]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["tokens"] == 18
    assert 0 <= line["accepted_draft_tokens"] <= line["draft_tokens"]
    assert line["accepted_draft_tokens"] < 12  # of the 14 that another pass with the same seeds could guess


def test_bench_says_what_the_machine_allows_and_where_the_time_goes(
    model: str, workload: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.commands.roofline._SECONDS", 0.0)
    assert main(["bench", model, str(workload), "--roofline", "--profile", *SMALL_ENGINE]) == 0
    out = capsys.readouterr().out
    assert "GFLOP/s" in out and "that matrix products alone allow" in out
    for part in ("matrix products", "attention", "sampling", "other kernels", "host", "all"):
        assert any(line.startswith(f"  {part} ") for line in out.splitlines())


def test_every_workload_that_we_ship_is_valid() -> None:
    names = [bench.read_workload(path)["name"] for path in sorted((ROOT / "scripts/bench/workloads").glob("*.json"))]
    assert names == ["grpo", "grpo_small", "long_context", "shared_prefix", "single"]


def test_the_process_started_in_the_past() -> None:
    program = "from rollout.commands.bench import seconds_since_process_start as age; print(age())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert 0 < float(done.stdout) < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "no/such/model", "--prompt", "x"], "not a folder"),
        (["generate", SMOLLM2], "--prompt TEXT"),
        (["generate", SMOLLM2, "--prompt", "x", "--system", "y"], "--chat"),
        (["generate", SMOLLM2, "--prompt", "x", "--top-p", "2"], "top_p=2.0"),
        (["generate", SMOLLM2, "--prompt", "x", "--block-size", "0"], "block_size=0"),
        (["generate", SMOLLM2, "--prompts-file", "no/such/file"], "no/such/file"),
        (["generate", SMOLLM2, "--prompt", "x", "--speculative-config", "ngram"], "--speculative-config ngram is not"),
        (["generate", SMOLLM2, "--prompt", "x", "--speculative-config", '{"method": "x"}'], "method='x' is not valid"),
        (["generate", SMOLLM2, "--prompt", "x", "--speculative-config", "[]"], "speculative_config=[] is not valid"),
        (["bench", SMOLLM2], "nothing to measure"),
        (["bench", SMOLLM2, "--startup", "--profile"], "--profile needs workload files"),
        (["bench", SMOLLM2, "no/such/workload.json"], "no/such/workload.json"),
        (["bench", SMOLLM2, "pyproject.toml"], "is not JSON"),
        (["bench", SMOLLM2, "--startup", "--passes", "0"], "--passes 0"),
        (["train", "no/such/recipe.yaml"], "no/such/recipe.yaml"),
        (["train", "recipe.yaml", "steps"], "key=value"),
    ],
)
def test_a_users_fault_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    sentence = one_sentence(capsys.readouterr().err)
    assert sentence.startswith(f"rollout {arguments[0]}: error: ")
    assert message in sentence


def test_a_wrong_key_in_a_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {SMOLLM2}\nstepz: 3\n")
    assert main(["train", str(recipe)]) == 2
    assert "stepz" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "needs a name"),
        ('{"name": "x", "requests": []}', "needs a name"),
        ('{"name": "x", "requests": [{"max_tokens": 1}]}', "request 0 has no prompt_token_ids"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        bench.read_workload(path)


def test_traceback_shows_where_it_went_wrong() -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        main(["--traceback", "bench", SMOLLM2])
