"""Started by SLURM and by mpirun: the batch script of the docs, a task that is killed, going on.

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
ARGS = [
    *RUN,
    "--warmup",
    "2",
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    "3",
    "--dead-after",
    "5",
]


def script_of_the_docs(tasks, command):
    """The batch script in docs/checkpoints.md, of two nodes, with another command and no GPUs."""
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


def step_of(out):
    """The last step that was written down."""
    try:
        return max(line["step"] for line in metrics(out))
    except (OSError, ValueError, KeyError):
        return 0


def pid_of(rank, out):
    """The process of a rank in the newest start, as its sign of life has it."""
    signs = sorted(Path(out).glob(f"alive/start-*/{rank:05d}.json"), key=os.path.getmtime)
    return int(re.search(r"pid (\d+)", json.loads(signs[-1].read_text())["process"])[1])


def alone(tasks):
    """The losses of the same run in one process."""
    ((code, _, error),) = finish([start(*ARGS, "--out", "alone", "--devices", str(tasks))])
    assert code == 0, error
    return curve("alone")


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_slurm_job_of_which_one_task_is_killed_is_requeued_and_goes_on(folder, tasks):
    assert not slurm_cluster.missing(), "install slurm-wlm"
    own = ["--out", str(folder / "out"), "--data", str(folder / "text.txt"), *ARGS]
    command = [sys.executable, str(ROOT / "train.py"), *own, "--devices", str(tasks)]
    (folder / "job.sh").write_text(script_of_the_docs(tasks, " ".join(command)))
    short = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with short as slurm, slurm_cluster.Cluster(Path(slurm)) as cluster:
        job = cluster.submit(folder / "job.sh", folder / "job.log")
        cluster.wait(lambda: step_of("out") >= 8)
        # As when its time is nearly over: it saves, and is put back into the queue.
        assert cluster.run("scancel", "--signal=USR1", job).returncode == 0
        cluster.wait(lambda: cluster.job(job)["Restarts"] == "1")
        stopped = step_of("out")
        cluster.wait(lambda: step_of("out") >= stopped + 5)
        os.kill(pid_of(tasks - 1, "out"), signal.SIGKILL)
        cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED")
        assert cluster.job(job)["Restarts"] == "2"
    said = (folder / "job.log").read_text()
    assert said.count("Going on from") == 2, said
    assert f"process {tasks - 1} (pid" in said and "is gone" in said, said
    assert [line["step"] for line in metrics("out") if "loss" in line][-1] == STEPS
    np.testing.assert_allclose(curve("out"), alone(tasks), rtol=1e-5)


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_run_by_mpirun_of_which_one_task_is_killed_goes_on(folder, tasks):
    assert shutil.which("mpirun"), "install openmpi-bin"
    command = [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(tasks)),
        *(sys.executable, str(ROOT / "train.py"), *ARGS, "--out", "out", "--devices", str(tasks)),
    ]

    def run():
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    first = run()
    end = time.monotonic() + 240
    while step_of("out") < 8:
        assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
        time.sleep(0.2)
    os.kill(pid_of(1, "out"), signal.SIGKILL)
    said, _ = first.communicate(timeout=120)
    assert first.returncode != 0, said
    again = run()
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert said.count("Going on from") == 1, said
    np.testing.assert_allclose(curve("out"), alone(tasks), rtol=1e-5)
