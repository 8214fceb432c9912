"""What XLA for GPUs runs into the ends of loops over layers: of small networks, in closed form."""

import jax
import jax.numpy as jnp
import pytest
from test_forecast import AHEAD, N, Network

from zero_jax.plan import forecast


class OneProduct(Network):
    """A network; the gradient of its head, made in one product, is the largest of all."""

    def loss(self, params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean(jnp.square(h @ params["head"]))


class Twins(Network):
    """A network with two matrices in a layer."""

    @property
    def layer(self):
        return 2 * self.D * self.D

    def make(self):
        return {"layers": [jnp.zeros((self.L, self.D, self.D))] * 2}

    def loss(self, params, x):
        def layer(h, w):
            return jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["layers"])[0]))


class Nested(Network):
    """A network with an MLP, and a loop over eight matrices, in a layer."""

    @property
    def layer(self):
        return (2 * 16 + 8) * self.D * self.D

    def make(self):
        L, D = self.L, self.D
        shapes = {"up": (L, D, 16 * D), "down": (L, 16 * D, D), "own": (L, 8, D, D)}
        return {"layers": {k: jnp.zeros(shape) for k, shape in shapes.items()}}

    def loss(self, params, x):
        def layer(h, w):
            h = h + jnp.tanh(h @ w["up"]) @ w["down"]
            y, _ = jax.lax.scan(lambda y, own: (jnp.tanh(y @ own), None), h, w["own"])
            return h + y, None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["layers"])[0]))


class Embedded(Network):
    """A network whose rows are taken from a table (V, D) by a product: it is gathered."""

    def make(self):
        return {"layers": jnp.zeros((self.L, self.D, self.D)), "table": jnp.zeros((self.V, self.D))}

    def loss(self, params, x):
        h = jax.nn.one_hot(x[..., 0].astype(int), self.V, dtype=x.dtype) @ params["table"]
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])
        return jnp.mean(jnp.square(h))


def test_while_a_loss_in_one_piece_ends_the_last_layer_is_gathered_again():
    """Behind its last product; what is worst before that is as it was."""
    net = OneProduct(L=3, D=64, B=2, T=4, V=5000)
    without = net.forecast(3, habits=forecast.Habits(of_gpus=True))
    ahead = net.forecast(3, habits=AHEAD)
    assert without.terms["gradients"] + without.terms["work"] >= 4 * 64 * 5000, "that of the head"
    assert ahead.bytes - without.bytes == 4 * net.layer


def test_at_the_end_of_a_layer_its_gradients_wait_beside_those_of_the_one_before():
    """In the reduce dtype; of the weights only the next layer's are still there."""
    net = Twins(L=4, D=256, B=1, T=4, dtype="bf16")
    ahead = net.forecast(3, habits=AHEAD).terms
    assert ahead["copy"] == 2 * net.layer
    assert ahead["buffers"] == 2 * 4 * net.layer
    found = net.forecast(3, habits=forecast.Habits(of_gpus=True)).terms
    assert found["buffers"] == 4 * net.layer, "that loop does not run into the next turn"


@pytest.mark.parametrize(("L", "larger"), [(6, "gradients"), (64, "inputs")])
def test_the_first_layers_gradients_are_under_way_while_the_embeddings_is_cast(L, larger):
    """It is there in bf16 and in fp32 then, and so is the larger of what layers kept and of another
    layer's gradients."""
    net = Embedded(L=L, D=64, B=2, T=2, V=5000, dtype="bf16")
    found = net.forecast(3, habits=AHEAD).terms
    layer, saved = 4 * net.layer, L * net.carry
    assert (saved > layer) == (larger == "inputs")
    assert found["buffers"] + found["saved"] == layer + max(layer, saved)
    shards = 4 * L * net.layer // N
    assert found["gradients"] == (2 + 4) * net.V * net.D + shards + 4, "and the loss"


def test_both_are_there_while_it_is_sent():
    """Where its copy in bf16 is smaller than either, that is the worst instant."""
    net = Embedded(L=64, D=64, B=2, T=2, V=100, dtype="bf16")
    found = net.forecast(3, habits=AHEAD).terms
    assert found["buffers"] == 2 * 4 * net.layer
    assert found["saved"] == net.L * net.carry
    assert found["gradients"] == 4 * net.V * net.D + 4 * net.psi // N + 4, "and the loss"


def test_a_loop_that_gathers_nothing_runs_its_last_turn_itself():
    """One within a layer, over slices of what the layer gathered."""
    net = Nested(L=4, D=32, B=16, T=64)
    without = net.forecast(3, habits=forecast.Habits(of_gpus=True))
    assert net.forecast(3, habits=AHEAD).bytes - without.bytes == 4 * net.layer


def test_the_next_micro_batch_has_gathered_what_it_reads_first():
    net = Embedded(L=6, D=64, B=2, T=2, V=5000, dtype="bf16")
    one, two = (net.forecast(3, micro_batches=k, habits=AHEAD) for k in (1, 2))
    table = 2 * net.V * net.D
    assert one.terms["copy"] == 0, "nothing is left to gather"
    assert two.terms["copy"] == table + 2 * net.layer
