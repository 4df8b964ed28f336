"""The watchdog: a thread beside training that names the rank that died or hangs, and ends this rank too.

Without it, a run on many machines ends, if at all, in a time-out of a collective in which every rank blames every
other. Each rank sends a heartbeat every second, with the place in the code where its main thread is; training itself
is not involved, and no device is touched.
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
"""With many ranks heartbeats are rarer: one thread reads them all."""
SECONDS_OF_SILENCE = 60.0
"""A rank without a heartbeat for so long is stopped, swapped out, or its machine or network is down."""
SECONDS_OF_SILENCE_AFTER_DISCONNECT = 4.0
"""The limit once a rank has lost its connection to another."""
SECONDS_OF_GRACE = 5.0
SECONDS_TO_LOOK = 3.0
# A main thread in one of these files, or in what they call, waits for other ranks: it is not the one to blame.
_COLLECTIVES = ("torch/distributed/", "torch/autograd/graph.py")
DIED = "died without an error message"


def start_time_of(pid: int) -> str | None:
    """The start time of a process, in the kernel's ticks; None if it has ended, or where there is no /proc.

    The kernel reuses pids, and each container has its own; with the start time, they are unique.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the program's name before it may contain any character
    return None if state in ("Z", "X") else rest[18]


class Watchdog:
    """Rank 0 watches all others, which watch rank 0. The reason why the run ends is shared through the store."""

    def __init__(self, store: Store, world: World, members: list[dict[str, Any]], timeout: float) -> None:
        self._store = store
        self._world = world
        self._timeout = timeout
        self._names = [name_of(member) for member in members]
        others = members[1:] if world.first else members[:1]
        # Processes that this one sees: containers may share a host name, but not their processes.
        self._local = {m["rank"]: m for m in others if m["started"] and start_time_of(m["pid"]) == m["started"]}
        self._interval = max(HEARTBEAT, HEARTBEAT_PER_RANK * world.size)
        self._stack: tuple[tuple[int, int], ...] = ()
        self._moved = self._checked = time.monotonic()
        self._checks = 0
        self._mine: dict[str, Any] = {"number": 0}
        # For each other rank, the number of its last heartbeat and when it arrived, by our own clock.
        self._last_change = {member["rank"]: (-1, self._moved) for member in others}
        self._stopped = False
        self._disconnected = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")
        self._thread.start()

    def leave(self, seconds: float) -> None:
        """Stop at the end of the run; rank 0, which may serve the store, waits until all ranks have left."""
        self._stop()
        end = time.monotonic() + seconds
        try:
            self._store.set(f"heartbeat/{self._world.rank}", json.dumps({"left": True}))
            self._store.add("left", 1)
            while self._world.first and self._store.add("left", 0) < self._world.size and time.monotonic() < end:
                time.sleep(0.02)
        except Exception:  # the store is closed already: nobody waits for us either
            return

    def report_failure(self, error: BaseException) -> None:
        """Tell the others that this rank failed; it prints its own error itself."""
        self._stop()
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        try:
            self._store.set("end", json.dumps({"text": f"{self._names[self._world.rank]} failed: {reason}"}))
            if self._world.first:  # which may serve the store
                time.sleep(2 * self._interval)
        except Exception:
            return

    def look(self) -> None:
        """Look at once whether a rank has failed: if so, this process ends with its reason, and this never returns."""
        end = time.monotonic() + SECONDS_TO_LOOK
        enough = self._checks + 2  # one may be past the place where it looks
        while self._checks < enough and time.monotonic() < end:
            self._woken.set()
            time.sleep(0.01)

    def expect_lost_rank(self) -> None:
        """The connection to another rank is lost: wait less long for heartbeats, to find out which one died."""
        self._disconnected = True
        self._woken.set()

    def _stop(self) -> None:
        self._stopped = True
        self._woken.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._check()
            except Exception as error:  # whatever a broken connection looks like
                if not self._stopped:
                    self._store_is_lost(error)
                return
            self._checks += 1
            self._woken.wait(self._interval)
            self._woken.clear()

    def _check(self) -> None:
        """Send a heartbeat, and read those of others."""
        now = time.monotonic()
        if now - self._checked > 5 * self._interval:  # this process was suspended, and perhaps all: nobody was silent
            self._moved = now
            self._last_change = {rank: (number, now) for rank, (number, _) in self._last_change.items()}
        self._checked = now
        killed = self._killed()  # before "end" is read, where a killed rank may have left its reason
        idle = self._look_at_main_thread()
        self._store.set(f"heartbeat/{self._world.rank}", json.dumps(self._mine))
        if self._store.check(["end"]):
            self._end(**json.loads(self._store.get("end")))
        if self._disconnected:
            self._store.set("disconnected", "1")
        if idle > self._timeout:
            self._store.set("stuck", "1")
        heartbeats = {rank: self._heartbeat_of(rank) for rank in self._last_change}
        for rank in killed:
            if "left" not in heartbeats[rank]:
                reason, needs_terminal = self._death_of(rank)
                self._decide(reason, needs_terminal)
        self._look_for_silence(heartbeats, now)
        if self._world.first and self._store.check(["stuck"]):
            self._decide(self._blame_for_hang(heartbeats))

    def _heartbeat_of(self, rank: int) -> dict[str, Any]:
        key = f"heartbeat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {"number": 0}

    def _look_for_silence(self, heartbeats: dict[int, dict[str, Any]], now: float) -> None:
        """End the run for a rank whose heartbeat has not changed for too long."""
        disconnected = self._store.check(["disconnected"])
        limit = min(SECONDS_OF_SILENCE_AFTER_DISCONNECT if disconnected else SECONDS_OF_SILENCE, self._timeout)
        limit = max(limit, 3 * self._interval)
        for rank, heartbeat in heartbeats.items():
            number, since = self._last_change[rank]
            if "left" in heartbeat or number != heartbeat["number"]:
                self._last_change[rank] = (heartbeat.get("number", 0), now)
            elif now - since > limit:
                how = f"has sent no heartbeat for {limit:.0f} s: it is stopped, or its machine or network is down"
                if disconnected:
                    how = f"{DIED}: killed, out of memory, or its machine is down"
                if rank in self._local:
                    # A stopped process keeps its launcher waiting. Continued, it finds the reason and exits, too.
                    os.kill(self._local[rank]["pid"], signal.SIGCONT)
                self._decide(f"{self._names[rank]} {how}")

    def _killed(self) -> list[int]:
        """Ranks of this machine whose processes have ended."""
        return [rank for rank, process in self._local.items() if start_time_of(process["pid"]) != process["started"]]

    def _death_of(self, rank: int) -> tuple[str, bool]:
        """The reason why the run ends, and whether the terminal needs it: some launchers name the killed process."""
        text = f"{self._names[rank]} {DIED}: it was killed, perhaps by the out-of-memory killer"
        return text, self._world.launcher not in NAME_THE_KILLED

    def _blame_for_hang(self, heartbeats: dict[int, dict[str, Any]]) -> str:
        """Of the ranks that do not themselves wait for others, blame the one that is where no other is."""
        ranks = {0: self._mine, **{rank: heartbeat for rank, heartbeat in heartbeats.items() if "place" in heartbeat}}
        suspects = [rank for rank, heartbeat in ranks.items() if not heartbeat["in_collective"]] or list(ranks)
        # A GPU's main thread may wait for others without a trace of it: then those that wait are all at one place.
        crowds = Counter(ranks[rank]["place"] for rank in suspects)
        odd = [rank for rank in suspects if crowds[ranks[rank]["place"]] == min(crowds.values())]
        since = f"for {counted(self._timeout / 60, 'minute')} (DIST.TIMEOUT)"
        if len(odd) == 1:
            return f"{self._names[odd[0]]} has kept the others waiting {since}; it is in {ranks[odd[0]]['place']}"
        places = [f"{self._names[rank]} is in {ranks[rank]['place']}" for rank in odd]
        return f"no rank has made progress {since}: {some_of(places, 3, '; ')}"

    def _look_at_main_thread(self) -> float:
        """Note in our heartbeat where the main thread is. Returns the seconds since any frame of its stack moved."""
        innermost = sys._current_frames()[threading.main_thread().ident or 0]
        frames = [frame for frame, _ in traceback.walk_stack(innermost)]
        stack = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        if stack != self._stack:
            self._stack = stack
            self._moved = time.monotonic()
        ours = next((frame for frame in frames if _is_ours(frame.f_code.co_filename)), innermost)
        place = _place(innermost) + (f", called from {_place(ours)}" if ours is not innermost else "")
        in_collective = any(part in innermost.f_code.co_filename for part in _COLLECTIVES)
        self._mine = {"number": self._mine["number"] + 1, "place": place, "in_collective": in_collective}
        return time.monotonic() - self._moved

    def _decide(self, text: str, on_terminal: bool = True) -> NoReturn:
        """End the run for this reason, unless another rank was first with its own."""
        ending = {"text": text, "found_by": self._world.rank, "on_terminal": on_terminal}
        self._end(**json.loads(self._store.compare_set("end", "", json.dumps(ending))))

    def _store_is_lost(self, error: Exception) -> None:
        """End the run: who served the store has died. That is rank 0, or torchrun, which then reports it itself."""
        if 0 in self._killed():
            text, on_terminal = self._death_of(0)
            self._end(text, 1, on_terminal)
        # Ranks whose launcher was killed first finish an update and save, unless they have lost each other, too.
        began = time.monotonic()
        served = self._world.served
        while time.monotonic() - began < (SECONDS_TO_SAVE if served and not self._disconnected else SECONDS_OF_GRACE):
            if self._stopped:
                return
            time.sleep(0.1)
        if served:
            self._end(f"the launcher has ended ({error})", found_by=0)
        self._end(f"{self._names[0]} {DIED}", found_by=1)

    def _end(self, text: str, found_by: int | None = None, on_terminal: bool = True) -> NoReturn:
        """Report the reason, on one rank's terminal, and exit; an exception might never reach a hanging main thread.

        `found_by`: the rank that prints it; None where a rank has failed, and reports its failure itself.
        `on_terminal`: false where the launcher already says so on the terminal.
        """
        mine = found_by == self._world.rank
        on_terminal = self._world.launcher == BY_HAND or (mine and on_terminal)  # by hand, each has its own terminal
        # Only rank 0 and the launcher are found to be lost by another rank: nobody else can write into log.txt then.
        arguments = f"{text}. This run ends.", on_terminal, mine and not self._world.first
        writer = threading.Thread(target=_write, args=arguments, daemon=True)
        writer.start()
        writer.join(2)  # a disk that hangs must not keep this process
        if self._world.first:
            time.sleep(2 * self._interval)
        for child in multiprocessing.active_children():  # one that stalls as it begins would outlive this process
            child.kill()
        os._exit(EXIT_FAILED)


def _is_ours(file: str) -> bool:
    return file.startswith(ROOT) and "site-packages" not in file  # an environment may be in the project's folder


def _place(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    short = file.removeprefix(ROOT) if _is_ours(file) else os.sep.join(file.split(os.sep)[-3:])
    return f"{short}:{frame.f_lineno} ({frame.f_code.co_name})"


def _write(text: str, on_terminal: bool, for_rank_0: bool) -> None:
    """Write an error into the log files, and on the terminal if wanted."""
    if on_terminal and logs_to_terminal():
        log.error("%s", text)
        return
    if on_terminal:
        print(f"error: {text}", file=sys.stderr, flush=True)
    write_to_files(text, for_rank_0)
