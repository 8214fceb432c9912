"""Scanned networks whose memory is known in closed form, for plans and for audits."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax
from zero_jax.models import cross_entropy
from zero_jax.plan.peak_memory import temporaries

N = 8  # devices
TX = optax.adamw(1e-3)


def scanned(h, layers):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]


@dataclasses.dataclass(frozen=True)
class Network:
    """L layers of tanh(h @ w), h (B, T, D) on each device, and mean squares or V classes."""

    L: int
    D: int
    B: int
    T: int
    V: int = 0
    dtype: str = "fp32"
    bucket_bytes: int = 2**30

    @property
    def layer(self):
        return self.D * self.D

    @property
    def psi(self):
        return self.L * self.layer + self.D * self.V

    @property
    def carry(self):
        """Bytes of what one layer hands to the next."""
        return self.B * self.T * self.D * self.width

    @property
    def width(self):
        return {"fp32": 4, "bf16": 2}[self.dtype]

    def make(self):
        layers = {"layers": jnp.zeros((self.L, self.D, self.D))}
        return layers | ({"head": jnp.zeros((self.D, self.V))} if self.V else {})

    def loss(self, params, x):
        h = scanned(x, params["layers"])
        if not self.V:
            return jnp.mean(jnp.square(h))
        return jnp.mean(jax.nn.logsumexp(h @ params["head"], axis=-1))

    def step(self, stage, remat, grad_accum_steps=1, mesh=None):
        """A step and its arguments, of which no array exists."""
        more = {"precision": self.dtype, "remat": remat, "grad_accum_steps": grad_accum_steps}
        more["bucket_bytes"] = self.bucket_bytes
        zero = zero_jax.Zero(mesh or zero_jax.make_mesh(), stage, **more)
        params = zero.eval_shape(self.make)
        shape, dtype = (N * self.B, self.T, self.D), {4: "float32", 2: "bfloat16"}[self.width]
        rows = NamedSharding(zero.mesh, PartitionSpec("data"))
        batch = jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        tx = zero.optimizer(TX)
        return zero.train_step(self.loss, tx), (params, tx.init(params), batch)

    def temporaries(self, stage, remat="block", grad_accum_steps=1, on_gpu=False):
        step, args = self.step(stage, remat, grad_accum_steps)
        leaves = step.read(*args).leaves
        return temporaries(step.trace(*args).jaxpr, leaves, on_gpu=on_gpu)


class Chunked(Network):
    """The same, its logits two rows at a time."""

    def loss(self, params, x):
        h = scanned(x, params["layers"]).reshape(-1, self.D)
        labels, weights = jnp.zeros(len(h), "int32"), jnp.ones(len(h))
        head = params["head"].T
        return zero_jax.Weighted(*cross_entropy.chunked_cross_entropy(h, head, labels, weights, 2))


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
            return h + scanned(h, w["own"]), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["layers"])[0]))


class Embedded(Network):
    """A network whose rows are taken from a table (V, D) by a product: it is gathered."""

    def make(self):
        return {"layers": jnp.zeros((self.L, self.D, self.D)), "table": jnp.zeros((self.V, self.D))}

    def loss(self, params, x):
        h = jax.nn.one_hot(x[..., 0].astype(int), self.V, dtype=x.dtype) @ params["table"]
        return jnp.mean(jnp.square(scanned(h, params["layers"])))


LONG = Network(L=6, D=64, B=16, T=64)  # activations outweigh weights
WIDE = Network(L=8, D=256, B=2, T=4)  # and the other way round
