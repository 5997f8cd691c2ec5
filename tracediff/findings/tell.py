"""All that is said of a result, computed once."""

from dataclasses import replace

from tracediff.findings.arithmetic import arithmetic
from tracediff.findings.gaps import gaps
from tracediff.findings.logits import logits
from tracediff.findings.mistakes import findings
from tracediff.findings.next import next_step
from tracediff.findings.normal import normal
from tracediff.findings.summary import details, summary
from tracediff.result import Result


def told(result: Result) -> Result:
    """The result with its findings, its summary and what else there is to say."""
    said = (*normal(result), *logits(result), *arithmetic(result), *gaps(result))
    result = replace(result, findings=findings(result.ops, result.weights), said=said)
    return replace(result, summary=summary(result), details=tuple(details(result)), next=next_step(result))
