"""Values that should be equal on several devices, and are not."""

import jax
import numpy as np
import optax
import pytest
from problems import gpt_problem

import zero_jax
from zero_jax.checkpoint.replicas import ReplicasDiffer, check_replicas

TX = optax.adam(1e-3)


def states(stage, **axes):
    zero = zero_jax.Zero(zero_jax.make_mesh(**axes), stage)
    params = zero.init(gpt_problem().make)
    return params, zero.optimizer(TX).init(params)


def flipped(value, device):
    """The same array, one bit of which differs on one device."""
    parts = []
    for shard in value.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.reshape(-1).view(np.uint32)[0] ^= 1
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)


@pytest.mark.parametrize(
    ("stage", "axes"), [(0, {}), (3, {}), (1, {"replica": 2}), (3, {"replica": 4})]
)
def test_equal_values_pass(stage, axes):
    tree = states(stage, **axes)
    every = len(jax.tree.leaves(tree))
    found = check_replicas(tree)
    assert 0 < found < every / 2 if (stage, axes) == (3, {}) else found > every * 0.9


@pytest.mark.parametrize(("stage", "axes"), [(0, {}), (3, {"replica": 2})])
def test_one_bit_on_one_device_is_found_and_named(stage, axes):
    params, state = states(stage, **axes)
    leaves, treedef = jax.tree.flatten(params)
    at = max(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[at] = flipped(leaves[at], 5)
    params = jax.tree.unflatten(treedef, leaves)
    with pytest.raises(ReplicasDiffer, match="mlp/down/kernel is not the same") as error:
        check_replicas((params, state))
    assert "5" in str(error.value)
    if stage == 0:
        assert "[5] differ from [0, 1, 2, 3, 4, 6, 7]" in str(error.value)
