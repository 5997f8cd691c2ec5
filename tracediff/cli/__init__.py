"""The command line: a module for each group of commands; `app` is the only place that catches."""

from tracediff.cli.app import app, main
from tracediff.cli.ci import ci
from tracediff.cli.interchange import export, import_
from tracediff.cli.judging import check, compare, mismatch, self_
from tracediff.cli.looking import faults, imatrix, inspect, validate, weights
from tracediff.cli.reproducing import bundle, reproduce
from tracediff.cli.running import demo, run
from tracediff.cli.tracing import trace

__all__ = ["app", "main"]

for _command in (
    demo,
    run,
    trace,
    compare,
    self_,
    mismatch,
    check,
    ci,
    reproduce,
    bundle,
    validate,
    weights,
    imatrix,
    inspect,
    faults,
    import_,
    export,
):
    app.command(_command.__name__.rstrip("_"))(_command)
