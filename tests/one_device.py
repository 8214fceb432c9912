"""Steps and gradients on a mesh beside those of plain JAX and optax on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import Problem, plain_steps, ulps, zero_on

import zero_jax

# eps: Adam turns the rounding of a gradient that is next to nothing into a step.
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4))


class Case(Problem):
    """A problem that equals itself alone, so that results are cached; its loss may return aux."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    @functools.cached_property
    def has_aux(self):
        out = jax.eval_shape(self.loss, self.start, self.batch)
        return isinstance(out, tuple) and not isinstance(out, zero_jax.Weighted)


@functools.cache
def alone(own, tx, steps):
    """Loss, gradient norm and sum of aux of each step, and the parameters after the last."""
    seen, params = plain_steps(own, tx, steps)
    return np.asarray([(loss, norm, jnp.sum(aux)) for loss, norm, aux in seen], np.float64), params


def begun(own, sizes, tx=ADAM, **settings):
    """A Zero, its step and the first arguments."""
    zero = zero_on(sizes, **settings)
    params, batch = zero.shard(own.start), zero_jax.global_batch(zero.mesh, own.batch)
    tx = zero.optimizer(tx)
    step = zero.train_step(own.loss, tx, has_aux=own.has_aux)
    return zero, step, (params, tx.init(params), batch)


def trained(own, sizes, tx=ADAM, steps=2, **settings):
    """Returns what `alone` does, and the audit of the step."""
    zero, step, (*states, batch) = begun(own, sizes, tx, **settings)
    program, seen = step.lower(*states, batch).compile(), []
    for _ in range(steps):
        *states, metrics = program(*states, batch)
        aux = metrics.aux if own.has_aux else 0.0
        seen.append((metrics.loss, metrics.grad_norm, jnp.sum(aux)))
    audit = zero_jax.audit(program, dict(zero.mesh.shape))
    return np.asarray(seen, np.float64), zero.unshard(states[0]), audit


def check_parity(own, sizes, tx=ADAM, steps=2, bound=256, **settings):
    """Compares steps in units of fp32 rounding, and returns the audit.

    Sums over devices are in another order; a wrong mean or norm is off by 10^4 ulps or more.
    """
    seen, params, audit = trained(own, sizes, tx, steps, **settings)
    wanted, want = alone(own, tx, steps)
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    assert ulps(params, want) < bound
    return audit


def check_gradients(loss, params, x, sizes, rounding=1e-5, plain=None, **settings):
    """Compares a loss and its gradients, and returns those of one device."""
    zero = zero_on(sizes, **settings)
    value, grads = zero.value_and_grad(loss)(zero.shard(params), x)
    wanted, want = jax.jit(jax.value_and_grad(plain or loss))(params, x)
    np.testing.assert_allclose(value, wanted, rtol=rounding, equal_nan=False)
    near = functools.partial(np.testing.assert_allclose, rtol=10 * rounding, atol=1e-6)
    pairs = jax.tree.leaves_with_path(zero.unshard(grads)), jax.tree.leaves(want)
    for (path, a), b in zip(*pairs, strict=True):
        near(a, b, equal_nan=False, err_msg=str(path))
    return want


def audited(loss, make, x, sizes, **settings):
    zero = zero_on(sizes, **settings)
    lowered = jax.jit(zero.value_and_grad(loss)).lower(zero.eval_shape(make), x)
    return zero_jax.audit(lowered.compile(), dict(zero.mesh.shape))


# XLA for CPUs drops barriers, and merged equal operations of both passes before jax 0.12.
MERGES = jax.__version_info__ < (0, 12)


def sent(audit, kind, axis="data", dtypes=None):
    """Elements that a device sends, and messages; without the loss, its weight and the norm."""
    found = [c for c in audit.collectives if (c.kind, c.axis) == (kind, axis)]
    found = [c for c in found if c.elements > 8 or kind != "all-reduce"]
    chosen = [c for c in found if dtypes is None or c.dtype in dtypes]
    return sum(c.elements * c.runs for c in chosen), sum(c.runs for c in chosen)
