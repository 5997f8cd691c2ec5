"""Wrong lines in engines that others wrote: transformers' models of ten architectures, each with one edit, recorded.

    python benchmarks/edited_engines.py [--only mamba] [--kept FILE] [--out docs/edited-engines.md]

An edit replaces a piece of a model's source as it is installed (transformers of constraints.txt), and the edited model
runs a prompt and two decode steps of a tiny model (tiny_models.py). Its trace is checked by itself, once with all that
was recorded and once with its hidden states alone. Nobody chose the edits from a list of what is known; what the report
must say of each is written here, and another word is a false one. What --kept has is not made again.

Fourteen of the edits were not named, or by other words, when they were first made. What they taught is in no case about
the one edit, but a page that has been learnt from is no estimate for the next.
"""

import argparse
import importlib
import json
import multiprocessing
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tiny_models
from architectures import N_DECODE, TOKENS, table
from tiny_metadata import TRANSFORMERS

from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import trace_transformers
from tracediff.model.model import Model
from tracediff.names import Capture
from tracediff.pipeline import Effort, check_trace

SECONDS = 300.0  # of a search for causes
CAPTURES = {"all": "every op", "layers": "hidden states"}
MODULES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
# Of mixtures the decorator picks another implementation than the one that is edited.
DROPPED = "@use_experts_implementation\n"


@dataclass(frozen=True, slots=True)
class Edit:
    """A wrong line: `says` are patterns, each of a finding; a finding that none of them finds is another word."""

    arch: str
    wrong: str
    old: str
    new: str
    says: tuple[str, ...]


EDITS = (
    Edit("gemma2", "scores are not divided by the cap before tanh", "attn_weights = attn_weights / softcap", "pass",
         (r"kq_scaled_1: the factor 0\.02 is left out",)),
    Edit("gemma2", "scores are not capped", "if softcap is not None:", "if False:", ("kq_tanh: tanh is not applied",)),
    Edit("gemma2", "logits are not capped", "if self.config.final_logit_softcapping is not None", "if False",
         ("tanh is not applied",)),
    Edit("gemma2", "1/sqrt(n_embd) scales the scores", "config.query_pre_attn_scalar**-0.5",
         "config.hidden_size**-0.5", (r"the attention scale is 1/sqrt\(n_embd\)",)),
    Edit("gemma2", "norms do not add 1 to their weights", "(1.0 + self.weight.float())", "self.weight.float()",
         ("weight is used as w - 1",)),
    Edit("gemma2", "the norm after attention comes after the residual, too",
         "self.post_attention_layernorm(hidden_states)\n        hidden_states = residual + hidden_states",
         "self.post_attention_layernorm(residual + hidden_states)",
         (r"reads attn_output \+ ", "is not added")),
    Edit("gemma2", "no norm after the feed-forward",
         "hidden_states = self.post_feedforward_layernorm(hidden_states)", "pass",
         ("post_ffw_norm: the input passes through unchanged",)),
    Edit("gemma2", "the norm before the feed-forward has the weight of the one after attention",
         "self.pre_feedforward_layernorm(hidden_states)", "self.post_attention_layernorm(hidden_states)",
         (r"ffn_norm: uses post_attention_norm\.weight",)),
    Edit("gemma2", "the embedding is not scaled", "* self.embed_scale.to(self.weight.dtype)", "",
         (r"token_embd_scaled: the factor 9\.79796 is left out",)),
    Edit("gemma2", "GELU without tanh", "ACT2FN[config.hidden_activation]", "ACT2FN['gelu']",
         (r"GELU is used for GELU \(tanh\)",)),
    Edit("gemma2", "KV heads are tiled, not repeated",
         "return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)",
         "return hidden_states[:, :, 0].repeat(1, n_rep, 1, 1)", (r"query head h reads key/value head h % 2",)),
    Edit("qwen3moe", "weights of experts are not divided by their sum", "if self.norm_topk_prob:", "if False:",
         ("the weights are not divided by their sum",)),
    Edit("qwen3moe", "a softmax of the chosen weights",
         "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)",
         "router_top_value = router_top_value.softmax(-1)", ("a softmax is taken of the weights",)),
    Edit("qwen3moe", "sigmoid for softmax",
         "torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)", "torch.sigmoid(router_logits)",
         ("a sigmoid is taken where a softmax belongs",)),
    Edit("qwen3moe", "one expert fewer", "self.top_k = config.num_experts_per_tok",
         "self.top_k = config.num_experts_per_tok - 1", ("only 2 of the 3 chosen experts count",)),
    Edit("qwen3moe", "gate and up exchanged", "gate, up = nn", "up, gate = nn",
         ("each multiplies with the other's weight|activation is applied to up",)),
    Edit("qwen3moe", "the down projection of the next expert", "self.down_proj[expert_idx])",
         "self.down_proj[(expert_idx + 1) % self.num_experts])", ("the matrix of the one after it",)),
    Edit("qwen3moe", "weights of the next slot", "top_k_weights[token_idx, top_k_pos, None]",
         "top_k_weights[token_idx, (top_k_pos + 1) % top_k_weights.shape[1], None]",
         ("the weight of each slot goes to the one before it",)),
    Edit("qwen3moe", "the weight of the first slot for all", "top_k_weights[token_idx, top_k_pos, None]",
         "top_k_weights[token_idx, 0, None]", ("all slots have the weight of the first",)),
    Edit("qwen3moe", "the residual takes the normed value",
         "residual = hidden_states\n        hidden_states = self.post_attention_layernorm(hidden_states)",
         "hidden_states = residual = self.post_attention_layernorm(hidden_states)",
         ("ffn_norm is added where attn_residual belongs",)),
    Edit("qwen2moe", "the gate of the shared expert without sigmoid",
         "F.sigmoid(self.shared_expert_gate", "(self.shared_expert_gate",
         ("ffn_shexp_gate: sigmoid is not applied",)),
    Edit("qwen2moe", "the shared expert without its gate",
         "F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) *", "1.0 *",
         ("ffn_down_shexp is not multiplied by ffn_shexp_gate",)),
    Edit("qwen2moe", "no shared expert", "expert_output = expert_output + shared_expert_output", "pass",
         ("ffn_shexp_out is not added",)),
    Edit("minimax-m2", "the bias of the choice is in the weights", "top_k_weights = routing_weights.gather",
         "top_k_weights = scores_for_choice.gather", ("the weights have the bias of the choice in them",)),
    Edit("minimax-m2", "no bias of the choice", "routing_weights + e_score_correction_bias", "routing_weights",
         (r"exp_probs_b\.bias is not added",)),
    Edit("mamba", "B and C exchanged", "time_step, B, C = torch.split", "time_step, C, B = torch.split",
         ("channels 8 to 47 and 48 to 87 of ssm_x are exchanged",)),
    Edit("mamba", "x and gate exchanged", "hidden_states_B_C, gate = projected_states.chunk",
         "gate, hidden_states_B_C = projected_states.chunk", ("of ssm_in are (read|exchanged)",)),
    Edit("mamba", "no D", "if D is not None:", "if False:", ("ssm_d is not added",)),
    Edit("mamba", "softplus before the bias of dt", "dt = dt + delta_bias.to(dt.dtype)[..., None]",
         "dt = F.softplus(dt) + delta_bias.to(dt.dtype)[..., None] if seq_len > 1 else dt", ()),
    Edit("lfm2", "B and C exchanged", "B, C, x = BCx.chunk", "C, B, x = BCx.chunk",
         (r"channels 0 to 95 and 96 to 191 of shortconv\.in_proj are exchanged",)),
    Edit("lfm2", "C through silu", "y = C * hidden_states", "y = torch.nn.functional.silu(C) * hidden_states", ()),
    Edit("gpt2", "no position embedding", "hidden_states = inputs_embeds + position_embeds",
         "hidden_states = inputs_embeds", ("position_embd is not added",)),
    Edit("gpt2", "positions begin at 2", "self.wpe(position_ids)", "self.wpe(position_ids + 2)",
         (r"position t has row t \+ 2",)),
    Edit("gpt2", "another eps", "eps=config.layer_norm_epsilon", "eps=1e-3", (r"eps is 0\.001 instead of 1e-05",)),
    Edit("bloom", "a digit more in GELU", "(1 + 0.044715 * x * x)", "(1 + 0.44715 * x * x)",
         (r"0\.44715 \* ffn_up, where 0\.044715",)),
    Edit("bloom", "ALiBi's slopes of another power", "math.log2(closest_power_of_2) - 3",
         "math.log2(closest_power_of_2) - 2", ()),
    Edit("stablelm", "frequencies over the whole head",
         "(torch.arange(0, dim, 2, dtype=torch.float) / dim)",
         "(torch.arange(0, dim, 2, dtype=torch.float) / head_dim)",
         ("frequencies use head_dim where the rotary dimension belongs",)),
    Edit("nemotron", "norms do not add 1 to their weights", "self.weight + 1.0", "self.weight",
         ("weight is used as w - 1",)),
)  # fmt: skip


def edited(n: int, capture: str, folder: Path) -> "Found":
    """The number of an edit, the capture, what came of it, and what the report says. In a process of its own."""
    edit = EDITS[n]
    others, without = TRANSFORMERS[edit.arch]
    model = tiny_models.write(edit.arch, folder / f"{n}-{capture}.gguf", others=others, without=without)
    name = MODULES.get(edit.arch, edit.arch)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = Path(str(module.__file__)).read_text().replace(DROPPED, "")
    if edit.old not in source:
        raise LookupError(f"{module.__file__} has no {edit.old!r}: this is for the transformers of constraints.txt.")
    changed = folder / f"{n}-{capture}.py"
    changed.write_text(source.replace(edit.old, edit.new))
    exec(compile(changed.read_text(), str(changed), "exec"), module.__dict__)
    out = folder / f"{n}-{capture}.trace"
    options = TorchOptions(capture=cast(Capture, capture))
    trace_transformers(Model(model), out, options, list(TOKENS), N_DECODE)
    result = check_trace(out, model, effort=Effort(seconds=SECONDS))
    said = [finding.text for finding in result.findings]
    explained = [finding.text for finding in result.findings if finding.mistake]
    false = [text for text in explained if not any(re.search(pattern, text) for pattern in edit.says)]
    named = all(any(re.search(pattern, text) for text in explained) for pattern in edit.says)
    if false:
        return n, capture, "other words", said
    if not said:
        return n, capture, "missed", said
    return n, capture, "named" if named and len(explained) == len(said) else "located", said


Found = tuple[int, str, str, list[str]]


def results(only: str, kept: Path, folder: Path) -> Iterator[Found]:
    """Of all edits of the architectures `only`, every op recorded and hidden states alone."""
    context = multiprocessing.get_context("spawn")
    lines = map(json.loads, kept.read_text().splitlines()) if kept.exists() else ()
    before: dict[tuple[int, str], Found] = {(n, capture): (n, capture, *rest) for n, capture, *rest in lines}
    for n, edit in enumerate(EDITS):
        for capture in CAPTURES if only in edit.arch else ():
            if (n, capture) in before:
                yield before[n, capture]
                continue
            with ProcessPoolExecutor(1, context) as process:
                found = process.submit(edited, n, capture, folder).result()
            with kept.open("a") as file:
                file.write(f"{json.dumps(found)}\n")
            yield found


def page(found: list[Found]) -> str:
    """The document."""
    outcomes = ("named", "located", "other words", "missed")
    counts = Counter((capture, outcome) for _, capture, outcome, _ in found)
    by_edit = {(n, capture): (outcome, said) for n, capture, outcome, said in found}
    rows = []
    for n in dict.fromkeys(n for n, *_ in found):
        said = by_edit[n, "all"][1]
        texts = "; ".join(dict.fromkeys(re.sub(r" \(seen in [^)]*\)|\(blk.*", "", text) for text in said))
        rows.append((EDITS[n].arch, EDITS[n].wrong, *(by_edit[n, capture][0] for capture in CAPTURES), texts))
    about = (__doc__ or "").split("\n\n")
    totals = [(words, *(counts[capture, outcome] for outcome in outcomes)) for capture, words in CAPTURES.items()]
    return "\n\n".join((
        "# Wrong lines in engines that others wrote",
        about[0].partition(": ")[2].capitalize() + " Written by",
        "    python benchmarks/edited_engines.py --out docs/edited-engines.md",
        about[2].strip().replace(" What --kept has is not made again.", ""),
        about[3].strip(),
        "*Named*: every finding says what was done. *Located*: some say only where, and what can be seen there. *Other "
        "words*: a finding names another cause.",
        table(("recorded", *outcomes), totals),
        table(("architecture", "edit", *CAPTURES.values(), "what the report says of every op"), rows),
    )) + "\n"  # fmt: skip


def main() -> int:
    """1 where an edit is missed, or another cause is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures with this in their name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kept", type=Path, help="JSON lines of results, which are added to")
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for n, capture, outcome, said in results(arguments.only, arguments.kept or Path(name, "kept"), Path(name)):
            print(
                f"{EDITS[n].arch}, {EDITS[n].wrong}, {CAPTURES[capture]}: {outcome}: {'; '.join(said)[:300]}",
                flush=True,
            )
            found.append((n, capture, outcome, said))
    if arguments.out:
        arguments.out.write_text(page(found))
    return 0 if not any(outcome in ("other words", "missed") for _, _, outcome, _ in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
