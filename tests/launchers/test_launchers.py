"""Runs under SLURM (the batch script of the docs) and mpirun resume after a task is killed.

They need Debian's slurm-wlm and openmpi-bin, and run with -m launchers.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import slurm_cluster
from test_resume import RUN, curve
from test_train import finish, folder, metrics, start

pytestmark = pytest.mark.launchers
__all__ = ["folder"]  # a fixture

ROOT = Path(__file__).parents[2]
STEPS = 40
ARGS = [*RUN, *f"--warmup 2 --steps {STEPS} --checkpoint-every 3 --dead-after 5".split()]


def script_of_the_docs(tasks, command):
    """Returns the batch script of docs/checkpoints.md for two nodes and no GPUs."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    changes = [
        (r"--nodes=2-8 --ntasks-per-node=8 --gpus-per-node=8", f"--nodes=2 -n {tasks}"),
        (r"srun python train.py .*", f"srun {command}"),
        (r"export JAX_COMPILATION_CACHE_DIR.*\n", ""),  # of GPU programs, and on a shared disk
    ]
    for old, new in changes:
        script, count = re.subn(old, new, script)
        assert count == 1, old
    return script


def last_step():
    try:
        return max(line["step"] for line in metrics("out"))
    except (OSError, ValueError, KeyError):
        return 0


def kill(rank):
    """Kills the process of a rank in the newest start, as its sign of life names it."""
    signs = sorted(Path("out").glob(f"alive/start-*/{rank:05d}.json"), key=os.path.getmtime)
    pid = re.search(r"pid (\d+)", json.loads(signs[-1].read_text())["process"])[1]
    os.kill(int(pid), signal.SIGKILL)


def assert_losses_of_one_process(tasks):
    ((code, _, error),) = finish([start(*ARGS, "--out", "alone", "--devices", str(tasks))])
    assert code == 0, error
    np.testing.assert_allclose(curve("out"), curve("alone"), rtol=1e-5)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_slurm_job_with_a_killed_task_is_requeued_and_resumes(folder, tasks):
    assert shutil.which("slurmctld"), "install slurm-wlm"
    own = ["--out", str(folder / "out"), "--data", str(folder / "text.txt"), *ARGS]
    command = [sys.executable, str(ROOT / "train.py"), *own, "--devices", str(tasks)]
    (folder / "job.sh").write_text(script_of_the_docs(tasks, " ".join(command)))
    short = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with short as slurm, slurm_cluster.Cluster(Path(slurm)) as cluster:
        log = folder / "job.log"
        job = cluster.run("sbatch", "--parsable", f"--output={log}", str(folder / "job.sh")).strip()
        cluster.wait(lambda: last_step() >= 8)
        # The signal shortly before the time limit: it saves, and is requeued.
        cluster.run("scancel", "--signal=USR1", job)
        cluster.wait(lambda: cluster.job(job)["Restarts"] == "1")
        stopped = last_step()
        cluster.wait(lambda: last_step() >= stopped + 5)
        kill(tasks - 1)
        cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED")
        assert cluster.job(job)["Restarts"] == "2"
    text = log.read_text()
    assert text.count("Going on from") == 2, text
    assert f"process {tasks - 1} (pid" in text and "is gone" in text, text
    assert [line["step"] for line in metrics("out") if "loss" in line][-1] == STEPS
    assert_losses_of_one_process(tasks)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_run_by_mpirun_with_a_killed_task_resumes(folder, tasks):
    assert shutil.which("mpirun"), "install openmpi-bin"
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(tasks)]
    command += [sys.executable, str(ROOT / "train.py"), *ARGS, "--out", "out"]
    command += ["--devices", str(tasks)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen(command, **options)
    end = time.monotonic() + 240
    while last_step() < 8:
        assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
        time.sleep(0.2)
    kill(1)
    text, _ = first.communicate(timeout=120)
    assert first.returncode != 0, text
    again = subprocess.run(command, timeout=300, **options)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("Going on from") == 1, again.stdout
    assert_losses_of_one_process(tasks)
