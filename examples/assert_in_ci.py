"""A continuous-integration test of memory and communication, read from the compiled program.

Copy it beside your tests, with your model in the place of `make` and `loss_fn`. It needs no GPU:
XLA compiles the step for eight simulated CPU devices. The test fails when a change makes a device
store or send more.

    pytest examples/assert_in_ci.py
    python examples/assert_in_ci.py
"""

import jax
import jax.numpy as jnp
import optax

import zero_jax

jax.config.update("jax_num_cpu_devices", 8)

ROWS, WIDTH, LAYERS = 64, 256, 6
PSI = LAYERS * WIDTH * WIDTH
# Parameters, Adam's two moments and gradients are sharded: 16 bytes of Ψ / N. Full are at most five
# layers: the two of a loop body, the next one, and the first and the last, outside of the loop.
MOST_BYTES = 16 * PSI // 8 + 5 * 4 * WIDTH * WIDTH


def make(key):
    return {"layers": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 16}


def loss_fn(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)


def compiled_step():
    """The audit of a step, from shapes alone."""
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3, remat="block")
    params = zero.eval_shape(make, jax.random.key(0))
    tx = zero.optimizer(optax.adamw(1e-3))
    step = zero.train_step(loss_fn, tx)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return zero_jax.audit(step.lower(params, tx.init(params), batch).compile())


def test_no_device_holds_more_than_its_share():
    audit = compiled_step()
    print(
        f"bytes per device: {audit.argument_bytes:,} between steps, {audit.total_bytes:,} at most"
    )
    assert audit.total_bytes <= MOST_BYTES


def test_a_step_sends_three_elements_per_parameter():
    audit = compiled_step()
    print("elements sent by each device:", audit.sent_elements)
    assert audit.elements_per_param(PSI) <= 3.01  # the rest are sums of single numbers


if __name__ == "__main__":
    test_no_device_holds_more_than_its_share()
    test_a_step_sends_three_elements_per_parameter()
