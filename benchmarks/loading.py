"""What processes read of a folder of weights, and the host memory that they take for it.

    python benchmarks/loading.py                 # 2 GB, 4 processes, 2 minutes on two cores
    python benchmarks/loading.py --base nf4      # as the base of QLoRA

Makes a folder of a Llama in bf16 (zeros, which are read like any), starts processes of one
device each over loopback, and has them load it at stage 3, as fp32 masters or as a frozen base.
Each says how many bytes of tensors it read, and how much memory of its own it took at most, looked
at a hundred times a second; pages of the files, which the kernel may drop, are not its own. Limits:
its shard in the files' bf16; its shard as it rests and one leaf.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

PROCESSES, VOCAB, WIDTH, HIDDEN = 4, 32768, 2048, 8192


def config_of(gigabytes: float):
    """A Llama of about so many bytes in bf16."""
    from zero_jax.models import decoder

    ends, layer = 2 * VOCAB * WIDTH, 3 * WIDTH * HIDDEN + 4 * WIDTH**2
    return decoder.DecoderConfig(
        layers=max(1, round((gigabytes * 1e9 / 2 - ends) / layer)),
        width=WIDTH,
        heads=16,
        kv_heads=16,
        head_dim=128,
        hidden=HIDDEN,
        vocab=VOCAB,
        seq=2048,
    )


def make(folder: pathlib.Path, gigabytes: float) -> int:
    """The folder; returns its bytes of weights."""
    from zero_jax.interchange.safetensor_files import Writer
    from zero_jax.models import hf

    config = config_of(gigabytes)
    kinds = {p.name: (p.shape, "bfloat16") for p in hf.layout(config).places}
    writer = Writer(folder, kinds, 10**9)
    for name, (shape, dtype) in kinds.items():
        writer.write(name, (), np.zeros(shape, jnp.dtype(dtype)))
    writer.finish()
    (folder / "config.json").write_text(json.dumps(hf.json_of(config, "bfloat16")))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def one(folder: str, base: str, address: str, index: str) -> None:
    """In one process: loads, and prints what that took."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    import zero_jax
    from zero_jax import interchange
    from zero_jax.adapters.lora import Lora
    from zero_jax.interchange import safetensor_files
    from zero_jax.plan.text_model import TextModel

    zero_jax.initialize(address, PROCESSES, int(index))
    text = TextModel(interchange.config(folder), Lora(base=base) if base else None)
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, frozen=text.frozen)
    like = zero.eval_shape(text.make)
    like = like["base"] if base else like
    read, count = safetensor_files.Files.read, [0]

    def counted(*args):
        part = read(*args)
        count[0] += part.nbytes
        return part

    safetensor_files.Files.read = counted
    before, peak, done = own_memory(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], own_memory())

    looking = threading.Thread(target=look)
    looking.start()
    params = interchange.load(folder, like, rounded=bool(base))
    done.set()
    looking.join()
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
    known = {"read": count[0], "rests": held, "peak": peak[0] - before}
    print(json.dumps(known), flush=True)


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--base", default="", help="int8, nf4, bf16; masters unless given")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        one(parsed.one[0], parsed.base, *parsed.one[1:])
        return
    from training.supervise import free_address

    with tempfile.TemporaryDirectory() as name:
        size, address = make(pathlib.Path(name), parsed.gigabytes), free_address()
        command = [sys.executable, __file__, "--base", parsed.base, "--one", name, address]
        started = [
            subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, text=True)
            for index in range(PROCESSES)
        ]
        found = [json.loads(own.communicate()[0].splitlines()[-1]) for own in started]
    print(f"{size / 1e9:.2f} GB in bf16, {PROCESSES} processes, {parsed.base or 'fp32 masters'}")
    print("| process | read GB | of the folder | rests GB | peak GB | less what rests GB |")
    print("|---|---|---|---|---|---|")
    for index, own in enumerate(found):
        read, rests, peak = (own[key] / 1e9 for key in ("read", "rests", "peak"))
        cells = f"{read:.3f} | {own['read'] / size:.3f} | {rests:.3f} | {peak:.3f}"
        print(f"| {index} | {cells} | {peak - rests:.3f} |")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
