"""Translated configurations, beside the documentation of DeepSpeed, accelerate and transformers."""

import fnmatch
import io
import json
import os
import pathlib
import re
import runpy
import shlex
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import zero_jax
from training import config
from zero_jax.commands.settings import mesh_sizes
from zero_jax.translate import command
from zero_jax.translate.command import main, translate

DATA, ROOT = pathlib.Path(__file__).parent / "data", pathlib.Path(__file__).parents[2]
FILES = yaml.safe_load((DATA / "expected.yaml").read_text())  # what each becomes


def run(made):
    """Executes the printed lines; returns their names."""
    names = {"loss_fn": lambda params, x: jnp.mean((x @ params["w"] - 1.0).astype("float32") ** 2)}
    exec(command.python(made), names)
    return names


def train(made):
    """Returns the settings that train.py reads from its printed command line."""
    words = shlex.split(command.train(made))
    assert words[:2] == ["python", "train.py"]
    return config.resolve(config.parse(words[2:]))


def dotted(tree, prefix=""):
    """Yields the names of all values, of lists too."""
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        yield from dotted(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]


def test_every_file_is_judged_and_has_a_licence_and_jax_is_not_imported():
    files = {str(path.relative_to(DATA)) for path in DATA.glob("*/*")}
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\S+) \|$", (DATA / "SOURCES.md").read_text(), re.M)
    assert {name for name, _ in rows} == files == set(FILES)
    assert {licence for _, licence in rows} <= {"Apache-2.0", "MIT"}
    for path in (ROOT / "zero_jax/translate").glob("*.py"):
        found = re.findall(r"^(?:import|from) (\S+)", path.read_text(), re.M)
        assert not {name.split(".")[0] for name in found} & {"jax", "flax", "optax"}, path


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_what_is_expected_and_each_key_is_listed_once(name):
    more = {"precision": "fp32", "reduce": "fp32", "remat": "none", "grad_accum_steps": 1}
    more |= FILES[name]
    devices, text, is_json = more["devices"], (DATA / name).read_text(), name.endswith(".json")
    made, rows = translate(text, str(DATA / name), devices if is_json else None)
    zero, settings = run(made)["zero"], train(made)
    mesh, offload = more.get("mesh", {"data": devices}), more.get("offload")
    expected = zero_jax.Precision(more["precision"], more["reduce"])
    for one in zero.config, settings:
        assert (one.stage, one.grad_accum_steps) == (more["stage"], more["grad_accum_steps"])
        assert str(one.remat) == more["remat"]
    assert mesh_sizes(settings.mesh) == mesh
    assert {**zero.mesh.shape, "data": 0} == {**mesh, "data": 0}
    precision = zero.config.precision
    assert (precision.compute, precision.reduce) == (expected.compute, expected.reduce)
    assert zero_jax.Precision(settings.compute_dtype, settings.reduce_dtype) == expected
    assert {precision.matmul_dtype, settings.matmul_dtype} == {more.get("matmuls")}
    if "scale" in more:
        assert [precision.initial_scale, precision.growth_interval] == more["scale"]
    assert (settings.offload, str(zero.config.offload)) == (offload, offload or "none")
    assert made["global_batch_size"] == more.get("batch")
    assert settings.global_batch_size == more.get("batch", 16)
    for flag, value in more.get("train", {}).items():
        assert getattr(settings, flag) == value, flag
    for verdict in ("unsupported", "unknown"):
        found = {key for key, _, of, _ in rows if of == verdict}
        matched = [set(fnmatch.filter(found, pattern)) for pattern in more.get(verdict, [])]
        assert all(matched) and found == set().union(*matched), verdict
    # The account has every key of the file once.
    keys = [*dotted(json.loads(text) if is_json else yaml.safe_load(text))]
    if name.endswith("sp-alst.accelerate-config.yml"):
        beside = json.loads((DATA / "accelerate/sp-alst.ds-config.json").read_text())
        keys += [f"sp-alst.ds-config.json: {key}" for key in dotted(beside)]
    assert sorted(row[0] for row in rows) == sorted(keys)
    text = " ".join(command.account(rows).replace("\n#", " ").split())
    assert all(f"{row[0]} {' '.join(row[1].split())}" in text and row[3] in text for row in rows)
    if name == "deepspeed/deepspeed_torch_compile_z3.json":
        names = run(made)
        params = names["zero"].init(lambda: {"w": jnp.ones((8, 8))})
        state = names["optimizer"].init(params)
        for _ in range(20):  # after the warm-up
            params, state, metrics = names["step"](params, state, jnp.ones((8, 8)))
        assert metrics.loss < (8 - 1) ** 2, "the printed lines train"


SIZED = """distributed_type: FSDP
num_processes: 8
parallelism_config: {parallelism_config_dp_replicate_size: 1, parallelism_config_dp_shard_size: 2,
  parallelism_config_tp_size: 2, parallelism_config_cp_size: 2}"""


def deepspeed(devices=None, **settings):
    return translate(json.dumps(settings), "a.json", devices)


def sized(*sizes):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {name: size for name, size in zip(names, sizes, strict=True) if size}


def zero(**settings):
    return {"zero_optimization": settings}


def row(found, key):
    """How a key is handled, and the sentence about it."""
    return next((verdict, why) for name, _, verdict, why in found[1] if name == key)


BFLOAT = ("bf16", "bfloat16")
NVME = {"device": "nvme", "nvme_path": '/a b/"c"'}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": 1}
RECOMPUTED = {"partition_activations": True, "cpu_checkpointing": True}
SETTINGS = [
    # A batch is rows x micro-batches x devices; "auto" is 8 rows, or what the two others leave.
    *((n, sized(*sizes), dict(global_batch_size=b, grad_accum_steps=k)) for n, sizes, b, k in [
        (4, (256, 8, None), 256, 8), (4, (None, 8, 3), 96, 3), (None, (256, None, 4), 256, 4),
        (8, (256, 4, "auto"), 256, 8), (4, ("auto", "auto", "auto"), 32, 1),
        (None, (256, 8, None), 256, "32 // D"), (None, (None, 8, 3), "24 * D", 3)]),
    # Gradients are reduced in the data type of the communication.
    *((8, {x: {"enabled": True}}, dict(compute_dtype="bf16", reduce_dtype="bf16")) for x in BFLOAT),
    (8, {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
     dict(compute_dtype="bf16", reduce_dtype="fp32")),
    (8, {"fp16": {"enabled": True, "loss_scale": 128}},
     dict(compute_dtype="fp16", reduce_dtype="fp32", initial_scale=128.0, growth_interval=1000)),
    (8, {"zero_optimization": True}, dict(stage=1)),
    (8, zero(stage=3, zero_hpz_partition_size=4, **QUANTIZED),
     dict(replica=2, secondary_shards=True, param_comm_dtype="int8", grad_comm_dtype="int4")),
    (None, zero(stage=3, zero_hpz_partition_size=4), dict(replica="len(jax.devices()) // 4")),
    (8, zero(stage=3, mics_shard_size=2), dict(replica=4, secondary_shards=False)),
    *((8, zero(stage=2, cpu_offload=x), dict(offload="optimizer")) for x in (True, "yes")),
    (8, zero(stage=3, offload_param={"device": "cpu"}), dict(offload=None)),
    (8, zero(stage=3, offload_optimizer=NVME, offload_param=NVME),
     dict(offload='optimizer,params:nvme=/a b/"c"')),
    # Activations are sharded over a model axis, where there is one.
    (8, {"activation_checkpointing": RECOMPUTED, "tensor_parallel": {"autotp_size": 2}},
     dict(remat="block@partitioned+host", model=2)),
    (8, {"activation_checkpointing": RECOMPUTED}, dict(remat="block@host")),
]  # fmt: skip
PARAMS = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.5, "momentum": 0.5}
ADAM = 1 / (1 + 1e-6)
OPTIMIZERS = [  # the first update, divided by -lr, of a weight of 2 at a gradient of 1
    *((name, {}, ADAM + 0.5 * 2, "adamw") for name in ("AdamW", "Adam", "OneBitAdam")),
    ("Adam", {"torch_adam": True, "weight_decay": None}, ADAM + 0.01 * 2, "adamw"),
    ("Adam", {"adam_w_mode": False}, 2 / (2 + 1e-6), None),  # at a gradient of 1 + 0.5 * 2
    ("Lamb", {}, 2.0, "lamb"),  # with a trust ratio of 2 / norm of the update
    ("Lion", {}, 1 + 0.5 * 2, "lion"), ("SGD", {}, 1 + 0.5 * 2, "sgd"),
    ("Adagrad", {}, 2 / (2 + 1e-6), None),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "settings", "expected"), SETTINGS)
def test_settings_of_deepspeed_become_arguments(devices, settings, expected):
    made, _ = deepspeed(devices, **settings)
    assert {name: made[name] for name in expected} == expected
    zero = run(made)["zero"]
    for name in {"stage", "remat", "offload", "secondary_shards"} & set(expected):
        value = "none" if expected[name] is None else expected[name]
        assert str(getattr(zero.config, name)) == str(value)
        assert getattr(train(made), name) == expected[name]
    if "grad_accum_steps" in expected:
        assert zero.config.grad_accum_steps == eval(
            str(expected["grad_accum_steps"]), {"D": zero.mesh.size}
        )
    sizes = ("global_batch_size", "grad_accum_steps", "replica")
    unknown = any(isinstance(made[name], str) for name in sizes)
    assert ("--devices N" in command.train(made)) == unknown


def test_strategies_of_fsdp_are_stages_and_replicas():
    strategies = {"SHARD_GRAD_OP": 2, "1": 3, "NO_SHARD": 0, "HYBRID_SHARD": 3}
    lines = {f"sharding_strategy: {x}": stage for x, stage in strategies.items()}
    lines |= {"sharding_strategy: HYBRID_SHARD_ZERO2": 2, "reshard_after_forward: FULL_SHARD": 3}
    lines["reshard_after_forward: true\n  fsdp_version: 2"] = 3
    lines["reshard_after_forward: 0\n  fsdp_version: 2"] = 2
    for line, stage in lines.items():
        text = f"distributed_type: FSDP\nnum_machines: 2\nfsdp_config:\n  fsdp_{line}"
        made = run(translate(f"{text}\n  fsdp_offload_params: 'yes'", "a.yaml", 8)[0])["zero"]
        mesh = {"replica": 2, "data": 4} if "HYBRID" in line else {"data": 8}
        assert (made.config.stage, dict(made.mesh.shape)) == (stage, mesh), line
        assert str(made.config.offload) == "optimizer,params"
    with pytest.raises(ValueError, match="reshard_after_forward` is NO_SHARD"):  # of FSDP 1
        translate(text.replace(": 0", ": NO_SHARD"), "a.yaml", 8)
    made, _ = translate(SIZED, "a.yaml")
    assert (made["devices"], made["model"], made["replica"]) == (8, 2, 1)


@pytest.mark.parametrize(("name", "more", "expected", "flag"), OPTIMIZERS)
def test_the_first_update_of_an_optimizer_is_that_of_its_formula(name, more, expected, flag):
    found = deepspeed(8, optimizer={"type": name, "params": {**PARAMS, **more}})
    tx, params = run(found[0])["tx"], {"w": jnp.full((1,), 2.0)}
    updates, _ = tx.update({"w": jnp.ones((1,))}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1 * expected, rtol=1e-5)
    assert found[0]["optimizer"] == flag
    assert (row(found, "optimizer.type")[0] == "unsupported") == (name == "OneBitAdam")


@pytest.mark.parametrize("warmup", [0, 2, 10])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("shape", ["log", "linear"])
def test_rates_are_those_of_deepspeeds_lr_schedules(warmup, kind, shape):
    cosine, total, up, step = kind == "WarmupCosineLR", 40, max(2, warmup), np.arange(45)
    low, high = (0.2 * 1e-2, 1e-2) if cosine else (1e-4, 1e-3)
    params = {"warmup_num_steps": warmup, "warmup_type": shape}
    bounds = {"warmup_min_lr": low, "warmup_max_lr": high}
    params |= {"warmup_min_ratio": 0.2} if cosine else bounds
    params |= {"total_num_steps": total} if kind != "WarmupLR" else {}
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    made, _ = deepspeed(optimizer=adam, scheduler={"type": kind, "params": params})
    share = np.log(step + 1) / np.log(up) if shape == "log" else step / up
    after, turn = high, np.pi * (step - up + 1) / (total - up)
    if kind == "WarmupDecayLR":
        after = low + (high - low) * np.maximum(0.0, (total - step) / (total - up))
    elif cosine:
        after = high * (1e-4 + (1 - 1e-4) * (1 + np.cos(turn)) / 2)
    want = np.where(step < up, low + (high - low) * share, after)
    lr = run(made)["lr"]
    np.testing.assert_allclose([lr(jnp.int32(i)) for i in step], want, rtol=1e-4, atol=1e-9)


def test_the_rate_is_that_of_the_schedule_or_of_an_unknown_optimizer():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": "auto"}}
    for rate in ("auto", 5e-5):
        found = deepspeed(optimizer={"type": "AdamW", "params": {"lr": rate}}, scheduler=scheduler)
        assert row(found, "optimizer.params.lr")[1] == "scheduler.params.warmup_max_lr replaces it"
        assert found[0]["learning_rate"] == run(found[0])["lr"] == 2e-5
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}
    optimizer = {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.1}}
    found = deepspeed(8, scheduler=scheduler, optimizer=optimizer)
    names = {f"scheduler.{x}" for x in ("type", "params.cycle_min_lr")}
    names |= {f"optimizer.{x}" for x in ("type", "params.weight_decay")}
    assert {key for key, _, verdict, _ in found[1] if verdict == "unsupported"} == names
    assert run(found[0])["lr"] == 0.02


def test_keys_that_are_unknown_are_named_and_keys_that_are_off_are_not_needed():
    found = deepspeed(**zero(stage=2, overlap_com=True), zero_optimisation={"stage": 2})
    verdict, why = row(found, "zero_optimization.overlap_com")
    assert verdict == "unknown" and why.endswith(" zero_optimization.overlap_comm")
    assert row(found, "zero_optimisation.stage")[1].endswith(" zero_optimization.stage")
    for on in (False, True):
        found = deepspeed(8, elasticity={"enabled": on, "version": 1}, sparse_gradients=on)
        for key in ("elasticity.enabled", "elasticity.version", "sparse_gradients"):
            assert row(found, key)[0] == ("unsupported" if on else "not needed")


def test_auto_is_the_mixed_precision_of_accelerate(tmp_path):
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": "auto"}, "train_batch_size": 8}')
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    text += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    found = translate(text, str(tmp_path / "a.yaml"))
    assert found[0]["compute_dtype"] == "bf16"
    assert row(found, "ds.json: bf16.enabled")[1].endswith("bf16")
    key = "deepspeed_config.deepspeed_config_file"
    assert row(translate(text, "elsewhere/a.yaml"), key)[0] == "unsupported"
    other = translate(text.replace("DEEPSPEED", "MULTI_GPU"), "a.yaml")
    assert row(other, key)[0] == "not needed" and other[0]["stage"] == 0


ERRORS = {
    "a.json": [
        ("{", "a.json"), ('{"steps_per_print": 1, "steps_per_print": 2}', "steps_per_print"),
        ("[]", "a.json"), ('{"optimizer": {"type": "Adam", "params": {"lr": [1]}}}', "params.lr`"),
        ('{ // one\n"a": 1,\n"b" 2}', "line 3"), ('{"train_batch_size": 0}', "`train_batch_size`"),
        *((f'{{"train_batch_size": {x}}}', "line 1") for x in ("010", "1:30", "1_0", "&a 8")),
        ('{"colour": "red"}', "docs/coming-from.md"), (json.dumps(zero(stage=4)), ".stage`"),
        (json.dumps(sized(256, 8, 4)), "`train_batch_size` 256"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "`bf16.enabled`"),
        *((f'{{"gradient_clipping": {x}}}', "`gradient_clipping`") for x in ("1e999", "-1")),
        ('{"optimizer": {"type": "Adam", "params": {"betas": [null, 1]}}}', "betas`"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 5000}}', "`fp16.loss_scale`"),
        ('{"scheduler": {"type": "WarmupDecayLR"}}', "total_num_steps`"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested"), ("{" + " " * 1_000_000 + "}", "`FILE`"),
    ],
    "a.yaml": [
        ("distributed_type: FSDP\nuse_cpu: no\nuse_cpu: yes", "use_cpu"),
        ("distributed_type: FSDP\nfsdp_config:\n  a: 1\n  a: 2", " a "),
        (SIZED, "8 devices, not 4"), ("distributed_type: NO\na: &a {b: *a}", "nested"),
        (SIZED[:-1] + ", parallelism_config_sp_size: x}", "`parallelism_config` is x"),
        ("distributed_type: FSDP\nfsdp_config: !!map [a]", "no DeepSpeed JSON"),
        ("distributed_type: MAYBE", "`distributed_type`"), ("distributed_type: [", "docs/com"),
        ("distributed_type: NO\nmixed_precision: int4", "`mixed_precision`"),
        ("distributed_type: NO\na0: &a0 {x: 1, y: 2}\n" + "\n".join(
            f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 30)), "10000 keys"),
        *((text, "docs/coming-from.md") for text in (
            "distributed_type: MEGATRON_LM", "tensor_model_parallel_size: 2\nmicro_batch_size: 1")),
    ],
    "a.sh": [("torchrun pretrain_gpt.py --use-distributed-optimizer", "docs/coming-from.md")],
    "a.bin": [("\udcff\udcfe", "utf-8"), ("\x00\x01\x02", "special characters")],
}  # fmt: skip


def test_no_configuration_is_an_error_in_one_line(tmp_path, capsys):
    for name, text, said in [(file, *row) for file in ERRORS for row in ERRORS[file]]:
        path = tmp_path / name
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert main([str(path), "--devices=4"]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and error.startswith("error: ")
        assert said in error and str(path) in error, text[:80]
    os.mkfifo(tmp_path / "pipe")
    for named in (str(tmp_path / "pipe"), "/dev/zero", "nowhere.json", "."):
        assert main([named]) == 2
        out, error = capsys.readouterr()
        assert out == "" and re.fullmatch(f"error: .* \\({named}\\)\n", error)


def test_comments_trailing_commas_and_merged_blocks_are_read(monkeypatch, capsys):
    """As DeepSpeed does. The time is linear in the comments after a comma."""
    known = {**zero(stage=2), "wandb": {"a": "https://x/*y*/ #,]", "b": [1, 2], "c": "\\"}}
    plain = json.dumps(known, indent=1)
    for comment in ("", "# ours\n", "/* c, */" * 200, '// c "d"\n' * 200):
        text = comment + re.sub(r"(?<!,)\n *([]}])", rf", {comment}\1", plain)
        text = text.replace(",\n", f", {comment}\n") + comment
        assert translate(text, "ds.conf") == translate(plain, "ds.conf")
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["-"]) == 0 and "stage=2" in capsys.readouterr().out
    # A merged block of a YAML may replace a key.
    text = "a: &a {use_cpu: no}\nb: {c: {d: &b {<<: *a, use_cpu: yes}}}\nx: {<<: *b}\n"
    values = command.load(text + "distributed_type: FSDP", "a.yaml")
    assert values["b.c.d.use_cpu"] is values["x.use_cpu"] is True


def test_the_page_shows_what_the_command_prints(monkeypatch, capsys):
    pattern = r"```sh\npython -m (zero_jax\.translate .*?)\n```\n\n```text\n(.*?)```"
    page = (ROOT / "docs/coming-from.md").read_text()
    line, output = re.search(pattern, page, re.S).groups()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zero_jax.translate", run_name="__main__")
    assert capsys.readouterr().out == output
