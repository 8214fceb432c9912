"""Export of a run: LoRA adapters in PEFT format, the model in transformers format."""

import json
import pathlib
import shutil

import jax
import numpy as np

from training import byte_tokenizer
from training.multiprocess import say
from training.run_folder import CHECKPOINTS
from training.trainer import PyTree, RunPlan, Trainer
from zero_jax import interchange
from zero_jax.interchange import peft
from zero_jax.interchange.folder_config import check_free, copy_tokenizer, ends_of

ADAPTER = "adapter"  # in the folder of the run


def check(plan: RunPlan) -> None:
    """Raises ValueError for an unusable `--export-dir` or `--lora-init-from`, before training."""
    config, lora = plan.config, plan.model.lora
    if config.lora_init_from is not None:
        asked = f"--lora-init-from {config.lora_init_from}"
        if lora is None or config.init_from is None:
            raise ValueError(
                f"{asked} requires --lora-rank, the rank of these adapters, and --init-from, their "
                "base model: give both"
            )
        given = peft.adapter_config(config.lora_init_from)
        if (given.rank, given.scale) != (lora.rank, lora.scale):
            sizes = f"--lora-rank {given.rank} --lora-alpha {given.scale * given.rank:g}"
            raise ValueError(f"{asked} has adapters of another rank or alpha: give {sizes}")
    if config.export_dir is None:
        return
    check_free(pathlib.Path(config.export_dir))
    if lora is None and not config.save_steps:
        raise ValueError(
            "--export-dir exports the last checkpoint, and --save-steps 0 writes none: leave one "
            "of them out"
        )
    if lora is not None and config.init_from is None:
        raise ValueError(
            "--export-dir merges adapters into the model of --init-from: give it, or leave "
            "--export-dir out"
        )


def write(trainer: Trainer, params: PyTree) -> None:
    """Writes the adapters and the exported model of a run whose checkpoints are on the disk.

    Process 0 writes; every process calls it.
    """
    config, model, corpus = trainer.plan.config, trainer.model, trainer.plan.corpus
    folder, ends = trainer.out / ADAPTER, corpus.ends
    full = trainer.zero.unshard({"lora": params["lora"]}) if model.lora is not None else {}
    if jax.process_index() != 0:
        return
    if model.lora is not None:
        shutil.rmtree(folder, ignore_errors=True)  # from an earlier start of this run
        lora = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), full["lora"])
        peft.save_adapter(lora, model.lora, model.config, folder, config.init_from)
        say(f"LoRA adapters in PEFT format: {folder}")
        if config.init_from is not None:
            say(f"To ask a question: python -m training.generate {trainer.out} '...'")
            # A PEFT folder has no generation config, so that of the base model applies.
            former = ends_of(pathlib.Path(config.init_from))
            if not set(ends) <= set(former):
                say(
                    f"The adapters are trained to end at token {', '.join(map(str, ends))}, and "
                    f"`eos_token_id` of {config.init_from} is {former or 'not set'}: generate with "
                    f"eos_token_id={[*dict.fromkeys([*ends, *former])]}, or use --export-dir"
                )
    if config.export_dir is None:
        return
    out = pathlib.Path(config.export_dir)
    if model.lora is not None:
        assert config.init_from is not None
        peft.merge(config.init_from, folder, out, ends=ends)
    else:
        interchange.export(trainer.out / CHECKPOINTS, out, like=config.init_from, ends=ends)
    if config.tokenizer is not None:
        copy_tokenizer(pathlib.Path(config.tokenizer), out, replace=True)
    if corpus.byte_level:
        byte_tokenizer.write(out)
        known = json.loads((out / "config.json").read_text())
        end = {"eos_token_id": byte_tokenizer.END[0], "bos_token_id": None}
        (out / "config.json").write_text(json.dumps(known | end, indent=2) + "\n")
    say(f"Exported transformers model: {out}")
