"""What an engine is fed, by the command line: text or token ids, and the tokens after a prompt."""

from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.cli.output import say
from tracediff.errors import EngineError

if TYPE_CHECKING:
    from tracediff.engine.llama_cpp import Prompt
    from tracediff.model.graph import Graph


def prompt_of(text: str | None, tokens: str | None, graph: "Graph") -> "Prompt":
    """The one that is given; raises EngineError for both, none or an empty one."""
    from tracediff.engine.llama_cpp import Prompt

    if (text is None) == (tokens is None):
        raise EngineError("give the prompt either as text with -p or as ids with --tokens 1,2,3.")
    if tokens is None:
        if not text:
            raise EngineError("the prompt is empty. Give some text with -p, or ids with --tokens 1,2,3.")
        return Prompt(text=text)
    return Prompt(tokens=ids_of(tokens, graph))


def ids_of(text: str, graph: "Graph") -> tuple[int, ...]:
    """Token ids, checked before anything is loaded."""
    from tracediff.model.hparams import check_tokens, parse_tokens

    ids = parse_tokens(text)
    check_tokens(ids, graph.hparams.n_vocab)
    return ids


def passes_after(given: list[str], n_prompts: int, graph: "Graph") -> list[list[tuple[int, ...]]]:
    """For each prompt the passes after it, of a token each: those given, or those of a trace after its first step."""
    from tracediff.trace.runs import open_trace
    from tracediff.trace.ways import fed_to

    each: list[list[int]] = []
    for text in given:
        if text.endswith(".trace"):
            each += [fed.tokens[fed.sizes[0] :] for fed in fed_to(open_trace(Path(text))).values()]
        else:
            each.append([*ids_of(text, graph)])
    if each and len(each) != n_prompts:
        raise EngineError(f"--decode-tokens for {len(each)} prompts, where there are {n_prompts}. Give as many.")
    return [[(token,) for token in tokens] for tokens in each]


def show_tokens(given: "Prompt", tokens: tuple[int, ...]) -> None:
    """Those that a text came to."""
    if given.text is not None:
        say(f"{len(tokens)} tokens: {','.join(map(str, tokens))}")
