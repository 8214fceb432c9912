"""A SLURM cluster of two nodes on this machine: one slurmctld and two slurmd."""

import getpass
import os
import re
import socket
import subprocess
import time
from pathlib import Path

from training.supervise import free_address

# JAX looks for the coordinator on the first node, so that has to be a name of this machine.
NODES = (socket.gethostname(), "zz-second")
CONF = """ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
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
NodeName={nodes[0]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={nodes[1]} NodeHostname={nodes[0]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A context manager that ends its jobs and its own processes.

    The folder's path has to be short: sockets in it may have 108 characters.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        conf, user = folder / "slurm.conf", getpass.getuser()
        self.environment = {**os.environ, "SLURM_CONF": str(conf), "JAX_PLATFORMS": "cpu"}
        ports = [free_address().rpartition(":")[2] for _ in range(3)]
        conf.write_text(CONF.format(folder=folder, user=user, ports=ports, nodes=NODES))
        self._running: list[subprocess.Popen] = []

    def __enter__(self):
        (self.folder / "state").mkdir()
        nodes = (("slurmd", "-D", "-N", name) for name in NODES)
        # Own sessions: a Ctrl-C in the terminal does not end them.
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        options |= {"env": self.environment, "start_new_session": True}
        for command in (("slurmctld", "-D"), *nodes):
            self._running.append(subprocess.Popen(command, **options))
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
        return self.run("sinfo", "-hN").count("idle") == len(NODES)

    def _end(self):
        for process in reversed(self._running):
            process.terminate()
            process.wait(timeout=30)

    def run(self, *command):
        """Returns the output of one of SLURM's commands."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def job(self, number):
        """Returns SLURM's record of a job, by name."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, until, seconds=240):
        end = time.monotonic() + seconds
        while not until():
            logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < end, "\n".join(logs)
            time.sleep(0.2)
