"""Which devices take part together, and along which axis, in every spelling of groups."""

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import make_mesh

from zero_jax.hlo import auditor, replica_groups

CUBE = {"replica": 2, "data": 2, "model": 2}
NODES = "mesh['node'=16,'gpu'=8] "
SHUFFLED = "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) "


GROUPS = [
    ("{{0,4},{1,5},{2,6},{3,7}}", 2, "replica"),
    ("{{0,1,4,5},{2,3,6,7}}", 4, "replica+model"),
    ("{{0,1,2,3,4,5,6,7}}", 8, "replica+data+model"),
    ("{}", 8, "replica+data+model"),
    ("{{0,3},{1,2},{4,7},{5,6}}", 2, "?"),
    ("{{0,1,2},{3,4,5,6,7}}", None, "?"),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", 1, None),
    ("[4,2]<=[8]", 2, "model"),
    ("[4,2]<=[4,2]T(1,0)", 2, "data"),  # {0,2} {4,6} {1,3} {5,7}
    ("[4,2]<=[2,2,2]T(0,2,1)", 2, "data"),
    ("[2,4]<=[2,2,2]T(1,0,2)", 4, "replica+model"),
    ("mesh['replica'=2,'data'=2,'model'=2] {'model','replica'}", 4, "replica+model"),
    ("mesh['axis_0'=4,'axis_1'=2] device_ids=([2,2,2]T(0,2,1)) {'axis_1'}", 2, "data"),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", 2, "data"),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2,'axis_1'}", 4, "replica+model"),
    (NODES + "{'node','gpu'}", 128, None),
    ("mesh['data'=8,'model'=1] {'model'}", 1, None),
    (SHUFFLED + "{'axis_1':(2)2}", 2, None),
]


@pytest.mark.parametrize(("text", "size", "axis"), GROUPS)
def test_sizes_and_axes_are_found_in_every_spelling_of_groups(text, size, axis):
    groups = replica_groups.parse(text, 8)
    assert size is None or groups.size == size
    assert axis is None or groups.axis(CUBE) == axis


def test_without_a_mesh_only_the_text_can_say():
    assert replica_groups.parse("{{0,1},{2,3}}", 4).axis(None) == "?"
    assert replica_groups.parse("mesh['gpu'=2] {'gpu'}", 2).axis(None) == "gpu"


def test_axes_of_a_program_that_xla_partitioned_are_those_of_the_mesh():
    """GSPMD names a mesh of its own; the product's sum runs along what was contracted."""
    mesh = make_mesh((2, 2, 2), ("replica", "data", "model"))
    specs = jax.P(("replica", "model"), "data"), jax.P("data"), jax.P()
    *inputs, whole = (jax.NamedSharding(mesh, spec) for spec in specs)
    step = jax.jit(jnp.matmul, in_shardings=tuple(inputs), out_shardings=whole)
    compiled = step.lower(jnp.ones((64, 64)), jnp.ones((64, 64))).compile()
    found = {c.kind: c.axis for c in auditor.collectives(compiled, dict(mesh.shape))}
    assert (found["all-reduce"], found["all-gather"]) == ("data", "replica+model")
