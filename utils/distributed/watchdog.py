"""A thread beside training that finds out which rank died or hangs, names it, and ends this rank too.

Without it a run on many machines ends, if at all, in a time-out of the exchange in which everybody blames everybody.
Each rank leaves a sign of life every second, with the place in the code where its main thread stands; nothing is asked
of the training itself, and no device is touched.
"""

# torch exports its stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from utils.distributed.processes import Process, birth_of
from utils.distributed.world import BY_HAND, MPICH, OPENMPI, TORCHRUN, World
from utils.errors import EXIT_FAILED
from utils.log import is_heard, log, write_to_files

if TYPE_CHECKING:
    from torch.distributed import Store

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep
MOST_NAMED = 3
BEAT = 1.0
BEAT_OF_EACH_RANK = 0.01
"""With many ranks signs of life are left less often: one thread reads them all."""
SECONDS_OF_SILENCE = 60.0
"""Without a sign of life for so long, a rank is stopped, swapped out, or its machine or network is down."""
SECONDS_OF_SILENCE_IN_A_HURRY = 4.0
"""The same where another rank has lost the connection to it."""
SECONDS_FOR_THE_LAUNCHER = 5.0
NAME_THE_KILLED = (TORCHRUN, OPENMPI, MPICH)
"""Launchers that name on the terminal which of their processes was killed, and end the others a moment later."""
# A main thread in one of these, or in what they call, waits for other ranks: it is not the one to blame.
_EXCHANGES = ("torch/distributed/", "torch/autograd/graph.py")


class Watch:
    def __init__(
        self, store: Store, world: World, names: list[str], timeout: float, near: Mapping[int, Process] | None = None
    ) -> None:
        """`near`: processes of ranks that this one can see because they are on the same machine."""
        self._store, self._world, self._names, self._timeout = store, world, names, timeout
        self._others = range(1, world.size) if world.first else [0]
        self._near = {rank: process for rank, process in (near or {}).items() if rank in self._others}
        self._main, self._beat = _MainThread(), max(BEAT, BEAT_OF_EACH_RANK * world.size)
        self._stopped, self._hurried, self._woken = False, False, threading.Event()
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        """When each rank's sign of life last changed, by our own clock."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def _run(self) -> None:
        now = time.monotonic()
        self._seen = dict.fromkeys(range(self._world.size), (-1, now))
        while not self._stopped:
            try:
                self._look_around()
            except Exception as error:  # whatever a broken connection looks like
                if not self._stopped:
                    self._store_is_gone(error)
                return
            self._woken.wait(self._beat)
            self._woken.clear()

    def part(self, seconds: float) -> None:
        """The end of the run: stop, and let nobody's store go before all have stopped."""
        self._stop()
        end = time.monotonic() + seconds
        try:
            self._store.set(f"beat/{self._world.rank}", json.dumps({"parted": True}))
            self._store.add("parted", 1)
            while self._world.first and self._store.add("parted", 0) < self._world.size and time.monotonic() < end:
                time.sleep(0.02)
        except Exception:  # the store has gone already: then nobody waits for us either
            return

    def tell_failure(self, error: BaseException) -> None:
        """This rank ends alone, and says itself why; the others are to know that it was this one."""
        self._stop()
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        try:
            self._store.set(
                "end", json.dumps({"text": f"{self._name()} failed: {reason}", "told_by": self._world.rank})
            )
            if self._world.first:  # perhaps the store's keeper
                time.sleep(2 * self._beat)
        except Exception:
            return

    def hurry(self) -> None:
        """The connection to another rank is lost: which one is gone will soon be known."""
        self._hurried = True
        self._woken.set()

    def _stop(self) -> None:
        self._stopped = True
        self._woken.set()
        self._thread.join(5)

    def _name(self, rank: int | None = None) -> str:
        return self._names[self._world.rank if rank is None else rank]

    def _look_around(self) -> None:
        self._beats += 1
        killed = self._killed()  # before the others' last words are read, which may explain it
        silent = self._main.look()
        mine = {"beats": self._beats, "place": self._main.place, "waits": self._main.waits}
        self._store.set(f"beat/{self._world.rank}", json.dumps(mine))
        if self._store.check(["end"]):
            self._end(json.loads(self._store.get("end")))
        if self._hurried:
            self._store.set("hurry", "1")
        if silent > self._timeout:
            self._store.set("stuck", self._name())
        beats = {rank: self._beat_of(rank) for rank in self._others}
        for rank in killed:
            if "parted" not in beats[rank]:
                self._decide(self._words_of_killed(rank), rank, self._world.launcher not in NAME_THE_KILLED)
        self._find_the_gone(beats)
        if self._world.first and self._store.check(["stuck"]):
            self._decide(self._who_keeps_all_waiting(beats))

    def _beat_of(self, rank: int) -> dict[str, Any]:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {"beats": 0}

    def _killed(self) -> list[int]:
        """Ranks of this machine whose processes are gone."""
        return [rank for rank, process in self._near.items() if birth_of(process.pid) != process.birth]

    def _words_of_killed(self, rank: int) -> str:
        return f"{self._name(rank)} is gone without a word: it was killed, perhaps by the out-of-memory killer"

    def _find_the_gone(self, beats: dict[int, dict[str, Any]]) -> None:
        now, hurried = time.monotonic(), self._store.check(["hurry"])
        limit = min(SECONDS_OF_SILENCE_IN_A_HURRY if hurried else SECONDS_OF_SILENCE, self._timeout)
        limit = max(limit, 3 * self._beat)
        for rank, beat in beats.items():
            if "parted" in beat or self._seen[rank][0] != beat["beats"]:
                self._seen[rank] = (beat.get("beats", 0), now)
            elif now - self._seen[rank][1] > limit:
                how = (
                    "is gone without a word: killed, out of memory, or its machine is down"
                    if hurried
                    else f"gives no sign of life for {limit:.0f} s: it was stopped, or its machine or network is down"
                )
                self._decide(f"{self._name(rank)} {how}", rank)

    def _who_keeps_all_waiting(self, beats: dict[int, dict[str, Any]]) -> str:
        """Of those ranks that do not themselves wait for others, the one that stands where no other does."""
        mine = {"place": self._main.place, "waits": self._main.waits}
        places = {0: mine, **{rank: beat for rank, beat in beats.items() if "place" in beat}}
        free = [rank for rank, beat in places.items() if not beat["waits"]] or list(places)
        # A GPU's main thread may wait for others without a trace of it: then those that wait stand all at one place.
        crowds = Counter(places[rank]["place"] for rank in free)
        odd = [rank for rank in free if crowds[places[rank]["place"]] == min(crowds.values())]
        since = f"for {self._timeout / 60:g} minutes (DIST.TIMEOUT)"
        if len(odd) == 1:
            return f"{self._name(odd[0])} keeps the others waiting {since}: it stands in {places[odd[0]]['place']}"
        stand = "; ".join(f"{self._name(rank)} stands in {places[rank]['place']}" for rank in odd[:MOST_NAMED])
        more = f"; and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
        return f"nothing moves {since}: {stand}{more}"

    def _decide(self, text: str, gone: int | None = None, aloud: bool = True) -> NoReturn:
        """`aloud`: somebody has to say it on the terminal."""
        found = {"text": text, "told_by": None, "found_by": self._world.rank, "gone": gone, "aloud": aloud}
        self._end(json.loads(self._store.compare_set("end", "", json.dumps(found))))

    def _store_is_gone(self, error: Exception) -> None:
        """Its keeper is: rank 0, or torchrun, which then says so itself."""
        found = {"text": f"{self._name(0)} is gone without a word", "told_by": None, "found_by": 1, "gone": 0}
        if 0 in self._killed():
            self._end({**found, "text": self._words_of_killed(0), "aloud": self._world.launcher not in NAME_THE_KILLED})
        end = time.monotonic() + SECONDS_FOR_THE_LAUNCHER
        while time.monotonic() < end:
            if self._stopped:
                return
            time.sleep(0.1)
        if self._world.launcher == TORCHRUN:
            found |= {"text": f"the launcher is gone ({error})", "gone": None}
        self._end({**found, "aloud": True})

    def _end(self, end: dict[str, Any]) -> NoReturn:
        """Say why, once in all, and leave. Not by an exception: the main thread may hang where none reaches it."""
        text, rank = f"{end['text']}. This run ends.", self._world.rank
        by_hand = self._world.launcher == BY_HAND  # a terminal each
        found = end["told_by"] is None and end["found_by"] == rank
        aloud = by_hand or (found and end["aloud"])
        speaker = threading.Thread(target=_write, args=(text, aloud, found and end["gone"] == 0), daemon=True)
        speaker.start()
        speaker.join(2)  # a disk that hangs is no reason to hang here
        if rank == 0:
            time.sleep(2 * self._beat)
        os._exit(EXIT_FAILED)


class _MainThread:
    """Where the main thread stands, and for how long it has."""

    def __init__(self) -> None:
        self._id = threading.main_thread().ident or 0
        self._stack: tuple[tuple[int, int], ...] = ()
        self._since = time.monotonic()
        self.place, self.waits = "", False

    def look(self) -> float:
        """Seconds for which not the least has moved."""
        frame = sys._current_frames().get(self._id)
        innermost, ours, stack = frame, None, []
        while frame is not None:
            stack.append((id(frame.f_code), frame.f_lasti))
            if ours is None and _is_ours(frame.f_code.co_filename):
                ours = frame
            frame = frame.f_back
        now, found = time.monotonic(), tuple(stack)
        if found != self._stack:
            self._stack, self._since = found, now
        if innermost is not None:
            self.place = _place(innermost, ours)
            self.waits = any(part in innermost.f_code.co_filename for part in _EXCHANGES)
        return now - self._since


def _is_ours(file: str) -> bool:
    return file.startswith(ROOT) and "site-packages" not in file  # an environment may lie in the project's folder


def _place(innermost: FrameType, ours: FrameType | None) -> str:
    def words(frame: FrameType) -> str:
        file = frame.f_code.co_filename
        short = file.removeprefix(ROOT) if _is_ours(file) else os.sep.join(file.split(os.sep)[-3:])
        return f"{short}:{frame.f_lineno} ({frame.f_code.co_name})"

    return words(innermost) if ours is None or ours is innermost else f"{words(innermost)}, called from {words(ours)}"


def _write(text: str, aloud: bool, first_is_gone: bool) -> None:
    """Into the log's files in any case; on the terminal where it is to be heard."""
    if aloud and is_heard():
        log.error("%s", text)
        return
    if aloud:
        print(f"error: {text}", file=sys.stderr, flush=True)
    write_to_files(text, first_is_gone)
