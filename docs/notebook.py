"""Runs docs/memory.ipynb anew and keeps what it shows: `PYTHONPATH=. python docs/notebook.py`.

Another file may be named, to keep it there. Needs nbclient and ipykernel. Of a run only outputs are
kept, and no times or paths.
"""

import pathlib
import sys
import tempfile

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = pathlib.Path(__file__).with_name("memory.ipynb")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same cells with the outputs of a run of their own."""
    cells = [nbformat.from_dict({**cell}) for cell in notebook.cells]
    fresh = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    with tempfile.TemporaryDirectory() as folder:
        # Sockets of this folder: nobody else's process can reach them.
        where = {"transport": "ipc", "ip": f"{folder}/kernel"}
        kernel = AsyncKernelManager(kernel_name=KERNEL["name"], **where)
        NotebookClient(fresh, kernel, timeout=300, record_timing=False).execute()
    fresh.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    return fresh


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(executed(nbformat.read(NOTEBOOK, as_version=4)), where)
