from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.launch.output import MAX_LINE, PATIENCE_S, REFRESH_S, LineAssembler, clean, prefix_for, render, wants_colour


def fed(*pieces: bytes, assembler: LineAssembler | None = None) -> list[str]:
    """All lines of a stream that comes in these pieces at once and then ends."""
    assembler = assembler or LineAssembler()
    lines = [line for piece in pieces for line in assembler.feed(piece, 0.0)]
    return lines + assembler.flush()


def is_pending(assembler: LineAssembler) -> bool:
    """Asked anew each time, which the type checker would not believe of the property."""
    return assembler.pending


def test_whole_lines_only() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"one\ntw", 0.0) == ["one"]
    assert is_pending(assembler)
    assert assembler.feed(b"o\n\nthree\n", 0.0) == ["two", "", "three"]
    assert not is_pending(assembler)
    assert assembler.flush() == []


def test_no_newline_at_the_end() -> None:
    assert fed(b"a\nb") == ["a", "b"]


def test_characters_cut_by_the_pipe() -> None:
    text = "grüße 🚀 日本\n".encode()
    assert fed(*(text[i : i + 1] for i in range(len(text)))) == ["grüße 🚀 日本"]


def test_bytes_that_are_not_text() -> None:
    assert fed(b"\xff\xfe ok \x80\n") == ["\ufffd\ufffd ok \ufffd"]
    assert fed(b"a\x00b\x07c\n") == ["a\ufffdb\ufffdc"]


def test_windows_newlines() -> None:
    assert fed(b"a\r\nb\r\n") == ["a", "b"]
    assert fed(b"a\r", b"\nb\r", b"\n") == ["a", "b"]


class TestProgressBars:
    def test_only_the_last_state_is_a_line(self) -> None:
        assert fed(b"\r 10%", b"\r 50%", b"\r100%\nnext\n") == ["100%", "next"]
        assert fed(b" 10%\r", b" 50%\r", b"100%\r", b"\n") == ["100%"]

    def test_an_erased_bar_leaves_what_follows(self) -> None:
        assert fed(b"\r 99%", b"\r      \rdone\n") == ["done"]

    def test_shown_now_and_then(self) -> None:
        assembler = LineAssembler()
        lines = []
        for step in range(100):
            now = step * 0.1
            lines += assembler.feed(f"\r{step}%".encode(), now)
            lines += assembler.tick(now)
        assert lines == [f"{step}%" for step in range(0, 100, 10)]
        assert assembler.flush() == ["99%"]

    def test_the_state_on_display_is_not_repeated(self) -> None:
        assembler = LineAssembler()
        assembler.feed(b"\r100%", 0.0)
        assert assembler.tick(0.0) == ["100%"]
        assert not assembler.pending
        assert assembler.tick(REFRESH_S) == []
        assert assembler.feed(b"\nnext\n", REFRESH_S) == ["next"]

    def test_memory_stays_small(self) -> None:
        assembler = LineAssembler()
        for step in range(2000):
            assert assembler.feed(b"\r" + b"#" * 100 + str(step).encode(), 0.0) == []
            assert len(assembler._partial) < 256
        assert assembler.flush() == ["#" * 100 + "1999"]

    def test_a_bar_wider_than_a_line(self) -> None:
        assembler = LineAssembler(max_line=64)
        lines = [line for _ in range(10) for line in assembler.feed(b"\r" + b"x" * 100 + b"\r", 0.0)]
        assert lines
        assert set("".join(lines)) == {"x"}
        assert len(assembler._partial) <= 64


class TestPatience:
    def test_a_prompt_is_shown_after_a_while(self) -> None:
        assembler = LineAssembler()
        assembler.feed(b"waiting for peer... ", 10.0)
        assert assembler.tick(10.0 + PATIENCE_S / 2) == []
        assert assembler.tick(10.0 + PATIENCE_S) == ["waiting for peer... "]
        assert not assembler.pending
        assert assembler.feed(b"here\n", 20.0) == ["here"]

    def test_the_newline_of_a_line_shown_early_is_not_an_empty_line(self) -> None:
        assembler = LineAssembler()
        assembler.feed(b"text", 0.0)
        assert assembler.tick(5.0) == ["text"]
        assert assembler.feed(b"\n\nmore\n", 6.0) == ["", "more"]

    def test_half_a_character_waits_for_the_rest(self) -> None:
        assembler = LineAssembler()
        assembler.feed("caf\u00e9".encode()[:-1], 0.0)
        assert assembler.tick(5.0) == ["caf"]
        assert assembler.feed("\u00e9".encode()[-1:] + b"\n", 6.0) == ["\u00e9"]


class TestLongLines:
    def test_cut_and_complete(self) -> None:
        text = "é" * MAX_LINE  # twice as many bytes
        lines = fed(text.encode() + b"\nshort\n")
        assert lines[-1] == "short"
        assert "".join(lines[:-1]) == text
        assert all(len(line.encode()) <= MAX_LINE for line in lines)

    def test_without_newline_memory_is_bounded(self) -> None:
        assembler = LineAssembler(max_line=100)
        lines = []
        for _ in range(50):
            lines += assembler.feed(b"x" * 30, 0.0)
            assert len(assembler._partial) <= 100
        lines += assembler.feed(b"\nend\n", 0.0)
        assert "".join(lines) == "x" * 1500 + "end"
        assert "" not in lines

    def test_garbage_that_looks_like_one_endless_character(self) -> None:
        lines = fed(b"\x80" * 1000, assembler=LineAssembler(max_line=100))
        assert "".join(lines) == "\ufffd" * 1000


class TestClean:
    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("plain\ttext", "plain\ttext"),
            ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
            ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
            ("\x1b[2Kerased\x1b[1A", "erased"),
            ("\x1b[?25lhidden cursor", "hidden cursor"),
            ("\x1b]0;title\x07text", "text"),
            ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
            ("\x1b(Bcharset", "charset"),
            ("\x1bcreset", "reset"),
            ("12\b\b34", "1234"),
            ("nul\x00", "nul\ufffd"),
            ("csi \x9b2J", "csi \ufffd2J"),
            ("end\x1b", "end"),
        ],
    )
    def test_what_would_reach_beyond_the_line_goes(self, text: str, kept: str) -> None:
        assert clean(text) == kept

    def test_off_without_prefix(self) -> None:
        assert LineAssembler(cleaned=False).feed(b"\x1b[2K\x07x\n", 0.0) == ["\x1b[2K\x07x"]


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))), st.data())
def test_text_arrives_whole_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.replace(" ", "\n").encode()
    assembler = LineAssembler(max_line=16)
    lines: list[str] = []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        lines += assembler.feed(raw[:size], 0.0)
        raw = raw[size:]
    lines += assembler.flush()
    assert "".join(lines) == text.replace(" ", "")
    assert all(len(line.encode()) <= 16 for line in lines)


@given(st.lists(st.tuples(st.binary(max_size=60), st.floats(0, 3))))
def test_any_bytes_at_any_time(pieces: list[tuple[bytes, float]]) -> None:
    assembler = LineAssembler(max_line=32)
    now, lines = 0.0, []
    for piece, pause in pieces:
        lines += assembler.feed(piece, now)
        now += pause
        lines += assembler.tick(now)
        assert len(assembler._partial) <= 32 + 2
    lines += assembler.flush()
    assert not assembler.pending
    for line in lines:
        without_colours = re.sub(r"\x1b\[[0-?]*[ -/]*m", "", line)
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", without_colours), repr(line)


def test_prefixes() -> None:
    assert prefix_for("rollout:0", 0, colour=False) == "[rollout:0] "
    assert prefix_for("a:0", 1, colour=True) != prefix_for("a:1", 2, colour=True)
    assert re.fullmatch(r"\x1b\[\d+m\[a:0\]\x1b\[0m ", prefix_for("a:0", 1000, colour=True))
    assert render(["a", "", "b"], "[w:0] ") == "[w:0] a\n[w:0] \n[w:0] b\n"
    assert render([]) == ""


def test_when_to_colour() -> None:
    assert wants_colour(True, {})
    assert not wants_colour(False, {})
    assert not wants_colour(True, {"TERM": "dumb"})
    assert not wants_colour(True, {"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert wants_colour(False, {"FORCE_COLOR": "1"})
