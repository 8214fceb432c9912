"""Instructions and computations as HLO text, of which the tests of the audit build programs."""

M, K, N = 4, 8, 16
FLOPS = 2 * M * K * N  # of `product`
ARGUMENTS = {"shard": "bf16[6]{0}", "a": f"f32[{M},{K}]{{1,0}}", "b": f"f32[{K},{N}]{{1,0}}"}
GATHERED = 48  # elements of what `gather` makes of %shard


def parameters(shapes):
    return [f"%{name} = {shape} parameter({at})" for at, (name, shape) in enumerate(shapes.items())]


def computation(name, shapes, *lines):
    """A computation of parameters of these shapes; its last line is its result."""
    *body, last = [*parameters(shapes), *lines]
    text = "".join(f"  {line}\n" for line in [*body, f"ROOT {last}"])
    return f"%{name} (p: f32[]) -> f32[] {{\n{text}}}\n"


def program(shapes, *lines, computations=(), header="num_partitions=8"):
    """A module whose entry computation has parameters of these shapes; the last line returns."""
    parts = [f"HloModule m, is_scheduled=true, {header}\n", "%add (a: f32[], b: f32[]) -> f32[] {"]
    parts += ["  %a = f32[] parameter(0)", "  %b = f32[] parameter(1)"]
    parts += ["  ROOT %sum = f32[] add(%a, %b)\n}\n", *computations]
    *body, last = [*parameters(shapes), *lines]
    entry = "\n  ".join(["ENTRY %main (p: f32[]) -> f32[] {", *body, f"ROOT {last}"])
    return "\n".join([*parts, entry, "}\n"])


def loop(name, state, init, body, results=(), trips=8, condition=()):
    """The lines of a while loop, each result of which is then %name_key, and its computations.

    The body and the condition read the `state` (shapes by key, which start from `init`) as %key,
    and the body makes of each the operand in `results`; a counter %i comes first by itself.
    """
    shape = f"(s32[], {', '.join(state.values())})"

    def parts(whole, prefix):
        return [
            f"%{prefix}{key} = {each} get-tuple-element(%{whole}), index={at}"
            for at, (key, each) in enumerate(state.items(), 1)
        ]

    given = [f"%s = {shape} parameter(0)", "%i = s32[] get-tuple-element(%s), index=0"]
    given += parts("s", "")
    result = f"%t = {shape} tuple(%i, {', '.join(f'%{r}' for r in results or state)})"
    known = "{}" if trips is None else f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    lines = [
        f"%zero_{name} = s32[] constant(0)",
        f"%init_{name} = {shape} tuple(%zero_{name}, {', '.join(f'%{i}' for i in init)})",
        f"%{name} = {shape} while(%init_{name}), condition=%condition_{name}, body=%body_{name}, "
        f"backend_config={known}",
        *parts(name, f"{name}_"),
    ]
    computations = [
        computation(f"body_{name}", {}, *given, *body, result),
        computation(f"condition_{name}", {}, *given, *condition, "%go = pred[] and(%i, %i)"),
    ]
    return lines, computations


def product(name):
    """A matrix product of %a and %b."""
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"%{name} = f32[{M},{N}]{{1,0}} dot(%a, %b), {dims}"


def gather(name, elements=GATHERED, n=8, of="shard", more=""):
    """The start and the done of an all-gather over n devices; its result is %name-done."""
    part, full = f"bf16[{elements // n}]{{0}}", f"bf16[{elements}]{{0}}"
    how = f"replica_groups={{}}, dimensions={{0}}{more}"
    return (f"%{name}-start = (({part}), {full}) all-gather-start(%{of}), {how}",
            f"%{name}-done = {full} all-gather-done(%{name}-start)")  # fmt: skip
