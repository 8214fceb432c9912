"""The largest set of live temporaries beside XLA's own plan on the CPU, and their names."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from hlo_programs import snippet
from jax.sharding import PartitionSpec
from test_forecast import LONG, WIDE
from test_liveness import U, array, make, peak_of

import zero_jax
from zero_jax.hlo import auditor, hlo_text, liveness

P = PartitionSpec

# Against the plan of XLA, on eight CPU devices.

L, B, D = 6, 32, 256


def layer(h, w):
    return jnp.tanh(h @ w), None


def loss(ws, x, layer=layer):
    return jnp.sum(jax.lax.scan(layer, x, ws)[0])


def updated(ws, x, **how):
    return ws - 0.1 * jax.grad(functools.partial(loss, **how))(ws, x)


def gathering(ws, x):
    def gathered(h, w):
        return layer(h, jax.lax.all_gather(w, "data", axis=1, tiled=True))

    return updated(ws, x, layer=jax.checkpoint(gathered))


def summed(ws, x):
    return jnp.sum(jnp.sin(jax.lax.psum(ws[0] @ ws[1], "data")) @ ws[2])


def branched(ws, x):
    w = ws[0]
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(w @ w) @ w, lambda: w))


PROGRAMS = {
    "forward": loss,
    "kept activations": lambda ws, x: jax.lax.scan(lambda h, w: (layer(h, w)[0], h), x, ws)[1],
    "gradient": jax.grad(loss),
    "update": updated,
    "update with remat": functools.partial(updated, layer=jax.checkpoint(layer)),
    "gather and scatter": gathering,
    "all-reduce": summed,
    "branch": branched,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak_is_what_xla_plans(program):
    """Within 1 %: XLA aligns buffers, and packs these without gaps. Weights are donated where they
    are updated: into the memory of a fresh output XLA puts temporaries."""
    updates = "update" in program or program == "gather and scatter"
    shard = P(None, None, "data") if program == "gather and scatter" else P()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        PROGRAMS[program],
        mesh=mesh,
        in_specs=(shard, P()),
        out_specs=shard if updates else P(),
        check_vma=False,
    )
    step = jax.jit(mapped, donate_argnums=0 if updates else ())
    report = auditor.audit(step.lower(jnp.ones((L, D, D)), jnp.ones((B, D))).compile())
    assert report.peak.bytes > B * D * 4, "nothing lives: the test shows nothing"
    assert report.fragmentation == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("net", [LONG, WIDE], ids=["long", "wide"])
def test_the_peak_of_a_training_step_is_what_xla_plans(net, stage):
    """Never more, and less only by the gaps that the CPU backend leaves between its buffers."""
    step, args = net.step(stage, "block")
    report = auditor.audit(step.lower(*args).compile())
    assert 0.999 < report.fragmentation < 1.15


# What they are called.


def test_temporaries_are_named_largest_first():
    lines = [make("small", "p"), make("large", "p", units=3), make("out", "small", "large")]
    found = peak_of(*lines).temporaries
    assert [(t.name, t.bytes, t.shape) for t in found] == [
        ("large", 3 * U, "f32[768]"),
        ("small", U, "f32[256]"),
    ]


HEAD = """HloModule m, is_scheduled=true

FileNames
1 "/home/me/zero_jax/models/gpt.py"
2 "/lib/python3.12/site-packages/flax/nnx/module.py"
3 "{library}"
4 "/home/me/zero_jax/train.py"
5 "<frozen runpy>"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=120 end_line=120 column=1 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}
3 {{file_name_id=3 function_name_id=1 line=9 end_line=9 column=1 end_column=9}}
4 {{file_name_id=4 function_name_id=1 line=33 end_line=33 column=1 end_column=9}}
5 {{file_name_id=5 function_name_id=1 line=88 end_line=88 column=1 end_column=9}}

StackFrames
1 {{file_location_id=4 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=3}}
4 {{file_location_id=3 parent_frame_id=4}}
5 {{file_location_id=2 parent_frame_id=1}}
6 {{file_location_id=5 parent_frame_id=1}}
7 {{file_location_id=2 parent_frame_id=7}}
"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("stack_frame_id=4", "models/gpt.py:120"),  # in a clone, under two lines of libraries
        ("stack_frame_id=2", "models/gpt.py:120"),
        ("stack_frame_id=1", "zero_jax/train.py:33"),
        ("stack_frame_id=5", "nnx/module.py:7"),  # of no line of one's own
        ("stack_frame_id=7", "nnx/module.py:7"),  # begun by python -m
        ("", ""),
        ('source_file="/home/me/models/gpt.py" source_line=120', "models/gpt.py:120"),
    ],
)
def test_a_temporary_knows_the_innermost_line_that_is_not_a_librarys(metadata, source):
    body = [
        f"%p = {array()} parameter(0)",
        make("a", "p") + f', metadata={{op_name="jit(f)/mul" {metadata}}}',
        f"ROOT {make('out', 'a')}",
    ]
    text = (
        HEAD.format(library=f"{pathlib.Path(zero_jax.__file__).parent}/engine/grads.py")
        + snippet(body).partition("\n")[2]
    )
    (found,) = liveness.peak(hlo_text.parse(text)).temporaries
    assert (found.source, found.op_name) == (source, "jit(f)/mul")
