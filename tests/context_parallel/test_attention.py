"""Attention over `context` equals attention of full rows on one device, in linear memory."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import equations_of

from zero_jax.context_parallel import blocks
from zero_jax.context_parallel.attention import attention
from zero_jax.hlo.collectives import collectives
from zero_jax.sharding.mesh import make_mesh

B, T, H = 2, 32, 8
HEADS, KEY_HEADS = 8, 4  # of two layers


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)


def formula(q, k, v, segments=None, causal=True, window=None, scale=None):
    """Softmax attention, written out."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    seen = ((distance >= 0) & (distance < (window or tokens))) | (not causal)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or q.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v)


def inputs(heads=4, key_heads=4, tokens=T, dtype=jnp.float32, documents=0):
    """Queries, keys, values, a random cotangent, and segment ids."""
    keys = jax.random.split(jax.random.key(heads + tokens), 4)
    arrays = [
        jax.random.normal(key, (B, tokens, n, H), jnp.bfloat16).astype(dtype)
        for key, n in zip(keys, (heads, key_heads, key_heads, heads), strict=True)
    ]
    ids = jax.random.randint(jax.random.key(1), (B, tokens), 0, max(documents, 1))
    return *arrays, jnp.sort(ids, axis=1) if documents else None


def results(function, q, k, v, dout):
    """The output, and the gradients of queries, keys and values by sum(dout · output)."""
    out, back = jax.vjp(function, q, k, v)
    return [out, *back(dout)]


def in_parallel(function, C, data=1):
    """A function of arrays (B, T, ...) whose tokens are split over C devices."""
    mesh = make_mesh(data=data, context=C, devices=jax.devices()[: data * C])
    spec = P("data", "context") if C > 1 else P("data")
    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(sharded)


def reordered(parallel, C):
    """The same function of rows in the order of their tokens."""

    def run(*arrays):
        chunk = np.arange(arrays[0].shape[1]).reshape(2 * C, -1)
        order = np.concatenate([chunk[[c, 2 * C - 1 - c]].reshape(-1) for c in range(C)])
        outs = parallel(*(x[:, order] for x in arrays))
        return jax.tree.map(lambda x: x[:, np.argsort(order)], outs)

    return run


def split(function, C, data=1):
    return reordered(in_parallel(function, C, data), C)


def assert_near(got, want, bound):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert jnp.max(jnp.abs(a - b)) <= bound * jnp.max(jnp.abs(b))


# C, exchange, heads, heads of keys, options, documents
CASES = [
    (1, None, 4, 4, {}, 0),
    (1, None, 6, 2, {"window": 5, "scale": 0.3}, 5),
    (1, None, 3, 1, {"is_causal": False}, 0),
    (2, "all_gather", 6, 3, {}, 3),
    (2, "all_to_all", 4, 2, {"window": 1}, 0),
    (4, "all_gather", 3, 1, {"window": 5, "scale": 0.3}, 4),
    (4, "all_gather", 2, 2, {"is_causal": False}, 2),
    (4, "all_to_all", 8, 4, {"window": 11}, 5),
    (4, "all_to_all", 4, 4, {"is_causal": False}, 0),
    (8, "all_gather", 4, 2, {"window": 99}, 0),
    (8, "all_gather", 2, 1, {"window": 1}, 0),
    (8, "all_to_all", 8, 8, {}, 6),
    (8, "all_to_all", 16, 2, {"window": 7}, 3),
    # Heads that C does not divide.
    (4, "all_to_all", 6, 2, {}, 4),
    (4, "all_to_all", 10, 5, {"window": 5}, 0),
    (8, "all_to_all", 3, 1, {"is_causal": False}, 2),
]


@pytest.mark.parametrize(("C", "exchange", "heads", "key_heads", "options", "documents"), CASES)
def test_output_and_gradients_equal_the_formula(C, exchange, heads, key_heads, options, documents):
    *arrays, segments = inputs(heads, key_heads, documents=documents)
    own = functools.partial(attention, exchange=exchange, **options)

    def ours(q, k, v, dout, segments=None):
        return results(functools.partial(own, segment_ids=segments), q, k, v, dout)

    given = dict(options)
    causal = given.pop("is_causal", True)
    exact = jax.jit(
        lambda *x: results(lambda q, k, v: formula(q, k, v, segments, causal, **given), *x)
    )
    packed = arrays if segments is None else [*arrays, segments]
    run = jax.jit(ours) if C == 1 else split(ours, C)
    # Sums of at most 32 terms of fp32, in another order.
    assert_near(run(*packed), exact(*arrays), 1e-5)


@pytest.mark.parametrize(("tokens", "window"), ((1, None), (9, 2), (14, 8), (23, 99)))
def test_rows_of_any_length_work_on_one_device(tokens, window):
    *arrays, segments = inputs(6, 3, tokens, documents=2)
    run = jax.jit(results, static_argnums=0)
    for causal in (True, False):
        how = {"is_causal": causal, "window": window if causal else None, "scale": 0.3}
        ours = run(lambda *x, h=how: attention(*x, segment_ids=segments, **h), *arrays)
        assert_near(ours, run(lambda *x, h=how: formula(*x, segments, *h.values()), *arrays), 1e-5)
    assert attention(*(x[:, :0] for x in arrays[:3])).shape == (B, 0, 6, H)


@pytest.mark.parametrize("tokens", (600, 2300))
def test_blocks_of_the_usual_size_equal_the_formula(tokens, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 1024)
    *arrays, segments = inputs(4, 2, tokens, documents=7)
    run = jax.jit(results, static_argnums=0)
    ours = run(lambda *x: attention(*x, segment_ids=segments, window=700), *arrays)
    # Sums of at most 700 terms of fp32, in another order.
    assert_near(ours, run(lambda *x: formula(*x, segments, window=700), *arrays), 2e-5)


def over_model(parts, key_heads):
    """Attention in a step over `data`, in which XLA splits heads over `model`."""
    mesh = make_mesh(data=8 // parts, model=parts)
    *arrays, segments = inputs(8, key_heads, documents=3)

    def ours(q, k, v, dout, segments):
        return results(functools.partial(attention, segment_ids=segments), q, k, v, dout)

    rows = jax.shard_map(ours, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"})
    heads = NamedSharding(mesh, P(None, None, "model"))
    keys = heads if key_heads % parts == 0 else NamedSharding(mesh, P())
    run = jax.jit(
        rows,
        in_shardings=(heads, keys, keys, heads, None),
        out_shardings=[heads, heads, keys, keys],
    )
    return run, (*arrays, segments)


@pytest.mark.parametrize(("parts", "key_heads"), ((2, 4), (4, 4), (4, 2)))
def test_a_device_of_the_model_axis_computes_its_part_of_the_heads(parts, key_heads):
    run, (*arrays, segments) = over_model(parts, key_heads)
    exact = jax.jit(lambda *x: results(lambda q, k, v: formula(q, k, v, segments), *x))
    assert_near(run(*arrays, segments), exact(*arrays), 1e-5)
    text = run.lower(*arrays, segments).compile().as_text()
    sent = re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    assert bool(sent) == (key_heads % parts > 0)


def test_arrays_on_a_mesh_with_a_model_axis_have_ordinary_attention_without_jit():
    *arrays, _ = inputs(8, 4)
    with jax.set_mesh(make_mesh(data=2, model=4)):
        found = attention(*arrays[:3])
    assert_near([found], [formula(*arrays[:3])], 1e-5)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_half_precision_rounds_operands_and_results_only(dtype):
    *arrays, _ = inputs(4, 2, dtype=dtype)
    exact = jax.jit(functools.partial(results, formula))(*(x.astype(jnp.float32) for x in arrays))
    for exchange in ("all_gather", "all_to_all"):
        own = functools.partial(attention, exchange=exchange)
        for got, want in zip(
            split(functools.partial(results, own), 2)(*arrays), exact, strict=True
        ):
            assert got.dtype == dtype
            error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
            # Shares (or gradients of scores), the saved output and the result are rounded, each by
            # at most half an ulp, eps / 2. Rounded partial sums would add one for each block.
            assert 0 < error < 1.5 * jnp.finfo(dtype).eps


def test_large_scores_do_not_overflow():
    q, k, v, dout, _ = inputs()
    run = jax.jit(results, static_argnums=0)
    ours = run(functools.partial(attention, scale=100.0), q, k, v, dout)
    # Scores reach 1000, whose ulp of 1e-4 is a relative error of the shares.
    assert_near(ours, run(functools.partial(formula, scale=100.0), q, k, v, dout), 1e-3)


def test_keys_are_gathered_in_their_dtype_and_gradients_are_summed_over_devices_in_fp32():
    *arrays, _ = inputs(4, 2, dtype=jnp.bfloat16)
    ours = functools.partial(results, functools.partial(attention, exchange="all_gather"))
    sent = collections.defaultdict(list)
    for eqn in equations_of(jax.make_jaxpr(in_parallel(ours, 2))(*arrays).jaxpr):
        if eqn.primitive.name in ("all_gather", "reduce_scatter"):
            sent[eqn.primitive.name].append(eqn.invars[0].aval.dtype)
    assert sent == {"all_gather": [jnp.bfloat16] * 2, "reduce_scatter": [jnp.float32] * 2}


@pytest.mark.parametrize("exchange", ("all_gather", "all_to_all"))
def test_a_document_depends_on_no_bit_of_another(exchange):
    *arrays, segments = inputs(4, 4, documents=4)
    document = int(segments[0, T // 2])

    def ours(q, k, v, dout, segments):
        own = functools.partial(attention, segment_ids=segments, exchange=exchange)
        return results(own, q, k, v, dout)

    run = split(ours, 4)
    before = run(*arrays, segments)
    after = run(*(x.at[0, T // 2].set(100.0) for x in arrays), segments)
    others = np.asarray(segments != document) | (np.arange(B) > 0)[:, None]
    assert 0 < others[0].sum() < T
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
        assert (np.asarray(a) != np.asarray(b)).any()


def test_blocks_that_no_query_sees_are_not_computed():
    """A NaN times a share of zero is NaN, so one in a computed block would be in the results."""
    *arrays, _ = inputs()
    first, last = slice(8, 12), slice(16, 20)  # queries of a block; both see no key outside 4:20
    run = jax.jit(results, static_argnums=0)
    arrays = [x.at[:, :4].set(jnp.nan).at[:, 20:].set(jnp.nan) for x in arrays]
    out, dq, _, _ = run(functools.partial(attention, window=4), *arrays)
    assert jnp.isnan(out[:, :4]).all()
    for x in (out, dq):
        assert jnp.isfinite(x[:, first]).all() and jnp.isfinite(x[:, last]).all()


def test_the_loop_has_as_many_pairs_of_blocks_on_every_device():
    def pairs(C, window=None):
        chunk = np.arange(T).reshape(2 * C, -1)
        own = np.concatenate([chunk[:C], chunk[::-1][:C]], axis=1)
        counts = [blocks.count_pairs(own[c : c + 1], T, window) for c in range(C)]
        assert blocks.count_pairs(own, T, window) == max(counts)
        return counts

    # 8 chunks have 36 blocks on or below the diagonal; each device has the same share of them.
    assert pairs(1) == [36] and pairs(2) == [18] * 2 and pairs(4) == [9] * 4
    # Within a window of 5 a block sees itself and one before it, and the first one itself.
    assert pairs(1, 5) == [15] and pairs(4, 5) == [3, 4, 4, 4]
    assert pairs(4, 99) == [9] * 4 and pairs(1, 1) == [8]


@pytest.mark.parametrize(("C", "exchange"), ((1, None), (4, "all_gather"), (4, "all_to_all")))
def test_no_array_has_two_dims_of_tokens(C, exchange):
    *arrays, _ = inputs(tokens=32 * C)
    ours = functools.partial(results, functools.partial(attention, exchange=exchange))

    def largest(function):
        """The second largest dim of an array, at most."""
        jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
        shapes = [v.aval.shape for eqn in equations_of(jaxpr) for v in eqn.outvars]
        return max(sorted(shape)[-2] for shape in shapes if len(shape) > 1)

    assert largest(functools.partial(results, formula)) == 32 * C
    assert largest(jax.jit(ours) if C == 1 else in_parallel(ours, C)) == H  # a device has 32 tokens


def layers(attend, weights, x):
    """Gradients of the weights of two layers under `jax.checkpoint`, and of their input."""

    @jax.checkpoint
    def layer(x, w):
        q, kv = w[0] * x, w[1] * x[:, :, :KEY_HEADS]
        return x + w[2] * attend(q, jnp.sin(kv), kv), None

    return jax.grad(lambda *given: jax.lax.scan(layer, *given)[0].sum(), (1, 0))(x, weights)


@pytest.mark.parametrize("exchange", ("all_gather", "all_to_all"))
def test_two_layers_send_what_the_formula_says_and_have_the_gradients_of_one_device(exchange):
    C, data, weights = 4, 2, jnp.linspace(0.5, 1.5, 6).reshape(2, 3)
    x = inputs(HEADS)[0]

    def ours(x):
        grads, dx = layers(functools.partial(attention, exchange=exchange), weights, x)
        return jnp.broadcast_to(grads, (1, T // C, 2, 3)), dx

    compiled = in_parallel(ours, C, data).lower(x).compile()
    want, want_dx = jax.jit(functools.partial(layers, formula, weights))(x)
    grads, dx = reordered(compiled, C)(x)
    # The gradients of a device are repeated for each of its tokens.
    assert_near([C * grads.sum((0, 1)) / T, dx], [want, want_dx], 1e-5)

    sent = collections.Counter()
    for one in collectives(compiled, {"data": data, "context": C}):
        assert one.axis == "context"
        sent[one.kind] += one.sent_elements
    rows, each = B // data, 2 * H * T  # two layers
    if exchange == "all_gather":
        keys = 2 * KEY_HEADS * each * rows
        assert sent == {"all-gather": 2 * keys, "reduce-scatter": keys}
    else:
        assert sent == {"all-to-all": 3 * (2 * HEADS + 2 * KEY_HEADS) * each * rows // C}


def test_segment_ids_are_gathered_once():
    q, k, v, _, segments = inputs(documents=3)
    for exchange, keys in (("all_gather", 2 * 4 * H * T), ("all_to_all", 0)):

        def ours(q, k, v, ids, exchange=exchange):
            return attention(q, k, v, segment_ids=ids, exchange=exchange)

        compiled = in_parallel(ours, 2).lower(q, k, v, segments).compile()
        gathers = [one for one in collectives(compiled) if one.kind == "all-gather"]
        assert sum(one.sent_elements for one in gathers) == B * (keys + T)


def test_the_trace_has_one_equation_and_by_default_the_exchange_that_sends_less():
    def exchanges(C, heads, key_heads, **options):
        *arrays, segments = inputs(heads, key_heads, documents=2)

        def ours(q, k, v, ids):
            return attention(q, k, v, segment_ids=ids, **options)

        trace = jax.make_jaxpr(in_parallel(ours, C))(*arrays[:3], segments).jaxpr
        (body,) = [
            e.params["jaxpr"] for e in equations_of(trace) if e.primitive.name == "shard_map"
        ]
        assert [e.primitive.name for e in body.eqns] == ["custom_vjp_call"]
        names = {e.primitive.name for e in equations_of(body)}
        return "all_to_all" in names

    # 3 · (2·N + 2·M)·H·T / C elements against 3 · 2·M·H·T.
    assert exchanges(4, 4, 4) and not exchanges(4, 12, 4) and exchanges(8, 16, 8)
    assert not exchanges(2, 4, 4) and not exchanges(4, 4, 2)
    assert exchanges(2, 4, 4, exchange="all_to_all")


def test_without_a_context_axis_a_shard_map_has_ordinary_attention():
    q, k, v, dout, _ = inputs()
    ours = split(functools.partial(results, attention), 1, data=2)(q, k, v, dout)
    assert_near(ours, jax.jit(functools.partial(results, formula))(q, k, v, dout), 1e-5)


def test_a_shard_map_that_checks_varying_axes_accepts_it():
    *arrays, _ = inputs()
    mesh = make_mesh(data=1, context=2, devices=jax.devices()[:2])
    for exchange in ("all_gather", "all_to_all"):
        ours = functools.partial(results, functools.partial(attention, exchange=exchange))
        spec = P(None, "context")
        sharded = jax.shard_map(ours, mesh=mesh, in_specs=spec, out_specs=spec)
        assert jax.eval_shape(sharded, *arrays)[1].shape == arrays[0].shape


def test_wrong_arguments_are_named():
    q, k, v, _, segments = inputs(4, 2, documents=2)
    wrong = [
        ((q, k[:, 1:], v[:, 1:]), {}, "`key`"),
        ((q, k, v.astype(jnp.bfloat16)), {}, "`value`"),
        ((q[0], k, v), {}, "`query`"),
        ((q[:, :, :3], k, v), {}, "`query` 3"),
        ((q, k[:, :, :0], v[:, :, :0]), {}, "`key` has 0"),
        ((q, k, v), {"segment_ids": segments[:, 1:]}, "`segment_ids`"),
        ((q, k, v), {"window": 0}, "`window`=0"),
        ((q, k, v), {"window": 2, "is_causal": False}, "`window`=2 with `is_causal`=False"),
        ((q, k, v), {"implementation": "flash"}, "`implementation`='flash'"),
        ((q, k, v), {"exchange": "ring"}, "`exchange`='ring'"),
    ]
    for arrays, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            attention(*arrays, **options)

    def odd(*arrays):
        return attention(*(x[:, 1:] for x in arrays))

    with pytest.raises(ValueError, match="`query` has 15 tokens.*multiple of 4"):
        split(odd, 2)(q, k, v)
