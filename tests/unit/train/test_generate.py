"""`tridock generate`: transformers' text, up to the tokens that end it, and transformers' chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.unit.train.test_huggingface import KINDS, written
from tridock.cli import main as tridock
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import RequestError
from tridock.experiment.model import Model
from tridock.train.huggingface.generate import ChatTemplate, main
from tridock.train.models.gpt import GPT, Shape
from tridock.train.sampling import choose

TOKENS, PROMPT = 280, "another text"


def model_folder(folder: Path, kind: str = "qwen2") -> Path:
    """A model of the family with other weights than initial ones, and a tokenizer."""
    torch.manual_seed(1)
    fields = {**KINDS[kind], "vocab_size": TOKENS, "seq_length": 256}
    gpt = GPT(Shape.of(Model.model_validate(fields), TOKENS)).eval()
    with torch.no_grad():
        for weight in gpt.parameters():
            weight += 0.2 * torch.randn_like(weight)
    text = "a line of text\n" * 20 + "another text\n" * 5 + "the quick brown fox\n" * 5
    BytePairTokenizer.train([text], vocab_size=TOKENS).save(folder)
    return written(gpt, folder, TOKENS)


def generation_config(folder: Path, **content: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(content))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object, fails: bool = False) -> str:
        monkeypatch.setattr("sys.argv", ["generate", *map(str, argv)])
        capsys.readouterr()  # what transformers says
        assert (main() != 0) == fails
        printed = capsys.readouterr()
        return printed.err if fails else printed.out

    return run


def transformers_ids(folder: Path, prompt: str = PROMPT, **options: Any) -> list[int]:
    """The tokens of the prompt and of its continuation, without the one that ends it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**given, **{"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options})[0]
    ends = model.generation_config.eos_token_id
    ids: list[int] = found.tolist()
    return ids[:-1] if ids[-1] in (ends if isinstance(ends, list) else [ends]) else ids


@pytest.mark.parametrize("kind", thinned(KINDS, ("gpt2", "llama-yarn", "qwen3", "granite", "qwen3-moe")))
def test_the_text_is_that_of_transformers(kind: str, tmp_path: Path, said: Any) -> None:
    """Greedy; without an end, up to one of a list of ends, and with a penalty for tokens that are in the text."""
    folder, greedy = model_folder(tmp_path, kind), ("--temperature", 0, "--max-new-tokens", 24, "--prompt", PROMPT)
    decode, ids_of = HuggingFaceTokenizer(folder).decode, HuggingFaceTokenizer(folder).ids_of
    generation_config(folder, eos_token_id=[TOKENS - 1])
    whole = transformers_ids(folder)
    assert said(folder, *greedy) == decode(whole) + "\n"
    new = whole[len(ids_of(PROMPT)) :]
    assert len(new) == 24
    end = next(token for place, token in enumerate(new) if place > 2 and token not in new[:place])
    generation_config(folder, eos_token_id=[TOKENS - 1, end], repetition_penalty=1.0, max_new_tokens=3)
    assert transformers_ids(folder) == whole[: whole.index(end, len(whole) - 24)]
    assert said(folder, *greedy) == decode(transformers_ids(folder)) + "\n"
    generation_config(folder, eos_token_id=TOKENS - 1, repetition_penalty=1.7)
    other = transformers_ids(folder)
    assert said(folder, *greedy) == decode(other) + "\n"
    assert other != whole


def test_how_many_tokens_and_which_prompts(tmp_path: Path, said: Any) -> None:
    folder = model_folder(tmp_path)
    assert said(folder, "--prompt", PROMPT, "--max-new-tokens", 0) == f"{PROMPT}\n"
    (tmp_path / "prompts").write_text("b\n\nc\n")
    given = ("--prompt", "a", "--prompt-file", tmp_path / "prompts", "--max-new-tokens", 0)
    assert said(folder, *given) == "a\nb\n\nc\n"
    text = said(folder, "--prompt", "", "--temperature", 0, "--max-new-tokens", 5)
    ids = transformers_ids(folder, "<|endoftext|>", max_new_tokens=5)
    assert text == HuggingFaceTokenizer(folder).decode(ids) + "\n"
    err = said(folder, "--prompt-file", tmp_path, fails=True)
    assert err == f"{tmp_path}: cannot be read as a prompt; got a folder; give the path of a prompt file\n"


def test_the_folders_sampling_is_the_default(tmp_path: Path, said: Any) -> None:
    folder = model_folder(tmp_path)
    given = (folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    greedy, free = said(*given, "--temperature", 0), said(*given)
    assert greedy != free == said(*given, "--seed", 1234) != said(*given, "--seed", 1)
    assert greedy == said(*given, "--top-k", 1) == said(*given, "--top-p", 1e-6)
    for content in ({"do_sample": True, "top_k": 1}, {"top_p": 1e-6}, {"do_sample": False}, {"temperature": 0.0}):
        generation_config(folder, **content)
        assert said(*given) == greedy, content
    assert said(*given, "--temperature", 1) == free


def test_a_generation_config_is_understood_whole(tmp_path: Path, said: Any) -> None:
    folder = model_folder(tmp_path)
    generation_config(folder, num_beams=4, no_repeat_ngram_size=None, watermarking_config={}, top_p=2.0, use_cache=True)
    where = f"{folder}/generation_config.json"
    known = "eos_token_id, bos_token_id, do_sample, temperature, top_k, top_p, repetition_penalty"
    assert said(folder, "--prompt", "a", fails=True).splitlines() == [
        f"{where}: top_p: must be at most 1; got 2.0; lower it",
        f"{where}: num_beams: is not a field; got 4; remove it, or use one of {known}",
        f"{where}: watermarking_config: is not a field; got {{}}; remove it, or use one of {known}",
    ]
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "no_repeat_ngram_size": 2}))  # of older folders
    assert "no_repeat_ngram_size: is not a field; got 2; " in said(folder, "--prompt", "a", fails=True)


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path, said: Any) -> None:
    folder = model_folder(tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": TOKENS}))
    assert said(folder, "--prompt", "a <new>", fails=True) == (
        "--prompt: has a token beyond the model's vocabulary of 280; got 280; leave special tokens out, or give its"
        " --tokenizer\n"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-k", "-1", "must be at least 0; got -1"),
        ("--top-k", "x", "invalid int value: 'x'"),
        ("--temperature", "-0.5", "must be at least 0; got -0.5"),
        ("--temperature", "nan", "must be at least 0; got nan"),
        ("--top-p", "0", "must be greater than 0 and at most 1; got 0"),
        ("--top-p", "1.5", "must be greater than 0 and at most 1; got 1.5"),
        ("--max-new-tokens", "-1", "must be at least 0; got -1"),
        ("--seed", "-1", "must be at least 0 and less than 2**63; got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        tridock(["generate", "x", "--prompt", "a", f"{option}={value}"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"tridock generate: error: argument {option}: {message}"


def test_a_prompt_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    assert tridock(["generate", str(tmp_path)]) == 2
    assert tridock(["generate", str(tmp_path), "--prompt-file", "/none"]) == 2
    assert capsys.readouterr().err == (
        "--prompt: is missing; give a text to continue, or --prompt-file\n"
        "--prompt-file: does not exist; got /none; give the path of a file of prompts\n"
    )


def test_top_p_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    for top_p in (0.01, 0.3, 0.9, 1.0):
        kept = transformers.TopPLogitsWarper(top_p)(None, logits[None] / 0.7)[0].isfinite()
        drawn = torch.stack([choose(logits, 0.7, 0, top_p) for _ in range(3000)])
        assert kept[drawn].all()
        assert len(drawn.unique()) >= 0.6 * kept.sum()


TEMPLATE = """\
{%- set ns = namespace(count=0) -%}
{%- for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ bos_token }}[{{ message['role'] }}] {{ message.content | trim }} {{ message | tojson }} {{ dict(a=1)['a'] }}
{% generation %}{{ eos_token }}{% set inside = 1 %}{% endgeneration %}{{ inside is defined }}
{% endfor %}
{%- if not tools is defined or tools is none and strftime_now('%Y') | int > 2000 %}  {{ ns.count }}
{% endif %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_chat_is_that_of_transformers(place: str, tmp_path: Path, said: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder = model_folder(tmp_path)
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        config["chat_template"] = "not this one"
    elif place == "config":
        config["chat_template"] = TEMPLATE
    else:
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, own = transformers.AutoTokenizer.from_pretrained(folder), HuggingFaceTokenizer(folder)
    text = ChatTemplate.of(folder, own.special).asking(" an <é> 'text' ")
    asked = ([{"role": "user", "content": " an <é> 'text' "}],)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert text == theirs.apply_chat_template(*asked, tokenize=False, **options)
    assert own.ids_of(text) == theirs.apply_chat_template(*asked, **options)
    assert text.startswith("<|endoftext|>[user] an <é> 'text' {")
    assert text.endswith("[assistant] ")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = ([{"role": "user", "content": "a"}],)
    ids = theirs.apply_chat_template(*asked, return_tensors="pt", **options)
    greedy = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    with torch.no_grad():
        found = model.generate(ids, **greedy)[0, ids.shape[1] :]
    answer = said(folder, "--chat", "--prompt", "a", "--temperature", 0, "--max-new-tokens", 8)
    assert answer == f"a\n{theirs.decode(found, skip_special_tokens=True)}\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no user') }}", "no user"),
        ("{% for", "unexpected 'end of template'"),
        ("{{ messages.__class__.mro }}", "access to attribute '__class__' of 'list' object is unsafe."),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "access to attribute '__class__' of 'str' object is unsafe.",
        ),
        ("{% set ns = namespace() %}{% set ns.__call__ = '{0.__class__}'.format %}{{ ns(1) }}", "takes no name that"),
        ("{{ namespace(__call__=dict)(1) }}", "a namespace takes no name that begins with _, as '__call__'"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_runs_in_a_sandbox(template: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(
        RequestError, match=r"chat_template.jinja: is a chat template that cannot be rendered; got "
    ) as no:
        ChatTemplate.of(tmp_path, {}).asking("a")
    assert said in str(no.value)


def test_a_folder_without_a_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "tools", "template": "x"}]}')
    with pytest.raises(RequestError, match=r"has no chat template; leave --chat out, or add the model's chat_template"):
        ChatTemplate.of(tmp_path, {})
