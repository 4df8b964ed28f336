"""The watchdog: a thread beside training that names the rank that died or hangs, and ends this rank, too.

Without it, a run on many machines ends, if at all, in a timeout of a collective, and every rank blames every other.
Each rank sends a heartbeat every second, which has the place in the code where its main thread is. Training itself is
not involved, and no device is used.
"""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from utils.distributed.launch import SECONDS_TO_SAVE
from utils.distributed.launchers import BY_HAND, NAME_THE_KILLED
from utils.distributed.world import World, name_of
from utils.errors import EXIT_FAILED
from utils.log import log, logs_to_terminal, write_to_files
from utils.text import counted, some_of

if TYPE_CHECKING:
    from torch.distributed import Store

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
HEARTBEAT = 1.0
HEARTBEAT_PER_RANK = 0.01
"""Seconds between heartbeats, per rank: with many ranks they are rarer, because one thread reads them all."""
SECONDS_OF_SILENCE = 60.0
"""A rank without a heartbeat for this time is stopped, swapped out, or its machine or network is down."""
SECONDS_OF_SILENCE_AFTER_DISCONNECT = 4.0
"""The limit that replaces SECONDS_OF_SILENCE once a rank has lost its connection to another."""
SECONDS_OF_GRACE = 5.0
SECONDS_TO_LOOK = 3.0
# A rank whose main thread is in one of these files, or in code that they call, waits for other ranks. So it is not to
# blame for a hang.
_COLLECTIVES = ("torch/distributed/", "torch/autograd/graph.py")
DIED = "died without an error message"


def start_time_of(pid: int) -> str | None:
    """The start time of a process, in the kernel's ticks since boot; None if it has ended, or if there is no /proc.

    A pid alone does not identify a process, because the kernel reuses pids, and each container has its own pids.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The program's name, which is in brackets, may contain any character. After it, proc(5) lists the fields from
    # number 3, the state, on. Field 22 is the start time.
    fields = text.rpartition(")")[2].split()
    state = fields[0]
    has_ended = state in ("Z", "X")
    return None if has_ended else fields[22 - 3]


class Watchdog:
    """Watches other ranks from a thread: rank 0 watches all others, and they watch rank 0.

    The store holds, as JSON: `heartbeat/RANK`; `end`, the reason why the run ends; `left`, the number of ranks that
    have left; and the marks `disconnected` (a rank has lost its connection to another) and `stuck` (the main thread of
    a rank has not moved for DIST.TIMEOUT).
    """

    def __init__(self, store: Store, world: World, members: list[dict[str, Any]], timeout: float) -> None:
        """Start watching: rank 0 watches all other ranks, and each of them watches rank 0.

        members: the descriptions of all ranks, as `group.join` returns them
        timeout: DIST.TIMEOUT in seconds
        """
        self._store = store
        self._world = world
        self._timeout = timeout
        self._names = [name_of(member) for member in members]
        watched = members[1:] if world.first else members[:1]
        self._local = {
            member["rank"]: member
            for member in watched
            if member["started"] and start_time_of(member["pid"]) == member["started"]
        }
        """The watched ranks whose processes this one sees. Containers may share a host name, but not processes."""
        self._interval = max(HEARTBEAT, HEARTBEAT_PER_RANK * world.size)
        self._stack: tuple[tuple[int, int], ...] = ()
        """The stack of the main thread at the last check."""
        self._stack_changed = time.monotonic()
        """Time at which the stack was last seen to change."""
        self._checked = self._stack_changed
        """Time of the last check."""
        self._checks = 0
        self._own_heartbeat: dict[str, Any] = {"number": 0}
        self._last_change = {member["rank"]: (-1, self._checked) for member in watched}
        """For each watched rank, the number of its last heartbeat and when it arrived, by our own clock."""
        self._stopped = False
        self._disconnected = False
        """Whether this rank has lost its connection to another."""
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        self._thread.start()

    def leave(self, seconds: float) -> None:
        """Stop watching at the end of the run.

        Rank 0, which may serve the store, waits up to `seconds` until all ranks have left.
        """
        self._stop()
        deadline = time.monotonic() + seconds
        try:
            self._store.set(f"heartbeat/{self._world.rank}", json.dumps({"left": True}))
            self._store.add("left", 1)
            # Adding 0 reads the number of ranks that have left.
            while self._world.first and self._store.add("left", 0) < self._world.size and time.monotonic() < deadline:
                time.sleep(0.02)
        except Exception:  # The store is closed already, so that no rank waits for this one either.
            return

    def report_failure(self, error: BaseException) -> None:
        """End the other ranks, with the error of this rank as their reason; this rank prints its error itself."""
        self._stop()
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        try:
            self._store.set("end", json.dumps({"text": f"{self._names[self._world.rank]} failed: {reason}"}))
            if self._world.first:  # Rank 0 may serve the store, from which the others read the reason.
                time.sleep(2 * self._interval)
        except Exception:
            return

    def look(self) -> None:
        """Check at once whether a rank has failed; if so, this process ends with the reason.

        The thread of the watchdog makes the check, and ends the process. This function returns after the check.
        """
        deadline = time.monotonic() + SECONDS_TO_LOOK
        # The check that is running may be too far to notice the failure, so that a second one is needed.
        needed_checks = self._checks + 2
        while self._checks < needed_checks and time.monotonic() < deadline:
            self._woken.set()
            time.sleep(0.01)

    def expect_lost_rank(self) -> None:
        """Wait less long for heartbeats from now on, because the connection to another rank is lost."""
        self._disconnected = True
        self._woken.set()

    def _stop(self) -> None:
        self._stopped = True
        self._woken.set()
        self._thread.join(5)

    def _run(self) -> None:
        """Check once per interval, or when woken, until this rank leaves or the store is lost; runs in the thread."""
        while not self._stopped:
            try:
                self._check()
            except Exception as error:  # A broken connection may raise any exception.
                if not self._stopped:
                    self._store_is_lost(error)
                return
            self._checks += 1
            self._woken.wait(self._interval)
            self._woken.clear()

    def _check(self) -> None:
        """Send a heartbeat, read those of the watched ranks, and end the run if one is dead, silent or stuck."""
        now = time.monotonic()
        was_suspended = now - self._checked > 5 * self._interval
        if was_suspended:  # The other ranks may have been suspended, too. So the time does not count.
            self._stack_changed = now
            self._last_change = {rank: (number, now) for rank, (number, _) in self._last_change.items()}
        self._checked = now

        # This comes before "end" is read, because a dead rank may have left its reason there.
        dead_ranks = self._dead_ranks()
        idle_seconds = self._look_at_main_thread()
        self._store.set(f"heartbeat/{self._world.rank}", json.dumps(self._own_heartbeat))
        if self._store.check(["end"]):
            self._end(**json.loads(self._store.get("end")))
        if self._disconnected:
            self._store.set("disconnected", "1")
        if idle_seconds > self._timeout:
            self._store.set("stuck", "1")

        heartbeats = {rank: self._heartbeat_of(rank) for rank in self._last_change}
        for rank in dead_ranks:
            if "left" not in heartbeats[rank]:
                reason, needs_terminal = self._death_of(rank)
                self._decide(reason, needs_terminal)
        self._look_for_silence(heartbeats, now)
        if self._world.first and self._store.check(["stuck"]):
            self._decide(self._blame_for_hang(heartbeats))

    def _heartbeat_of(self, rank: int) -> dict[str, Any]:
        """Return the last heartbeat of a rank; its number is 0 if the rank has sent none yet."""
        key = f"heartbeat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {"number": 0}

    def _look_for_silence(self, heartbeats: dict[int, dict[str, Any]], now: float) -> None:
        """End the run if the heartbeat of a rank has not changed for too long.

        heartbeats: rank -> its last heartbeat, whose number grows each time; {"left": True} of a rank that has left
        """
        disconnected = self._store.check(["disconnected"])
        usual_limit = SECONDS_OF_SILENCE_AFTER_DISCONNECT if disconnected else SECONDS_OF_SILENCE
        # A rank may miss two heartbeats, even with a very short DIST.TIMEOUT.
        limit = max(min(usual_limit, self._timeout), 3 * self._interval)
        for rank, heartbeat in heartbeats.items():
            last_number, last_time = self._last_change[rank]
            if "left" in heartbeat or last_number != heartbeat["number"]:
                self._last_change[rank] = (heartbeat.get("number", 0), now)
            elif now - last_time > limit:
                problem = f"has sent no heartbeat for {limit:.0f} s: it is stopped, or its machine or network is down"
                if disconnected:
                    problem = f"{DIED}: killed, out of memory, or its machine is down"
                if rank in self._local:
                    # A stopped process keeps its launcher waiting. If it continues, it reads the reason and exits.
                    os.kill(self._local[rank]["pid"], signal.SIGCONT)
                self._decide(f"{self._names[rank]} {problem}")

    def _dead_ranks(self) -> list[int]:
        """List the watched ranks of this machine whose processes have ended."""
        return [rank for rank, process in self._local.items() if start_time_of(process["pid"]) != process["started"]]

    def _death_of(self, rank: int) -> tuple[str, bool]:
        """Return the reason to end the run for a dead rank, and whether to print it on the terminal.

        It is not printed if the launcher itself names the dead process.
        """
        reason = f"{self._names[rank]} {DIED}: it was killed, perhaps by the out-of-memory killer"
        on_terminal = self._world.launcher not in NAME_THE_KILLED
        return reason, on_terminal

    def _blame_for_hang(self, heartbeats: dict[int, dict[str, Any]]) -> str:
        """Return the reason to end a run that hangs, which names the rank that the others wait for; called by rank 0.

        Ranks in a collective wait for others, so the suspects are the ranks that are in none. Of these, the one to
        blame is alone at its place in the code; if none is alone, those at the place with the fewest ranks are named.
        """
        states = {0: self._own_heartbeat}
        states |= {rank: heartbeat for rank, heartbeat in heartbeats.items() if "place" in heartbeat}
        suspects = [rank for rank, state in states.items() if not state["in_collective"]]
        if not suspects:
            suspects = list(states)
        # On a GPU, the stack of a main thread may not show that it waits for others. But all ranks that wait are at the
        # same place.
        ranks_at_place = Counter(states[rank]["place"] for rank in suspects)
        fewest = min(ranks_at_place.values())
        blamed = [rank for rank in suspects if ranks_at_place[states[rank]["place"]] == fewest]
        duration = f"for {counted(self._timeout / 60, 'minute')} (DIST.TIMEOUT)"
        if len(blamed) == 1:
            rank = blamed[0]
            return f"{self._names[rank]} has kept the others waiting {duration}; it is in {states[rank]['place']}"
        places = [f"{self._names[rank]} is in {states[rank]['place']}" for rank in blamed]
        return f"no rank has made progress {duration}: {some_of(places, 3, '; ')}"

    def _look_at_main_thread(self) -> float:
        """Update our heartbeat by the place of the main thread; return the seconds since its stack last changed."""
        main_thread_id = threading.main_thread().ident or 0  # A thread has an id once it runs: never 0.
        innermost = sys._current_frames()[main_thread_id]
        frames = [frame for frame, _ in traceback.walk_stack(innermost)]
        stack = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        if stack != self._stack:
            self._stack = stack
            self._stack_changed = time.monotonic()
        # If the innermost frame is in a library, the innermost frame in our own code, if any, is named, too.
        own_frame = next((frame for frame in frames if _is_ours(frame.f_code.co_filename)), innermost)
        place = _place(innermost)
        if own_frame is not innermost:
            place += f", called from {_place(own_frame)}"
        in_collective = any(part in innermost.f_code.co_filename for part in _COLLECTIVES)
        # Each heartbeat has a new number, by which others see that this rank is alive.
        number = self._own_heartbeat["number"] + 1
        self._own_heartbeat = {"number": number, "place": place, "in_collective": in_collective}
        return time.monotonic() - self._stack_changed

    def _decide(self, reason: str, on_terminal: bool = True) -> NoReturn:
        """End the run for this reason, or for that of another rank, if it has stored one before."""
        ending = {"text": reason, "found_by": self._world.rank, "on_terminal": on_terminal}
        self._end(**json.loads(self._store.compare_set("end", "", json.dumps(ending))))

    def _store_is_lost(self, error: Exception) -> None:
        """End this process because the process that served the store has died: rank 0 or torchrun.

        It waits a while first, in which ranks may save and exit. The function returns only if this rank leaves in this
        time. Without the store, the ranks cannot agree on who prints the reason: rank 0 does, or rank 1 if rank 0 died.
        """
        if 0 in self._dead_ranks():
            reason, on_terminal = self._death_of(0)
            self._end(reason, found_by=1, on_terminal=on_terminal)
        began = time.monotonic()
        launcher_served = self._world.served
        while True:
            # If the launcher died, ranks have time to finish an update and to save. But without a connection to each
            # other, which may be lost at any time, they cannot finish it.
            can_save = launcher_served and not self._disconnected
            if time.monotonic() - began >= (SECONDS_TO_SAVE if can_save else SECONDS_OF_GRACE):
                break
            if self._stopped:
                return
            time.sleep(0.1)
        if launcher_served:
            self._end(f"the launcher has ended ({error})", found_by=0)
        self._end(f"{self._names[0]} {DIED}", found_by=1)

    def _end(self, text: str, found_by: int | None = None, on_terminal: bool = True) -> NoReturn:
        """Log the reason, print it on the terminal of one rank, and exit.

        An exception would not do, because it might never reach a main thread that hangs.

        found_by: the rank that found the problem, which prints the reason; None if a rank has failed, which reports its
            failure itself
        on_terminal: False if the launcher itself prints the reason
        """
        is_finder = found_by == self._world.rank
        # Ranks that were started by hand have a terminal each, and all print the reason.
        prints = self._world.launcher == BY_HAND or (is_finder and on_terminal)
        # The other ranks watch only rank 0. So if one of them is the finder, rank 0 or the launcher is lost, and this
        # rank writes log.txt in place of rank 0.
        rank_0_is_lost = is_finder and not self._world.first
        writer = threading.Thread(target=_write, args=(f"{text}. This run ends.", prints, rank_0_is_lost), daemon=True)
        writer.start()
        writer.join(2)  # A disk that hangs must not keep this process from exiting.
        if self._world.first:  # It may serve the store, from which the others read the reason.
            time.sleep(2 * self._interval)
        for child in multiprocessing.active_children():  # A child that hangs while it starts would not exit by itself.
            child.kill()
        os._exit(EXIT_FAILED)


def _is_ours(file: str) -> bool:
    """Whether a file of code is the project's own, and not in an environment in the project's folder."""
    return file.startswith(ROOT) and "site-packages" not in file


def _place(frame: FrameType) -> str:
    """Where a frame is: 'engine/run.py:120 (train)'; of libraries, the file has its last two folders."""
    file = frame.f_code.co_filename
    short = file.removeprefix(ROOT) if _is_ours(file) else os.sep.join(file.split(os.sep)[-3:])
    return f"{short}:{frame.f_lineno} ({frame.f_code.co_name})"


def _write(text: str, on_terminal: bool, rank_0_is_lost: bool) -> None:
    """Write an error into the log files; with `on_terminal`, also print it, even if this rank prints no log.

    rank_0_is_lost: whether this rank also writes into log.txt, which only rank 0 writes otherwise
    """
    if on_terminal and logs_to_terminal():
        log.error("%s", text)
        return
    if on_terminal:
        print(f"error: {text}", file=sys.stderr, flush=True)
    write_to_files(text, rank_0_is_lost)
