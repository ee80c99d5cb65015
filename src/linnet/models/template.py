"""Chat templates: jinja2 in its sandbox, with the names that templates of the Hub rely on.

Messages are put into one form before a template sees them, so that what different clients send for
the same turn (content null, absent, empty, or a list of text parts) gives the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from linnet.models.json_object import as_list, as_object

Message = Mapping[str, Any]
_PROBE = "linnet:content"


class TemplateError(ValueError):
    """A chat template refused the messages; the text is the template's own where it gave one."""


class BrokenTemplateError(TemplateError):
    """A chat template that can't be read, or that fails whatever the messages are."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The jinja2 text.
        special: Texts of special tokens by name (`bos_token`, `eos_token`, ...), which templates
            refer to.

    Raises:
        BrokenTemplateError: The text is no valid template.
        ImportError: jinja2 is not installed.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        import_jinja2()
        import jinja2

        self.source = source
        self._special = dict(special or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BrokenTemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from None
        except (SyntaxError, RecursionError) as error:
            raise BrokenTemplateError(
                f"the chat template can't be compiled: {type(error).__name__}: {error}"
            ) from None
        self._reads_parts: bool | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: Turns with a `role`, and `content`: a string, null or a list of text parts.
                Arguments of `tool_calls` may be JSON text or objects.
            add_generation_prompt: End with the header of the assistant's next turn.
            tools: JSON schemas of functions.
            variables: More names for the template.

        Returns:
            The text, special tokens included: encode it without adding them again.

        Raises:
            TemplateError: The template refused the messages.
            BrokenTemplateError: The template failed.
            ValueError: A message of a shape that no template can take.
        """
        turns = [_plain_message(message) for message in messages]
        if not turns:
            raise ValueError("a chat needs at least one message")
        if self._reads_parts is None:
            self._reads_parts = self._probe()
        if self._reads_parts:
            for turn in turns:
                text = turn["content"]
                turn["content"] = [{"type": "text", "text": text}] if text else []
        context = {
            **self._special,
            **_plain(variables, "a variable"),
            "messages": turns,
            "tools": None if tools is None else _plain(list(tools), "a tool"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(context)
        except TypeError:
            # Some templates join the arguments as text where others take them apart.
            _arguments_as_text(turns)
            try:
                return self._render(context)
            except TypeError as error:
                raise BrokenTemplateError(f"the chat template failed: {error}") from None

    def _render(self, context: dict[str, Any]) -> str:
        import jinja2

        try:
            return self._template.render(context)
        except _RefusedError as error:
            raise TemplateError(str(error)) from None
        except jinja2.exceptions.SecurityError as error:
            raise BrokenTemplateError(f"the chat template was stopped: {error}") from None
        except TypeError:
            raise
        except Exception as error:
            # Templates are other people's programs: whatever they raise is theirs.
            raise BrokenTemplateError(f"the chat template failed: {error}") from None

    def _probe(self) -> bool:
        """Whether the template only shows content that comes as a list of parts."""
        seen: list[bool] = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            turn = {"role": "user", "content": content}
            try:
                text = self._render(
                    {**self._special, "messages": [turn], "tools": None, "add_generation_prompt": 0}
                )
            except (TemplateError, TypeError):
                text = ""
            # A list written out as Python text holds the probe too.
            seen.append(_PROBE in text and "'type'" not in text and '"type"' not in text)
        return seen == [False, True]


class _RefusedError(Exception):
    """What a template's raise_exception raises, told apart from jinja2's own errors."""


def import_jinja2() -> None:
    """Checks that jinja2 is there, and new enough for its sandbox to hold.

    Raises:
        ImportError: It is missing or too old.
    """
    try:
        import jinja2
    except ImportError:
        raise ImportError(
            "chat templates need the package jinja2: pip install 'linnet[models]'"
        ) from None
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < (3, 1, 6):
        raise ImportError(
            f"chat templates need jinja2 3.1.6 or newer, whose sandbox has no known way out; "
            f"{jinja2.__version__} is installed: pip install -U jinja2"
        )


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says, for training; here it only passes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _refuse(message: str = "the chat template refused the messages") -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _plain_message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'a message must be an object with a "role", found {message!r}')
    turn = {key: _plain(value, "a message") for key, value in message.items() if value is not None}
    turn["content"] = _content_text(turn.get("content", ""), message["role"])
    for function in _called(turn):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed: Any = json.loads(arguments)
            except ValueError:
                continue
            if isinstance(parsed, dict):
                function["arguments"] = parsed
    return turn


def _content_text(content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"content of a {role} message must be text or a list of parts, found {content!r}"
        )
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(text := as_object(part).get("text"), str):
            texts.append(text)
        else:
            raise ValueError(
                f"a {role} message has a content part that is not text ({part!r}); this model "
                'reads text parts: {"type": "text", "text": ...}'
            )
    return "".join(texts)


def _arguments_as_text(turns: list[dict[str, Any]]) -> None:
    for turn in turns:
        for function in _called(turn):
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def _called(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions of a turn's tool calls, which some clients nest one level less."""
    calls = [as_object(call) for call in as_list(turn.get("tool_calls"))]
    return [as_object(call.get("function", call)) for call in calls]


def _plain(value: Any, what: str) -> Any:
    """A copy out of JSON's own types: nothing else has methods that a template may reach."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(item, what) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [_plain(item, what) for item in cast("Sequence[Any]", value)]
    raise ValueError(f"{what} holds a {type(value).__name__}; expected what JSON can hold")
