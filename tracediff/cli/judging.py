"""The commands that judge traces: `compare`, `self`, `mismatch`, `check`."""

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tracediff.cli.formats import Formats, report, report_all
from tracediff.cli.options import (
    Allow,
    ArithmeticOption,
    DType,
    EffortOptions,
    Explain,
    Fault,
    Json,
    MadeWith,
    Require,
    Resolve,
    ShowPlan,
    ToJudge,
    Tolerance,
    grouped,
    policy_of,
    refuse,
)
from tracediff.cli.output import MATCH, check_json, print_listing, progress_bars, say, show
from tracediff.errors import TracediffError
from tracediff.files import temporary_folder
from tracediff.printable import printable

if TYPE_CHECKING:
    from tracediff.judge import Policy
    from tracediff.pipeline import Effort
    from tracediff.result import Result
    from tracediff.trace.runs import Paths


_SPENT = ("workers", "ray", "time")
_VERDICT = ("tolerance", "require", "allow", "resolve", "explain", *_SPENT, *(field.name for field in fields(Formats)))
_NO_VERDICT = "is of the verdict, and --plan prints what would be judged and how. Leave one of the two out."


@grouped
def compare(
    context: typer.Context,
    reference: Annotated[Path, typer.Argument(help="The trace that is right.")],
    candidate: Annotated[Path, typer.Argument(help="The trace to judge.")],
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[THIRD]",
            help="A third engine's: which of the three is the outlier? Of engines of several ranks those of all.",
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The GGUF file: replay, floors and causes.")] = None,
    arithmetic: ArithmeticOption = None,
    tolerance: Tolerance = None,
    require: Require = None,
    allow: Allow = None,
    resolve: Resolve = None,
    explain: Explain = None,
    plan: ShowPlan = False,
    spent: EffortOptions = EffortOptions(),
    formats: Formats = Formats(),
) -> int:
    """Compare two traces, or three: op by op with the model, by drift alone without."""
    from tracediff.pipeline import compare_traces
    from tracediff.trace.runs import runs_of

    formats.check(reference, candidate, *(others or ()), model, explain=explain)
    effort, policy = spent.effort(), policy_of(tolerance, allow, require, resolve)
    runs = runs_of([reference, candidate, *(others or ())])
    if not 2 <= len(runs) <= 3:
        raise TracediffError(f"{len(runs)} runs to compare: give two, or three. The traces of a run's ranks are one.")
    if plan:
        refuse(context, _VERDICT, _NO_VERDICT)
        return _show_plan([*zip(runs, (None, arithmetic, None), strict=False)], model, spent.device)
    if runs[2:]:
        refuse(context, ["explain"], "shows an op of one candidate. Compare two traces.")
        return _compare_three((runs[0], runs[1], runs[2]), model, policy, effort, arithmetic, formats)
    if arithmetic and not model:
        raise TracediffError("--arithmetic is that of the replay, which needs the GGUF file: give --model as well.")
    with progress_bars() as progress:
        result = compare_traces(
            *runs, model=model, policy=policy, arithmetic=arithmetic, effort=effort, progress=progress
        )
    return _explained(result, explain, report(result, formats))


def _show_plan(traces: list[tuple[list[Path], str | None]], model: Path | None, device: str) -> int:
    from tracediff.pipeline import plan_traces

    if model is None or traces[2:]:
        raise TracediffError("--plan is that of the replay of one or two traces, which needs the GGUF file (--model).")
    with progress_bars() as progress:
        lines = [*plan_traces(traces, model, device, lambda fraction: progress("plan", fraction))]
    sys.stdout.writelines(f"{printable(line)}\n" for line in lines)
    return MATCH


def _compare_three(
    traces: "tuple[Paths, Paths, Paths]",
    model: Path | None,
    policy: "Policy",
    effort: "Effort",
    arithmetic: str | None,
    formats: Formats,
) -> int:
    from tracediff.report.threeway import render, render_json
    from tracediff.threeway import compare_three

    if arithmetic:
        raise TracediffError("--arithmetic pins that of one candidate: compare two traces, or let it be fitted.")
    if formats != Formats(formats.json):
        raise TracediffError("of three traces there is a report and --json: compare two for the other formats.")
    with progress_bars() as progress:
        result = compare_three(traces, model=model, policy=policy, effort=effort, progress=progress)
    return show(result, render, render_json, formats.json)


@grouped
def self_(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace of the engine; with --engine a GGUF file.")],
    b: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[B]", help="Another, of the same tokens fed in another way. Of several ranks those of all."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The GGUF file: which of the two is wrong, and why.")] = None,
    engine: Annotated[
        Literal["torch", "llama.cpp", "transformers"] | None,
        typer.Option(help="Run this engine in each way that must make no difference."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="What --engine is fed: 1,2,3.")] = "1,2,3,4,5,6,7,8,9",
    dtype: DType = "f32",
    fault: Fault = None,
    tolerance: Tolerance = None,
    spent: EffortOptions = EffortOptions(),
    formats: Formats = Formats(),
) -> int:
    """Hold an engine against itself: decode against prefill, chunks against the whole, in a batch against alone."""
    from tracediff.itself.two_ways import compare_with_itself
    from tracediff.trace.runs import runs_of

    policy, effort = policy_of(tolerance), spent.effort()
    if engine:
        from tracediff.model.hparams import parse_tokens

        if b:
            raise TracediffError(f"self {a} {b[0]}: --engine makes the traces itself. Give the GGUF file alone.")
        refuse(context, ["model"], "is for two traces; with --engine the GGUF file comes first, alone.")
        formats.check(a)
        options: dict[str, Any] = {"dtype": dtype, "device": spent.device, "faults": tuple(fault or ())}
        return _each_way(a, engine, parse_tokens(tokens), options, policy, effort, formats)
    refuse(context, ["tokens", "dtype", "fault"], "says how --engine is run. Give that as well, and a GGUF file.")
    runs = runs_of([a, *(b or ())])
    if len(runs) != 2:
        raise TracediffError(
            f"self {a}: {'one run' if len(runs) == 1 else f'{len(runs)} runs'}, where two are held together. Give a "
            "trace of each, or of several ranks those of all; or a GGUF file with --engine."
        )
    formats.check(a, *(b or ()), model)
    with progress_bars() as progress:
        result = compare_with_itself(*runs, model=model, policy=policy, effort=effort, progress=progress)
    return report(result, formats)


def _each_way(
    path: Path,
    engine: str,
    tokens: tuple[int, ...],
    options: dict[str, Any],
    policy: "Policy",
    effort: "Effort",
    formats: Formats,
) -> int:
    """A table of all ways; then the report of the first that is no match."""
    from tracediff.engine.torch_run import TorchOptions
    from tracediff.findings.next import next_step
    from tracediff.itself.every_way import engine_of, hold, table, ways
    from tracediff.model.hparams import check_tokens
    from tracediff.model.model import Model

    model = Model(path)
    check_tokens(tokens, model.graph.hparams.n_vocab)
    given = ways(tokens)
    with progress_bars() as progress, temporary_folder() as folder:
        run, several = engine_of(engine, model, TorchOptions(**options))
        if not several:
            say(f"{engine} is not run in batches: of this architecture not all values have a row for each token")
            given = [way for way in given if not way.several]
        held = hold(run, given, tokens, folder, model=model, policy=policy, effort=effort, progress=progress)
        again = shlex.join(("tracediff", *sys.argv[1:]))  # the traces are deleted
        results = {name: replace(one, next=next_step(one, again)) for name, one in held}
    return report_all(results, table(results), formats)


def mismatch(
    a: Annotated[Path, typer.Argument(help="A trace of the trainer.")],
    b: Annotated[Path, typer.Argument(help="One of the rollout, of the same tokens.")],
    model: Annotated[Path | None, typer.Option(help="The GGUF file: which op makes how much of the gap.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Mean |gap| in nats that is no mismatch, whatever roundings explain."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Leave out so many tokens, which nobody sampled.")] = 1,
    json: Json = None,
) -> int:
    """Hold a trainer against its rollout: the gap of the log-probabilities of the same tokens, and what makes it.

    Traces need hold no more than `output`, or log-probabilities (`tracediff import logprobs`). Exit code 1: the mean
    |gap| is more than the roundings of both sides explain, one side's are processed, or it holds other weights. 2: the
    tokens or positions do not line up, or it cannot be told without --model.
    """
    from tracediff.mismatch.mismatch import mismatch_traces
    from tracediff.report.mismatch import render, render_json

    check_json(json, a, b, model)
    with progress_bars() as progress:
        result = mismatch_traces(a, b, model=model, tolerance=tolerance, prompt=prompt, progress=progress)
    return show(result, render, render_json, json)


def _explained(result: "Result", op: str | None, code: int) -> int:
    """After the report the numbers of one op, where they are asked for."""
    if op:
        from tracediff.cli.evidence import evidence

        told = evidence(result, op)
        sys.stdout.write("\n")
        if isinstance(told, str):
            sys.stdout.write(f"{told}\n")
        else:
            print_listing(told)
    return code


@grouped
def check(
    context: typer.Context,
    trace: ToJudge,
    model: MadeWith,
    arithmetic: ArithmeticOption = None,
    require: Require = None,
    resolve: Resolve = None,
    explain: Explain = None,
    plan: ShowPlan = False,
    spent: EffortOptions = EffortOptions(),
    formats: Formats = Formats(),
) -> int:
    """Judge one trace by replay alone: no reference needed."""
    from tracediff.pipeline import check_trace

    formats.check(*trace, model, explain=explain)
    if plan:
        refuse(context, _VERDICT, _NO_VERDICT)
        return _show_plan([(trace, arithmetic)], model, spent.device)
    with progress_bars() as progress:
        policy = policy_of(require=require, resolve=resolve)
        result = check_trace(
            trace, model, policy=policy, arithmetic=arithmetic, effort=spent.effort(), progress=progress
        )
    return _explained(result, explain, report(result, formats))
