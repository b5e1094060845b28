"""Chat rendering: ids against text put together by hand, masks against the assistant's words."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmq_nb.core.errors import UserError
from llmq_nb.data.chat import CHATML, ChatRenderer
from llmq_nb.data.tokenizer import ByteTokenizer, FileTokenizer

SPECIAL = ByteTokenizer.special_ids
START, END = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
NO_MARKS = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
NO_PROMPT = NO_MARKS[: NO_MARKS.index("{% if add_generation_prompt %}")]
# As Qwen3 does: what the assistant thought is kept in the last turn alone.
FORGETS = NO_MARKS.replace(
    "{{ message['content'] }}<|im_end|>{% else %}",
    "{% if loop.last %}<think></think>{% endif %}{{ message['content'] }}<|im_end|>{% else %}",
)
TURN = st.tuples(
    st.sampled_from(["system", "user", "assistant"]),
    st.text("ab é😀\n|<>", max_size=8) | st.sampled_from(["<|im_end|>", "x<|im_start|>assistant"]),
)


def with_template(template):
    class Templated(ByteTokenizer):
        chat_template = template

    return ChatRenderer(Templated())


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def chatml(messages):
    """ChatML by hand: ids and mask, byte by byte."""
    ids, mask = [], []
    for message in messages:
        said = message["role"] == "assistant"
        header = [START, *message["role"].encode(), 10]
        content = [*message["content"].encode(), END]
        ids += header + content + [10]
        mask += [False] * len(header) + [said] * len(content) + [False]
    return ids, mask


def assert_renders(renderer, messages):
    ids, mask = renderer.render(messages)
    expected_ids, expected_mask = chatml(messages)
    assert ids.dtype == np.int32 and mask.dtype == np.bool_
    assert ids.tolist() == expected_ids
    assert mask.tolist() == expected_mask


@pytest.mark.parametrize(
    "template", [None, CHATML, NO_MARKS, NO_PROMPT], ids=["built-in", "marks", "none", "no prompt"]
)
@given(st.lists(TURN, min_size=1, max_size=5))
def test_only_the_assistant_is_supervised(template, turns):
    """Also with special tokens in the messages, which stay text, and with empty messages."""
    assert_renders(with_template(template), chat(*turns))


def test_a_header_like_content_is_found_where_it_is():
    assert_renders(with_template(NO_PROMPT), chat(("user", "a"), ("assistant", "assistant")))
    assert_renders(with_template(NO_PROMPT), chat(("assistant", "|"), ("assistant", "")))


def test_prompt_ends_where_the_assistant_begins():
    messages = chat(("user", "hi <|im_end|>"))
    expected = chatml(messages)[0] + [START, *b"assistant\n"]
    for template in (CHATML, NO_MARKS):
        assert with_template(template).prompt(messages).tolist() == expected


def test_a_template_that_rewrites_earlier_turns_is_refused():
    renderer = with_template(FORGETS)
    ids, mask = renderer.render(chat(("user", "a"), ("assistant", "b")))
    assert renderer.tokenizer.decode(ids[mask]) == "<think></think>b"
    two = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(UserError, match=r"rewrites earlier turns \(message 2\) in f.jsonl:3"):
        renderer.render(two, "f.jsonl:3")


def test_a_template_that_drops_the_assistant_is_refused():
    users_only = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="leaves out what the assistant says in f:1"):
        with_template(users_only).render(chat(("user", "a"), ("assistant", "b")), "f:1")


def test_a_template_may_refuse_messages_and_use_the_usual_variables():
    template = (
        "{%- if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{{ eos_token }}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}"
    )
    renderer = with_template(template)
    with pytest.raises(UserError, match=r"refuses the messages \(user first\) in f:7"):
        renderer.render(chat(("assistant", "x")), "f:7")
    ids, mask = renderer.render(chat(("user", " <é> ")))
    assert ids[0] == SPECIAL["<|endoftext|>"]
    assert renderer.tokenizer.decode(ids) == '{"role": "user", "content": " <é> "}<é>'
    assert renderer.tokenizer.decode(ids[mask]) == "<é>"


def test_a_template_cannot_reach_the_program():
    with pytest.raises(UserError, match="refuses"):
        with_template("{{ messages.__class__.__mro__ }}").render(chat(("user", "a")))
    with pytest.raises(UserError, match="malformed chat template"):
        with_template("{% if %}")


def test_without_template_and_tokens_it_is_refused(tmp_path, bpe_folder):
    class Plain(ByteTokenizer):
        special_ids = {"<|endoftext|>": 256}

    with pytest.raises(UserError, match="no chat template in bytes: .*chat_template.jinja"):
        ChatRenderer(Plain())


@pytest.mark.parametrize("marks", [True, False])
def test_file_tokenizer_renders_with_its_template(tmp_path, bpe_folder, marks):
    """Ids are the whole text's, as the Rust tokenizer encodes it; the mask spells the answer."""
    shutil.copytree(bpe_folder, tmp_path / "t")
    template = "{{ bos_token }}" + (CHATML if marks else NO_MARKS)
    config = json.loads((bpe_folder / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template})
    )
    tokenizer = FileTokenizer(tmp_path / "t")
    messages = chat(("user", "hello é"), ("assistant", "the quick\nfox"), ("user", "dog"))
    ids, mask = ChatRenderer(tokenizer).render(messages)
    text = "<s>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    rust = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    assert ids.tolist() == rust.encode(text, add_special_tokens=False).ids
    assert rust.decode(ids[mask].tolist(), skip_special_tokens=False) == "the quick\nfox<|im_end|>"

    unsafe = chat(("user", "<|im_end|>x"), ("assistant", "a<|im_end|>b"))
    ids, mask = ChatRenderer(tokenizer).render(unsafe)
    specials = [i for i in ids.tolist() if i in tokenizer.special_ids.values()]
    names = ["<s>", *["<|im_start|>", "<|im_end|>"] * 2]
    assert specials == [tokenizer.special_ids[name] for name in names]
    assert tokenizer.decode(ids[mask]) == "a<|im_end|>b"
    assert ids[mask][-1] == tokenizer.special_ids["<|im_end|>"]
