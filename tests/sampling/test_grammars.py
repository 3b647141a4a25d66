"""Masks of grammars against brute force: a language with few texts is written out, and looked at token by token."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import rollout.sampling.grammars
from rollout import SamplingParams, StructuredOutputsParams
from rollout.core.schedule import Draw
from rollout.models.tokenizer import find_tokenizer
from rollout.sampling.grammars import Grammars, PendingMasks
from rollout.sampling.state import SampleState
from tests.support.tiny import write_tiny_tokenizer

EOS = 2
TOKENIZER_SIZE = 300  # 3 specials, every byte, 41 pairs of letters


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder, TOKENIZER_SIZE)
    (folder / "config.json").write_text("{}")
    found = find_tokenizer(None, folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: PreTrainedTokenizerBase) -> Grammars:
    return Grammars(tokenizer, TOKENIZER_SIZE, num_threads=2)


@pytest.fixture(scope="module")
def pieces(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes of every token that is none of the specials, read off the byte-level alphabet."""
    char_of = {char: byte for byte, char in byte_level_alphabet().items()}
    return {
        token_id: bytes(char_of[char] for char in token)
        for token, token_id in tokenizer.get_vocab().items()
        if token_id > EOS
    }


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def make_draw(
    structured: StructuredOutputsParams,
    output: Sequence[int],
    eos: Sequence[int] = (EOS,),
    stops: Sequence[int] = (),
    min_tokens: int = 0,
    position: int | None = None,
) -> Draw:
    """The draw after `output`, of a sample whose prompt is two tokens."""
    params = SamplingParams(structured_outputs=structured, stop_token_ids=stops, min_tokens=min_tokens, max_tokens=None)
    state = SampleState([7, 8, *output], 2, frozenset(eos), frozenset(stops))
    return Draw("a", 0, params, 0, 0, 2 + len(output) if position is None else position, (), state)


def ids_in(row: np.ndarray) -> set[int]:
    assert row.dtype == np.int32
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def allowed(grammars: Grammars, draw: Draw) -> set[int]:
    masks = grammars.masks({3: draw})
    assert list(masks.rows) == [3]
    assert bool(masks.failures) == (not masks.rows[3].any())
    return ids_in(masks.rows[3])


def brute_force(texts: set[bytes], output: bytes, pieces: dict[int, bytes], ends: Sequence[int] = (EOS,)) -> set[int]:
    """What may follow `output` where the whole must become one of `texts`."""
    going_on = {
        token_id
        for token_id, piece in pieces.items()
        if piece and any(text.startswith(output + piece) for text in texts)
    }
    return going_on | (set(ends) if output in texts else set())


def random_walk(
    grammars: Grammars, structured: StructuredOutputsParams, texts: set[bytes], pieces: dict[int, bytes], seed: int
) -> None:
    """Follows allowed tokens at random to the end, comparing the whole mask at every step."""
    rng = np.random.default_rng(seed)
    output: list[int] = []
    while True:
        mine = allowed(grammars, make_draw(structured, output))
        assert mine == brute_force(texts, b"".join(pieces[token_id] for token_id in output), pieces)
        token_id = int(rng.choice(sorted(mine)))
        if token_id == EOS:
            return
        output.append(token_id)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text('tea h{"\\/.*é\n1', min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 99))
def test_masks_of_choices_are_what_brute_force_says(
    grammars: Grammars, pieces: dict[int, bytes], choices: list[str], seed: int
) -> None:
    random_walk(grammars, StructuredOutputsParams(choice=choices), {text.encode() for text in choices}, pieces, seed)


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        (
            StructuredOutputsParams(regex="(te|e?a){1,2}|h"),
            [
                "h",
                *("te", "ea", "a"),
                *(a + b for a in ("te", "ea", "a") for b in ("te", "ea", "a")),
            ],
        ),
        (StructuredOutputsParams(regex="^[ht]e?$"), ["h", "t", "he", "te"]),  # anchors say nothing new
        (
            StructuredOutputsParams(json={"type": "integer", "minimum": -2, "maximum": 112}),
            ["-0", *map(str, range(-2, 113))],
        ),
        (
            StructuredOutputsParams(json='{"enum": ["tea", 7, null, [1]]}', disable_any_whitespace=True),
            ['"tea"', "7", "null", "[1]"],
        ),
        (
            StructuredOutputsParams(
                json={"type": "array", "items": {"const": 1}, "maxItems": 2}, whitespace_pattern=" ?"
            ),
            ["[" + " " * a + "]" for a in (0, 1)]
            + ["[" + " " * a + "1" + " " * b + "]" for a in (0, 1) for b in (0, 1)]
            + [
                "[" + " " * a + "1" + " " * b + "," + " " * c + "1" + " " * d + "]"
                for a, b, c, d in itertools.product((0, 1), repeat=4)
            ],
        ),
        (StructuredOutputsParams(grammar='start: "t" rest\nrest: "e" | "ea" "!"?'), ["te", "tea", "tea!"]),
        (StructuredOutputsParams(grammar='root ::= "t" rest\nrest ::= "e" | "ea" "!"?'), ["te", "tea", "tea!"]),
    ],
    ids=["regex", "anchored regex", "integers", "enum", "array with spaces", "lark", "gbnf"],
)
def test_masks_of_every_kind_are_what_brute_force_says(
    grammars: Grammars, pieces: dict[int, bytes], structured: StructuredOutputsParams, texts: list[str]
) -> None:
    for seed in range(25):
        random_walk(grammars, structured, {text.encode() for text in texts}, pieces, seed)


@pytest.mark.parametrize("vocab_size", [TOKENIZER_SIZE, 301, 320, 321, 352, 400])
def test_ids_beyond_the_tokenizer_are_never_allowed(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    grammars = Grammars(tokenizer, vocab_size, num_threads=1)
    anything = StructuredOutputsParams(regex="(?s:.)*")
    row = grammars.masks({0: make_draw(anything, [])}).rows[0]
    assert row.shape == (-(-vocab_size // 32),)
    assert EOS in ids_in(row) and max(ids_in(row)) == TOKENIZER_SIZE - 1
    assert not ids_in(row) & {0, 1}  # specials write no text


def test_a_model_with_fewer_ids_than_the_tokenizer_gets_none_that_it_has_not(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    grammars = Grammars(tokenizer, 100, num_threads=1)
    row = grammars.masks({0: make_draw(StructuredOutputsParams(regex="(?s:.)*"), [])}).rows[0]
    assert row.shape == (4,) and max(ids_in(row)) < 100 and EOS in ids_in(row)


def test_ids_that_end_come_only_where_the_grammar_may_end(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    # case SO-01
    ids = {piece: token_id for token_id, piece in pieces.items()}
    schema = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    ends = {"eos": (EOS, 1), "stops": (5, ids[b"7"], 290)}
    for index, expected_end in [(0, False), (1, False), (5, False), (6, False), (7, True)]:
        output = [ids[bytes([byte])] for byte in b'{"a":12}'[:index]]
        if index == 7:
            output = [ids[bytes([byte])] for byte in b'{"a":12}']
        may_come = allowed(grammars, make_draw(schema, output, **ends))
        assert may_come & {EOS, 1, 5, ids[b"7"], 290} == ({EOS, 1, 5, ids[b"7"], 290} if expected_end else set())
        assert bool(may_come - {EOS, 1, 5, ids[b"7"], 290}) == (not expected_end)


def test_before_min_tokens_nothing_ends_unless_nothing_else_can_come(
    grammars: Grammars, pieces: dict[int, bytes]
) -> None:
    # case SO-01
    ids = {piece: token_id for token_id, piece in pieces.items()}
    optional, a, b = StructuredOutputsParams(regex="ab?"), ids[b"a"], ids[b"b"]
    assert allowed(grammars, make_draw(optional, [a], min_tokens=1)) == {b, EOS}
    assert allowed(grammars, make_draw(optional, [a], min_tokens=2, stops=[9])) == {b}
    assert allowed(grammars, make_draw(optional, [a, b], min_tokens=9, stops=[9])) == {EOS, 9}
    assert allowed(grammars, make_draw(optional, [], min_tokens=9)) == {a}


@pytest.mark.parametrize(
    ("regex", "output", "eos", "stops", "expected"),
    [
        ("ab?", "a", (), (), {}),
        ("ab?", "ab", (), (), {0: None}),
        ("ab?", "ab", (EOS,), (), {}),  # EOS has still to come
        ("ab?", "ab", (), (5,), {0: None}),  # stop ids may come, and need not
        ("a*", "aaaa", (), (), {}),
        ("a{0,3}", "aaa", (), (), {0: None}),
        ("(a|ab)(c|)", "abc", (), (), {0: None}),
    ],
)
def test_a_sample_without_eos_ends_where_its_grammar_can_go_no_further(
    grammars: Grammars,
    pieces: dict[int, bytes],
    regex: str,
    output: str,
    eos: tuple[int, ...],
    stops: tuple[int, ...],
    expected: dict[int, None],
) -> None:
    # case SO-01
    ids = {piece: token_id for token_id, piece in pieces.items()}
    tokens = [ids[bytes([byte])] for byte in output.encode()]
    draw = make_draw(StructuredOutputsParams(regex=regex), tokens, eos, stops, position=len(tokens) + 1)
    pending = grammars.begin([draw])
    assert pending is not None
    before = ids_in(pending.future.result().rows[0])
    for _ in range(2):  # looking changes nothing
        assert grammars.completions(pending.draws, np.array([tokens[-1]])) == expected
        assert ids_in(grammars.masks({0: draw}).rows[0]) == before


def test_an_id_that_ends_is_told_also_before_min_tokens(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    draws = [make_draw(StructuredOutputsParams(regex="a"), [ids[b"a"]], stops=[9], min_tokens=5) for _ in range(4)]
    pending = grammars.begin(draws)
    assert pending is not None
    assert grammars.completions(pending.draws, np.array([EOS, 9, -1, 44])) == {0: None, 1: 9}


def test_draws_without_a_grammar_start_nothing(grammars: Grammars) -> None:
    plain = Draw("a", 0, SamplingParams(), 0, 0, 3)
    penalised = Draw("a", 0, SamplingParams(), 0, 0, 3, (), SampleState([1, 2, 3], 3))
    assert grammars.begin([plain, penalised]) is None
    pending = grammars.begin([plain, make_draw(StructuredOutputsParams(choice=["a"]), []), penalised])
    assert isinstance(pending, PendingMasks) and list(pending.draws) == list(pending.future.result().rows) == [1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=6))
def test_masks_of_one_sample_at_any_positions_in_any_order_are_those_of_a_fresh_one(
    grammars: Grammars, pieces: dict[int, bytes], steps: list[list[int]]
) -> None:
    """Forced tokens are drawn several a step, a resumed or preempted sample begins in the middle, drafts go back."""
    ids = {piece: token_id for token_id, piece in pieces.items()}
    output = [ids[bytes([byte])] for byte in b'{"tea": [1,']
    structured = StructuredOutputsParams(json_object=True)
    sample = make_draw(structured, output)
    assert sample.state is not None
    for positions in steps:
        draws = {
            index: Draw("a", 0, sample.params, 0, 0, 2 + count, (), sample.state)
            for index, count in enumerate(min(count, len(output)) for count in positions)
        }
        masks = grammars.masks(draws)
        assert not masks.failures
        for index, draw in draws.items():
            fresh = make_draw(structured, output[: draw.position - 2])
            assert ids_in(masks.rows[index]) == allowed(grammars, fresh)


STEPS = st.lists(
    st.tuples(st.lists(st.sampled_from([b"a", b"b", b"z", b"ea", b""]), max_size=5), st.integers(0, 5)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(["(a|b|ea)*", "(ab|ba|e?a){1,4}", "a{0,4}b?"]), st.booleans())
def test_masks_behind_guesses_are_those_of_a_sample_that_has_them(
    grammars: Grammars, pieces: dict[int, bytes], steps: list[tuple[list[bytes], int]], regex: str, has_eos: bool
) -> None:
    """Guesses that are drawn, guesses in whose place another token is drawn, and some that the grammar forbids."""
    # case SD-02
    ids = {piece: token_id for token_id, piece in pieces.items()} | {b"": EOS}
    structured = StructuredOutputsParams(regex=regex)
    sample = make_draw(structured, [], eos=(EOS,) if has_eos else ())
    state = sample.state
    assert state is not None
    for number, (guessed, choice) in enumerate(steps):
        drafts, known = [ids[piece] for piece in guessed], len(state.token_ids)
        output = state.token_ids[2:]
        draws = {
            number + row: replace_draw(sample, known + row, drafts[:row])
            for row in range(len(drafts) + 1)  # they stand behind other requests' draws
        }
        pending = grammars.begin([*[Draw("b", 0, SamplingParams(), 0, 1, 3)] * number, *draws.values()])
        assert pending is not None and pending.draws == draws
        masks = pending.future.result()
        drawn: list[int] = []
        for row in range(len(drafts) + 1):
            fresh = make_draw(structured, [*output, *drafts[:row]], eos=(EOS,) if has_eos else ())
            expected = grammars.masks({0: fresh})
            assert ids_in(masks.rows[number + row]) == ids_in(expected.rows[0])
            assert masks.failures.get(number + row) == expected.failures.get(0)
            may_come = sorted(ids_in(expected.rows[0]))
            is_right = row < len(drafts) and drafts[row] in may_come and choice != row
            drawn.append(drafts[row] if is_right else may_come[choice % len(may_come)] if may_come else -1)
        num_new = next((row + 1 for row, draft in enumerate([*drafts, -1]) if drawn[row] != draft), len(drafts) + 1)
        found = grammars.completions(draws, np.array([7] * number + drawn))
        assert all(index < number + num_new for index in found)
        for row in range(num_new):
            fresh = make_draw(structured, [*output, *drafts[:row]], eos=(EOS,) if has_eos else ())
            expected = grammars.completions({0: fresh}, np.array(drawn[row : row + 1]))
            assert found.get(number + row, "no") == expected.get(0, "no")
        if found or -1 in drawn[:num_new]:
            return
        state.token_ids += drawn[:num_new]


def replace_draw(draw: Draw, position: int, draft_token_ids: list[int]) -> Draw:
    return msgspec.structs.replace(draw, position=position, draft_token_ids=draft_token_ids)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("teah", min_size=1, max_size=9), min_size=1, max_size=4),
    st.lists(st.sampled_from([b"t", b"e", b"a", b"h", b"te", b"ea", b"th", b""]), max_size=6),
    st.integers(0, 99),
)
def test_what_is_told_before_a_step_is_what_its_masks_allow(
    grammars: Grammars, pieces: dict[int, bytes], choices: list[str], guessed: list[bytes], seed: int
) -> None:
    # case SD-02
    ids = {piece: token_id for token_id, piece in pieces.items()} | {b"": EOS}
    structured, drafts = StructuredOutputsParams(choice=choices), [ids[piece] for piece in guessed]
    rng, texts = np.random.default_rng(seed), {text.encode() for text in choices}
    sample = make_draw(structured, [])
    state, params = sample.state, sample.params
    assert state is not None
    while True:
        written = b"".join(pieces[token_id] for token_id in state.token_ids[2:])
        going_on = [text[len(written) :] for text in texts if text.startswith(written)]
        certain = grammars.next_tokens(state, params)
        assert EOS not in certain
        assert all(text.startswith(b"".join(pieces[token_id] for token_id in certain)) for text in going_on)
        allowed_ones = [
            b"".join(guessed[: row + 1]) for row, piece in enumerate(guessed) if piece and b"" not in guessed[:row]
        ]
        expected = [any(text.startswith(some) for text in going_on) for some in allowed_ones]
        assert grammars.num_allowed(state, params, drafts) == sum(expected)
        mine = allowed(grammars, replace_draw(sample, len(state.token_ids), []))
        assert mine == brute_force(texts, written, pieces)  # to have been asked changes nothing
        token_id = int(rng.choice(sorted(mine)))
        if token_id == EOS:
            return
        state.token_ids.append(token_id)


def test_a_text_with_one_spelling_of_the_tokenizer_is_told_as_that(
    grammars: Grammars, tokenizer: PreTrainedTokenizerBase
) -> None:
    schema = {"type": "object", "properties": {"state": {"type": "integer"}}, "required": ["state"]}
    draw = make_draw(StructuredOutputsParams(json=schema, disable_any_whitespace=True), [])
    assert draw.state is not None
    told = grammars.next_tokens(draw.state, draw.params)
    expected = tokenizer.encode('{"state":', add_special_tokens=False)
    assert told == expected[: len(told)] and len(told) >= len(expected) - 2
    ended = make_draw(StructuredOutputsParams(json=schema, disable_any_whitespace=True), [], stops=told[3:4])
    assert ended.state is not None
    assert grammars.next_tokens(ended.state, ended.params) == told[:3]  # which may not come within a text


def test_a_token_outside_the_grammar_leaves_its_sample_nothing_and_others_alone(
    grammars: Grammars, pieces: dict[int, bytes]
) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    wrong = make_draw(StructuredOutputsParams(regex="ab+"), [ids[b"a"], ids[b"z"]])
    right = make_draw(StructuredOutputsParams(regex="ab+"), [ids[b"a"], ids[b"b"]])
    for _ in range(2):
        masks = grammars.masks({0: wrong, 1: right})
        assert not masks.rows[0].any() and ids_in(masks.rows[1]) == {ids[b"b"], EOS}
        assert masks.failures == {0: f"structured_outputs.regex: the grammar does not allow token {ids[b'z']}"}
    only_wrong = grammars.masks({0: wrong})
    assert only_wrong.failures.keys() == {0} and not only_wrong.rows[0].any()


def test_a_text_that_the_vocabulary_cannot_write_does_not_come(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, 131)  # without most bytes
    (tmp_path / "config.json").write_text("{}")
    tokenizer = find_tokenizer(None, tmp_path)
    assert tokenizer is not None
    grammars = Grammars(tokenizer, 131, 1)
    a = tokenizer.get_vocab()["a"]
    masks = grammars.masks({0: make_draw(StructuredOutputsParams(choice=["\u4e00"]), [])})
    assert masks.failures == {0: "structured_outputs.choice: the vocabulary has no token that could come next"}
    longer = StructuredOutputsParams(choice=["a", "a\u4e00"])
    assert allowed(grammars, make_draw(longer, [])) == {a}
    assert allowed(grammars, make_draw(longer, [a])) == {EOS}
    pending = grammars.begin([make_draw(longer, [], eos=())])
    assert pending is not None
    assert pending.future.result().failures == {} and grammars.completions(pending.draws, np.array([a])) == {0: None}


WRONG = [
    ({"json": "[1]"}, "json=.*an object"),
    ({"json": {"type": {1}}}, "json=.*no JSON"),
    ({"json": {"type": "nope"}}, "json=.*Invalid type: nope"),
    ({"json": {"not": {}}}, "json=.*Unimplemented keys"),
    ({"json": "false"}, "json=.*"),
    ({"json": {"type": "string", "pattern": "("}}, "json=.*unclosed group"),
    ({"json": {"$ref": "#/$defs/x"}}, r"json=.*\$defs/x"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json=.*Unsatisfiable"),
    ({"json": {}, "whitespace_pattern": "("}, "whitespace_pattern=.*unclosed group"),
    ({"regex": "("}, "regex=.*unclosed group"),
    ({"regex": r"(a)\1"}, "regex=.*backreferences"),
    ({"regex": "(?=a)a"}, "regex=.*look-around"),
    ({"grammar": 'start: "a'}, "grammar=.*"),
    ({"grammar": "start: other"}, "grammar=.*other"),
    ({"grammar": 'root ::= "a" other'}, "grammar=.*other"),
    ({"choice": ["\ud800"]}, "choice=.*"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(fields)[:40] for fields, _ in WRONG])
def test_what_cannot_be_compiled_is_refused_by_the_name_of_its_field(
    grammars: Grammars, fields: dict[str, object], message: str
) -> None:
    structured = StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"(?s)^structured_outputs.{message}") as raised:
        grammars.check(SamplingParams(structured_outputs=structured), {EOS})
    assert len(str(raised.value)) < 900


def test_options_that_a_form_does_not_use_are_refused() -> None:
    for fields in (
        {"regex": "a", "disable_any_whitespace": True},
        {"choice": ["a"], "whitespace_pattern": " "},
        {"grammar": "start: /a/", "disable_additional_properties": True},
        {"json_object": True, "disable_additional_properties": True},
        {"choice": []},
        {"json_object": "yes"},
        {"json": ""},
        {"json": "{"},
    ):
        with pytest.raises(ValueError, match="structured_outputs"):
            StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"thinking_token_budget=5 is not valid: .*structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), thinking_token_budget=5)


def test_forced_tokens_must_be_what_the_grammar_allows(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    a, b = ids[b"a"], ids[b"b"]
    structured = StructuredOutputsParams(regex="ab?")
    for forced, bad in [
        ([a], None),
        ([a, b], None),
        ([a, EOS], None),
        ([a, b, 9], None),
        ([EOS], 0),
        ([b], 0),
        ([a, a], 1),
        ([a, EOS, b], 1),
        ([a, b, b], 2),
    ]:
        params = SamplingParams(structured_outputs=structured, stop_token_ids=[9], forced_token_ids=forced)
        if bad is None:
            grammars.check(params, {EOS})
        else:
            with pytest.raises(ValueError, match=rf"forced_token_ids\[{bad}\]=.*structured_outputs.regex"):
                grammars.check(params, {EOS})


def test_an_output_that_goes_on_must_begin_as_the_grammar_says(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    a, b = ids[b"a"], ids[b"b"]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab*"), stop_token_ids=[9])
    for output, bad in [([], None), ([a], None), ([a, b, b], None), ([b], 0), ([a, EOS], 1), ([a, b, 9], 2)]:
        if bad is None:
            grammars.check(params, {EOS}, output)
        else:
            with pytest.raises(ValueError, match=rf"output token {bad} is .*structured_outputs.regex"):
                grammars.check(params, {EOS}, output)


def test_white_space_between_parts_of_json_is_bounded_by_default(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    # case SO-01
    white = {token_id for token_id, piece in pieces.items() if piece.isspace()}
    rng = np.random.default_rng(0)
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}}
    for structured in (StructuredOutputsParams(json=schema | {"required": ["a"], "additionalProperties": False}),):
        for _ in range(10):
            output: list[int] = []
            while EOS not in (may_come := allowed(grammars, make_draw(structured, output))):
                output.append(int(rng.choice(sorted(may_come & white or may_come))))
            text = b"".join(pieces[token_id] for token_id in output).decode()
            assert re.search(r"\s", text) and max(map(len, re.findall(r"\s+", text))) <= 21
            json.loads(text)


def test_pretty_printed_json_is_in_the_default_grammar(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    value = {"a": [1, 2, {"b": None}], "c": "x y"}
    for text in (json.dumps(value), *(json.dumps(value, indent=indent) for indent in (1, 2, 4, "\t"))):
        forced = [ids[bytes([byte])] for byte in text.encode()]
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(json_object=True), forced_token_ids=forced, max_tokens=None
        )
        grammars.check(params, set())


def test_options_of_the_library_in_a_schema_are_heard(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}

    def accepts(text: str, **fields: Any) -> bool:
        forced = [*(ids[bytes([byte])] for byte in text.encode()), EOS]
        structured = StructuredOutputsParams(**fields)
        params = SamplingParams(structured_outputs=structured, max_tokens=None)
        grammars.check(params, {EOS})
        try:
            grammars.check(replace(params, forced_token_ids=forced), {EOS})
        except ValueError:
            return False
        return True

    array = {"type": "array", "not": {}, "x-guidance": {"lenient": True, "whitespace_pattern": "  "}}
    assert accepts("[  1]", json=array) and not accepts("[ 1]", json=array)
    assert accepts("[ 1]", json=array, whitespace_pattern=" ")
    assert not accepts("[  1]", json=array, whitespace_pattern=" ")
    assert accepts("[1]", json=array, disable_any_whitespace=True)
    assert not accepts("[  1]", json=array, disable_any_whitespace=True)
    assert accepts('{"a": [null, -1.5e3]}', json="true") and accepts("7", json={}) and not accepts("seven", json={})


def test_objects_are_closed_where_asked_also_inside(grammars: Grammars, pieces: dict[int, bytes]) -> None:
    ids = {piece: token_id for token_id, piece in pieces.items()}
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": inner}, "b": {"type": "object"}, "c": {"$ref": "#/$defs/d"}},
        "$defs": {"d": inner | {"additionalProperties": True}},
    }
    open_texts = ['{"z":1}', '{"a":[{"z":1}]}']
    texts = ['{"a":[{"properties":1}]}', '{"b":{"z":1}}', '{"c":{"z":1}}']
    for text, closed, accepted in [
        *((text, False, True) for text in open_texts + texts),
        *((text, True, False) for text in open_texts),
        *((text, True, True) for text in texts),
    ]:
        structured = StructuredOutputsParams(json=schema, disable_additional_properties=closed)
        forced = [ids[bytes([byte])] for byte in text.encode()]
        params = SamplingParams(structured_outputs=structured, forced_token_ids=[*forced, EOS], max_tokens=None)
        if accepted:
            grammars.check(params, {EOS})
        else:
            with pytest.raises(ValueError, match="forced_token_ids"):
                grammars.check(params, {EOS})
    assert "additionalProperties" not in schema  # the user's own is not changed


def test_a_grammar_is_compiled_once_and_few_are_kept(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = rollout.sampling.grammars.LLMatcher

    def counting(tokenizer: object, grammar: str, **options: object) -> object:
        compiled.append(grammar)
        return real(tokenizer, grammar, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rollout.sampling.grammars, "LLMatcher", counting)
    monkeypatch.setattr(rollout.sampling.grammars, "_NUM_KEPT", 3)
    grammars = Grammars(tokenizer, TOKENIZER_SIZE, num_threads=1)

    def check(number: int) -> None:
        schema = {"type": "integer", "minimum": number}
        grammars.check(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)), {EOS})

    for _ in range(5):
        check(0)
        grammars.masks({0: make_draw(StructuredOutputsParams(json={"type": "integer", "minimum": 0}), [])})
    assert len(compiled) == 1
    for number in (1, 2, 0, 3, 0):
        check(number)
    assert len(compiled) == 4
    check(1)  # was the one that had not been asked for longest
    assert len(compiled) == 5


def test_masks_for_a_tokenizer_with_byte_fallback_are_what_brute_force_says() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "h", "e", "l", "o", "w", "he", "ll", "llo", "hello", "\u2581w", "\u00e9"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("\u2581", "w")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(parts)
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")
    pieces = {3 + byte: bytes([byte]) for byte in range(256)}
    pieces |= {token_id: token.replace("\u2581", " ").encode() for token, token_id in vocab.items() if token_id > 258}
    grammars = Grammars(tokenizer, len(tokens), 1)
    choices = ["hello w", "hell", "\u00e9 he", "\u4e00"]
    for seed in range(12):
        random_walk(
            grammars, StructuredOutputsParams(choice=choices), {text.encode() for text in choices}, pieces, seed
        )


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    vocab = {"<unk>": 0, "hello": 1}
    built = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"structured_outputs cannot be used with this tokenizer: .*decoder"):
        Grammars(PreTrainedTokenizerFast(tokenizer_object=built), 2, 1)
