"""cuDNN's attention: documents as offsets, its check on a GPU, and programs for absent GPUs.

No CPU runs cuDNN's kernel. A kernel with the same arguments takes its place, which leaves NaN where
cuDNN leaves what was in memory: at tokens of no document.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from problems import equations_of

import zero_jax
from zero_jax import releases
from zero_jax.commands.case import Case
from zero_jax.context_parallel import cudnn
from zero_jax.hlo import aot, targets
from zero_jax.models import gpt

B, T, N, M, H = 2, 40, 4, 2, 8
BF16 = jnp.bfloat16


def plain(q, k, v, *, segment_ids=None, window=None):
    """Causal attention in fp32 with all scores at once."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    t, s = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = (s <= t) & (s > t - (window or q.shape[1]))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
        seen = seen[:, None]
    scores = jnp.where(seen, jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


class Kernel(cudnn._Kernel):
    """Takes the place of cuDNN's kernel."""

    def result(self, starts, lengths, q, k, v):
        t = jnp.arange(q.shape[1])
        ends = starts[:, :-1] + lengths
        own = (starts[:, :-1, None] <= t) & (t < ends[..., None])
        assert starts.shape[1] == cudnn.DOCUMENTS + 1
        # A token of no document is one by itself, with another number than all others.
        number = jnp.where(own.any(1), own.argmax(1), -1 - t)
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        return plain(*wide, segment_ids=number, window=self.window).astype(q.dtype), own.any(1)

    def forward(self, qkv, at):
        out, written = self.result(*at, *qkv)
        statistics = jnp.zeros((at.lengths.size, qkv[0].shape[2], qkv[0].shape[1]))
        return jnp.where(written[..., None, None], out, jnp.nan), statistics

    def backward(self, qkv, at, results, cotangent):
        _, pull, written = jax.vjp(functools.partial(self.result, *at), *qkv, has_aux=True)
        wanted = jnp.where(written[..., None, None], cotangent, 0)
        return tuple(jnp.where(written[..., None, None], x, jnp.nan) for x in pull(wanted))


class OneDocument(Kernel):
    """A kernel that takes every row for one document."""

    def result(self, starts, lengths, q, k, v):
        _, written = super().result(starts, lengths, q, k, v)
        return plain(q, k, v).astype(q.dtype), written


class Failing(Kernel):
    def forward(self, *args):
        raise jax.errors.JaxRuntimeError("No valid engine configs")


@pytest.fixture
def kernel(monkeypatch):
    """Replaces cuDNN's kernel, and the number of documents of a call."""
    cudnn._passes_check.cache_clear()

    def use(kind, documents=cudnn.DOCUMENTS):
        monkeypatch.setattr(cudnn, "_Kernel", kind)
        monkeypatch.setattr(cudnn, "DOCUMENTS", documents)

    yield use
    cudnn._passes_check.cache_clear()


def inputs(key_heads=M, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    heads = (N, key_heads, key_heads, N)
    return [jax.random.normal(x, (B, T, n, H), dtype) for x, n in zip(keys, heads, strict=True)]


def results(fn, q, k, v, cotangent, **options):
    out, pull = jax.vjp(functools.partial(fn, **options), q, k, v)
    return out, *pull(cotangent)


# Ids of documents may be any integers, in any order; the last tokens are padding.
LENGTHS = [(7, 1, 12, 2, 9, 3, 6), (33, 7)]
SEGMENTS = jnp.array(
    [[(-1) ** i * (9 - i) for i, n in enumerate(row) for _ in range(n)] for row in LENGTHS]
)


@pytest.mark.parametrize("documents", [2, 3, 7, 64])  # a call takes; the rows have 7 and 2
@pytest.mark.parametrize("window", [None, 4, T])
def test_packed_rows_are_attention_within_documents_however_many_there_are(
    kernel, documents, window
):
    kernel(Kernel, documents)
    options = {"segment_ids": SEGMENTS, "window": window}
    for key_heads in (N, M, 1):
        found = jax.jit(functools.partial(results, cudnn.attention, **options))(*inputs(key_heads))
        want = results(plain, *inputs(key_heads), **options)
        for one, other in zip(found, want, strict=True):
            # Sums of at most 40 terms in fp32, in another order.
            assert jnp.abs(one - other).max() < 2e-6 * jnp.abs(other).max()


def test_offsets_are_the_starts_and_lengths_of_documents_and_nothing_more(kernel):
    kernel(Kernel, 3)
    documents = cudnn._numbered(SEGMENTS)
    assert documents[0].tolist() == [i for i, n in enumerate(LENGTHS[0]) for _ in range(n)]
    starts, lengths = cudnn._offsets(documents, 0)
    assert starts.tolist() == [[0, 7, 8, -1], [0, 33, -1, -1]]
    assert lengths.tolist() == [[7, 1, 12], [33, 7, -1]]
    starts, lengths = cudnn._offsets(documents, 2)
    assert starts.tolist() == [[34, -1, -1, -1], [-1] * 4]
    assert lengths.tolist() == [[6, -1, -1], [-1, -1, -1]]


def test_jax_gives_cudnn_the_documents_of_all_rows_one_after_the_other(kernel):
    """An end of a row among the offsets would move those of the next row by one."""
    kernel(Kernel, 3)
    starts, lengths = cudnn._offsets(cudnn._numbered(SEGMENTS), 0)
    query, keys = jnp.zeros((B, T, N, H)), jnp.zeros((B, T, M, H))
    numbers = cudnn.fused._fix_seqlen_offsets(lengths, lengths, starts, starts, query, keys)
    q_lengths, k_lengths, q_starts, k_starts = (x.ravel().tolist() for x in numbers)
    assert q_lengths == k_lengths == [7, 1, 12, 33, 7, 0]
    tokens = [0, 7, 8, T, T + 33, *[B * T] * 3]  # the fourth ends where the fifth starts
    assert q_starts == [N * H * t for t in tokens]
    heads = M if releases.GROUPED_OFFSETS else N
    assert k_starts == [heads * H * t for t in tokens]


def test_the_private_module_of_this_jax_has_what_is_used_of_it():
    assert jax.__version__ in cudnn.RELEASES, "check zero_jax/context_parallel/cudnn.py with it"
    fused = cudnn.fused
    names = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type"}
    names |= {"sliding_window_length", "return_residual"}
    assert names <= set(inspect.signature(fused.dot_product_attention).parameters)
    rule = list(inspect.signature(fused._dot_product_attention_bwd_rule).parameters)
    settings = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"]
    score_mod = ["score_mod"] * (jax.__version_info__ >= (0, 12))
    assert rule[:7] == [*settings, "sliding_window_length"]
    assert rule[7 : 7 + len(score_mod)] == score_mod
    assert rule[-3:] == ["return_residual", "res", "grad_output"] and len(rule) == 11 + len(
        score_mod
    )
    assert not inspect.signature(fused.check_cudnn_version).parameters
    for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        assert len(inspect.signature(getattr(fused, name)).parameters) == 1


def test_the_backward_pass_gets_the_arrays_of_the_forward_pass():
    """JAX's own derivative of its function and `_Kernel.backward` bind the same kernel."""
    shapes = [jax.ShapeDtypeStruct(x.shape, BF16) for x in inputs(N)]
    at = cudnn._offsets(cudnn._numbered(SEGMENTS), 0)
    kernel = cudnn._Kernel(cudnn.fused.MaskType.PADDING_CAUSAL, 4, 0.5)

    def ours(q, k, v, cotangent):
        return kernel.backward((q, k, v), at, kernel.forward((q, k, v), at), cotangent)

    def theirs(q, k, v, cotangent):
        options = {"scale": 0.5, "mask_type": cudnn.fused.MaskType.PADDING_CAUSAL}
        options |= dict.fromkeys(("q_seqlen", "kv_seqlen"), at.lengths)
        options |= dict.fromkeys(("q_offsets", "kv_offsets"), at.starts)
        options |= {"sliding_window_length": 4}
        attention = functools.partial(cudnn.fused.dot_product_attention, **options)
        return jax.vjp(attention, q, k, v)[1](cotangent)

    with cudnn.compiling_for("cuda", (9, 0)):
        texts = [str(jax.make_jaxpr(fn)(*shapes)) for fn in (ours, theirs)]
    bwd = "dot_product_attention_bwd_wrapper["
    assert [text.count(bwd) for text in texts] == [1, 1]
    params = [text.split(bwd)[1].split("]")[0] for text in texts]
    assert params[0] == params[1]


def test_reasons_name_what_the_kernel_does_not_take(monkeypatch):
    packed = functools.partial(cudnn.reason_against, BF16, 128, packed=True)
    assert "NVIDIA" in cudnn.reason_against(BF16, 128)
    with cudnn.compiling_for("tpu"):
        assert "NVIDIA" in cudnn.reason_against(BF16, 128)
    with cudnn.compiling_for("cuda", (8, 0)):
        assert cudnn.reason_against(jnp.float16, 64) == "" and "9.0" in packed()
    with cudnn.compiling_for("cuda", (7, 0)):
        assert "8.0" in cudnn.reason_against(BF16, 128)
    with cudnn.compiling_for("cuda", (9, 0)):
        assert packed(elements=2**31 - 1) == "" and "32 bits" in packed(elements=2**31)
        assert bool(packed(grouped=True)) != releases.GROUPED_OFFSETS
        assert "float32" in cudnn.reason_against(jnp.float32, 128)
        assert cudnn.reason_against(BF16, 256) == ""
        for head_dim in (264, 60):
            assert f"head dim {head_dim}" in cudnn.reason_against(BF16, head_dim)
        mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        with jax.sharding.use_abstract_mesh(mesh):
            assert "data and model" in cudnn.reason_against(BF16, 128)
    for other in ((8, 9), (10, 0)):  # no gradient for larger heads but on Hopper
        with cudnn.compiling_for("cuda", other):
            assert "up to 128" in cudnn.reason_against(BF16, 136)
    old = cudnn.KernelTarget("gpu", (9, 0))
    monkeypatch.setattr(cudnn, "kernel_target", lambda: old)
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 90500)
    assert "9.6" in packed() and "9.6" in cudnn.reason_against(BF16, 256)


def test_a_gpu_checks_the_kernel_once_and_says_why_it_is_not_used(kernel, monkeypatch):
    monkeypatch.setattr(cudnn, "kernel_target", lambda: cudnn.KernelTarget("gpu", (9, 0)))
    monkeypatch.setattr(cudnn.fused, "check_cudnn_version", lambda: 90800)
    packed = functools.partial(cudnn.reason_against, BF16, 128, packed=True)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    def traced():
        said.append(packed())
        return jnp.zeros(())

    kernel(Kernel)
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(traced)
    assert said == [""] and packed() == "" and cudnn._passes_check.cache_info().misses == 1
    # Larger heads are checked too, for each multiple of 64.
    assert cudnn.reason_against(BF16, 256) == "" and cudnn._passes_check.cache_info().misses == 2
    for kind in (OneDocument, Failing):
        cudnn._passes_check.cache_clear()
        kernel(kind)
        with pytest.warns(UserWarning, match="blocks of queries"):
            assert "check" in packed()
        assert "check" in packed(), "without a second warning"


def test_a_trace_for_an_absent_gpu_is_one_of_its_own_and_leaves_jax_as_it_was():
    before = cudnn.fused.check_cudnn_version
    seen = []

    @jax.jit
    def traced(x):
        seen.append(cudnn.kernel_target())
        return x

    traced(1.0)
    with pytest.raises(KeyError), cudnn.compiling_for("cuda", (9, 0)):
        traced.trace(1.0)
        assert cudnn.fused.check_cudnn_version is not before
        assert cudnn.fused.check_compute_capability("8.6")
        assert not cudnn.fused.is_cuda_compute_capability_equal("10.3")
        raise KeyError
    traced(1.0)
    assert seen == [cudnn.KernelTarget("cpu"), cudnn.KernelTarget("gpu", (9, 0), present=False)]
    assert cudnn.fused.check_cudnn_version is before


@pytest.mark.parametrize("window", [None, 4, T])
def test_rows_of_one_document_take_the_public_function(window):
    q, k, v, _ = inputs(dtype=BF16)
    with cudnn.compiling_for("cuda", (9, 0)):
        text = str(jax.make_jaxpr(functools.partial(cudnn.attention, window=window))(q, k, v))
    assert f"sliding_window_length={None if window == T else window}" in text
    assert "mask_type=MaskType.CAUSAL" in text and "while" not in text


def kernels_of(mesh, queries, keys, spec, axes, **options):
    """The shapes of the queries of each cuDNN kernel in a step, and if its heads are grouped."""
    shapes = [jax.ShapeDtypeStruct((8, 64, n, 64), BF16) for n in (queries, keys, keys)]
    attention = functools.partial(zero_jax.attention, **options)
    step = jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)
    with cudnn.compiling_for("cuda", (9, 0)), jax.sharding.use_abstract_mesh(mesh):
        trace = jax.make_jaxpr(jax.jit(step))(*shapes)
    calls = [e for e in equations_of(trace.jaxpr) if "fwd_wrapper" in e.primitive.name]
    return [e.invars[0].aval.shape for e in calls]


def test_each_device_of_the_model_axis_has_a_kernel_for_its_heads():
    mesh = zero_jax.abstract_mesh(2, model=4)
    found = functools.partial(kernels_of, mesh, spec=PartitionSpec("data"), axes={"data"})
    assert found(16, 8) == [(4, 64, 4, 64)]
    assert found(16, 2) == [], "in blocks: a head of keys would be on two devices"


def test_devices_that_do_not_divide_the_heads_have_a_kernel_too():
    spec = PartitionSpec(None, "context")
    mesh = zero_jax.abstract_mesh(1, context=8)
    found = functools.partial(kernels_of, mesh, spec=spec, axes={"data", "context"})
    # 28 heads of queries become 32, four on each device with its full rows.
    assert found(28, 4) == [(8, 64, 4, 64)]
    # More zeros than heads only if it is asked for.
    assert found(3, 1) == []
    assert found(3, 1, implementation="cudnn") == [(8, 64, 1, 64)]


# Programs for absent GPUs.


def gradients_of(tokens, packed, key_heads=8):
    """Gradients of attention over one row of each of 8 devices, their arguments and the mesh."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    shapes = [((8, tokens, n, 128), BF16) for n in (32, key_heads, key_heads)]
    shapes.append(((8, tokens), jnp.int32))

    def gradients(q, k, v, ids):
        def loss(q, k, v):
            out = cudnn.attention(q, k, v, segment_ids=ids if packed else None)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    args = [jax.ShapeDtypeStruct(*shape, sharding=rows) for shape in shapes]
    specs = {"in_specs": rows.spec, "out_specs": rows.spec}
    return jax.shard_map(gradients, mesh=mesh, **specs, check_vma=False), args, mesh


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_for_an_absent_gpu_is_exported_with_cudnns_calls(packed):
    fn, args, _ = gradients_of(256, packed)
    target = targets.target("h100")
    with cudnn.compiling_for(target.platform, target.compute_capability):
        exported = jax.export.deserialize(bytearray(aot._exported(target, fn, args)))
    text = exported.mlir_module()
    # In the loops over further documents: forward in both passes, backward in one.
    assert text.count("@__cudnn$fmhaSoftmax(") == (3 if packed else 1)
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == (2 if packed else 1)


def audit_of(tokens):
    fn, args, mesh = gradients_of(tokens, True)
    target = targets.target("h100")
    with cudnn.compiling_for(target.platform, target.compute_capability):
        return aot.compile_for(target, fn, args, mesh, donated=0)


@pytest.mark.compile
@pytest.mark.skipif(not releases.GROUPED_OFFSETS, reason="its packed attention has no key groups")
def test_temporaries_of_packed_attention_are_linear_in_the_tokens():
    """Statistics of D documents, an output and its cotangent; no array has T² elements."""
    short, long = map(audit_of, (1024, 4096))
    for audit, tokens in ((short, 1024), (long, 4096)):
        instructions = [
            i for c in audit.program.computations.values() for i in c.instructions.values()
        ]
        arrays = [array.dims for i in instructions for array in i.arrays]
        assert not any(dims.count(tokens) > 1 for dims in arrays)
        calls = [i.target for i in instructions if i.kind == "custom-call"]
        assert "__cudnn$fmhaSoftmax" in calls and "__cudnn$fmhaSoftmaxBackward" in calls
        expected = tokens * 32 * (4 * cudnn.DOCUMENTS + 2 * 2 * 128)
        assert audit.temp_bytes == pytest.approx(expected, rel=0.02)
        # Two products forward and five backward, of each query with the keys up to its own.
        assert audit.flops == 7 * 2 * 32 * (tokens * (tokens + 1) // 2) * 128
    assert long.temp_bytes == pytest.approx(4 * short.temp_bytes, rel=0.02)


@pytest.mark.compile
def test_a_compile_check_of_a_model_calls_cudnn_where_the_run_does():
    config = gpt.GPTConfig(layers=2, width=512, heads=8, vocab=96, seq=256)
    mesh, precision = zero_jax.abstract_mesh(1, context=8), zero_jax.Precision("bf16")
    case = Case(config, zero_jax.Zero(mesh, 3, precision=precision), "adamw", 1)
    target = targets.target("h100")
    assert case.attention_on(target) == "attention: cuDNN"
    plan = case.plan(3, target=target)
    instructions = [
        i for c in plan.compiled.program.computations.values() for i in c.instructions.values()
    ]
    calls = {i.target for i in instructions if "cudnn" in i.target}
    assert calls == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert plan.compiled.uncounted == ()
