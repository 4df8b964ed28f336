"""Real launchers for tests, and small private clusters for those that need one."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.program import ROOT, Result
from tests.waiting import free_port, until

MULTI, SINGLE = str(ROOT / "main_multi_gpu.py"), str(ROOT / "main_single_gpu.py")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def needs(*programs: str, root: bool = False, package: str) -> None:
    """Skip, and say why, where a launcher is not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed (apt install {package})")
    if root and os.geteuid() != 0:
        pytest.skip("needs to be root")


class Command:
    """A launcher's command in the background; all its processes have a mark in their environment, on any node."""

    def __init__(self, *command: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.mark = f"VITAMP_TEST={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        around = {key: text for key, text in os.environ.items() if key not in RANK_VARIABLES}
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env={**around, "OMP_NUM_THREADS": "1", **(env or {}), name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, seconds: float) -> Result:
        """Wait for its end; afterwards none of its processes may be alive."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate(timeout=10)
            raise AssertionError(f"no end after {seconds} s\n{out}\n{err}") from None
        until(lambda: not marked(self.mark), 10)
        return Result(self.process.returncode, out, err)

    def wait_until(self, happens: Callable[[], object], seconds: float) -> None:
        """Wait until `happens`; on a time-out, show its output."""
        try:
            until(happens, seconds)
        except AssertionError as error:
            self.kill()
            out, err = self.process.communicate(timeout=10)
            raise AssertionError(f"{error}\n{out}\n{err}") from None

    def kill(self) -> None:
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(*command: object, env: dict[str, str] | None = None, seconds: float = 240) -> Result:
    started = Command(*command, env=env)
    try:
        return started.end(seconds)
    finally:
        started.kill()


def marked(mark: str) -> list[int]:
    """Pids of processes with this word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            has_it = entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes()
            zombie = has_it and (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if has_it and not zombie:
            found.append(int(entry.name))
    return found


SLURM_CONF = """\
ClusterName=test{port}
SlurmctldHost={control}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODES_HERE = (
    "NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000 State=UNKNOWN"
)


class Slurm:
    """A SLURM of two nodes: munged, slurmctld and two slurmd, as this user's own processes."""

    def __init__(self, wrap: Callable[[int], list[str]] | None = None) -> None:
        """`wrap`: the command prefix that runs a command on machine 0 or 1; None: both nodes are this machine."""
        # Not pytest's folder: the path of a socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="vitamp-slurm-", dir="/tmp"))
        self.on = wrap or (lambda _machine: [])
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname().split(".")[0]
        port = free_port()
        nodes = NODES_HERE.format(host=host, first=(first := _free_pair()), last=first + 1)
        if wrap is not None:
            nodes = "NodeName=n[0-1] CPUs=4 RealMemory=1000 State=UNKNOWN"
        control = "n0" if wrap else f"{host}(127.0.0.1)"
        for name in ("state", "spool.n0", "spool.n1"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self.folder.chmod(0o755)
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(control=control, port=port, folder=self.folder, nodes=nodes)
        )

    def start(self) -> None:
        folder, conf = self.folder, str(self.folder / "slurm.conf")
        files = [("key-file", "munge.key"), ("socket", "munge.sock"), ("pid-file", "munged.pid")]
        files += [("log-file", "munged.log"), ("seed-file", "munged.seed")]
        self._daemon("munged", "-F", "--force", *(f"--{option}={folder / name}" for option, name in files))
        until((folder / "munge.sock").exists, 20)
        self._daemon(*self.on(0), "slurmctld", "-D", "-c", "-f", conf)
        for machine in (0, 1):
            self._daemon(*self.on(machine), "slurmd", "-D", "-f", conf, "-N", f"n{machine}")
        until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            [*self.on(0), *command],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return done.stdout.strip()

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.ask("scancel", "--signal=KILL", "--full", "--user=root")
            self.ask("scancel", "--user=root")
            until(lambda: not self.ask("squeue", "-h"), 15)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemon(self, *command: str) -> None:
        log = (self.folder / "daemons.log").open("ab")
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        self.daemons.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # no daemon outlives a test that is killed
                env={**os.environ, **self.env, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        )
        log.close()


def _free_pair() -> int:
    for _ in range(50):
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as listener:
            listener.bind(("localhost", first + 1))
            return first
    raise AssertionError("no two free ports in a row")


@contextlib.contextmanager
def slurm(wrap: Callable[[int], list[str]] | None = None) -> Iterator[Slurm]:
    package = "slurmd slurmctld slurm-client munge util-linux"
    needs("munged", "slurmctld", "slurmd", "srun", "setpriv", root=True, package=package)
    cluster = Slurm(wrap)
    try:
        try:
            cluster.start()
        except AssertionError:
            last = (cluster.folder / "daemons.log").read_text(errors="replace").splitlines()[-3:]
            pytest.skip(f"SLURM is installed and does not start here: {' / '.join(last)}")
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def two_machines() -> Iterator[Callable[[int], list[str]]]:
    """Two network namespaces joined by a virtual cable, each with its own host name; yields the command prefix."""
    needs("ip", "unshare", "nsenter", root=True, package="iproute2 util-linux")
    mark = uuid.uuid4().hex[:6]
    spaces = [f"vitamp-{mark}-{machine}" for machine in (0, 1)]
    hosts = Path(tempfile.mkdtemp(prefix="vitamp-hosts-")) / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 n0\n10.77.0.2 n1\n")

    def ip(*words: str, check: bool = True) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if check and done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")

    def on(machine: int) -> list[str]:
        become = f'hostname n{machine}; mount --bind {hosts} /etc/hosts; exec "$@"'
        inside = ["unshare", "-m", "-u", "--propagation", "private", "sh", "-c", become, "sh"]
        return ["nsenter", f"--net=/run/netns/{spaces[machine]}", *inside]

    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ends = [f"v{mark}{machine}" for machine in (0, 1)]
        ip("link", "add", ends[0], "netns", spaces[0], "type", "veth", "peer", "name", ends[1], "netns", spaces[1])
        for machine, (space, end) in enumerate(zip(spaces, ends, strict=True), start=1):
            ip("-n", space, "addr", "add", f"10.77.0.{machine}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
        if subprocess.run([*on(0), "true"], capture_output=True, check=False).returncode:
            pytest.skip("no mount namespaces here")
        yield on
    finally:
        for space in spaces:
            ip("netns", "del", space, check=False)
        shutil.rmtree(hosts.parent, ignore_errors=True)


def torchrun(*words: object) -> list[object]:
    return [sys.executable, "-m", "torch.distributed.run", *words]
