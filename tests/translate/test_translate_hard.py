"""Files as people have them, and as nobody should: what is easily lost, read as off, or NaN."""

import jax
import jax.numpy as jnp
import pytest
from judged import line, made
from test_translate import deepspeed, fsdp, why

from zero_jax.translate import megatron, printed, script
from zero_jax.translate.command import main, translate
from zero_jax.translate.optax_lines import deepspeed_cosine, deepspeed_falling, deepspeed_warmup


def of_script(text, devices=8):
    return translate(text, "run.sh", devices)


@pytest.mark.parametrize(
    "after",
    ["$EXTRA_ARGS", '"$@"', "${MORE}", "2>&1 | tee log", "> log.txt", "; echo done", "p.py"],
)
def test_a_switch_takes_no_value_from_what_follows_it(after):
    asked = of_script(f"torchrun p.py --use-distributed-optimizer --bf16 {after}").asked
    assert (asked.stage, asked.compute) == (1, "bf16")


@pytest.mark.parametrize("after", ["$@", '"$@"', "2>&1", "| tee log", "> log.txt", "; echo"])
def test_a_number_ends_before_the_rest_of_the_line(after):
    text = f"p.py --micro-batch-size 2 --lr 1e-4 --global-batch-size 16 {after}"
    assert of_script(text).asked.global_batch() == 16


@pytest.mark.parametrize(
    "text",
    [
        'P="--tensor-model-parallel-size 8 --sequence-parallel"\nT="--bf16 --lr 1e-4"\np.py $P $T',
        "A=(--tensor-model-parallel-size 8 --sequence-parallel --lr 1e-4 --bf16)\np.py ${A[@]}",
        "A=(\n --tensor-model-parallel-size 8 --lr 1e-4\n)\n"
        "A+=(--sequence-parallel --bf16)\np.py ${A[@]}",
    ],
)
def test_the_first_and_the_last_flag_of_a_variable_count(text):
    asked = of_script(text).asked
    assert (asked.model, asked.compute, asked.sequence_parallel) == (8, "bf16", True)
    assert asked.rate.peak == 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adam --no-decoupled-weight-decay", "adam"])
def test_megatron_decays_no_biases_and_norms_whatever_the_optimizer(optimizer):
    found = of_script(f"p.py --optimizer {optimizer} --weight-decay 0.1 --lr 1e-4")
    assert "mask=decayed" in printed.python(found.asked)
    params = {"blocks": {"attn": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}}
    tx = made(found)["tx"]
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert updates["blocks"]["attn"]["kernel"].any() and not updates["blocks"]["attn"]["bias"].any()


@pytest.mark.parametrize("warmup", ["0", "1", "2", "10"])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_rates_of_deepspeed_are_finite_however_short_their_rise_is(warmup, logarithmic):
    """`max(2, warmup)` steps up and `max(1, total - warmup)` down, as in its lr_schedules.py."""
    for rate in (
        deepspeed_warmup(0.0, 1e-3, int(warmup), logarithmic),
        deepspeed_falling(0.0, 1e-3, warmup, "10", logarithmic),
        deepspeed_cosine(1e-3, 0.0, 1e-4, warmup, "10", logarithmic),
    ):
        names = {}
        exec("import math, optax\nimport jax.numpy as jnp\n" + "\n".join(rate.lines), names)
        values = jnp.asarray([names["lr"](step) for step in range(20)])
        assert jnp.isfinite(values).all() and values[0] == 0 and values.max() <= 1.001e-3


def test_no_steps_of_warm_up_are_taken():
    asked = deepspeed(
        optimizer={"type": "Adam", "params": {"lr": 1e-3}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    ).asked
    assert asked.rate.warmup == 0


def test_1_is_true_and_0_is_false():
    assert fsdp(version=2, reshard_after_forward=1).asked.stage == 3
    assert fsdp(version=2, reshard_after_forward=0).asked.stage == 2
    whole = {"stage": 3, "zero_quantized_weights": 1}
    assert deepspeed(zero_optimization=whole).asked.gather == "int8"
    with pytest.raises(ValueError, match="true or false"):
        fsdp(version=2, reshard_after_forward=8)


def test_of_an_optimizer_that_nobody_knows_the_rate_stays_and_the_rest_is_told():
    found = deepspeed(optimizer={"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1}})
    assert "lr = 0.02" in printed.python(found.asked)
    row = next(row for row in found.rows if row.key == "optimizer.params.weight_decay")
    assert row.verdict == "no equal" and "Muon" in row.why


def test_kept_values_are_split_once_where_sequences_are_split_already():
    found = of_script(
        "p.py --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
        "--distribute-saved-activations"
    )
    assert made(found)["zero"].remat == "block"


def test_a_line_of_train_py_has_no_number_that_it_refuses():
    found = of_script("p.py --eval-iters 0 --seed 99999999999999 --save-interval 5 --bf16")
    assert "--eval-batches" not in printed.command(found.asked)[0]
    assert line(found).checkpoint_every == 5
    assert "0 is none" in why(found, "--eval-iters")


def test_experts_ask_for_a_model_that_has_some():
    found = of_script("p.py --expert-model-parallel-size 2 --bf16")
    assert any("no experts" in text for text in printed.command(found.asked)[1])


def test_folders_with_blanks_are_quoted():
    place = {"device": "nvme", "nvme_path": '/a b/"c"'}
    asked = deepspeed(zero_optimization={"stage": 3, "offload_optimizer": place}).asked
    compile(printed.python(asked), "printed", "exec")
    assert "'optimizer:nvme=/a b/" in printed.command(asked)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"gradient_clipping": 1e999}', "number"),
        ('{"gradient_clipping": [1]}', "number"),
        ('{"gradient_clipping": -1}', "norm"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": [0.001]}}}', "number"),
        ('{"optimizer": {"type": "Adam", "params": {"betas": [null, 1]}}}', "two numbers"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 5000}}', "2^126"),
        ('{"fp16": {"enabled": true, "loss_scale": -2}}', "2^126"),
        ('{"train_batch_size": 10, "gradient_accumulation_steps": 3}', "multiple of 12"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested"),
        ("distributed_type: NO\na: &a {b: *a}", "nested"),
        ("p.py --bf16 --nproc_per_node=", ""),
    ],
)
def test_malformed_settings_are_one_line(text, said, tmp_path, capsys):
    path = tmp_path / ("a.json" if text[0] == "{" else "a.yaml" if "type:" in text else "a.sh")
    path.write_text(text)
    code, printed_ = main([str(path), "--devices", "4"]), capsys.readouterr()
    assert (code == 2 and said in printed_.err and printed_.err.count("\n") == 1) or not said


def test_switches_are_flags_that_a_reader_takes_for_such():
    flags = script.read("p.py " + " ".join(f"--{name} $X" for name in megatron.SWITCHES)).flags
    assert set(flags) == megatron.SWITCHES
    own = script.read("p.py " + " ".join(f"--{n} $X" for n in megatron.SWITCHES), megatron.SWITCHES)
    assert set(own.flags.values()) == {True}
