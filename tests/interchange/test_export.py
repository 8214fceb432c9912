"""Models that go to Hugging Face's GPT-2 have the same logits there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange import ATOL, GPTS, logits, noisy, save
from gpt2_models import by_transformers, their_logits, their_model, tokens_of

from zero_jax import interchange
from zero_jax.models import hf

pytestmark = pytest.mark.interchange


@pytest.mark.parametrize("name", GPTS)
def test_exported_weights_give_the_same_logits_in_pytorch(exported, name):
    assert len(list(exported[name].glob("model-*-of-*.safetensors"))) > 1
    config, model = GPTS[name], by_transformers(exported[name])
    assert model.lm_head.weight is model.transformer.wte.weight
    known = model.config
    assert (known.activation_function, known.layer_norm_epsilon) == ("gelu_new", 1e-5)
    shapes = {name: tuple(x.shape) for name, x in their_model(config).named_parameters()}
    assert {place.name: place.shape for place in hf.layout(config).places} == shapes
    want = logits(config, noisy(config), tokens_of(config))
    assert np.abs(want).max() > 1, "or nothing is compared"
    np.testing.assert_allclose(their_logits(model, config), want, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_exported_as_it_is(tmp_path, dtype):
    config, params = GPTS["odd"], noisy(GPTS["odd"], dtype)
    save(tmp_path / "in", {"params": params}, {"model": {"heads": 2}})
    interchange.export(tmp_path / "in", tmp_path / "out")
    model = by_transformers(tmp_path / "out")
    assert str(model.dtype) == f"torch.{dtype}"
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want = logits(config, wide, tokens_of(config))
    np.testing.assert_allclose(their_logits(model.float(), config), want, atol=ATOL, rtol=ATOL)
