"""Runs under SLURM and mpirun resume after a task is killed: needs slurm-wlm and openmpi-bin."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import RUN, curve, finish, folder, metrics, start, wait_for

from training.supervise import free_address

pytestmark = pytest.mark.launchers
__all__ = ["folder"]  # a fixture

ROOT = Path(__file__).parents[2]
STEPS = 40
ARGS = f"--warmup-steps 2 --max-steps {STEPS} --save-steps 3 --heartbeat-timeout-seconds 5"
ARGS = [*RUN, *ARGS.split()]
# JAX looks for the coordinator on the first node, so that has to be a name of this machine.
NODES = (socket.gethostname(), "zz-second")
CONF = """ClusterName=here SlurmctldHost=localhost(127.0.0.1) AuthType=auth/none CredType=cred/none
AuthInfo=cred_expire=5 MpiDefault=none ProctrackType=proctrack/linuxproc TaskPlugin=task/none
SelectType=select/cons_tres SelectTypeParameters=CR_Core SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none AccountingStorageType=accounting_storage/none
ReturnToService=2 KillWait=5 SlurmUser={user} SlurmdUser={user} SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log SlurmdLogFile={folder}/slurmd.%n.log"""  # a line each


def wait(until, folder, seconds=240):
    end = time.monotonic() + seconds
    while not until():
        logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
        assert time.monotonic() < end, "\n".join(logs)
        time.sleep(0.2)


@contextlib.contextmanager
def cluster(folder):
    """Starts SLURM in a folder with a short path; yields a function that runs its commands."""
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf", "JAX_PLATFORMS": "cpu"}
    ports, user = [free_address().rpartition(":")[2] for _ in range(3)], getpass.getuser()
    lines = CONF.format(folder=folder, user=user, port=ports.pop()).split()
    at = f"NodeHostname={NODES[0]} NodeAddr=127.0.0.1 CPUs=8"
    lines += [f"NodeName={node} {at} Port={x}" for node, x in zip(NODES, ports, strict=True)]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP", ""]
    (folder / "slurm.conf").write_text("\n".join(lines))
    (folder / "state").mkdir()

    def run(*command):
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    def is_idle():
        return run("sinfo", "-hN").count("idle") == len(NODES)

    # Own sessions: a Ctrl-C in the terminal does not end them.
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    commands = (("slurmctld", "-D"), *(("slurmd", "-D", "-N", name) for name in NODES))
    running = [subprocess.Popen(x, start_new_session=True, **options) for x in commands]
    try:
        wait(is_idle, folder, 60)
        yield run
    finally:
        run("scancel", "--user", user)
        with contextlib.suppress(AssertionError):
            wait(is_idle, folder, 60)
        for process in reversed(running):
            process.terminate()
            process.wait(timeout=30)


def last_step():
    try:
        return max(line["step"] for line in metrics("out"))
    except (OSError, ValueError, KeyError):
        return 0


def kill(rank):
    """Kills the process of a rank."""
    ranks = {f"{name}={rank}".encode() for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            is_task = b"train.py" in path.with_name("cmdline").read_bytes()
            if is_task and not ranks.isdisjoint(path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGKILL)


def assert_losses_of_one_process(tasks):
    ((code, _, error),) = finish([start(*ARGS, "--output-dir", "alone", "--devices", str(tasks))])
    assert code == 0, error
    np.testing.assert_allclose(curve("out"), curve("alone"), rtol=1e-5)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_slurm_job_with_a_killed_task_is_requeued_and_resumes(folder, tasks):
    assert shutil.which("slurmctld"), "install slurm-wlm"
    own = ["--output-dir", str(folder / "out"), "--data", str(folder / "text.txt"), *ARGS]
    command = [sys.executable, str(ROOT / "train.py"), *own, "--devices", str(tasks)]
    # The batch script of the docs, for two nodes and no GPUs.
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    for old, new in [
        (r"--nodes=2-4 --ntasks-per-node=8 --gpus-per-node=8", f"--nodes=2 -n {tasks}"),
        (r"srun python train.py .*", f"srun {' '.join(command)}"),
        (r"export JAX_COMPILATION_CACHE_DIR.*\n", ""),  # of GPU programs, and on a shared disk
    ]:
        script, count = re.subn(old, new, script)
        assert count == 1, old
    (folder / "job.sh").write_text(script)
    log = folder / "job.log"
    short = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with short as name, cluster(Path(name)) as run:

        def job(key):
            return dict(re.findall(r"(\w+)=(\S*)", run("scontrol", "show", "job", number)))[key]

        number = run("sbatch", "--parsable", f"--output={log}", str(folder / "job.sh")).strip()
        wait(lambda: last_step() >= 8, Path(name))
        # The signal shortly before the time limit: it saves, and is requeued.
        run("scancel", "--signal=USR1", number)
        wait(lambda: job("Restarts") == "1", Path(name))
        stopped = last_step()
        wait(lambda: last_step() >= stopped + 5, Path(name))
        kill(tasks - 1)
        wait(lambda: job("JobState") == "COMPLETED", Path(name))
        assert job("Restarts") == "2"
    text = log.read_text()
    assert text.count("Resuming from") == 2, text
    assert f"process {tasks - 1} (pid" in text and "is gone" in text, text
    assert [line["step"] for line in metrics("out") if "loss" in line][-1] == STEPS
    assert_losses_of_one_process(tasks)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_run_by_mpirun_with_a_killed_task_resumes(folder, tasks):
    assert shutil.which("mpirun"), "install openmpi-bin"
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(tasks), sys.executable]
    command += [str(ROOT / "train.py"), *ARGS, "--output-dir", "out", "--devices", str(tasks)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen(command, **options)
    wait_for(lambda: last_step() >= 8, first, 240)
    kill(1)
    text, _ = first.communicate(timeout=120)
    assert first.returncode != 0, text
    again = subprocess.run(command, timeout=300, **options)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("Resuming from") == 1, again.stdout
    assert_losses_of_one_process(tasks)
