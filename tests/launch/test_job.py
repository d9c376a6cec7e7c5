from __future__ import annotations

from aiorlinf.launch.job import JobState, Order, Phase, Stop


def test_all_do_well() -> None:
    job = JobState(["a:0", "b:0"])
    assert job.exited("a:0", 0) is Order.NOTHING
    assert job.phase is Phase.RUNNING
    assert job.exited("b:0", 0) is Order.NOTHING
    assert (job.phase, job.failed, job.stopped) == (Phase.ENDED, None, None)
    assert job.returncodes == {"a:0": 0, "b:0": 0}


def test_the_first_failure_ends_the_job_and_is_the_one_named() -> None:
    job = JobState(["a:0", "b:0", "c:0"])
    assert job.exited("b:0", 3) is Order.TERMINATE
    assert job.exited("a:0", 7) is Order.NOTHING
    assert job.exited("c:0", -15) is Order.NOTHING
    assert (job.phase, job.failed, job.stopped) == (Phase.ENDED, "b:0", Stop("failure"))


def test_the_grace_ends_once() -> None:
    job = JobState(["a:0", "b:0"])
    assert job.grace_over() is Order.NOTHING
    job.exited("a:0", 1)
    assert job.grace_over() is Order.KILL
    assert job.grace_over() is Order.NOTHING
    job.exited("b:0", -9)
    assert job.grace_over() is Order.NOTHING


def test_asked_twice() -> None:
    job = JobState(["a:0"])
    assert job.stop(Stop("signal", 2)) is Order.TERMINATE
    assert job.stop(Stop("signal", 15)) is Order.KILL
    assert job.phase is Phase.KILLING
    job.exited("a:0", -9)
    assert job.failed is None
    assert job.stopped == Stop("signal", 2)
    assert job.stop(Stop("signal", 2)) is Order.KILL  # for what it left behind


def test_failures_while_ending_are_not_causes() -> None:
    job = JobState(["a:0", "b:0"])
    job.stop(Stop("timeout"))
    assert job.exited("a:0", 1) is Order.NOTHING
    assert job.failed is None


class TestHolding:
    """A worker says that it failed for the loss of another."""

    def test_the_other_is_the_cause(self) -> None:
        job = JobState(["a:0", "b:0", "c:0"])
        assert job.exited("b:0", 1, consequence=True) is Order.HOLD
        assert job.exited("c:0", 1, consequence=True) is Order.NOTHING
        assert job.failed == "b:0"
        assert job.exited("a:0", 3) is Order.TERMINATE
        assert (job.failed, job.phase, job.stopped) == ("a:0", Phase.ENDED, Stop("failure"))

    def test_nobody_else_fails(self) -> None:
        job = JobState(["a:0", "b:0"])
        job.exited("b:0", 1, consequence=True)
        assert job.hold_over() is Order.TERMINATE
        assert job.hold_over() is Order.NOTHING
        assert job.exited("a:0", -15) is Order.NOTHING
        assert job.failed == "b:0"

    def test_the_hold_is_over_when_the_cause_is_known(self) -> None:
        job = JobState(["a:0", "b:0", "c:0"])
        job.exited("b:0", 1, consequence=True)
        job.exited("a:0", 3)
        assert job.hold_over() is Order.NOTHING
        assert job.phase is Phase.ENDING

    def test_somebody_does_not_want_to_wait(self) -> None:
        job = JobState(["a:0", "b:0"])
        job.exited("b:0", 1, consequence=True)
        assert job.stop(Stop("signal", 2)) is Order.TERMINATE
        assert (job.failed, job.stopped) == ("b:0", Stop("failure"))

    def test_the_others_end_well(self) -> None:
        job = JobState(["a:0", "b:0"])
        job.exited("b:0", 1, consequence=True)
        assert job.exited("a:0", 0) is Order.NOTHING
        assert (job.failed, job.phase) == ("b:0", Phase.ENDED)

    def test_a_good_end_is_never_a_consequence(self) -> None:
        job = JobState(["a:0", "b:0"])
        assert job.exited("b:0", 0, consequence=True) is Order.NOTHING
        assert job.phase is Phase.RUNNING


def test_the_last_one_fails() -> None:
    job = JobState(["a:0"])
    job.exited("a:0", 1)
    assert (job.phase, job.failed) == (Phase.ENDED, "a:0")


def test_not_started_after_all() -> None:
    job = JobState(["a:0", "b:0"])
    job.stop(Stop("error"))
    phases = []
    job.dropped("b:0")
    phases.append(job.phase)
    job.exited("a:0", -15)
    phases.append(job.phase)
    assert phases == [Phase.ENDING, Phase.ENDED]
    assert job.returncodes == {"a:0": -15}
