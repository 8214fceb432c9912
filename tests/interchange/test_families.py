"""GPT-2, Llama, Mistral, Qwen and Gemma: logits, gradients, training, and back to the bit."""

import json
import pathlib
import subprocess
import sys

import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft as their_peft
import pytest
import safetensors.numpy
import torch
from exchange import ATOL, GPTS, built, loaded, logits, noisy, save, zero_on
from families import FAMILIES, as_saved, their_logits, theirs, tokens
from problems import assert_bitwise, whole
from test_folder_refusals import written
from transformers import AutoConfig, AutoModelForCausalLM

import zero_jax
from training.packing import row_of
from training.supervise import free_address
from zero_jax import interchange
from zero_jax.adapters.lora import Lora
from zero_jax.interchange import peft
from zero_jax.models import decoder_presets, generate, gpt, hf
from zero_jax.plan.text_model import TextModel

pytestmark = [
    pytest.mark.interchange,
    # PEFT asks transformers for a name that is on its way out.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
EAGER = {"attn_implementation": "eager"}
ADAPTED = ["llama", "qwen2", "qwen3", "gemma3"]
ODD, EVEN = GPTS["odd"], GPTS["even"]
EXPORTED = [*((name, "float32") for name in GPTS), ("odd", "bfloat16"), ("odd", "float16")]
CASES = [*((family, "fp32") for family in ADAPTED), ("llama", "nf4")]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_text_are_theirs(folders, name):
    assert len(list(folders[name].glob("*.safetensors"))) > 1
    config, params = loaded(folders[name], 3)
    params = zero_on(3).unshard(params)
    want = their_logits(theirs(name))
    assert np.abs(want).max() > 1, "or nothing is compared"
    np.testing.assert_allclose(logits(config, params, tokens()), want, atol=1e-4, rtol=1e-4)
    prompt = tokens(1, 5)
    how = {"max_new_tokens": 20, "do_sample": False, "use_cache": False}
    text = theirs(name).generate(torch.from_numpy(prompt), **how)
    with jax.default_matmul_precision("highest"):
        own, rows = built(config, params), jnp.asarray(prompt[0])
        got = generate.generate(own, rows, 20, jax.random.key(0), 0.0)
    assert np.asarray(got).tolist() == text[0].tolist()


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gpt2"])
def test_gradients_are_theirs(folders, name):
    (config, params), model, rows = loaded(folders[name]), theirs(name), tokens()
    model.zero_grad()
    model(torch.from_numpy(rows), labels=torch.from_numpy(rows)).loss.backward()
    grads = ((name, x.grad.numpy()) for name, x in model.named_parameters())
    known = as_saved(grads, model.config.model_type == "mixtral")

    def loss(params):
        total, weight = TextModel(config).loss(params, jnp.asarray(rows))
        return total / weight

    with jax.default_matmul_precision("highest"):
        grads = jax.jit(jax.grad(loss))(params)
    flat = {"/".join(map(str, path)): x[...] for path, x in grads.flat_state()}
    for place in hf.layout(config).places:
        want = known[place.name]
        found = np.asarray(flat[place.path])[place.at]
        box, found = place.turn.put((0,) * found.ndim, found)
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(found, want[box], atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_in_and_out_and_in_again_is_the_same_to_the_bit(folders, tmp_path, name):
    n, stage = [(1, 3), (4, 3), (3, 1)][list(FAMILIES).index(name) % 3]
    config, params = loaded(folders[name], n, stage)
    save(tmp_path / "in", (params,))
    interchange.export(tmp_path / "in", tmp_path / "out", like=folders[name], max_file_bytes=3e4)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, value in theirs(name).state_dict().items():
        assert torch.equal(value, kept[key]), key
    again, back = loaded(tmp_path / "out", 2)
    assert again == config
    assert_bitwise(back, params)
    known = hf.json_of(config, "float32")
    assert hf.config_of(known) == config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known), **EAGER)
    model.load_state_dict(theirs(name).state_dict())
    assert np.array_equal(their_logits(model.eval()), their_logits(theirs(name)))


@pytest.mark.parametrize("name", decoder_presets.PRESETS)
def test_presets_are_models_of_theirs(name):
    preset = decoder_presets.preset(name)
    known = hf.json_of(preset, "bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
    # Arrays of a byte that all their elements share have the shapes, and cost nothing.
    empty = ((n, np.broadcast_to(np.int8(0), x.shape)) for n, x in model.named_parameters())
    shapes = {n: x.shape for n, x in as_saved(empty, known["model_type"] == "mixtral").items()}
    assert {p.name: p.shape for p in hf.layout(preset).places} == shapes


def test_the_text_of_a_model_with_images_is_read_and_the_rest_is_named(tmp_path, folders):
    text = json.loads((folders["gemma3"] / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"vision_tower.patches.weight": np.ones((2, 2), np.float32)}
    for file in folders["gemma3"].glob("*.safetensors"):
        held = safetensors.numpy.load_file(file)
        tensors |= {f"language_model.{name}": value for name, value in held.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    said = []
    _, params = loaded(tmp_path, 2, report=said.append)
    assert len(said) == 1 and "vision_tower.patches.weight" in said[0]
    assert_bitwise(params, loaded(folders["gemma3"])[1])


def test_files_are_read_as_transformers_reads_them(folders, tmp_path):
    """The head of a tied model alone, beside an index of other files."""
    theirs("llama, tied").save_pretrained(tmp_path)
    for file in folders["llama"].glob("*.safetensors*"):
        (tmp_path / file.name).symlink_to(file)
    own = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    own["lm_head.weight"] = own.pop("model.embed_tokens.weight")
    safetensors.numpy.save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    want = their_logits(theirs("llama, tied"))
    for found in (their_logits(opened(tmp_path)), logits(*loaded(tmp_path), tokens())):
        np.testing.assert_allclose(found, want, atol=1e-4, rtol=1e-4)


def documents(step):
    """Two documents for each of four rows, the second half of each is learned."""
    rng = np.random.default_rng(step)
    sizes = rng.integers(4, 11, (4, 2))
    ids = [[rng.integers(0, 97, size, np.int32) for size in row] for row in sizes]
    return [[(own, np.arange(own.size) >= own.size // 2) for own in row] for row in ids]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral"])
def test_losses_of_ten_steps_of_adamw_are_those_of_pytorch(family, tmp_path):
    """Ours has the documents side by side in rows, sharded over 4 devices; PyTorch one by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), **EAGER)
    model.save_pretrained(tmp_path)
    zero, (config, params) = zero_on(4), loaded(tmp_path, 4)
    tx, loss = zero.optimizer(optax.adamw(1e-3, weight_decay=0.1)), TextModel(config).loss
    opt_state, step, losses = tx.init(params), zero.train_step(loss, tx), []
    optimizer, wanted = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    for number in range(10):
        rows = [row_of(row, 20) for row in documents(number)]
        batch = tuple(np.stack(part) for part in zip(*rows, strict=True))
        batch = zero_jax.global_batch(zero.mesh, batch)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics.loss))
        total, count = 0.0, 0
        for ids, mask in (document for row in documents(number) for document in row):
            ids, mask = torch.tensor(ids, dtype=torch.long), torch.tensor(mask[1:])
            logits = model(ids[None]).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            total, count = total + each[mask].sum(), count + int(mask.sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        wanted.append(float(total.detach() / count))
    np.testing.assert_allclose(losses, wanted, atol=1e-4)
    assert losses[-1] != losses[0]


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()


def merged_logits(model, base, lora):
    params = {"base": jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), base), "lora": lora}
    merged = jax.jit(model.adapted.merged)(params)
    return merged, np.asarray(jax.jit(lambda p: model.model(p)(jnp.asarray(tokens())))(merged))


@pytest.mark.parametrize(("family", "base"), CASES)
def test_peft_loads_our_adapters_and_gives_our_logits(folders, family, base, tmp_path):
    """PEFT gets a quantised base as it opens, so that the error of the base is in both."""
    folder = folders[family]
    config = interchange.config(folder)
    model = TextModel(config, Lora(rank=3, alpha=5.0, base=base))
    zero = zero_jax.Zero(zero_on(8).mesh, stage=3, frozen=model.frozen)
    held = zero.unshard(interchange.load(folder, zero.eval_shape(model.make)["base"], rounded=True))
    rng, new = np.random.default_rng(1), jax.eval_shape(model.make)["lora"]
    lora = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 10, new)
    peft.save_adapter(lora, model.lora, config, tmp_path / "ours", str(folder))
    _, ours = merged_logits(model, held, lora)
    plain, own = opened(folder), folder
    if base != "fp32":
        zeros = jax.tree.map(jnp.zeros_like, lora)
        save(tmp_path / "run", merged_logits(model, held, zeros)[0])
        own = tmp_path / "opened"
        interchange.export(tmp_path / "run", own, like=folder)
    adapted = their_peft.PeftModel.from_pretrained(opened(own), str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(their_logits(adapted), ours, atol=1e-4, rtol=1e-4)
    assert abs(their_logits(plain) - ours).max() > 1e-2, "they change the model"


@pytest.mark.parametrize("family", ADAPTED)
def test_we_load_peft_adapters_and_give_their_logits(folders, family, tmp_path):
    folder = folders[family]
    config = interchange.config(folder)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    how = their_peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, task_type="CAUSAL_LM")
    adapted = their_peft.get_peft_model(opened(folder), how).eval()
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "theirs")
    lora, zero = peft.adapter_config(tmp_path / "theirs"), zero_on(8)
    model = TextModel(config, Lora(lora.rank, lora.alpha, base="fp32"))
    base = zero.unshard(interchange.load(folder, zero.eval_shape(model.own)))
    _, ours = merged_logits(model, base, peft.load_adapter(tmp_path / "theirs", config))
    np.testing.assert_allclose(their_logits(adapted), ours, atol=1e-4, rtol=1e-4)
    peft.merge(folder, tmp_path / "theirs", tmp_path / "merged")
    merged = their_logits(opened(tmp_path / "merged"))
    np.testing.assert_allclose(merged, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), EXPORTED)
def test_exported_weights_give_the_same_logits_in_pytorch(tmp_path, name, dtype):
    config, params = GPTS[name], noisy(GPTS[name], dtype)
    save(tmp_path / "in", {"params": params}, {"heads": config.heads})
    interchange.export(tmp_path / "in", tmp_path / "out", max_file_bytes=1e3)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = families.by_transformers(tmp_path / "out")
    assert str(model.dtype) == f"torch.{dtype}"
    assert model.lm_head.weight is model.transformer.wte.weight
    known = model.config
    assert (known.activation_function, known.layer_norm_epsilon) == ("gelu_new", 1e-5)
    shapes = {name: tuple(x.shape) for name, x in families.gpt2_model(config).named_parameters()}
    assert {place.name: place.shape for place in hf.layout(config).places} == shapes
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want = logits(config, params, families.gpt2_tokens(config))
    assert np.abs(want).max() > 1, "or nothing is compared"
    found = families.gpt2_logits(model.float(), config)
    np.testing.assert_allclose(found, want, atol=ATOL, rtol=ATOL)


def test_old_buffers_and_the_tied_head_are_left_out(tmp_path):
    """Names without "transformer.", as old versions saved them."""
    named = families.gpt2_model(ODD).named_parameters()
    theirs = {k.removeprefix("transformer."): v.detach().numpy().copy() for k, v in named}
    mask, head = np.tril(np.ones((1, 1, ODD.seq, ODD.seq), np.uint8)), theirs["wte.weight"]
    more = {f"h.{layer}.attn.bias": mask for layer in range(ODD.layers)}
    more |= {"h.0.attn.masked_bias": np.array(-1e4, np.float32), "lm_head.weight": head}
    written(tmp_path, families.gpt2_config(ODD).to_dict(), theirs | more)
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
