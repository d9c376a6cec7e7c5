from __future__ import annotations

import pickle

import pytest

from aiorlinf.errors import AiorlinfError
from aiorlinf.launch.job import Stop
from aiorlinf.launch.result import (
    UNKNOWN_EXIT,
    LaunchResult,
    WorkerFailed,
    describe_exit,
    failure_report,
    is_consequence,
    list_names,
    shell_code,
    signal_name,
)


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "ended well"),
        (3, "failed with exit code 3"),
        (-9, "was killed by SIGKILL (9), perhaps by the system for want of memory"),
        (-11, "was killed by SIGSEGV (11)"),
        (-64, "was killed by SIGRTMAX (64)"),
        (-40, "was killed by signal 40 (40)"),
        (UNKNOWN_EXIT, "failed with exit code 255, or somebody else in this process collected its status"),
    ],
)
def test_how_a_process_ended(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text


def test_codes() -> None:
    assert [shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
    assert signal_name(15) == "SIGTERM"


def test_good_result() -> None:
    result = LaunchResult({"a:0": 0}, None, (), 1.0)
    assert result.ok
    assert result.returncode == 0
    assert result.check() is result
    assert failure_report(result) == []


def test_failure() -> None:
    result = LaunchResult({"a:0": -15, "b:0": 3}, "b:0", ("Traceback...", "ValueError: no", ""), 2.0, Stop("failure"), 1.5)
    assert not result.ok
    assert result.returncode == 3
    with pytest.raises(WorkerFailed) as caught:
        result.check()
    error = caught.value
    assert (error.worker, error.returncode, error.stderr) == ("b:0", 3, ("Traceback...", "ValueError: no", ""))
    assert str(error) == "worker b:0 failed with exit code 3: ValueError: no [after 1.500 s]"
    assert isinstance(error, AiorlinfError)
    assert failure_report(result) == [
        "aiorlinf: worker b:0 failed with exit code 3 after 1.5 s; the other worker was ended",
        "aiorlinf: the last lines of its stderr (b:0):",
        "    Traceback...",
        "    ValueError: no",
        "    ",
    ]


def test_what_was_just_shown_is_not_said_again() -> None:
    result = LaunchResult({"b:0": 3}, "b:0", ("Traceback...", "ValueError: no", ""), 2.0, Stop("failure"), 1.5)
    assert failure_report(result, shown=True) == ["aiorlinf: worker b:0 failed with exit code 3 after 1.5 s", "    ValueError: no"]


def test_silent_failure_of_the_only_worker() -> None:
    result = LaunchResult({"a:0": -11}, "a:0", (), 2.0, Stop("failure"))
    assert result.returncode == 139
    assert failure_report(result) == ["aiorlinf: worker a:0 was killed by SIGSEGV (11)", "aiorlinf: it wrote nothing to its stderr"]


@pytest.mark.parametrize(
    ("stop", "code"), [(Stop("signal", 2), 130), (Stop("signal", 15), 143), (Stop("timeout"), 124), (Stop("cancel"), 1)]
)
def test_ended_from_outside(stop: Stop, code: int) -> None:
    result = LaunchResult({"a:0": -15}, None, (), 2.0, stop)
    assert result.returncode == code
    assert not result.ok
    assert result.check() is result


def test_names_of_workers() -> None:
    assert list_names({"b:0", "a:10", "a:2"}) == "a:2, a:10, b:0"
    assert list_names([f"a:{rank}" for rank in range(20)], 2) == "a:0, a:1 and 18 more"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], False),
        (["Traceback (most recent call last):", "aiorlinf.errors.PeerLost: recv: a:0#1 is gone"], True),
        (["aiorlinf.errors.PeerLeft: recv: a:0 left", "", "During handling of ...", "RuntimeError: no"], True),
        (["  | aiorlinf.errors.PeerRestarted: x"], True),
        (["ValueError: aiorlinf.errors.PeerLost: in a text"], False),
        (["aiorlinf.errors.PeerError: x", "aiorlinf.errors.RemoteError: x"], False),
    ],
)
def test_who_failed_for_the_loss_of_another(lines: list[str], expected: bool) -> None:
    assert is_consequence(lines) is expected


def test_the_error_travels() -> None:
    error = pickle.loads(pickle.dumps(WorkerFailed("a:0", 1, ["x"], elapsed=1.0)))
    assert (error.worker, error.returncode, error.stderr, error.elapsed) == ("a:0", 1, ("x",), 1.0)
