"""Chat templates: one form of each message, refusals in the template's words, and the sandbox."""

import itertools
from datetime import datetime
from typing import Any

import jinja2
import pytest

from linnet.models import BrokenTemplateError, ChatTemplate, TemplateError, load_tokenizer

USER = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
CONTENTS: dict[str, dict[str, Any]] = {
    "null": {"content": None},
    "absent": {},
    "empty": {"content": ""},
    "a part": {"content": [{"type": "text", "text": ""}]},
}
CONCATENATES = (
    "{% for m in messages %}"
    "<{{ m.role }}>{{ '' + m['content'] }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}</>"
    "{% endfor %}"
)
TESTS_NONE = CONCATENATES.replace(
    "{{ '' + m['content'] }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
)
LOOPS = CONCATENATES.replace(
    "{{ '' + m['content'] }}", "{% for p in m.content %}{{ p['text'] }}{% endfor %}"
)
EITHER = CONCATENATES.replace(
    "{{ '' + m['content'] }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
IGNORES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def conversation(content: dict[str, Any], answer: Any = "18 degrees") -> list[dict[str, Any]]:
    return [
        USER,
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "content": answer, "tool_call_id": "c1"},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize(
    "source",
    [CONCATENATES, TESTS_NONE, LOOPS, EITHER],
    ids=["concatenates", "tests none", "loops", "either"],
)
def test_every_form_of_no_content_renders_the_same(source: str, content: dict[str, Any]):
    # By hand.
    expected = (
        '<user>Weather?</><assistant>[weather {"city": "Zürich"}]</>'
        "<tool>18 degrees</><user>Thanks</>"
    )
    assert ChatTemplate(source).render(conversation(content)) == expected


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_template_without_tools_shows_none_of_them(content: dict[str, Any]):
    expected = "<user>Weather?</><assistant></><tool>18 degrees</><user>Thanks</>"
    assert ChatTemplate(IGNORES).render(conversation(content)) == expected


@pytest.mark.parametrize("source", [CONCATENATES, LOOPS, EITHER])
def test_text_parts_are_joined_in_order(source: str):
    parts = [{"type": "text", "text": "18 "}, {"type": "text", "text": "degrees"}]
    template = ChatTemplate(source)
    assert template.render(conversation({}, parts)) == template.render(conversation({}))


def test_arguments_may_be_objects_or_their_text():
    template = ChatTemplate(CONCATENATES)
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages = conversation({})
    messages[1]["tool_calls"] = [call]
    assert template.render(messages) == template.render(conversation({}))


def test_a_template_that_joins_arguments_as_text_gets_text():
    source = "{% for m in messages %}{% for c in m.tool_calls %}" + (
        "{{ '```' + c.function.arguments + '```' }}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).render(conversation({})) == '```{"city": "Zürich"}```'


def test_the_caller_s_messages_stay_as_they_are():
    messages = conversation({"content": None})
    ChatTemplate(LOOPS).render(messages)
    assert messages == conversation({"content": None})


@pytest.mark.parametrize(
    "content",
    [3, {"text": "x"}, [{"type": "image_url", "image_url": {}}], [3], [{"type": "text"}]],
    ids=str,
)
def test_content_that_no_template_can_take_is_refused(content: Any):
    with pytest.raises(ValueError, match="user message"):
        ChatTemplate(IGNORES).render([{"role": "user", "content": content}])


@pytest.mark.parametrize("messages", [[{"content": "x"}], ["hi"], [{"role": 3}]], ids=str)
def test_a_message_without_a_role_is_refused(messages: Any):
    with pytest.raises(ValueError, match='"role"'):
        ChatTemplate(IGNORES).render(messages)


def test_no_messages_are_refused():
    with pytest.raises(ValueError, match="at least one message"):
        ChatTemplate(IGNORES).render([])


STRICT = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "user"], "roles must alternate"),
        (["tool"], "roles must alternate"),
        (["developer", "user"], "roles must alternate"),
    ],
)
def test_a_refusal_has_the_template_s_own_words(roles: list[str], message: str):
    template = ChatTemplate(STRICT, {"bos_token": "<bos>"})
    with pytest.raises(TemplateError, match=message) as caught:
        template.render([{"role": role, "content": "x"} for role in roles])
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, BrokenTemplateError)


def test_special_tokens_are_known_to_the_template():
    template = ChatTemplate(STRICT, {"bos_token": "<bos>"})
    assert template.render([{"role": "user", "content": "x"}]) == "<bos><user>x</>"


@pytest.mark.parametrize(
    "source", ["{% for m in %}", "{{ m ", "{% endfor %}", "{% nonsense %}", "{{ 'a' | nofilter }}"]
)
def test_a_syntax_error_is_found_when_the_template_is_made(source: str):
    with pytest.raises(BrokenTemplateError, match="syntax error in line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}"])
def test_a_template_that_fails_is_told_from_one_that_refuses(source: str):
    with pytest.raises(BrokenTemplateError, match="the chat template failed"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'].dumps }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str):
    with pytest.raises(BrokenTemplateError):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
        "{{ (1).__class__ }}",
    ],
)
def test_an_attribute_of_the_internals_is_empty(source: str):
    assert ChatTemplate(source).render([USER]) == ""


def test_the_usual_names_are_there():
    source = (
        "{%- for i in range(9) -%}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{%- endfor -%}"
        "{%- set ns = namespace(n=1) -%}{%- set ns.n = ns.n + 1 -%}{{ ns.n }}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{{ {'ü': '<b>'} | tojson }}{{ {'a': 1} | tojson(indent=1) }}{{ strftime_now('%Y') }}"
    )
    expected = '022Weather?{"ü": "<b>"}{\n "a": 1\n}' + str(datetime.now().year)
    assert ChatTemplate(source).render([USER]) == expected


def test_blocks_take_their_line_with_them():
    source = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render([USER]) == "x\n"


def test_variables_and_tools_reach_the_template():
    source = "{{ tools[0].function.name }} {{ enable_thinking }} {{ add_generation_prompt }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    rendered = ChatTemplate(source).render(
        [USER], tools=tools, enable_thinking=False, add_generation_prompt=True
    )
    assert rendered == "f False True"


def test_a_variable_with_methods_is_refused():
    template = ChatTemplate("x")
    with pytest.raises(ValueError, match=r"a variable holds a datetime"):
        template.render([USER], now=datetime.now())


def test_an_old_jinja2_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(ImportError, match=r"3\.1\.6 or newer"):
        ChatTemplate("x")


def conversations() -> list[list[dict[str, str]]]:
    """Twenty: every start, of one to five turns, with texts that need care."""
    texts = ["Hi", "  spaced  ", "two\nlines", "Zürich 🙂", "<|im_start|>", "", "{{ x }}", "a" * 50]
    rounds = itertools.cycle(texts)
    made: list[list[dict[str, str]]] = []
    for system, turns in itertools.product((False, True), range(1, 11)):
        messages = [{"role": "system", "content": next(rounds)}] if system else []
        for turn in range(turns):
            role = ("user", "assistant")[turn % 2]
            messages.append({"role": role, "content": next(rounds)})
        made.append(messages)
    return made


def test_smollm2_s_template_renders_as_transformers_does(smollm2: Any, tmp_path: Any):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.template is not None
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=tokenizer.template.source
    )
    assert len(conversations()) == 20
    for messages, prompt in itertools.product(conversations(), (True, False)):
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        assert tokenizer.template.render(messages, add_generation_prompt=prompt) == expected
