"""Generates an answer to one question, with a trained model.

    python -m training.generate runs/002 'Raises a "KeyError"'
    python -m training.generate tuned 'Raises a "KeyError"' --length 40
    python -m training.generate small 'Raises a "KeyError"' --adapter runs/002/adapter

The question is the user's turn of the chat template. Without a template it is a prompt to continue.
Decoding is greedy, in fp32, on one device and without a KV cache, so it is not for serving.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import zero_jax
from training.export import ADAPTER
from training.memory import lack_of_room
from training.show import printable
from training.tokenizer import Tokenizer
from zero_jax import interchange
from zero_jax.interchange import folder_config, peft
from zero_jax.models import families, generate
from zero_jax.plan.text_model import TextModel
from zero_jax.streams import lasting_streams

MAX_LENGTH = 10**6  # each token takes a pass over the context window


def model_of(folder: Path, adapter: Path | None = None) -> tuple[Path, Path | None]:
    """Returns the folder of the model and that of its adapters, also for the folder of a run."""
    settings = folder_config.read(folder) if (folder / "config.json").exists() else {}
    if "zero_jax" not in settings:  # that of a run has the release that wrote it
        return folder, adapter
    base, trained = settings.get("init_from"), folder / ADAPTER
    if base is not None and trained.is_dir():
        return Path(base), adapter or trained
    like = "" if base is None else f" --like {base}"
    raise ValueError(
        f"{folder} is a run whose model is in its checkpoints: export it with `python -m "
        f"zero_jax.checkpoint export {folder}/checkpoints DIR{like}`, then pass DIR"
    )


def answer(folder: Path, adapter: Path | None, question: str, length: int) -> str:
    """Returns the answer of a model, of at most `length` tokens with the end of its turn."""
    if not question or not 1 <= length <= MAX_LENGTH:
        raise ValueError(
            f"{question=}, {length=}: give a question that is not empty, and a length from 1 to "
            f"{MAX_LENGTH} tokens"
        )
    config = interchange.config(folder)
    tokenizer = Tokenizer(folder, config.vocab)
    if message := lack_of_room(4 * families.num_params(config), "answer"):
        raise ValueError(message)
    lora = None if adapter is None else peft.adapter_config(adapter)
    model = TextModel(config, lora and dataclasses.replace(lora, base="fp32"))
    zero = zero_jax.Zero(zero_jax.make_mesh(devices=jax.devices()[:1]), stage=0)
    params = interchange.load(folder, zero.eval_shape(model.own))
    if adapter is not None and (adapted := model.adapted) is not None:
        merged = jax.jit(
            lambda base, lora: adapted.merged({"base": base, "lora": lora}), donate_argnums=0
        )
        params = merged(params, jax.tree.map(jnp.asarray, peft.load_adapter(adapter, config)))
    prompt = jnp.asarray(tokenizer.asked(question), jnp.int32)
    tokens = generate.generate(model.model(params), prompt, length, jax.random.key(0), 0.0)
    return tokenizer.decode(tokenizer.to_end(np.asarray(tokens), prompt.size)[prompt.size :])


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser("python -m training.generate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    about = "Folder of a transformers model, or of a run with adapters."
    parser.add_argument("dir", type=Path, metavar="DIR", help=about)
    parser.add_argument("question", metavar="QUESTION", help="Question or prompt.")
    about = "Folder of PEFT adapters (default: those of the run)."
    parser.add_argument("--adapter", type=Path, help=about)
    about = "Maximum tokens of the answer (default: 100)."
    parser.add_argument("--length", type=int, default=100, help=about)
    parsed = parser.parse_args(args)
    try:
        said = answer(*model_of(parsed.dir, parsed.adapter), parsed.question, parsed.length)
        print(printable(said))
    except (ValueError, OSError) as error:
        print("error:", printable(str(error)).replace("\n", " "), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    lasting_streams()
    sys.exit(main())
