"""Programs for the tests of the audit: compiled for eight CPU devices, or literal text."""

import jax
from jax.sharding import AxisType, PartitionSpec

from zero_jax.hlo import auditor

P = PartitionSpec
WHOLE = P()


def make_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def compile_on(mesh, f, *arrays, in_specs=WHOLE, out_specs=WHOLE):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile()


def compile_on_8(f, *arrays, **specs):
    return compile_on(make_mesh((8,), ("data",)), f, *arrays, **specs)


def snippet(body, *computations, header="num_partitions=8"):
    parts = [f"HloModule m, is_scheduled=true, {header}\n", "%add (a: f32[], b: f32[]) -> f32[] {"]
    parts += ["  %a = f32[] parameter(0)", "  %b = f32[] parameter(1)"]
    parts += ["  ROOT %sum = f32[] add(%a, %b)\n}\n", *computations]
    entry = "\n  ".join(["ENTRY %main (p: f32[]) -> f32[] {", *body])
    return "\n".join([*parts, entry, "}\n"])


def the_only(compiled):
    found = auditor.collectives(compiled)
    assert len(found) == 1, found
    return found[0]
