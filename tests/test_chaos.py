"""scripts/chaos: a short form of the real thing, and what its ledger makes of what it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.chaoses.__main__ import main, render
from scripts.chaoses.conductor import ORDINARY, Asked, Outcome, _Conductor
from scripts.chaoses.ledger import SLACK_S, Ledger
from scripts.chaoses.messages import Head, Stream, look, make

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 150


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_job_lives_through_it() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "chaos"), "--faults", "8", "--workers", "5", "--rate", "4", "--heartbeat", "3", "--seed", "5"],
        capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "AIORLINF_PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n| wrong | nothing |\n" in done.stdout
    assert "| faults | 8: " in done.stdout


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--workers", "2"], ["--minutes", "0"], ["--rate", "-1"], ["--seed", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert "usage: scripts/chaos" in capsys.readouterr().err


def test_what_was_found_is_shown() -> None:
    outcome = Outcome(faults=Counter({"kill": 3, "cut": 4}), counts=Counter({"received": 1234}), wrong=["something"], seconds=60.0, rests=2)
    text = render(outcome, 9)
    assert "| ran | 60 s (seed 9), 2 times at rest |" in text
    assert "| faults | 7: kill 3, cut 4, freeze 0" in text
    assert "| received | 1,234 |" in text
    assert text.endswith("\n\nsomething\n")


# ---- the ledger

HEAD = Head(Stream("a:0", 1, "b:0", 1), 0)
LATER = 100.0


def ledger() -> Ledger:
    """Two workers that have been there for long."""
    made = Ledger()
    made.lives.joined("a:0", 1, 0.0)
    made.lives.joined("b:0", 1, 0.0)
    return made


def test_a_message_that_arrives_is_no_news() -> None:
    for first in ("received", "sent"):
        made = ledger()
        made.sends(HEAD, 50.0)
        if first == "received":
            made.received(HEAD)
            made.sent(HEAD, 51.0, "done")
        else:
            made.sent(HEAD, 51.0, "done")
            made.received(HEAD)
        made.all_at_rest(LATER)
        assert made.wrong == []


def test_the_receiver_may_tell_first() -> None:
    made = ledger()
    made.received(HEAD)
    made.sends(HEAD, 50.0)
    made.sent(HEAD, 51.0, "done")
    made.all_at_rest(LATER)
    assert made.wrong == []


def test_a_message_that_is_lost_is_seen() -> None:
    made = ledger()
    made.sends(HEAD, 50.0)
    made.sent(HEAD, 51.0, "done")
    made.all_at_rest(LATER)
    assert made.wrong == [
        "message 0 of a:0#1 to b:0 (tag 1) was done, and has not arrived",
        "1 messages of a:0#1 to b:0#1 tag 1 are lost",
    ]


def test_with_a_link_or_a_worker_it_may_be_lost() -> None:
    for what in ("cut", "sender", "receiver", "young"):
        made = ledger()
        if what == "young":
            made.lives.ends("b:0", 40.0)
            made.lives.joined("b:0", 2, 49.0)
        made.sends(HEAD, 50.0)
        made.sent(HEAD, 51.0, "done")
        if what == "cut":
            made.lives.cut("b:0", "a:0", 51.5)
        elif what == "sender":
            made.lives.ends("a:0", 60.0)
        elif what == "receiver":
            made.lives.ends("b:0", 60.0)
        made.all_at_rest(LATER)
        assert made.wrong == [], what


def test_a_cut_long_before_explains_nothing() -> None:
    made = ledger()
    made.lives.cut("a:0", "b:0", 50.0 - SLACK_S - 1)
    made.sends(HEAD, 50.0)
    made.sent(HEAD, 51.0, "done")
    made.all_at_rest(LATER)
    assert len(made.wrong) == 2


def told(*events: tuple[Any, ...]) -> Outcome:
    """What comes of what a worker said of itself and of its link to another; both have been there for long, and nothing else was done."""
    outcome = Outcome()
    conductor = _Conductor(Asked(workers=2), None, outcome)  # type: ignore[arg-type]  # nothing is started
    for address in conductor.names:
        conductor.ledger.lives.joined(address, 1, 0.0)
    for event in events:
        conductor.take_event(conductor.slots["w:0"], *event)
    conductor.judge(LATER)
    conductor.ledger.all_at_rest(LATER)
    return outcome


OUT = Head(Stream("w:0", 1, "w:1", 1), 0)


def test_a_cut_from_which_a_link_comes_back_explains_neither_a_loss_nor_an_error() -> None:
    for comes_back, wrong in ((True, 2), (False, 0)):
        cut = ("cut", "w:0", "w:1", comes_back, 50.5)
        outcome = told(("sends", OUT, 50.0), cut, ("sent", OUT, "done", "", 51.0))
        assert len(outcome.wrong) == wrong, "lost"
        outcome = told(("sends", OUT, 50.0), cut, ("sent", OUT, "failed", "PeerLost: no", 51.0))
        assert len(outcome.wrong) == wrong // 2, "failed"
        outcome = told(("sends", OUT, 50.0), cut, ("received", OUT, 50.7), ("sent", OUT, "done", "", 51.0))
        assert outcome.wrong == []


def test_a_link_that_does_not_come_back_is_seen() -> None:
    cut = ("cut", "w:0", "w:1", True, 50.0)
    assert told(cut, ("restored", "w:0", "w:1", 50.0, 50.2)).counts["links between hosts restored"] == 1
    assert told(cut, ("not restored", "w:0", "w:1", 50.0, 55.0)).wrong == [
        "the link of w:0 to w:1 was cut by the network and not restored, and nothing was done to either"
    ]


def test_a_send_that_fails_without_a_reason_is_seen() -> None:
    made = ledger()
    made.sends(HEAD, 50.0)
    made.lives.joined("c:0", 1, 52.0)  # time goes on
    made.sent(HEAD, 51.0, "failed", "PeerLost: no")
    made.judge(52.0)
    assert made.wrong == [], "the reason may still be told"
    made.judge(LATER)
    assert made.wrong == ["message 0 of a:0#1 to b:0 (tag 1) failed, and nothing was done to either or to their link: PeerLost: no"]
    for what in ("cut", "killed"):
        made = ledger()
        if what == "cut":
            made.lives.cut("a:0", "b:0", 50.5)
        else:
            made.lives.ends("b:0", 50.5)
        made.sends(HEAD, 50.0)
        made.sent(HEAD, 51.0, "failed", "PeerLost: yes")
        made.judge(LATER)
        assert made.wrong == [], what


def test_a_send_that_does_not_end_is_seen() -> None:
    made = ledger()
    made.sends(HEAD, 50.0)
    made.all_at_rest(LATER)
    assert made.wrong == ["message 0 of a:0#1 to b:0 (tag 1) is not over, 50.0 s after it began"]


def test_items_of_a_channel() -> None:
    made = ledger()
    for item, outcome in (("a:0#1/x", "done"), ("y", "done"), ("a:0#1/z", "cancelled"), ("u", "failed")):
        made.puts("c", item)
        made.was_put("c", item, outcome, 50.0)  # type: ignore[arg-type]  # one of them
    for item in ("a:0#1/x", "a:0#1/z", "a:0#1/x"):
        made.got("c", item)
    made.drained("c", leased=False)
    assert made.wrong == [
        "c: a:0#1/x came 2 times",
        "c: a:0#1/z was got, although its put was cancelled",
        "c: 1 items are lost (0 may be): y",
    ]
    made = ledger()
    made.lives.cut("a:0", "channel.c:0", 51.0)
    made.puts("c", "a:0#1/z")
    made.was_put("c", "a:0#1/z", "cancelled", 50.0)
    made.got("c", "a:0#1/z")
    made.drained("c", leased=False)
    assert made.wrong == [], "the word of it was cut off with the link"


def test_items_that_may_be_lost_or_come_again() -> None:
    for leased, what, wrong in ((False, "consumer", 0), (True, "consumer", 1), (True, "channel", 0), (False, "nothing", 1)):
        made = ledger()
        made.puts("c", "y")
        made.was_put("c", "y", "done", 50.0)
        if what == "consumer":
            made.may_lose("c", 8)
        elif what == "channel":
            made.channel_lost("c")
        made.drained("c", leased=leased)
        assert len(made.wrong) == wrong
        made.puts("c", "z")
        made.got("c", "z")
        made.got("c", "z")
        made.drained("c", leased=True)
        assert len(made.wrong) == wrong, "twice, with a lease"


def test_a_message_shows_whether_it_is_whole() -> None:
    for size in (0, 1, 5000):
        message = make(HEAD, size)
        assert look(message) == (HEAD, "")
    message = make(HEAD, 5000)
    message[3]["payload"][4000] += 1
    assert look(message) == (HEAD, "it is not what was sent")
    assert "elements arrived" in look((*message[:2], 10, message[3]))[1]


def test_what_nobody_has_seen_of_an_ordinary_end_is_no_complaint_with_and_without_its_traceback() -> None:
    seen = "12:00 aiorlinf the error of send, begun at life.py:308, was never looked at: "
    trace = 'Traceback (most recent call last):\n  File "life.py", line 1\n'
    ordinary = f"{seen}PeerLeft: send: w:2#7 closed\n{seen}PeerLost: send: gone\n{trace}aiorlinf.errors.PeerLost: send: gone\n"
    other = f"a line\n{seen}ValueError: it is bad\n{trace}ValueError: it is bad\n"
    assert ORDINARY.sub("", ordinary + other + ordinary) == other
