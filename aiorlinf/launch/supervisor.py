"""Runs the workers of one job: starts them, passes on their output, and sees to it that they all end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiorlinf.launch.guard import Guard
from aiorlinf.launch.job import JobState, Order, Phase, Stop
from aiorlinf.launch.output import LineAssembler, prefix_for, render
from aiorlinf.launch.printer import Printer, Sink
from aiorlinf.launch.process import Stream, WorkerProcess
from aiorlinf.launch.result import LaunchResult, WorkerFailed, describe_exit, failure_report, is_consequence, list_names, signal_name

__all__ = ["TAIL_LINES", "Supervisor", "WorkerCommand"]

TAIL_LINES = 50
"""Lines of each worker's stderr that are kept to be shown again."""

_TAIL_WIDTH = 2000  # characters of one such line
_RIGHT_ABOVE_LINES = 10
"""After so few lines of others, what a failed worker wrote last need not be printed again."""

_TICK_S = 0.25
_HOLD_S = 3.0  # seconds that the worker whose loss another one reports has to end, and so to be known as the cause
_AFTER_KILL_S = 5.0
_FLUSH_S = 2.0  # seconds without progress after which the output of an interrupted job is given up


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What to start as one worker: its address, its command line, its whole environment."""

    worker: str
    argv: Sequence[str]
    env: Mapping[str, str]


class _Output:
    """The two streams of one worker on their way to the printer."""

    def __init__(self, printer: Printer, worker: str, index: int, *, prefix: bool, colours: Mapping[Stream, bool]) -> None:
        self._printer = printer
        self._assemblers: dict[Stream, LineAssembler] = {"out": LineAssembler(cleaned=prefix), "err": LineAssembler(cleaned=prefix)}
        self._prefixes = {stream: prefix_for(worker, index, colour=colours[stream]) if prefix else "" for stream in self._assemblers}
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.tail_at = 0  # lines that the printer had been given when the last of these was among them

    @property
    def pending(self) -> bool:
        return any(assembler.pending for assembler in self._assemblers.values())

    def feed(self, stream: Stream, data: bytes, now: float) -> None:
        self._pass(stream, self._assemblers[stream].feed(data, now))

    def tick(self, now: float) -> None:
        for stream, assembler in self._assemblers.items():
            self._pass(stream, assembler.tick(now))

    def flush(self) -> None:
        for stream, assembler in self._assemblers.items():
            self._pass(stream, assembler.flush())

    def _pass(self, stream: Stream, lines: list[str]) -> None:
        if lines:
            self._printer.write(stream, render(lines, self._prefixes[stream]))
            if stream == "err":
                self.tail_at = self._printer.lines
                self.tail.extend(line[:_TAIL_WIDTH] for line in lines[-TAIL_LINES:])


class Supervisor:
    """One job, from its first process to its last. Made on the loop that runs it; `stop` belongs to that loop too."""

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        sinks: tuple[Sink, Sink],
        *,
        grace: float,
        prefix: bool,
        colours: tuple[bool, bool] = (False, False),
        timeout: float | None = None,
    ) -> None:
        self._commands = commands
        self._grace = grace
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._state = JobState(command.worker for command in commands)
        self._printer = Printer(*sinks, on_full=self._pause, on_low=self._resume)
        colour_of: dict[Stream, bool] = {"out": colours[0], "err": colours[1]}
        self._outputs = {
            command.worker: _Output(self._printer, command.worker, index, prefix=prefix, colours=colour_of)
            for index, command in enumerate(commands)
        }
        self._processes: dict[str, WorkerProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}  # of the workers of which something may still run
        self._started = False  # the last worker that will be started was
        self._unstartable: WorkerFailed | None = None
        self._over = asyncio.Event()  # nothing of any worker runs any more
        self._hurried = asyncio.Event()  # do not wait for the output to be read
        self._timers: list[asyncio.TimerHandle] = []
        self._ticking = False
        self._started_at = time.monotonic()
        self._failed_after: float | None = None

    async def run(self) -> LaunchResult:
        """Start all workers, return when nothing of them is left and their output is written.

        Raises:
            WorkerFailed: a worker could not even be started.

        Cancelling ends the job as `stop` does (cancelling again: at once), and is passed on when everything has ended.
        """
        cancelled = False
        try:
            with contextlib.closing(Guard()) as guard:
                starter = self._loop.create_task(self._start(guard), name="aiorlinf-start")
                if self._timeout is not None:
                    self._timers.append(self._loop.call_later(self._timeout, self._out_of_time))
                while not self._over.is_set():
                    try:
                        await self._over.wait()
                    except asyncio.CancelledError:
                        cancelled = True
                        self.stop(Stop("cancel"))
                await starter
            result = self._result()
            self.say(*failure_report(result, shown=self._just_shown(result)))
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._flush(patient=not cancelled and (self._state.stopped is None or self._state.stopped.signal is None))
        if cancelled:
            raise asyncio.CancelledError
        if self._unstartable is not None:
            raise self._unstartable
        return result

    def stop(self, why: Stop) -> None:
        """End the job: SIGTERM to all workers, SIGKILL after the grace. Called again: SIGKILL at once, then no wait for output."""
        if self._over.is_set():
            self._hurried.set()
            return
        if self._state.phase in (Phase.RUNNING, Phase.HOLDING):
            self._announce(why)
        self._obey(self._state.stop(why))

    def pass_on(self, number: int) -> None:
        """Give a signal to all workers that listen for it; to the others it would be the end."""
        heard = [worker for worker in self._watchers if self._processes[worker].catches(number)]
        deaf = [worker for worker in self._watchers if worker not in heard]
        for worker in heard:
            self._processes[worker].signal_alone(number)
        text = f"aiorlinf: {signal_name(number)}: passed on to {list_names(heard)}" if heard else f"aiorlinf: {signal_name(number)}"
        self.say(text + (f"; not to {list_names(deaf)}, which do not listen for it" if deaf else ""))

    def _just_shown(self, result: LaunchResult) -> bool:
        """Whether what the failed worker wrote to its stderr stands right above."""
        return result.failed is not None and self._printer.lines - self._outputs[result.failed].tail_at <= _RIGHT_ABOVE_LINES

    def say(self, *lines: str) -> None:
        """Print lines of the launcher's own, between those of the workers."""
        self._printer.write("err", render(lines))

    # --- starting

    async def _start(self, guard: Guard) -> None:
        for command in self._commands:
            if self._state.phase not in (Phase.RUNNING, Phase.HOLDING) or self._unstartable is not None:
                self._state.dropped(command.worker)
                continue
            try:
                process = WorkerProcess(command.argv, command.env, self._reader(self._outputs[command.worker]))
            except Exception as error:  # whatever it is, the workers that run must be ended and waited for
                message = f"worker {command.worker} could not be started: {error}"
                self._unstartable = WorkerFailed(command.worker, None, message=message, operation="launch")
                self._unstartable.__cause__ = error
                self._state.dropped(command.worker)
                self.stop(Stop("error"))
                continue
            guard.add(process.pid)
            self._processes[command.worker] = process
            self._watchers[command.worker] = self._loop.create_task(
                self._watch(command.worker, process, guard), name=f"aiorlinf-watch-{command.worker}"
            )
            # Starting takes milliseconds each; the manager on this loop has workers to answer by now.
            await asyncio.sleep(0)
        self._started = True
        self._look_for_end()

    async def _watch(self, worker: str, process: WorkerProcess, guard: Guard) -> None:
        try:
            returncode = await process.wait()
            process.take_output()
            self._exited(worker, returncode)
            if not await process.end_group(self._grace):
                self.say(f"aiorlinf: something that worker {worker} started cannot be killed (process group {process.pid})")
            guard.remove(process.pid)
        finally:
            process.finish_output()
            self._outputs[worker].flush()
            del self._watchers[worker]
            self._look_for_end()

    def _look_for_end(self) -> None:
        if self._started and not self._watchers:
            self._over.set()

    def _exited(self, worker: str, returncode: int) -> None:
        order = self._state.exited(worker, returncode, consequence=is_consequence(self._outputs[worker].tail))
        if self._state.failed == worker:
            self._failed_after = time.monotonic() - self._started_at
            if self._state.running:
                then = "ending" if order is Order.TERMINATE else "it had lost another one; waiting a moment for"
                self.say(f"aiorlinf: worker {worker} {describe_exit(returncode)}; {then} {list_names(self._state.running)}")
        self._obey(order)

    # --- ending

    def _announce(self, why: Stop) -> None:
        cause = {
            "signal": signal_name(why.signal) if why.signal is not None else "a signal",
            "timeout": f"the time limit of {self._timeout} s is over",
        }.get(why.kind)
        if cause is not None:
            self.say(f"aiorlinf: {cause}: ending {list_names(self._state.running)}")

    def _obey(self, order: Order) -> None:
        if order is Order.HOLD:
            self._timers.append(self._loop.call_later(_HOLD_S, self._hold_over))
        elif order is Order.TERMINATE:
            self._timers.append(self._loop.call_later(self._grace, self._grace_over))
            self._signal_all(signal.SIGTERM)
            self._signal_all(signal.SIGCONT)  # a stopped process would not notice
        elif order is Order.KILL:
            self._timers.append(self._loop.call_later(_AFTER_KILL_S, self._give_up))
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self._watchers:
            self._processes[worker].signal(number)

    def _hold_over(self) -> None:
        self._obey(self._state.hold_over())

    def _out_of_time(self) -> None:
        if self._state.phase in (Phase.RUNNING, Phase.HOLDING):
            self.stop(Stop("timeout"))

    def _grace_over(self) -> None:
        late = set(self._state.running)
        order = self._state.grace_over()
        if order is Order.KILL and late:
            self.say(f"aiorlinf: not ended {self._grace:g} s after SIGTERM, and killed: {list_names(late)}")
        self._obey(order)

    def _give_up(self) -> None:
        # A process in an uninterruptible system call cannot even be killed. It is named and left behind.
        for worker in sorted(self._state.running):
            self.say(f"aiorlinf: worker {worker} cannot be killed (process {self._processes[worker].pid})")
            self._state.exited(worker, -signal.SIGKILL)
            self._watchers[worker].cancel()

    def _result(self) -> LaunchResult:
        failed = self._state.failed
        return LaunchResult(
            returncodes={
                command.worker: self._state.returncodes[command.worker] for command in self._commands if command.worker in self._processes
            },
            failed=failed,
            stderr=tuple(self._outputs[failed].tail) if failed is not None else (),
            elapsed=time.monotonic() - self._started_at,
            stopped=self._state.stopped,
            failed_after=self._failed_after,
        )

    # --- output

    def _reader(self, output: _Output) -> Callable[[Stream, bytes], None]:
        def on_output(stream: Stream, data: bytes) -> None:
            output.feed(stream, data, self._loop.time())
            if not self._ticking and output.pending:
                self._ticking = True
                self._loop.call_later(_TICK_S, self._tick)

        return on_output

    def _tick(self) -> None:
        now = self._loop.time()
        for output in self._outputs.values():
            output.tick(now)
        self._ticking = any(output.pending for output in self._outputs.values())
        if self._ticking:
            self._loop.call_later(_TICK_S, self._tick)

    def _pause(self) -> None:
        for process in self._processes.values():
            process.pause()

    def _resume(self) -> None:
        for process in self._processes.values():
            process.resume()

    async def _flush(self, *, patient: bool) -> None:
        for channel, reason in self._printer.lost.items():
            self.say(f"aiorlinf: std{channel} could not be written any more, and what followed is lost: {reason}")
        written = self._loop.create_task(self._printer.close(None if patient else _FLUSH_S))
        hurried = self._loop.create_task(self._hurried.wait())
        try:
            await asyncio.wait({written, hurried}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            written.cancel()
            hurried.cancel()
            await asyncio.gather(written, hurried, return_exceptions=True)
