"""python -m zero_jax.translate: nothing is left out, what is printed is valid, errors one line."""

import ast
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from judged import DATA, VERDICTS, keys, line, made, translated

from zero_jax.translate import files, printed, script
from zero_jax.translate.account import NO_EQUAL, NOT_NEEDED, TRANSLATED, UNKNOWN, flat
from zero_jax.translate.command import main, translate

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(
    str(path.relative_to(DATA))
    for path in DATA.rglob("*")
    if path.is_file() and path.name != "SOURCES.md"
)


def deepspeed(devices=None, **settings):
    return translate(json.dumps(settings), "a.json", devices)


def fsdp(devices=None, hosts=1, **settings):
    lines = [f"  fsdp_{name}: {value}" for name, value in settings.items()]
    head = ["distributed_type: FSDP", f"num_machines: {hosts}", "fsdp_config:"]
    return translate("\n".join([*head, *lines]), "a.yaml", devices)


def why(found, key):
    return next(row.why for row in found.rows if row.key == key)


def test_every_file_has_a_source_and_a_licence():
    said = dict(
        re.findall(r"^\| `(\S+)` \|.*\| (\S+) \|$", (DATA / "SOURCES.md").read_text(), re.M)
    )
    assert set(said) == set(FILES) and len(FILES) >= 15
    assert set(said.values()) <= {"Apache-2.0", "MIT", "BSD-3-Clause"}


@pytest.mark.parametrize("name", FILES)
def test_every_setting_of_a_file_is_in_the_account(name):
    text = (DATA / name).read_text()
    if name.endswith(".sh"):
        given = {f"--{flag}" for flag in script.read(text).flags}
    else:
        parse = files.parse_json if name.endswith(".json") else files.parse_yaml
        given = set(flat(parse(text, name)))
    found = translated(name, devices=2 if "w8a8" in name else None)
    rows = {row.key for row in found.rows}
    blocks = tuple(row.removesuffix("*") for row in rows if row.endswith(".*"))
    assert {key for key in given - rows if not key.startswith(blocks)} == set()
    assert all(row.verdict in VERDICTS and row.why for row in found.rows)
    shown = printed.account(found.rows)
    assert all(row.key in shown for row in found.rows)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".sh")])
def test_flags_of_a_script_are_all_found(name):
    """By a search that knows nothing of the shell but its comments."""
    code = re.sub(r"(^|\s)#.*$", "", (DATA / name).read_text(), flags=re.M)
    every = set(re.findall(r"(?:^|[\s\"'])--([a-z][\w-]*)", code, re.M))
    assert len(every) > 20 and every == set(script.read(code).flags)


def test_a_key_that_nobody_knows_is_said_to_be_unknown():
    found = deepspeed(zero_optimization={"stage": 2, "overlap_com": True}, train_batch_size=8)
    assert keys(found, UNKNOWN) == {"zero_optimization.overlap_com"}
    assert "zero_optimization.overlap_comm" in why(found, "zero_optimization.overlap_com")


def test_the_nearest_name_may_be_one_that_a_reader_looks_for():
    found = deepspeed(zero_optimisation={"stage": 2}, train_batch_size=8)
    assert why(found, "zero_optimisation.stage").endswith("is zero_optimization.stage")


def test_gradients_are_said_to_be_summed_in_what_they_are():
    for given, summed in ((None, "bf16"), ("auto", "bf16"), ("fp32", "fp32")):
        sent = {} if given is None else {"communication_data_type": given}
        found = deepspeed(bf16={"enabled": True}, **sent)
        assert why(found, "bf16.enabled").endswith(f"gradients are summed in {summed}")


def test_a_schedule_that_warms_up_sets_the_rate_in_place_of_the_optimizers():
    for lr in ("auto", 5e-5):
        rate = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 10}}
        adam = {"type": "AdamW", "params": {"lr": lr}}
        found = deepspeed(optimizer=adam, scheduler=rate)
        said = why(found, "optimizer.params.lr")
        assert said.startswith("WarmupLR sets the rate in its place") and "5e-05" not in said


def test_a_batch_is_rows_x_micro_batches_x_devices():
    found = deepspeed(4, train_batch_size=256, train_micro_batch_size_per_gpu=8)
    assert found.asked.micro_batches() == 8
    found = deepspeed(4, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=3)
    assert found.asked.global_batch() == 96
    found = deepspeed(None, train_batch_size=256, gradient_accumulation_steps=4)
    assert (found.asked.global_batch(), found.asked.micro_batches()) == (256, 4)
    found = deepspeed(None, train_batch_size=256)
    assert found.asked.micro_batches() == 1, "a missing accumulation is one micro-batch"
    three = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    with pytest.raises(ValueError, match="256 is not 8 rows x 4 micro-batches x 4 devices"):
        deepspeed(4, train_batch_size=256, **three)


def test_micro_batches_that_are_auto_are_what_the_other_sizes_leave():
    sizes = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4}
    found = deepspeed(8, **sizes, gradient_accumulation_steps="auto")
    said = why(found, "gradient_accumulation_steps")
    assert said == "micro_batches=8, which the two other sizes leave"
    assert "micro_batches=8" in printed.python(found.asked)


def test_without_the_number_of_devices_it_is_asked_for():
    text, said = printed.command(
        deepspeed(train_batch_size=256, train_micro_batch_size_per_gpu=8).asked
    )
    assert text == "" and "--devices N" in said[0] and "--micro-batches 32 // D" in said[0]


def test_zero_plus_plus_has_its_three_parts():
    zero = {"stage": 3, "zero_hpz_partition_size": 4, "zero_quantized_weights": True}
    found = deepspeed(8, zero_optimization={**zero, "zero_quantized_gradients": True})
    made_of = made(found)["zero"]
    assert dict(made_of.mesh.shape) == {"replica": 2, "data": 4} and made_of.hierarchical
    assert (made_of.precision.gather, made_of.precision.scatter) == ("int8", "int4")
    assert line(found).mesh == "replica=2,data=4" and line(found).hierarchical
    unknown_n = deepspeed(zero_optimization={**zero})
    assert dict(made(unknown_n)["zero"].mesh.shape) == {"replica": 2, "data": 4}
    assert printed.command(unknown_n.asked)[0] == ""


def test_offload_to_files_names_the_folder(tmp_path):
    device = {"device": "nvme", "nvme_path": str(tmp_path)}
    both = {"offload_optimizer": device, "offload_param": device}
    found = deepspeed(8, zero_optimization={"stage": 3, **both})
    assert str(made(found)["zero"].offload) == f"optimizer,params:nvme={tmp_path}"
    assert line(found).offload == f"optimizer,params:nvme={tmp_path}"


def test_activations_are_split_over_a_model_axis():
    found = deepspeed(
        8,
        activation_checkpointing={"partition_activations": True, "cpu_checkpointing": True},
        tensor_parallel={"autotp_size": 2},
    )
    assert made(found)["zero"].remat == line(found).remat == "block@partitioned+host"
    assert line(found).mesh == "data=4,model=2"
    alone = deepspeed(8, activation_checkpointing={"cpu_checkpointing": True})
    assert made(alone)["zero"].remat == "block@host"


def test_which_layers_are_checkpointed_is_the_models_to_say_there():
    found = deepspeed(8, activation_checkpointing={"partition_activations": False})
    said = why(found, "activation_checkpointing.partition_activations")
    assert 'remat="block"' in said and 'checkpoints none remat="none"' in said


@pytest.mark.parametrize(
    ("settings", "hosts", "stage", "mesh"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 1, 2, {"data": 8}),
        ({"sharding_strategy": 1}, 1, 3, {"data": 8}),
        ({"sharding_strategy": "NO_SHARD"}, 1, 0, {"data": 8}),
        ({"sharding_strategy": "HYBRID_SHARD"}, 2, 3, {"replica": 2, "data": 4}),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, 2, 2, {"replica": 2, "data": 4}),
        ({"version": 2, "reshard_after_forward": "true"}, 2, 3, {"data": 8}),
        ({"version": 2, "reshard_after_forward": "false"}, 1, 2, {"data": 8}),
    ],
)
def test_strategies_of_fsdp_are_stages_and_replicas(settings, hosts, stage, mesh):
    zero = made(fsdp(8, hosts, **settings))["zero"]
    assert zero.stage == stage and dict(zero.mesh.shape) == mesh


def test_fsdp_that_offloads_moves_masters_too():
    assert str(made(fsdp(8, offload_params="true"))["zero"].offload) == "optimizer,params"


def test_megatron_recomputes_layers_offloads_and_narrows_states():
    flags = (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16"
    )
    flags += " --tensor-model-parallel-size 2 --sequence-parallel --optimizer-cpu-offload --lr 1e-3"
    flags += " --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --train-iters 100"
    found = translate(flags, "-", 8)
    zero, settings = made(found)["zero"], line(found)
    assert (zero.remat, str(zero.offload), zero.states) == ("block", "optimizer", "8bit")
    assert zero.sequence_parallel and settings.sequence_parallel
    assert settings.steps == 100 and not keys(found, NO_EQUAL)
    lr = made(found)["lr"]  # linear to 0 is Megatron's default
    assert float(lr(jnp.int32(50))) == pytest.approx(5e-4)


@pytest.mark.parametrize(("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2)])
def test_strategies_of_megatron_fsdp_are_stages(strategy, stage):
    text = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
    assert translate(text, "-").asked.stage == stage


def test_adam_with_adam_w_mode_off_adds_decay_to_the_gradient():
    params = {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}
    found = deepspeed(8, optimizer={"type": "Adam", "params": params})
    assert (
        "add_decayed_weights(0.1)" in found.asked.tx.call and "optax.adam(" in found.asked.tx.call
    )


def test_a_schedule_that_is_not_known_has_no_equal():
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}
    found = deepspeed(8, scheduler=scheduler, train_batch_size=8)
    assert {"scheduler.type", "scheduler.params.cycle_min_lr"} == keys(found, NO_EQUAL)


def test_mixed_precision_of_accelerate_is_what_auto_stands_for(tmp_path):
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": "auto"}, "train_batch_size": 8}')
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    text += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert made(translate(text, str(tmp_path / "a.yaml")))["zero"].precision.compute == jnp.bfloat16
    gone = translate(text, "elsewhere/a.yaml")
    assert keys(gone, NO_EQUAL) == {"deepspeed_config.deepspeed_config_file"}


def test_a_setting_that_is_off_is_not_without_an_equal():
    found = deepspeed(8, elasticity={"enabled": False}, sparse_gradients=False, train_batch_size=8)
    assert {"elasticity.*", "sparse_gradients"} <= keys(found, NOT_NEEDED)
    found = deepspeed(8, elasticity={"enabled": True}, train_batch_size=8)
    assert "elasticity.*" in keys(found, NO_EQUAL) and keys(found, TRANSLATED)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "{", "a.json is not JSON"),
        ("a.json", "[]", "holds list, not settings by name"),
        ("a.json", '{"steps_per_print": 1, "steps_per_print": 2}', "steps_per_print twice"),
        ("a.json", '{"colour": "red"}', "none of the settings"),
        ("a.json", '{"train_batch_size": "many"}', "train_batch_size is 'many': a number"),
        ("a.json", '{"train_batch_size": 0}', "a whole number of at least 1"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "DeepSpeed has stages 0 to 3"),
        ("a.json", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "both true"),
        ("a.yaml", "distributed_type: [", "a.yaml is not YAML"),
        ("a.yaml", "distributed_type: MAYBE", "distributed_type is 'MAYBE': it is one of NO"),
        ("a.yaml", "distributed_type: NO\nmixed_precision: int4", "mixed_precision is 'int4'"),
        ("a.yaml", "distributed_type: NO\ndebug: no\ndebug: no", "debug twice"),
        ("a.sh", "echo hello", "is no DeepSpeed JSON"),
        ("a.sh", "--global-batch-size 10 --micro-batch-size 4", "is not made of 4 rows"),
        ("a.sh", "--bf16 --fp16", "both given"),
    ],
)
def test_what_can_not_be_read_is_one_line_and_exit_code_2(name, text, said, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == 2
    printed_out = capsys.readouterr()
    assert printed_out.out == "" and printed_out.err.count("\n") == 1
    assert printed_out.err.startswith("error: ") and said in printed_out.err


def test_a_file_that_is_not_there_is_one_line_too(capsys):
    assert main(["nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


def test_the_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("--use-distributed-optimizer --bf16"))
    assert main(["-"]) == 0 and 'stage=1, precision="bf16"' in capsys.readouterr().out


def test_what_is_printed_is_python_as_a_whole(capsys):
    assert main([str(DATA / "deepspeed/accelerate_zero1.json")]) == 0
    ast.parse(capsys.readouterr().out)


def test_no_reader_imports_jax():
    for path in (ROOT / "zero_jax/translate").glob("*.py"):
        found = re.findall(r"^(?:import|from) (\S+)", path.read_text(), re.M)
        assert not {name.split(".")[0] for name in found} & {"jax", "flax", "optax"}, path


def test_the_page_shows_what_the_command_prints_and_it_is_one_of_the_commands():
    page = (ROOT / "docs/coming-from.md").read_text()
    command, output = re.search(
        r"```sh\npython -m (.*?)\n```\n\n```text\n(.*?)```", page, re.S
    ).groups()
    assert command.startswith("zero_jax.translate ")
    words = ["zero_jax", "translate", *command.split()[1:]]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


COMMENTED = """{
  // ZeRO-2 for the "small" machine
  "zero_optimization": {"stage": 2, },  # offload later
  /* two
     lines, */
  "train_batch_size": 8, // a comma before the end
}
"""


@pytest.mark.parametrize("text", [COMMENTED, f"# ours{chr(10)}{COMMENTED}"])
def test_comments_and_commas_at_the_end_are_read_as_deepspeed_does(text):
    found = translate(text, "ds.conf")
    assert (found.kind, found.asked.stage) == ("DeepSpeed", 2)
    assert found == translate(
        '{"zero_optimization": {"stage": 2}, "train_batch_size": 8}', "ds.json"
    )


def test_what_looks_like_a_comment_in_a_string_is_kept():
    text = '{"a": "https://x/*y*/ #,]", "b": "\\\\", "c": [1, [2,],], "d": "\\",}"}'
    assert files.parse_json(text, "a.json") == {
        "a": "https://x/*y*/ #,]", "b": "\\", "c": [1, [2]], "d": '",}'
    }  # fmt: skip
    with pytest.raises(ValueError, match="not JSON: .* at line 3"):
        files.parse_json('{ // one\n"a": 1,\n"b" 2}', "a.json")


@pytest.mark.parametrize("filler", ["#" * 200, "/* c */" * 200, "// c\n" * 200])
def test_many_comments_after_a_comma_take_no_longer_than_few(filler):
    """Each way to split them was tried: 2 to the power of their number."""
    assert files.parse_json(f'{{"a": 1, {filler}\n "b": 2}}', "a.json") == {"a": 1, "b": 2}


@pytest.mark.parametrize("named", ["pipe", "/dev/zero"])
def test_a_file_that_may_never_end_is_not_read(named, tmp_path, capsys):
    if named == "pipe":
        named = str(tmp_path / named)
        os.mkfifo(named)
    assert main([named]) == 2
    assert f"`FILE` {named} is not a regular file" in capsys.readouterr().err
