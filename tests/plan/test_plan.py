"""python -m zero_jax.plan and Zero.plan: predictions, data, pictures and what is refused."""

import json
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from problems import gpt_problem, resnet_problem

import zero_jax
from training.config import parse
from zero_jax.commands import plan as command
from zero_jax.engine import grads
from zero_jax.hlo import prove, targets
from zero_jax.models import gpt
from zero_jax.plan import memory
from zero_jax.plan.advice import least_seconds
from zero_jax.plan.plans import Plan, Predicted

ROOT = pathlib.Path(__file__).parents[2]
TX = optax.adamw(1e-3)
SCRIPT = [
    *("--model", "7.5b", "--stage", "3", "--devices", "64", "--batch-per-device", "4"),
    *("--seq", "1024", "--reduce", "bf16", "--target", "h100"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What a script gets from the call that the documentation shows, without --compile."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert (
        command.main([*SCRIPT, "--json", str(path), "--plot", str(path.with_suffix(".png"))]) == 0
    )
    assert path.with_suffix(".png").stat().st_size > 10_000
    return json.loads(path.read_text())


def test_arguments_of_7_5b_on_64_are_12_psi_over_n_and_the_batch(data):
    psi = gpt.num_params(gpt.preset("7.5b"))
    assert data["num_params"] == psi
    guard, counts, batch = 16, 4 + 4, 4 * 1025 * 4  # of Adam and of its schedule
    assert data["predicted"]["argument_bytes"] == 12 * psi // 64 + guard + counts + batch
    assert data["predicted"]["alias_bytes"] == 12 * psi // 64 + guard + counts


def test_terms_add_up_to_the_total(data):
    for predicted in [data["predicted"], *data["stages"].values()]:
        terms = dict(predicted["terms"])
        assert terms.pop("host") == 0
        assert sum(terms.values()) == predicted["total_bytes"]


def test_terms_follow_their_formulas(data):
    """36 layers x 4096, 4 x 1024 tokens, bf16: the formulas of forecast.py by hand."""
    psi, layer = data["num_params"], 12 * 4096**2 + 13 * 4096
    stages = {int(s): p["terms"] for s, p in data["stages"].items()}
    saved = 36 * 4 * 1024 * 4096 * 2
    for terms in stages.values():
        assert saved <= terms["saved"] <= 1.03 * saved  # and the embedded tokens
    assert stages[0]["parameters"] == 4 * psi
    assert stages[3]["parameters"] == 4 * psi // 64
    for stage in (0, 1, 2):  # what is not in use at the worst instant may be gone: embeddings
        assert 1.99 * 36 * layer <= stages[stage]["copy"] <= 2 * psi
    assert 1.99 * 36 * layer <= stages[0]["gradients"] <= 2 * psi + 4 * 50304 * 4096
    # Of bf16, the layer that is gathered ahead, and what is left of the one that runs backward.
    assert 2 * layer <= stages[3]["copy"] <= 2 * 2 * layer
    assert stages[3]["buffers"] == pytest.approx(2 * layer, rel=0.01)
    # In bf16 until the update, as they were sent; that of the embedding may be on its way.
    layers = 2 * 36 * 12 * 4096**2 / 64
    assert layers <= stages[3]["gradients"] <= layers + 4 * 50304 * 4096 + 2 * layer


def test_products_saved_by_dots_and_weights_saved_by_no_policy(tmp_path):
    """L·B·T·9·D·c for dots; stages that open weights at a touch save no copies.

    Of stage 3 the worst instant is the loss, where one hidden state more is there.
    """
    saved = {}
    for remat in ("dots", "none"):
        path = tmp_path / f"{remat}.json"
        assert command.main([*SCRIPT, "--remat", remat, "--json", str(path)]) == 0
        stages = json.loads(path.read_text())["stages"]
        saved[remat] = [stages[str(s)]["terms"]["saved"] for s in range(4)]
    products = 36 * 4 * 1024 * 9 * 4096 * 2  # of 3, 1, 4 and 1 times the width
    assert saved["dots"] == [pytest.approx(products, rel=0.01)] * 4
    hidden = 4 * 1024 * 4096 * 2
    assert saved["none"] == [saved["none"][1]] * 3 + [saved["none"][1] + hidden]


def test_higher_stages_hold_less(data):
    totals = [data["stages"][str(s)]["total_bytes"] for s in range(4)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor", "lamb", "muon"])
def test_every_optimizer_is_planned_by_its_own_state(optimizer, tmp_path):
    path = tmp_path / "plan.json"
    args = ["--model", "nano", "--devices", "4", "--optimizer", optimizer, "--json", str(path)]
    assert command.main(args) == 0
    terms = json.loads(path.read_text())["predicted"]["terms"]
    moments = {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}
    if optimizer in moments:
        assert terms["optimizer_state"] == pytest.approx(
            moments[optimizer] * terms["parameters"], rel=0.01
        )
    else:
        assert 0 < terms["optimizer_state"] < 2.1 * terms["parameters"]


@pytest.mark.slow
def test_model_parallelism_divides_all_but_the_residual_stream(tmp_path):
    def terms(mp, *more):
        path = tmp_path / f"{mp}.json"
        # In bf16: in fp32 the worst instant of four is when the embedding's gradient is sent, whose
        # scatter is not followed over `model`.
        args = ["--model", "7.5b", "--devices", str(64 * mp), "--batch-per-device", "4"]
        args += ["--reduce", "bf16", *more]
        assert command.main([*args, "--model-parallel", str(mp), "--json", str(path)]) == 0
        return json.loads(path.read_text())["predicted"]["terms"]

    one, four = terms(1), terms(4)
    D, L, T = 4096, 36, 1024
    # Held by every device of the model axis: biases, norms and positions, at rest over data.
    whole = L * 13 * D + T * D + 2 * D
    assert four["parameters"] == one["parameters"] / 4 + 4 * whole / 64 * 3 / 4
    assert four["optimizer_state"] == pytest.approx(2 * four["parameters"], rel=1e-6)
    for name in ("gradients", "buffers"):
        assert four[name] == pytest.approx(one[name] / 4, rel=0.03)
    assert four["copy"] == pytest.approx(one["copy"] / 4, rel=0.03)
    assert four["saved"] == pytest.approx(one["saved"], rel=1e-3)  # each device has all of it
    assert terms(4, "--sequence-parallel")["saved"] == pytest.approx(one["saved"] / 4, rel=1e-3)


def test_without_matplotlib_plot_names_the_package_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command.main(["--model", "nano", "--plot", str(tmp_path / "none.png")]) == 2
    assert "pip install 'zero_jax[train]'" in capsys.readouterr().err


def test_the_options_of_a_zero_reach_it_from_both_command_lines():
    words = "--hierarchical --micro-batches 2 --compute fp16 --reduce bf16 --gather int8"
    words += " --scatter int4 --remat dots --memory-limit 16"
    args = ["--model", "nano", "--replica", "2", "--batch-per-device", "2", *words.split()]
    zero = command.case_of(command.parser().parse_args(args)).zero
    assert zero.precision == zero_jax.Precision("fp16", "bf16", "int8", "int4")
    assert (zero.stage, zero.remat, zero.micro_batches) == (3, "dots", 2)
    assert zero.hierarchical and not zero.sequence_parallel and zero.memory_limit == 16e9
    config = parse(words.split())
    assert zero == zero_jax.Zero(zero.mesh, **config.settings())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "7b"], ["'7b'", "7.5b"]),
        (["--target", "h10"], ["'h10'", "'h100'"]),
        (["--optimizer", "lyon"], ["'lyon'", "'lion'"]),
        (["--remat", "blocks"], ["'blocks'", "'block'"]),
        (["--reduce", "fp16"], ["fp16", "bf16"]),
        (["--devices", "0"], ["--devices 0"]),
        (["--micro-batches", "0"], ["--micro-batches 0", "at least 1"]),
        (["--replica", "0"], ["--replica 0", "at least 1"]),
        (["--memory-limit", "0", "--auto"], ["memory_limit=0", "80e9"]),
        (["--devices", "6", "--model-parallel", "4"], ["--devices 6", "4"]),
        (["--batch-per-device", "3", "--micro-batches", "2"], ["--batch-per-device 3", "2"]),
        (["--sequence-parallel"], ["none", "model=..."]),
        (["--target", "v100-32gb", "--compile"], ["v100-32gb", "h100"]),
        (["--devices", "12", "--compile"], ["12 devices", "16", "topology"]),
        (["--topology", "2x1x8", "--compile"], ["2x1x8", "16 devices", "8"]),
        (["--topology", "8-1", "--compile"], ["8-1", "8x1x8"]),
        (["--latencies", "step.pbtxt"], ["--latencies", "add --compile"]),
        (["--latencies", "step.pbtxt", "--auto"], ["--latencies", "--auto"]),
        (["--latencies", "step.txt", "--compile"], ["step.txt", "step.pbtxt"]),
        (["--latencies", "none/step.pbtxt", "--compile"], ["no folder none"]),
        (["--latencies", "step.pbtxt", "--compile", "--target", "cpu"], ["cpu", "h100"]),
        (["--latencies", "a step.pbtxt", "--compile"], ["a step.pbtxt", "blank"]),
        (["meshes", "--latencies", "step.pbtxt"], ["--latencies is not for meshes"]),
        (["mesh"], ["'mesh'", "'meshes'"]),
        (["scaling"], ["no command is called 'scaling'", "plan, meshes"]),
    ],
    ids=" ".join,
)
def test_input_of_no_use_is_refused_with_a_way_out(args, words, capsys, monkeypatch):
    monkeypatch.setattr(prove, "_check_installed", lambda target: None)
    short = [] if args[0][0] != "-" else ["--model", "nano"] if "--model" not in args else []
    assert command.main([*args, *short]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(word in error for word in words), error


def traced(*_, **__):
    pytest.fail("nothing is traced before it is known that it can be compiled")


@pytest.mark.parametrize("what", ["--compile", "--auto"])
def test_a_missing_plugin_gets_the_install_line_at_once(what, monkeypatch, capsys):
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    assert command.main(["--model", "nano", what]) == 2
    error = capsys.readouterr().err
    assert "jax_cuda12_plugin" in error and "pip install jax-cuda12-plugin==" in error


def test_a_target_is_checked_before_a_step_is_traced(monkeypatch):
    monkeypatch.setattr(grads.GlobalLoss, "read", traced)
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4), stage=3)
    params = zero.abstract(lambda: {"w": jnp.zeros((8, 8))})
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    monkeypatch.setattr(prove.importlib.util, "find_spec", lambda name: True)  # all installed
    with pytest.raises(ValueError, match="topology '8-1'"):
        zero.plan(
            lambda p, x: jnp.mean(x @ p["w"]), TX, params, batch, target="h100", topology="8-1"
        )


def test_zero_plan_reads_what_the_mesh_would_run():
    """A model with statistics and keys, compiled in this process for the mesh's own devices."""
    problem = resnet_problem()
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.init(problem.make)
    args = (problem.loss_on_mesh, TX, params, problem.batch, *problem.extras)
    found = zero.plan(*args, has_aux=True, compile=True)
    assert found.compiled.argument_bytes == found.predicted.argument_bytes
    assert found.compiled.alias_bytes == found.predicted.alias_bytes
    assert found.total_bytes == found.compiled.total_bytes
    assert json.dumps(found.as_dict())
    again = zero.plan(*args, has_aux=True)
    assert again.compiled is None and again.predicted == found.predicted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_compiled_words_are_those_that_a_plan_promises(stage):
    problem = gpt_problem()
    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=stage)
    params = zero.abstract(problem.make)
    found = zero.plan(problem.loss, TX, params, problem.batch, compile=True)
    promised = memory.words_per_param(stage, 1)
    # Leaves too small to split are reduced whole, and a tied embedding is gathered once less.
    assert found.words_per_param == pytest.approx(promised, rel=0.25)
    zero_jax.assert_communication(
        found.compiled, found.words_per_param, num_params=found.num_params
    )


def test_a_mesh_without_devices_plans_but_does_not_compile():
    problem = gpt_problem()
    zero = zero_jax.Zero(zero_jax.abstract_mesh(4, replica=2), stage=2)
    params = zero.abstract(problem.make)
    found = zero.plan(problem.loss, TX, params, problem.batch)
    assert found.predicted.total_bytes > found.predicted.argument_bytes > 0
    with pytest.raises(ValueError, match="target='h100'"):
        zero.plan(problem.loss, TX, params, problem.batch, compile=True)


def test_a_plan_takes_no_memory():
    before = len(jax.live_arrays())
    zero = zero_jax.Zero(zero_jax.abstract_mesh(64), stage=3, precision="bf16")
    params = zero.abstract(lambda: {"w": jnp.ones((128, 25600, 25600))})

    def loss(params, x):
        layer = lambda x, w: (x @ w, None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0])

    batch = jax.ShapeDtypeStruct((64, 25600), jnp.bfloat16)
    found = zero.plan(loss, TX, params, batch)
    assert found.predicted.parameters == 4 * 128 * 25600**2 // 64
    assert len(jax.live_arrays()) <= before + 2


@pytest.mark.parametrize(("said", "runs"), [("No supported config found for HLO: %x", 2), ("x", 1)])
def test_where_xla_has_no_kernel_a_librarys_products_are_compiled(
    said, runs, monkeypatch, tmp_path
):
    tried = []

    def ran(here, target, devices, timeout, flags):
        tried.append(flags)
        done = len(tried) == 2
        return types.SimpleNamespace(returncode=0 if done else 1, stderr="" if done else said)

    monkeypatch.setattr(prove, "_ran", ran)
    if runs == 1:
        with pytest.raises(RuntimeError, match="compiling for h100 failed:\nx"):
            prove._run_child(tmp_path, targets.target("h100"), 8, 1.0)
    else:
        with pytest.warns(UserWarning, match="no kernel of its own.*as a library's"):
            prove._run_child(tmp_path, targets.target("h100"), 8, 1.0)
        assert "triton_gemm=false" in tried[1]
    assert len(tried) == runs


def test_a_plan_prints_the_table_of_the_command():
    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    zero = zero_jax.Zero(zero_jax.make_mesh(), stage=3)
    params = zero.abstract(lambda: {"w": jnp.ones((64, 64))})
    rows = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    plan = zero.plan(loss, TX, params, rows)
    printed = dict(line.split(maxsplit=1) for line in str(plan).splitlines())
    assert printed["parameters"] == f"{4 * 64 * 64 // jax.device_count()} B"
    assert {"total", "elements", "sent", "layers:"} <= set(printed) and "compiled" not in printed
    assert "Largest temporaries" in str(zero.plan(loss, TX, params, rows, compile=True))


@pytest.mark.parametrize(
    ("model", "limit", "fit", "advice"),
    [
        (SCRIPT, "80", 3, "take --stage 3: the shortest step of those that fit. "),
        (SCRIPT, "15", 1, "take --stage 3: no other fits. "),
        (["--model", "124m", "--devices", "4", "--target", "h100"], "0.1", 0, "none fits: "),
    ],
)
def test_the_command_says_which_stages_fit_and_which_to_take(capsys, model, limit, fit, advice):
    """The model is compared by estimated seconds, not by elements sent: stage 2 sends less."""
    assert command.main([*model, "--memory-limit", limit]) == 0
    lines = capsys.readouterr().out.splitlines()
    (said,) = (x for x in lines if x.startswith("in ") and " fit" in x)
    assert said.count("does not fit") == 4 - fit and said.count(" fits") == fit
    took = lines[-1]
    assert took.startswith(advice), took
    if limit == "80":  # 4 x 1024 tokens at 4 passes, and 7.456e9 parameters over the 400 GB/s
        products = 4096 * gpt.flops_per_token(gpt.preset("7.5b", seq=1024), 1024) / 989.4e12
        exposed = 7.456e9 * 2 * 63 / 64 / 400e9
        least, *others = (float(x) for x in re.findall(r"([0-9.]+) s\b", took))
        assert least == pytest.approx(products * 4 / 3, rel=0.02)
        assert others == pytest.approx([products * 4 / 3 + exposed] * 2, rel=0.02)


def test_the_command_advises_nothing_for_a_device_without_figures(capsys):
    assert command.main(["--model", "124m", "--devices", "4", "--target", "cpu"]) == 0
    assert "take --stage" not in capsys.readouterr().out


def proven_steps():
    """(estimated, compiled) seconds and bytes by stage, of each program in docs/proof.json."""
    proof = json.loads((ROOT / "docs" / "proof.json").read_text())
    found = {}
    for row in (r for rows in (proof["rows"], proof["more"]) for r in rows):
        config = gpt.preset(row["model"], seq=1024)
        products = row["rows"] * 1024 * gpt.flops_per_token(config, 1024) / 989.4e12
        psi, shards = gpt.num_params(config), row["devices"] if row["stage"] else 1
        names = ("model", "devices", "rows", "reduce", "micro_batches", "remat")
        plan = Plan(
            *(row["stage"], row["micro_batches"], row["remat"], {"data": row["devices"]}, psi),
            layers=(),
            window=0,
            predicted=Predicted(4 * psi // shards, 8 * psi // shards, 0, {}),
            precision=zero_jax.Precision("bf16", reduce=row["reduce"]),
        )
        estimate = least_seconds(plan, products, targets.target("h100"))
        known = estimate, row["step_seconds"], row["compiled"]["total_bytes"]
        found.setdefault(tuple(row[name] for name in names), {})[row["stage"]] = known
    return found


def test_the_stage_with_the_least_estimate_has_the_shortest_compiled_step():
    """Compares the programs in docs/proof.json that fit in an H100; up to 2 % count as equal."""
    compared = 0
    for name, stages in proven_steps().items():
        fitting = {s: known for s, known in stages.items() if known[2] < 0.92 * 84.9e9 and s > 1}
        if len(fitting) > 1:
            chosen = min(fitting, key=lambda s: fitting[s][0])
            shortest = min(seconds for _, seconds, _ in fitting.values())
            assert fitting[chosen][1] <= 1.02 * shortest, (name, fitting)
            compared += 1
    assert compared >= 10


def test_no_compiled_step_is_shorter_than_its_estimate():
    pairs = [known[:2] for stages in proven_steps().values() for known in stages.values()]
    ratios = [compiled / estimate for estimate, compiled in pairs]
    assert len(ratios) > 50 and 1.1 < min(ratios) and max(ratios) < 3.5


def test_bytes_sent_are_elements_of_parameters_and_of_gradients_in_their_dtypes():
    zero = zero_jax.Zero(zero_jax.abstract_mesh(8), 3, precision=zero_jax.Precision("bf16"))

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    params = zero.abstract(lambda: {"w": jnp.ones((64, 64))})
    rows = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    sent = [zero.at_stage(stage).plan(loss, TX, params, rows).sent_bytes for stage in range(4)]
    psi = 64 * 64  # parameters in bf16, gradients in fp32: all-reduced, or gathered and scattered
    assert sent == [2 * 4 * psi, (2 + 4) * psi, (2 + 4) * psi, (2 * 2 + 4) * psi]
