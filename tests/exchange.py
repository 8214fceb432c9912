"""Models for the tests of interchange: parameters, meshes, folders, and comparison of bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from problems import zero_on

import zero_jax
from zero_jax import interchange
from zero_jax.commands.checkpoint import main
from zero_jax.models import families, gpt

ATOL = 1e-4  # of logits in fp32, whose sums come in another order
GPTS = {
    "odd": gpt.GPTConfig(layers=2, width=12, heads=2, vocab=17, seq=8),
    "even": gpt.GPTConfig(layers=3, width=16, heads=4, vocab=20, seq=6),
    "one head": gpt.GPTConfig(layers=1, width=10, heads=1, vocab=31, seq=5),
    "as many heads as columns": gpt.GPTConfig(layers=4, width=6, heads=6, vocab=9, seq=12),
}


def make(config):
    return nnx.state(families.build(config, nnx.Rngs(0)), nnx.Param)


def noisy(config, dtype=jnp.float32):
    """Initial parameters with noise: none is zero or one, so that every bias and scale counts."""
    rng, start = np.random.default_rng(0), jax.jit(make, static_argnums=0)(config)
    return jax.tree.map(lambda x: (x + 0.3 * rng.normal(size=x.shape)).astype(dtype), start)


def abstract(config, n=1, stage=3, model=1):
    return zero_on({"data": n, "model": model}, stage).eval_shape(functools.partial(make, config))


def loaded(folder, n=1, stage=3, model=1, **settings):
    config = interchange.config(folder)
    return config, interchange.load(folder, abstract(config, n, stage, model), **settings)


def save(folder, tree, config=None, step=1):
    with zero_jax.Checkpoints(folder) as checkpoints:
        checkpoints.save(step, tree, config=config)
    return folder


def exported_in_files(folder, config):
    """Parameters on 4 devices, their checkpoint of step 3, and that exported in several files."""
    params = zero_on(4).shard(noisy(config))
    tree = params, {"mu": jax.tree.map(np.zeros_like, noisy(config))}
    save(folder / "in", tree, {"heads": config.heads}, step=3)
    args = ["export", str(folder / "in"), str(folder / "out"), "--max-file-bytes", "3e3"]
    assert main(args) == 0
    return params, folder / "in", folder / "out"


def built(config, params):
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: families.build(config, nnx.Rngs(0))))
    return nnx.merge(graphdef, params)


def logits(config, params, tokens):
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(lambda p: built(config, p)(tokens))(params))
