"""Compiles a training step from abstract arrays and prints what it sends and holds, as JSON.

    python abstract_step.py MODEL DEVICES STAGE MICRO_BATCHES

A process of its own, since the number of simulated devices is fixed when JAX starts.
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


def main(model: str, devices: int, stage: int, k: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    config = gpt.preset(model)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))

    def make() -> nnx.State:
        return nnx.state(gpt.GPT(config, rngs=nnx.Rngs(0)), nnx.Param)

    mesh, tx = zero_jax.make_mesh(), optax.adamw(1e-4)
    zero = zero_jax.Zero(mesh, stage=stage, precision="bf16", micro_batches=k, remat="block")
    params = zero.abstract(make)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    rows = jax.ShapeDtypeStruct((devices * k, config.seq + 1), jnp.int32, sharding=sharding)
    step = zero.train_step(lambda p, t: zero_jax.Weighted(*gpt.loss(nnx.merge(graphdef, p), t)), tx)
    report = auditor.audit(step.lower(params, zero.optimizer(tx).init(params), rows).compile())
    closed = memory.estimate(jax.eval_shape(make), shards=devices, stage=stage, tx=tx)
    scalars = sum(c.kind == "all-reduce" and c.elements <= 2 for c in report.collectives)
    found = {"num_params": gpt.num_params(config), "words": report.words}
    found |= {"scalar_all_reduces": scalars, "argument_bytes": report.argument_bytes}
    found |= {"closed_form_bytes": closed.at_rest, "batch_bytes": k * (config.seq + 1) * 4}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
