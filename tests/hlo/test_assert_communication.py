"""The summary of a compiled step, and the assertion of what it sends."""

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import compile_on_8, make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from test_how_often import nested_scans

from zero_jax.hlo import auditor

P = PartitionSpec


def test_audit_holds_the_bytes_of_the_arrays():
    mesh = make_mesh((8,), ("data",))
    x = jax.device_put(jnp.ones((64, 3)), NamedSharding(mesh, P("data")))
    y = jnp.ones(5, jnp.bfloat16)

    def f(x, y):
        return x * 2 + y[0], y

    jitted = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())),
        donate_argnums=0,
    )
    report = auditor.audit(jitted.lower(x, y).compile())
    assert report.argument_bytes == x.nbytes // 8 + y.nbytes
    assert report.alias_bytes == x.nbytes // 8
    held = report.argument_bytes + report.output_bytes + report.temp_bytes
    assert report.total_bytes == held - report.alias_bytes
    assert report.collectives == () and report.words == {}


def stage_3_step(num_layers, width, doubled=False):
    """Gather in forward and backward, reduce-scatter of the gradient, one psum of the loss."""

    def layer(h, w):
        return jnp.tanh(h @ jax.lax.all_gather(w, "data", tiled=True))

    def loss(w, h):
        h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), h, w)
        return jnp.sum(h**2)

    def step(w, h):
        value, gradient = jax.value_and_grad(loss)(w, h)
        if doubled:
            gradient = gradient + jax.lax.psum(jnp.sin(w), "data")
        return jax.lax.psum(value, "data"), gradient

    shard = P(None, "data")
    weights = jnp.ones((num_layers, width, width))
    args = (weights, jnp.ones((8, width)))
    return compile_on_8(step, *args, in_specs=(shard, P("data")), out_specs=(P(), shard))


def test_stage3_gathers_twice_and_scatters_once():
    num_params = 3 * 16 * 16
    program = stage_3_step(num_layers=3, width=16)
    auditor.assert_communication(program, 3, num_params=num_params)
    auditor.assert_communication(
        program, {"all-gather": 2, "reduce-scatter": 1}, num_params=num_params
    )
    report = auditor.audit(program)
    assert report.words == {
        "all-gather": 2 * num_params,
        "reduce-scatter": num_params,
        "all-reduce": 2,  # the loss
    }
    assert report.words_per_param(num_params) == pytest.approx(3 + 2 / num_params)


def test_what_is_not_compiled_is_not_audited():
    lowered = jax.jit(jnp.sin).lower(jnp.ones(4))
    with pytest.raises(ValueError, match=r"given a Lowered, .*\.compile\(\)"):
        auditor.audit(lowered)
    with pytest.raises(ValueError, match=r"given a Lowered"):
        auditor.assert_communication(lowered, 3.0, num_params=4)


def test_assert_communication_fails_on_another_mix_of_the_same_total():
    program = stage_3_step(num_layers=3, width=16)
    with pytest.raises(AssertionError, match="reduce-scatter"):
        auditor.assert_communication(
            program, {"all-gather": 1, "reduce-scatter": 2}, num_params=768
        )
    with pytest.raises(AssertionError, match="all-gather"):
        auditor.assert_communication(program, {"all-reduce": 3}, num_params=768)


def test_assert_communication_fails_on_a_doubled_psum_and_shows_the_table():
    def once(x):
        return jax.lax.psum(x, "data")

    def twice(x):
        return jax.lax.psum(x, "data") + jax.lax.psum(jnp.sin(x), "data") * x

    x = jnp.ones(100)
    auditor.assert_communication(compile_on_8(once, x), 2, num_params=x.size)
    with pytest.raises(AssertionError, match=r"expected .*2(.|\n)*kind .*(.|\n)*all-reduce"):
        auditor.assert_communication(compile_on_8(twice, x), 2, num_params=x.size)


def test_assert_communication_fails_on_a_stray_psum_in_a_step():
    program = stage_3_step(num_layers=3, width=16, doubled=True)
    with pytest.raises(AssertionError, match="all-reduce"):
        auditor.assert_communication(
            program, {"all-gather": 2, "reduce-scatter": 1}, num_params=768
        )


def test_the_table_starts_with_the_most_words():
    table = auditor.format_table(auditor.audit(nested_scans(outer=5, inner=3))).splitlines()
    words = [int(line.split()[5]) for line in table[1:]]
    assert words == [5 * 8 * 4, 5 * 3 * 2 * 4]
