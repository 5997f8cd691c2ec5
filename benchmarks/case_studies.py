"""Four investigations that ended in a wrong conclusion, recreated on generated models, one command each.

    python benchmarks/case_studies.py [--out docs/case-studies.md]

Writes what happened, the command and what it really printed. tests/test_case_studies.py runs the same recipes.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracediff.model.synthetic import Shape, write_model

TOKENS = "256,84,104,101,32,113,117,105,99,107,32,98,114,111,119,110,260"
NO_BOS = TOKENS.removeprefix("256,")
REFERENCE = f"trace model.gguf --engine llama.cpp --tokens {TOKENS} -o reference.trace"
HEAD, TAIL = 9, 6  # lines kept of a section that is too long


@dataclass(frozen=True, slots=True)
class Act:
    """A command, what must have run before it, and what its output settles (Markdown).

    Of its output the sections that begin with one of `keep` are shown, those over `limit` lines cut in the middle.
    """

    before: str
    setup: tuple[str, ...]
    command: str
    settles: str
    keep: tuple[str, ...] = ()
    limit: int = 24
    code: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """An investigation: what its authors saw and believed, a model that looks like theirs, and the commands."""

    title: str
    story: str
    model: str
    shape: Shape
    file_type: str
    acts: tuple[Act, ...]


def tracediff(command: str, folder: Path) -> tuple[int, str]:
    """Run the command line in a folder: its exit code, and what it printed, standard error first."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    arguments = [sys.executable, "-m", "tracediff", *shlex.split(command)]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr + done.stdout


def shorten(output: str, keep: tuple[str, ...], limit: int) -> Iterator[str]:
    """The verdict and the sections to keep, line by line; whatever is cut leaves a mark."""
    verdict, *sections = output.rstrip().split("\n\n")
    cut = [section.splitlines()[0] for section in sections if not section.startswith(keep)]
    yield from verdict.splitlines()
    for section in sections:
        if not section.startswith(keep):
            continue
        lines = section.splitlines()
        yield ""
        if len(lines) > limit:
            yield from (*lines[:HEAD], f"[... {len(lines) - HEAD - TAIL} lines cut ...]", *lines[-TAIL:])
        else:
            yield from lines
    if cut:
        yield from ("", f"[cut: {'; '.join(cut)}]")


def write(case: Case, folder: Path) -> Iterator[str]:
    """The case as Markdown, paragraph by paragraph."""
    write_model(folder / "model.gguf", case.shape, case.file_type)
    yield f"## {case.title}"
    yield case.story
    yield f"**Recreated**: {case.model}"
    for act in case.acts:
        yield act.before
        for command in act.setup:
            _expect(0, command, folder)
        output = _expect(act.code, act.command, folder)
        if act.setup:
            yield "\n".join(("```sh", *(f"tracediff {command}" for command in act.setup), "```"))
        shown = (line.rstrip() for line in shorten(output, act.keep, act.limit))
        yield "\n".join(("```", f"$ tracediff {act.command}", *shown, "```"))
        yield f"Exit code {act.code}. {act.settles}"


def _expect(code: int, command: str, folder: Path) -> str:
    """What the command printed; ends the script where it ended otherwise than the page says, or by a crash."""
    ended, output = tracediff(command, folder)
    if ended != code or "Traceback" in output:
        raise SystemExit(f"tracediff {command} ended with {ended}, not {code}:\n{output}")
    return output


INTRODUCTION = """# Case studies

Four investigations from public histories of inference engines, each of which ended, at first, in a wrong conclusion.
The engines and models are not at hand, so each is recreated: a generated model whose numbers look
like those of the real one, and tracediff's torch engine in the place of theirs, with their mistakes planted by
`--fault`. An engine of your own takes that place by [writing a trace](trace-format.md); the command is then

    tracediff compare reference.trace yours.trace --model model.gguf

Below is what the commands really print, shortened where a bracket says so. Made by

    python benchmarks/case_studies.py --out docs/case-studies.md

and held by `tests/test_case_studies.py`."""

LOUD = Case(
    title="1. A hidden state that grows 500 times, and norm weights of 16.75",
    story="""Qwen2.5-0.5B in float16 answered garbage. The authors printed statistics: the hidden state grows from 0.046
to 23.4 over 24 layers and to 32.8 after the final norm, whose weights run from -0.0114 to 16.75 with mean 7.14. A norm
weight should be near 1, they thought. They blamed the residual first, then "corrupted" norm weights, and multiplied
these by 0.1401, so that their mean was 1. The output did not change at all.

What was wrong: every matmul read its weight transposed, the loader filled the biases of Q, K and V with zeros, and rope
paired neighbouring channels where this model pairs halves. Three mistakes at once, two of them in the same op: undoing
any one of them still leaves garbage.""",
    model="24 layers, 112 channels in 14 heads, final-norm weights from -0.0114 to 16.75, float16.",
    shape=Shape(n_layer=24, n_embd=112, n_head=14, n_head_kv=2, n_ff=608, n_vocab=1187, tied=True, loud=True),
    file_type="F16",
    acts=(
        Act(
            before="The reference's trace, and the engine's:",
            setup=(
                REFERENCE,
                f"trace model.gguf --tokens {TOKENS} --fault weight_transposed --fault bias_missing "
                "--fault rope_pairing -o engine.trace",
            ),
            command="compare reference.trace engine.trace --model model.gguf",
            settles="""It settles:

- All three mistakes are named, in every layer, although each hides behind the one before it: an op is judged by what
  it made of its own inputs. Both mistakes of `attn_q`, `attn_k` and `attn_v` are named, because undoing the two
  together leaves nothing.
- The growth is the model's own: the reference grows about as much.
- The residual is innocent: each layer's output is `inherited`, with a local error of 1e-15.
- The norm weights are those of the file, -0.0114 to 16.75, and weights far from 1 are normal.""",
            keep=("What is wrong", "Hidden states", "Norm weights", "What is normal", "Next token"),
        ),
        Act(
            before="The authors' repair, on top of it all: the final norm's weight times 0.1401.",
            setup=(
                f"trace model.gguf --tokens {TOKENS} --fault weight_transposed --fault bias_missing "
                "--fault rope_pairing --fault norm_scaled@output_norm -o repaired.trace",
            ),
            command="compare reference.trace repaired.trace --model model.gguf",
            settles="""It settles: the repair is one more mistake, and is named with its factor. The candidate's tokens
stand in the same order as before, each logit times 0.1401: scaling the final norm cannot change which token is the
likeliest.""",
            keep=("What is wrong", "Next token"),
            limit=16,
        ),
    ),
)

QUIET = Case(
    title='2. "Q4_K verified correct", hence an architectural feedback loop',
    story="""TinyLlama in Q4_K_M. The RMS of the hidden state grows from 0.015 to 1.12 over 22 layers, its mean drifts
from -0.000174 to -0.0366, and a wrong token stands at rank 6. Q4_K was "verified correct", so the authors concluded
that something in the architecture feeds back on itself.

What was wrong: a Q4_K_M file is not all Q4_K. Some of its tensors are Q6_K, and the engine read those in the order of
their bytes. And the two engines had not been given the same tokens; here it is the BOS that one of them adds.""",
    model="a llama model of 22 layers and 256 channels, quantised by llama.cpp to Q4_K_M.",
    shape=Shape("llama", n_layer=22, n_embd=256, n_head=8, n_head_kv=2, n_ff=768, n_vocab=1024, theta=1e4, eps=1e-5),
    file_type="Q4_K_M",
    acts=(
        Act(
            before="The reference with a BOS, the engine without:",
            setup=(REFERENCE, f"trace model.gguf --tokens {NO_BOS} --fault q6_k_order -o engine.trace"),
            command="compare reference.trace engine.trace --model model.gguf",
            settles="""It settles: nothing but this. Every number would have differed for a reason that is no mistake in
the engine's arithmetic, so the comparison ends here.""",
            code=2,
        ),
        Act(
            before="With the same tokens:",
            setup=(f"trace model.gguf --tokens {TOKENS} --fault q6_k_order -o engine.trace",),
            command="compare reference.trace engine.trace --model model.gguf",
            settles="""It settles:

- Q4_K is indeed read correctly: no op with a Q4_K weight is faulty. The faulty ones are exactly those whose weights are
  Q6_K.
- There is no feedback loop: RMS and growth are those of the reference, in every layer. They are also no evidence of
  health. After layer 0 the values have nothing in common (NMSE 2), and no statistic of them shows it.""",
            keep=("What is wrong", "Hidden states", "What is normal", "Next token"),
            limit=20,
        ),
    ),
)

SPIKES = Case(
    title="3. Logits of 14 at three odd token ids",
    story="""Most logits lay between -4 and 4, but those of the ids 8850, 44394 and 137131 were 14 to 15, and rose from
one decode step to the next. The authors blamed the size of the vocabulary (151,643 tokens in the tokenizer, 151,936 in
the model), then uninitialised memory, then the parameters of the GEMM call in general.

What was wrong: the output head alone was read with the wrong leading dimension.""",
    model="a vocabulary of 151,936, 2 layers of 64 channels, the embedding as the head, float16.",
    shape=Shape(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=128, n_vocab=151_936, tied=True, loud=True),
    file_type="F16",
    acts=(
        Act(
            before="Both engines in one command, with two decode steps:",
            setup=(),
            command=f"run model.gguf --tokens {TOKENS} --decode 2 --fault weight_transposed@output --save traces",
            settles="""It settles:

- Everything up to the final norm is right: `ok`, with local errors of 1e-15. Only `output` is faulty, in the prompt and
  in every decode step, with the cause.
- The vocabulary is not the matter: the head multiplies all 151,936 rows, and with the cause undone every logit of them
  is right.
- The spikes are not memory that nobody wrote: they are sums of the right numbers in the wrong order. Ids that the
  reference ranks far down come first, and some come back at every step, as the same rows are misread at every step.""",
            keep=("What is wrong", "Hidden states", "What is normal", "Next token"),
        ),
    ),
)

FROZEN = Case(
    title='4. Hidden states of 50,000, and the blame on "layer 35"',
    story="""Qwen2.5-Coder-3B in 4 bits, 36 layers. Before the final norm the hidden state runs to +-50,000, with a mean
of -4,301; from one decode step to the next it changes by 0.01, and one token is repeated for ever. The numbers
that looked absurd were printed after layer 35, and layer 35 was blamed.

What was really wrong we do not know. What looks like this is a weight misread in an early layer: the state becomes so
large there that nothing later can change it.""",
    model="""36 layers of 256 channels, quantised by llama.cpp to Q4_K_S. In layer 4 Q4_K's minimum is added where it
must be subtracted; in that layer alone, to show what the layers after it look like.""",
    shape=Shape(n_layer=36, n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_vocab=1024, tied=True, loud=True),
    file_type="Q4_K_S",
    acts=(
        Act(
            before="Both engines in one command, with two decode steps:",
            setup=(),
            command=f"run model.gguf --tokens {TOKENS} --decode 2 --fault q4_k_min_added@4 --save traces",
            settles="""It settles:

- The reference does not do this: its state ends at 100 where the engine's is at 50,000 from layer 4 on. Its mean
  is near zero, the engine's of the size of the RMS: that is an alarm, as growth alone is not.
- It begins in layer 4, with the matmuls that are named. Layers 0 to 3 are `ok`.
- Layer 35 is innocent, as is every layer after the fourth: `inherited`, with a local error of 1e-15. It adds what it
  should to a state that it was handed, and next to 50,000 that is nothing: hence the same token at every step, whatever
  was read last.""",
            keep=("What is wrong", "Hidden states", "What is normal", "Next token"),
        ),
    ),
)

CASES = (LOUD, QUIET, SPIKES, FROZEN)


def document() -> Iterator[str]:
    """The whole page, paragraph by paragraph."""
    yield INTRODUCTION
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            yield from write(case, Path(folder))


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    text = "\n\n".join(document()) + "\n"
    if out:
        out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
