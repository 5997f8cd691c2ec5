"""What servers and other tools give back, imported: log-probabilities, hidden states, routes, trees, logits.

The samples have the layout that their writers document; transformers' debugger writes its own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models
from safetensors.torch import save_file

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.mismatch.logprobs import Told
from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]
IDS = (256, 84, 104, 101, 32, 113)
SAID = [None, -2.5, -0.25, -3.0, -9999.0, -1.5]  # -9999: a server's minus infinity


def item(token: int, said: float | None) -> dict[str, Any]:
    return {"id": token, "token": "x", "bytes": [120], "logprob": said, "top_logprobs": [{"id": 7, "logprob": -0.1}]}


def ranked(token: int, said: float | None) -> dict[str, Any] | None:
    return said and {str(token): {"logprob": said, "rank": 3, "decoded_token": "x"}, "7": {"logprob": -0.1, "rank": 1}}


PAIRS = [*zip(IDS, SAID, strict=True)]
ANSWERS: dict[str, dict[str, Any]] = {
    "vLLM, served": {
        "choices": [
            {
                "prompt_token_ids": IDS[:4],
                "prompt_logprobs": [ranked(*pair) for pair in PAIRS[:4]],
                "token_ids": IDS[4:],
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": SAID[4:], "top_logprobs": [{}, {}]},
            }
        ]
    },
    "vLLM, tokens as ids": {
        "prompt_logprobs": [None, *({str(token): {"logprob": said}} for token, said in PAIRS[1:4])],
        "prompt_token_ids": IDS[:4],
        "choices": [
            {"logprobs": {"content": [{"token": f"token_id:{token}", "logprob": said} for token, said in PAIRS[4:]]}}
        ],
    },
    "vLLM, offline": {
        "prompt_token_ids": IDS[:4],
        "prompt_logprobs": [ranked(*pair) for pair in PAIRS[:4]],
        "outputs": [{"token_ids": IDS[4:], "logprobs": [ranked(*pair) for pair in PAIRS[4:]]}],
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "llama-server": {"content": "xx", "tokens": [], "completion_probabilities": [item(*pair) for pair in PAIRS[4:]]},
    "llama-server, OpenAI": {"choices": [{"logprobs": {"content": [item(*pair) for pair in PAIRS[4:]]}}]},
    "OpenAI, chat": {
        "choices": [{"logprobs": {"content": [{"token": "x", "logprob": x, "bytes": None} for x in SAID[4:]]}}]
    },
    "OpenAI, completions": {"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": SAID[4:]}}]},
}


def saved(folder: Path, document: Any) -> Path:
    path = folder / "answer.json"
    path.write_text(json.dumps(document))
    return path


def imported(cli: Cli, form: str, path: Path, *options: object) -> Trace:
    out = path.with_name(f"of-{path.stem}.trace")
    code, _, error = cli("import", form, path, "-o", out, *options)
    assert code == 0, error
    return Trace(out)


@pytest.mark.parametrize("name", ANSWERS)
def test_prompt_and_completion(name: str, cli: Cli, tmp_path: Path) -> None:
    told = Told(imported(cli, "logprobs", saved(tmp_path, ANSWERS[name])))
    assert told.tokens == [*IDS]
    np.testing.assert_array_equal(told.logprobs, [np.nan, -2.5, -0.25, -3.0, -np.inf, -1.5])


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_alone(name: str, cli: Cli, refused: Callable[..., str], tmp_path: Path) -> None:
    """The ids of the prompt are the user's."""
    path = saved(tmp_path, COMPLETIONS[name])
    told = Told(imported(cli, "logprobs", path, "--tokens", ",".join(map(str, IDS))))
    np.testing.assert_array_equal(told.logprobs, [*[np.nan] * 4, -np.inf, -1.5])
    assert "give --tokens" in refused("import", "logprobs", path, "-o", tmp_path / "x.trace")
    if "llama" in name:
        shifted = ",".join(map(str, (*IDS[1:], 9)))
        assert "they are shifted" in refused(
            "import", "logprobs", path, "-o", tmp_path / "x.trace", "--tokens", shifted
        )


def test_after_sampling(cli: Cli, tmp_path: Path) -> None:
    """llama-server's post_sampling_probs are probabilities."""
    items = [{"id": token, "prob": p, "top_probs": []} for token, p in zip(IDS, (1.0, 0.5, 0, 1, 1, 1), strict=True)]
    path = saved(tmp_path, {"completion_probabilities": items})
    code, _, said = cli("import", "logprobs", path, "-o", tmp_path / "a.trace", "--tokens", ",".join(map(str, IDS)))
    assert (code, "processed, not raw" in said) == (0, True)
    np.testing.assert_array_equal(Told(Trace(tmp_path / "a.trace")).logprobs[:3], [np.nan, np.log(0.5), -np.inf])


CLOSED: dict[str, tuple[Any, str]] = {
    "empty": ({"choices": [{"logprobs": None}]}, "no log-probabilities in it"),
    "zeros": ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"2": {"logprob": 0.0}}]}, "are no log-prob"),
    "zeros, and one that is impossible": (
        {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": [None, {"2": {"logprob": 0}}, {"3": {"logprob": -9999}}]},
        "all 0 or infinite",
    ),
    "percent": ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"2": {"logprob": 97.0}}]}, "above 0"),
    "shifted": ({"prompt_token_ids": [1, 2], "prompt_logprobs": [{"2": {"logprob": -1}}, None]}, "they are shifted"),
    "which": ({"prompt_logprobs": [None, {"2": {"logprob": -1}, "3": {"logprob": -2}}]}, "not which is the prompt's"),
    "several": ({"choices": [{}, {}]}, "not of one sequence"),
    "uneven": ({"prompt_token_ids": [1], "prompt_logprobs": [None, None]}, "2 prompt_logprobs of 1 prompt_token_ids"),
    "other": ({"choices": [{"logprobs": {"content": [3]}}]}, "it is JSON, but not log-probabilities"),
    "a list": ([1, 2], "it is no answer of a server"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_log_probabilities_that_are_none(name: str, refused: Callable[..., str], tmp_path: Path) -> None:
    document, words = CLOSED[name]
    assert words in refused("import", "logprobs", saved(tmp_path, document), "-o", tmp_path / "a.trace")
    assert not (tmp_path / "a.trace").exists()


def test_an_answer_against_a_trainer(models: Models, cli: Cli, tmp_path: Path) -> None:
    """From the answer to the verdict."""
    trainer = trace_torch(models("tiny"), tmp_path / "a.trace", TorchOptions(), TOKENS)
    said = Told(Trace(trainer)).logprobs
    for off, code in ((0.0, 0), (0.05, 1)):
        pairs = zip(TOKENS, said + off * np.sin(range(len(said))), strict=True)
        answer = {"prompt_token_ids": TOKENS, "prompt_logprobs": [ranked(t, x) if x == x else None for t, x in pairs]}
        imported(cli, "logprobs", saved(tmp_path, answer))
        assert cli("mismatch", trainer, tmp_path / "of-answer.trace")[0] == code


# --- hidden states, routes, logits, trees ----------------------------------------------------------------------------


@pytest.mark.slow
def test_hidden_states_of_vllm(models: Models, cli: Cli, refused: Callable[..., str], tmp_path: Path) -> None:
    model = models("tiny")
    trace = Trace(trace_torch(model, tmp_path / "a.trace", TorchOptions(dtype="bf16"), TOKENS))
    states = [torch.from_numpy(trace.values(trace.ops[0, f"blk.{n}.ffn_residual"])).bfloat16() for n in (0, 1)]
    whole = torch.stack(states, 1)
    path = tmp_path / "0.safetensors"

    def save(values: torch.Tensor, **others: torch.Tensor) -> None:
        save_file({"hidden_states": values.contiguous(), "token_ids": torch.tensor(TOKENS), **others}, path)

    save(whole)
    names = tmp_path / "names.txt"
    names.write_text("hidden_states.{N}=blk.{N}.ffn_residual\n")
    made = imported(cli, "vllm-hidden-states", path, "--map", names)
    for n, state in enumerate(states):
        np.testing.assert_array_equal(made.values(made.ops[0, f"blk.{n}.ffn_residual"]), state.float().numpy())
    assert cli("check", tmp_path / "of-0.trace", "--model", model)[0] == 0
    found = imported(cli, "vllm-hidden-states", path, "--match", tmp_path / "a.trace")
    assert [op for _, op in found.ops] == ["blk.0.ffn_residual", "blk.1.ffn_residual"]

    command = "import", "vllm-hidden-states", path, "-o", tmp_path / "x.trace"
    assert "unknown names: hidden_states.N" in refused(*command)
    save(torch.cat((whole[:-2], torch.zeros_like(whole[:2]))))
    assert "all values of token 15 are 0" in refused(*command)
    save(torch.stack((states[0], torch.zeros_like(states[0])), 1))
    assert "all values of layer 1 of those asked for are 0" in refused(*command)
    save(whole[1:])
    assert "for 17 tokens: not [tokens, layers, channels]" in refused(*command)
    save_file({"a": whole}, path)
    assert "where vLLM writes hidden_states and token_ids" in refused(*command)


def test_routed_experts(tiny: Callable[[str], Path], cli: Cli, refused: Callable[..., str], tmp_path: Path) -> None:
    model, ids = tiny("olmoe"), tuple(range(3, 20))
    trace = Trace(trace_torch(model, tmp_path / "a.trace", TorchOptions(), ids))
    layers = [op for _, op in trace.ops if op.endswith("ffn_moe_topk")]
    routes = np.stack([trace.values(trace.ops[0, op]).astype(np.int16) for op in layers], 1)
    path, tokens = tmp_path / "routes.npy", ("--tokens", ",".join(map(str, ids)))
    np.save(path, routes)
    made = imported(cli, "routed-experts", path, *tokens, "--model", model)
    assert [op for _, op in made.ops] == layers
    for op in layers:
        np.testing.assert_array_equal(made.values(made.ops[0, op]), trace.values(trace.ops[0, op]))
    answer = {
        "choices": [
            {
                "prompt_token_ids": ids[:9],
                "token_ids": (*ids[9:], 5),
                "prompt_routed_experts": routes[:9].tolist(),
                "routed_experts": routes[9:].tolist(),
            }
        ]
    }
    again = imported(cli, "routed-experts", saved(tmp_path, answer), "--model", model)
    assert (again.tokens, len(again.ops)) == ([*ids], len(layers))

    command = "import", "routed-experts", path, "-o", tmp_path / "x.trace", *tokens
    assert "unknown names: routed_experts.N" in refused(*command)
    for wrong, words in (
        (routes[:, :1], "routes of 1 layers, where the model has"),
        (np.zeros_like(routes), "all ids are 0"),
        (routes - 1 - routes.max(), "which stands for tokens that were not routed"),
        (np.repeat(routes[:, :, :1], 2, 2), "twice to the same expert"),
        (routes.astype(np.float32), "ids of experts are whole numbers"),
        (routes[:0], "[tokens, layers, experts a token] is expected"),
        (routes[1:], "has 17 tokens, and nothing in it has so many rows"),
    ):
        np.save(path, wrong)
        assert words in refused(*command, "--model", model)


def test_logits_of_llama_debug(models: Models, cli: Cli, refused: Callable[..., str], tmp_path: Path) -> None:
    """Its four files, laid out as save_output_data does."""
    trace = Trace(trace_torch(models("tiny"), tmp_path / "a.trace", TorchOptions(), TOKENS))
    last = trace.last_row(0, "output")
    assert last is not None
    path = tmp_path / "llamacpp-tiny.bin"
    last.tofile(path)
    np.array(TOKENS, np.int32).tofile(tmp_path / "llamacpp-tiny-tokens.bin")
    made = imported(cli, "llama-logits", path)
    assert made.tokens == [*TOKENS]
    np.testing.assert_array_equal(made.last_row(0, "output"), last)
    assert cli("compare", tmp_path / "a.trace", tmp_path / "of-llamacpp-tiny.trace")[0] == 0
    command = "import", "llama-logits", path, "-o", tmp_path / "x.trace"
    np.zeros_like(last).tofile(path)
    assert "the logits are all 0" in refused(*command)
    path.write_bytes(b"")
    assert "0 bytes are no numbers" in refused(*command)
    (tmp_path / "llamacpp-tiny-tokens.bin").unlink()
    last.tofile(path)
    assert "there is no such file" in refused(*command)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model watched by transformers' own debugger: whole tensors in full/, shortened prints in repr/."""
    from transformers import LlamaConfig, LlamaForCausalLM, model_addition_debugger_context

    folder = tmp_path_factory.mktemp("trees")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=99
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    for name, options in {"full": {"use_repr": False}, "repr": {}}.items():
        whole = {"do_prune_layers": name == "repr"}
        with model_addition_debugger_context(model, debug_path=str(folder / name), **options, **whole):
            model(input_ids=ids)
    states = model(input_ids=ids, output_hidden_states=True)
    torch.save({"states": [*states.hidden_states], "logits": states.logits}, folder / "right.pt")
    return folder


def test_tree_of_the_model_debugger(trees: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    path = trees / "full" / "LlamaForCausalLM_debug_tree_FULL_TENSORS.json"
    code, _, said = cli("import", "debug-tree", path, "-o", out)
    assert code == 0, said
    trace, right = Trace(out), torch.load(trees / "right.pt", weights_only=True)
    assert trace.tokens == [3, 14, 15, 9, 26]
    expected = {"blk.0.ffn_residual": right["states"][1], "blk.1.ffn_residual": right["states"][2]}
    for op, values in {**expected, "output": right["logits"]}.items():
        np.testing.assert_array_equal(trace.values(trace.ops[0, op]), values[0].detach().numpy())
    assert {"blk.2.attn_q", "blk.2.attn_residual", "blk.2.ffn_down", "token_embd"} <= {op for _, op in trace.ops}


def test_a_file_of_the_debugger_holds_one_tensor(trees: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(trees / "full", tmp_path / "full")
    one = next((tmp_path / "full").rglob("*.safetensors"))
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, one)
    path = tmp_path / "full" / "LlamaForCausalLM_debug_tree_FULL_TENSORS.json"
    said = refused("import", "debug-tree", path, "-o", tmp_path / "a.trace")
    assert f"{one}: 2 tensors, where the debugger writes one" in said


def test_shortened_tree(trees: Path, cli: Cli, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Of printed tensors the statistics, by their own definition; pruned layers are said."""
    path = trees / "repr" / "LlamaForCausalLM_debug_tree_SUMMARY.json"
    code, _, said = cli("import", "debug-tree", path, "-o", tmp_path / "a.trace", "--tokens", "3,14,15,9,26")
    assert code == 0, said
    assert "the tree holds layers 0, 2 alone: do_prune_layers=False keeps all" in said
    trace, right = Trace(tmp_path / "a.trace"), torch.load(trees / "right.pt", weights_only=True)
    record, values = trace.ops[0, "blk.1.ffn_residual"], right["states"][2].detach()
    assert record.mean == pytest.approx(float(values.mean()), abs=1e-4)
    assert record.rms == pytest.approx(float(values.square().mean().sqrt()), rel=1e-3)
    assert "no debug tree" in refused("import", "debug-tree", saved(tmp_path, {}), "-o", tmp_path / "x.trace")
