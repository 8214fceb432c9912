"""Models that go to or come from Hugging Face's GPT-2 have the same logits there."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange import ATOL, GPTS, loaded, logits, noisy, save
from gpt2_models import by_transformers, their_config, their_logits, their_model, tokens_of
from problems import whole
from test_folder_refusals import written

from training.supervise import free_address
from zero_jax import interchange
from zero_jax.models import gpt, hf

pytestmark = pytest.mark.interchange
ODD, EVEN = GPTS["odd"], GPTS["even"]
CASES = [*((name, "float32") for name in GPTS), ("odd", "bfloat16"), ("odd", "float16")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_exported_weights_give_the_same_logits_in_pytorch(tmp_path, name, dtype):
    config, params = GPTS[name], noisy(GPTS[name], dtype)
    save(tmp_path / "in", {"params": params}, {"model": {"heads": config.heads}})
    interchange.export(tmp_path / "in", tmp_path / "out", max_file_bytes=1e3)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = by_transformers(tmp_path / "out")
    assert str(model.dtype) == f"torch.{dtype}"
    assert model.lm_head.weight is model.transformer.wte.weight
    known = model.config
    assert (known.activation_function, known.layer_norm_epsilon) == ("gelu_new", 1e-5)
    shapes = {name: tuple(x.shape) for name, x in their_model(config).named_parameters()}
    assert {place.name: place.shape for place in hf.layout(config).places} == shapes
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want = logits(config, params, tokens_of(config))
    assert np.abs(want).max() > 1, "or nothing is compared"
    np.testing.assert_allclose(their_logits(model.float(), config), want, atol=ATOL, rtol=ATOL)


def test_old_buffers_and_the_tied_head_are_left_out(tmp_path):
    """Names without "transformer.", as old versions saved them."""
    named = their_model(ODD).named_parameters()
    theirs = {k.removeprefix("transformer."): v.detach().numpy().copy() for k, v in named}
    mask, head = np.tril(np.ones((1, 1, ODD.seq, ODD.seq), np.uint8)), theirs["wte.weight"]
    more = {f"h.{layer}.attn.bias": mask for layer in range(ODD.layers)}
    more |= {"h.0.attn.masked_bias": np.array(-1e4, np.float32), "lm_head.weight": head}
    written(tmp_path, their_config(ODD).to_dict(), theirs | more)
    assert np.array_equal(whole(loaded(tmp_path)[1])["wte/embedding"], theirs["wte.weight"])


@pytest.mark.slow
def test_each_of_two_processes_reads_what_its_devices_hold(exported, tmp_path):
    script, address = pathlib.Path(__file__).parents[1] / "interchange_run.py", free_address()
    command = [sys.executable, script, exported["even"]]
    outs = [tmp_path / "0.npz", tmp_path / "1.npz"]
    runs = [subprocess.Popen([*command, out, address, "2", out.stem]) for out in outs]
    try:
        assert [run.wait(timeout=300) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    want, got = whole(noisy(EVEN)), {}
    for out in outs:
        pieces = dict(np.load(out))
        assert pieces.pop("read") == gpt.num_params(EVEN) // 2
        for key, piece in pieces.items():
            name, _, starts = key.partition("@")
            corner = map(int, starts.split(","))
            box = tuple(slice(a, a + n) for a, n in zip(corner, piece.shape, strict=True))
            full = got.setdefault(name, np.zeros_like(want[name]))
            assert not full[box].any(), "no piece twice"
            full[box] = piece
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)
