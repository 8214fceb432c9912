"""The plan of a model of one's own on 8 H100 that are not there: what fits, by stage.

A prediction from the trace of the step: a second, no GPU, nothing allocated. With the extra
`prove`, `target="h100"` in `zero.plan` compiles the step for them too (docs/plan.md).

`loss_fn` is as for one device; `plan` is what there is to write. Of one micro-batch stages 1 and 2
are one: gradients of a layer are summed as soon as they are there.

    python examples/plan_own_model.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import zero_jax

DEVICES, ROWS, TOKENS, WIDTH, LAYERS, VOCAB = 8, 16, 2048, 4096, 32, 32768
MEMORY = 80e9 * 0.92  # of an H100, less 8 % for what no plan shows


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=32)(h, mask=causal)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return nn.Dense(VOCAB)(layers()(x, None)[0])


causal = nn.make_causal_mask(jnp.ones((1, TOKENS)))
model = Model()


def loss_fn(params, tokens):
    logits = model.apply(params, tokens[:, :-1]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def plan(stage):
    mesh = zero_jax.abstract_mesh(DEVICES)
    zero = zero_jax.Zero(mesh, stage=stage, precision="bf16", remat="block")
    params = zero.eval_shape(model.init, jax.random.key(0), jnp.ones((1, TOKENS), jnp.int32))
    batch = jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)
    return zero.plan(loss_fn, zero.optimizer(optax.adamw(1e-4)), params, batch)


if __name__ == "__main__":
    plans = [plan(stage) for stage in (0, 1, 2, 3)]
    names = ("parameters", "optimizer_state", "copy", "gradients")
    print(f"{plans[0].num_params / 1e9:.2f}e9 parameters, GB on each of {DEVICES} devices")
    print("stage", *(f"{name:>15}" for name in (*names, "all")))
    for stage, one in enumerate(plans):
        terms, total = one.predicted.terms, one.predicted.total_bytes
        sizes = [*(terms.get(name, 0) for name in names), total]
        fits = "fits" if total < MEMORY else "does not fit"
        print(f"{stage:>5}", *(f"{size / 1e9:>15.2f}" for size in sizes), fits)

    psi = plans[0].num_params
    assert plans[0].predicted.parameters == 4 * psi
    assert abs(plans[3].predicted.parameters * DEVICES / (4 * psi) - 1) < 1e-3
    assert abs(plans[3].predicted.optimizer_state * DEVICES / (8 * psi) - 1) < 1e-3
    assert plans[0].predicted.total_bytes > MEMORY > plans[3].predicted.total_bytes
