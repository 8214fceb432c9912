"""A SLURM of two nodes on this machine: one slurmctld and two slurmd, all files in one folder."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from training.supervise import free_address

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
# The first is where JAX looks for the coordinator, so it has to be a name of this machine.
NODES = (socket.gethostname(), "zz-second")
CPUS = 8

CONF = """ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Programs of SLURM that are not installed (Debian: slurm-wlm)."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Cluster:
    """Started by `with`; ends its jobs and its own processes.

    The folder's path has to be short: sockets in it may have 108 characters.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf), "JAX_PLATFORMS": "cpu"}
        self._running: list[subprocess.Popen] = []

    def __enter__(self):
        ports = [free_address().rpartition(":")[2] for _ in range(1 + len(NODES))]
        nodes = [
            f"NodeName={name} NodeHostname={NODES[0]} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        self._conf.write_text(
            CONF.format(
                folder=self.folder, user=getpass.getuser(), control=ports[0], nodes="\n".join(nodes)
            )
        )
        (self.folder / "state").mkdir()
        self._start("slurmctld", "-D")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        try:
            self.wait(self._is_idle, 60)
        except AssertionError:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        self.run("scancel", "--user", getpass.getuser())
        try:
            self.wait(self._is_idle, 60)
        finally:
            self._end()

    def _is_idle(self):
        return len(re.findall("idle", self.run("sinfo", "-hN").stdout)) == len(NODES)

    def _end(self):
        for process in reversed(self._running):
            process.terminate()
            process.wait(timeout=30)

    def _start(self, *command):
        # A session of its own: a Ctrl-C in the terminal is not for it.
        self._running.append(
            subprocess.Popen(
                command,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def run(self, *command):
        """Runs one of SLURM's commands."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True)

    def submit(self, script: Path, log: Path):
        """Submits a batch script; returns the number of the job."""
        done = self.run("sbatch", "--parsable", f"--output={log}", str(script))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number):
        """What SLURM knows of a job, by name."""
        text = self.run("scontrol", "show", "job", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, until, seconds=240):
        """Waits for something to be true."""
        end = time.monotonic() + seconds
        while not until():
            logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < end, "\n".join(logs)
            time.sleep(0.2)
