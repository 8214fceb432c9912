"""Compiles a training step from abstract arrays and prints what it sends and holds, as JSON.

    python abstract_step.py MODEL DEVICES STAGE MICRO_BATCHES

A process of its own, since the number of fake devices is fixed when JAX starts.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import zero_jax
from zero_jax.hlo import auditor
from zero_jax.models import gpt
from zero_jax.plan import memory


def main(model: str, devices: int, stage: int, micro_batches: int) -> None:
    """Prints one JSON object."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    config = gpt.preset(model)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))

    def make() -> nnx.State:
        return nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param)

    mesh = zero_jax.make_mesh()
    zero = zero_jax.Zero(
        mesh, stage=stage, precision="bf16", micro_batches=micro_batches, remat="block"
    )
    tx = optax.adamw(1e-4)
    params = zero.abstract(make)
    rows = jax.ShapeDtypeStruct(
        (devices * micro_batches, config.seq + 1),
        jnp.int32,
        sharding=jax.sharding.NamedSharding(mesh, jax.P("data")),
    )
    step = zero.train_step(lambda p, t: zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, p), t)), tx)
    report = auditor.audit(step.lower(params, zero.optimizer(tx).init(params), rows).compile())
    closed = memory.estimate(jax.eval_shape(make), shards=devices, stage=stage, tx=tx)
    print(
        json.dumps(
            {
                "num_params": gpt.num_params(config),
                "words": report.words,
                "scalar_all_reduces": sum(
                    c.kind == "all-reduce" and c.elements <= 2 for c in report.collectives
                ),
                "argument_bytes": report.argument_bytes,
                "closed_form_bytes": closed.at_rest,
                "batch_bytes": micro_batches * (config.seq + 1) * 4,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
