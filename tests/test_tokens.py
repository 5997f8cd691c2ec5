"""Token ids that differ, explained with the vocabularies of real GGUF files: byte-level BPE and SentencePiece."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models
from gguf import GGUFWriter

from tracediff.compare.tokens import describe_difference
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.vocabulary import Vocabulary

# Of the byte-level vocabulary that models are generated with: 256 bytes, a BOS, merges, padding.
BOS, THE, SPACE_T, PAD = 256, 263, 257, 270


@pytest.fixture(scope="module")
def bpe(models: Models) -> Vocabulary:
    return Vocabulary(GGUFFile(models("qwen2")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The beginning of Llama 2's: control tokens, bytes, pieces; with a BOS, an EOS and padding."""
    path = tmp_path_factory.mktemp("vocabulary") / "llama.gguf"
    out = GGUFWriter(path, "llama")
    pieces = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(255)), "<0xno>"]
    words = ["▁Hello", "Hello", "▁world", "▁", "<", "/", "s", ">", "<|im_start|>", "|", "im", "_", "start"]
    out.add_tokenizer_model("llama")
    out.add_token_list([*pieces, *words])
    kinds = [2, 3, 3, 3, *[6] * 256, *(4 if word.startswith("<|") else 1 for word in words)]
    out.add_token_types(kinds)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(3)
    for write in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        write()
    return Vocabulary(GGUFFile(path))


def test_bytes(sentencepiece: Vocabulary) -> None:
    """A token that is said to be one and is spelled as none is text: nothing forbids it in a file."""
    assert sentencepiece.decode([4 + 0xC3, 4 + 0xA4, 259]) == "ä<0xno>"


def ids(text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The ids of pieces with spaces between, as the file spells them."""
    spelled = {vocabulary.spelled(token): token for token in range(600)}
    return tuple(spelled[piece] for piece in text.split())


def why(a: tuple[int, ...], b: tuple[int, ...], vocabulary: Vocabulary) -> str:
    *_, said = describe_difference(0, a, b, ("r", "c"), vocabulary)
    return said.removesuffix("Feed the candidate the reference's ids.").rstrip()


PROMPT = (BOS, 84, 104, 101, 32, 113)
PADDED = "record the prompt without, for positions and the mask count every token."


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (PROMPT, PROMPT[1:], "The candidate lacks the reference's first token 256: a BOS that was not added?"),
        (PROMPT, (BOS, *PROMPT), "The candidate has one more token in front, 256: {front}"),
        (
            PROMPT, (*PROMPT, 9),
            "The candidate has one more token at the end, 9: an EOS, or padding? A prompt to be continued has none.",
        ),
        (PROMPT, (*PROMPT, 9, 9), f"The candidate is padded on the right with 2 times 9: {PADDED}"),
        (PROMPT, (PAD, PAD, PAD, *PROMPT), f"The candidate is padded on the left with 3 times {PAD}: {PADDED}"),
        ((PAD, PAD, *PROMPT), PROMPT, f"The reference is padded on the left with 2 times {PAD}: {PADDED}"),
        (
            PROMPT, PROMPT[:4],
            "The candidate lacks 2 of 6 tokens, the last: its prompt was truncated on the right. "
            "Is its context or batch too small?",
        ),
        (
            PROMPT, PROMPT[2:],
            "The candidate lacks 2 of 6 tokens, at the front: its prompt was truncated on the left. "
            "Is its context too small?",
        ),
        (
            PROMPT, (BOS, *PROMPT[3:]),
            "The candidate lacks 2 of 6 tokens, at the front: its prompt was truncated on the left. "
            "Is its context too small?",
        ),
        (PROMPT, (BOS, 84, 105, 101, 33, 113), ""),
    ],
)  # fmt: skip
def test_what_numbers_tell(a: tuple[int, ...], b: tuple[int, ...], expected: str, bpe: Vocabulary) -> None:
    assert why(a, b, Vocabulary()) == expected.format(front="a BOS added where none belongs, or doubled?")
    assert why(a, b, bpe) == expected.format(front="the BOS, doubled.")


def test_a_leading_space_in_byte_level_bpe(bpe: Vocabulary) -> None:
    said = "The {} has a space in front that the other side has not: 'a' and ' a' are different tokens."
    plain, spaced = ids("<|bos|> t h e", bpe), ids("<|bos|> Ġthe", bpe)
    assert bpe.decode(spaced[1:]) == " " + bpe.decode(plain[1:])
    assert why(plain, spaced, bpe) == said.format("candidate")
    assert why(spaced, plain, bpe) == said.format("reference")
    assert why(ids("t h e", bpe), ids("Ġ t h e", bpe), bpe) == said.format("candidate")  # not taken for a BOS
    assert why(ids("Ġt on", bpe), ids("t an re", bpe), bpe) == said.format("reference")  # whatever follows
    assert "space" not in why(plain, spaced, Vocabulary())


def test_a_leading_space_in_sentencepiece(sentencepiece: Vocabulary) -> None:
    said = "The {} has a space in front that the other side has not: 'a' and ' a' are different tokens."
    a, b = ids("<s> ▁Hello ▁world", sentencepiece), ids("<s> Hello ▁world", sentencepiece)
    assert why(a, b, sentencepiece) == said.format("reference")
    assert why(b, a, sentencepiece) == said.format("candidate")
    assert why(b, ids("<s> ▁ Hello ▁world", sentencepiece), sentencepiece) == said.format("candidate")


@pytest.mark.parametrize(("text", "pieces"), [("<|im_start|>", "< | im _ start | >"), ("</s>", "< / s >")])
def test_a_special_token_in_pieces(text: str, pieces: str, sentencepiece: Vocabulary) -> None:
    a, b = ids(f"<s> {text} ▁world", sentencepiece), ids(f"<s> {pieces} ▁world", sentencepiece)
    n = len(pieces.split())
    said = f"reads the special token {text} ({a[1]}) as text, in {n} pieces: tokenise with special tokens parsed."
    assert why(a, b, sentencepiece) == f"The candidate {said}"
    assert why(b, a, sentencepiece) == f"The reference {said}"
    spaced = ids(f"<s> ▁ {pieces} ▁world", sentencepiece)  # SentencePiece puts a space before it
    assert why(a, spaced, sentencepiece) == f"The candidate {said}".replace(f"in {n}", f"in {n + 1}")


def test_a_bos_in_pieces(bpe: Vocabulary) -> None:
    a, b = ids("<|bos|> h e", bpe), ids("< | b o s | > h e", bpe)
    assert why(a, b, bpe).startswith("The candidate reads the special token <|bos|> (256) as text, in 7 pieces")


def test_end_and_padding_by_the_vocabulary(sentencepiece: Vocabulary) -> None:
    prompt = ids("<s> ▁Hello", sentencepiece)
    said = "The candidate has one more token at the end, 2: the EOS? A prompt to be continued has none."
    assert why(prompt, (*prompt, 2), sentencepiece) == said
    padded = f"The candidate is padded on the right with 1 times 3: {PADDED}"
    assert why(prompt, (*prompt, 3), sentencepiece) == padded
    more = (
        "The candidate was fed 1 more than the reference's 2 tokens, the last. Or was the reference's prompt truncated "
        "on the right: is its context or batch too small?"
    )
    assert why(prompt, (*prompt, 50), sentencepiece) == more
    twice = "The candidate was fed its first token, 50, twice."
    assert why((50, *prompt), (50, 50, *prompt), sentencepiece) == twice
    front = "The candidate has one more token in front, 1: a BOS added where none belongs."
    assert why(prompt[1:], prompt, sentencepiece) == front


def test_bytes_and_characters_of_several_tokens(sentencepiece: Vocabulary, bpe: Vocabulary) -> None:
    assert sentencepiece.decode([4 + 0xC3, 4 + 0xA9]) == "é"
    assert bpe.decode(bpe_byte for bpe_byte in "é€".encode()) == "é€"


def test_texts_beside_the_ids_with_the_model(
    models: Models, torch_trace: Callable[..., Path], refused: Callable[..., str]
) -> None:
    model = models("tiny")
    a, b = torch_trace(model, tokens=PROMPT, n_decode=0), torch_trace(model, tokens=PROMPT[1:], n_decode=0)
    said = (
        "the token ids differ in step 0, first at index 0: all later values differ for that reason.\n"
        f"  {a}: 6 tokens, {{}}...\n  {b}: 5 tokens, {{}}...\n"
        "The candidate lacks the reference's first token 256: a BOS that was not added? "
        "Feed the candidate the reference's ids."
    )
    assert refused("compare", a, b) == said.format("256, 84, 104, 101", "84, 104, 101, 32")
    first = "256 <|bos|>, 84 'T', 104 'h', 101 'e'"
    assert refused("compare", a, b, "--model", model) == said.format(first, "84 'T', 104 'h', 101 'e', 32 ' '")
