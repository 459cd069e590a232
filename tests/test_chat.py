"""Chat templates: rendered as transformers does, sandboxed, and with errors that say what is wrong."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyvllm.chat import choose_template, load_template, render_chat
from pyvllm.tokenizer import load_tokenizer
from tests.conftest import TinyCheckpoint

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
BLOCKS = """
{%- set ns = namespace(system='', turns=0) -%}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message['content'] %}
        {%- continue %}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<' + message.role + '>' }}
    {% if message.role == 'assistant' %}
    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
    {{ message.content }}
    {% endif %}
    {%- if ns.turns > 8 %}{% break %}{% endif %}
{%- endfor %}
{{ ns.system }}|{{ ns.turns }}|{{ strftime_now('%Y') }}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
TOOLS = """
{%- if tools %}{{ tools | tojson(indent=2) }}{{ tools | length }}{% endif %}
{%- for d in documents or [] %}{{ loop.index }}: {{ d.title }}{{ d | tojson }}{% endfor %}
{%- for m in messages %}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{{- m.reasoning_content }}{{ m.content }}{{ dict(a=1).a }}
{%- endfor %}{{ extra }}{{ enable_thinking is defined and enable_thinking is false }}
"""
TEMPLATES = {"chatml": CHATML, "stripping": STRIPPING, "blocks": BLOCKS, "tools": TOOLS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
QUESTION = [{"role": "user", "content": "hi"}]
TALK = [{"role": "system", "content": "Be <kind> & brief."}, *QUESTION, {"role": "assistant", "content": " ok then "}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "naïve", "parameters": {"a": [1, 2.5, None]}},
}


def transformers_render(template: str, messages: list[Any], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], chat_template=template, **options)
    return texts[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [QUESTION, TALK], ids=["question", "talk"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL, TOOL], "documents": [{"title": "<T>", "text": "x"}]},
    ],
    ids=str,
)
def test_equals_transformers(name: str, messages: list[Any], options: dict[str, Any]) -> None:
    extra = {"extra": "é", "enable_thinking": False}
    text = render_chat(TEMPLATES[name], messages, special_tokens=SPECIAL, template_kwargs=extra, **options)
    options = {"add_generation_prompt": True} | options
    assert text == transformers_render(TEMPLATES[name], messages, **SPECIAL, **extra, **options)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=6)), min_size=1, max_size=4),
    st.sampled_from(sorted(TEMPLATES)),
    st.booleans(),
)
def test_any_text_equals_transformers(turns: list[tuple[str, str]], name: str, go_on: bool) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    # A last message without letters may be cut at another of its copies by transformers.
    messages[-1]["content"] += "end "
    options: dict[str, Any] = {"add_generation_prompt": not go_on, "continue_final_message": go_on}
    assume(not go_on or name != "blocks")  # which does not write a system message where it stands
    text = render_chat(TEMPLATES[name], messages, special_tokens=SPECIAL, **options)
    assert text == transformers_render(TEMPLATES[name], messages, **SPECIAL, **options)


def test_b102_bos_is_there_once(tiny_checkpoint: TinyCheckpoint) -> None:
    from transformers import AutoTokenizer

    folder = tiny_checkpoint("llama")
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.render_chat(TALK, chat_template=STRIPPING)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(TALK, chat_template=STRIPPING, return_dict=False)
    assert ids.count(tokenizer.bos_token_id or -1) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate: ' + messages[0].role) }}", "roles must alternate: user"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{% for m in %}", "line 1"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError.*Range too big"),
        ("{{ tools | nofilter }}", "nofilter"),
    ],
)
def test_b103_the_template_has_its_say(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)chat template.*{message}"):
        render_chat(template, QUESTION)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}], "hi\nyou"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([], ""),
        (None, ""),
    ],
)
def test_b104_forms_of_content(content: Any, expected: str) -> None:
    assert render_chat("{{ messages[0].content }}|", [{"role": "user", "content": content}]) == expected + "|"


def test_b104_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    messages = [{"role": "assistant", "tool_calls": [call], "name": None}]
    template = (
        "{{ messages[0].content }}{{ messages[0].tool_calls[0].function | tojson }}{{ messages[0].name is defined }}"
    )
    assert render_chat(template, messages) == '{"name": "f", "arguments": {"a": [1, "é"]}}False'
    assert call["function"]["arguments"] == '{"a": [1, "é"]}', "what was given stays as it was"  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "hi"}], r"messages\[0\]\.role is None"),
        ([*QUESTION, {"role": 1, "content": "hi"}], r"messages\[1\]\.role is 1"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be a string or a list"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\]\.content\[0\] must be a part"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]\.type is 'image_url'"),
        ([{"role": "user", "content": [{"text": "hi"}]}], r"content\[0\]\.type is None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is None"),
        ([{"role": "user", "content": b"hi"}], r"messages\[0\]\.content must be made of .* got bytes"),
        ([{"role": "user", "x": {"y": [object()]}}], r"messages\[0\]\.x\.y\[0\] must be made of .* got object"),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], r"arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "[]"}}]}], r"must be a JSON object"),
    ],
)
def test_b104_what_is_no_message(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(CHATML, messages)


@pytest.mark.parametrize(
    "expression",
    [
        "raise_exception.__globals__",
        "strftime_now.__globals__['json']",
        "messages.__class__.__base__.__subclasses__()",
        "cycler.__init__.__globals__.os.popen('touch MARKER')",
        "lipsum.__globals__['os'].popen('touch MARKER')",
        "namespace.__init__.__globals__['Path']('MARKER').touch()",
        "dict.__call__.__globals__",
        "(messages | attr('__class__')).__mro__",
        "'{0.__class__.__init__.__globals__}'.format(raise_exception)",
        "'{x.__class__.__mro__}'.format_map({'x': cycler})",
        "namespace(__class__=1)",
        "messages.append(1)",
        "messages[0].update(role='x')",
    ],
)
def test_s044_templates_reach_nothing_but_their_input(expression: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(ValueError, match=r"unsafe|not safely callable|may not have the attribute"):
        render_chat("{{ (" + expression.replace("MARKER", str(marker)) + ").x }}", QUESTION)
    assert not marker.exists()


def test_s044_objects_do_not_reach_the_template() -> None:
    class Text(str):
        def shout(self) -> str:
            return self.upper()

    with pytest.raises(ValueError, match="has no attribute 'shout'"):
        render_chat("{{ messages[0].content.shout() }}", [{"role": "user", "content": Text("hi")}])
    with pytest.raises(ValueError, match=r"chat_template_kwargs\['x'\] must be made of"):
        render_chat(CHATML, QUESTION, template_kwargs={"x": Path("/")})


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "tools", "add_generation_prompt"])
def test_s028_template_kwargs_do_not_stand_in_for_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs may not have {name}"):
        render_chat(CHATML, QUESTION, template_kwargs={name: True})


def test_special_tokens_may_be_replaced() -> None:
    text = render_chat(
        "{{ bos_token }}{{ eos_token }}", QUESTION, special_tokens=SPECIAL, template_kwargs={"bos_token": "<b>"}
    )
    assert text == "<b></s>"


def test_variables_may_have_any_other_name() -> None:
    given = {"template": "a", "variables": "b", "self": "c", "where": "d"}
    assert render_chat("{{ template }}{{ variables }}{{ where }}", QUESTION, template_kwargs=given) == "abd"


def test_begin_an_answer_or_go_on_with_one() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        render_chat(CHATML, TALK, continue_final_message=True)
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert render_chat(CHATML, TALK, **options).endswith("<|im_start|>assistant\n ok then ")
    with pytest.raises(ValueError, match="does not write the final message"):
        render_chat("{{ messages[0].content }}", TALK, **options)


def test_dates_are_of_today() -> None:
    assert render_chat("{{ strftime_now('%d %b %Y') }}", QUESTION) == datetime.now().strftime("%d %b %Y")


# --- which template ---------------------------------------------------------------------------------------------------


def test_templates_by_name_text_and_path(tmp_path: Path) -> None:
    models = {"default": "D", "tool_use": "T", "rag": "R"}
    assert choose_template(models, None) == "D"
    assert choose_template(models, None, has_tools=True) == "T"
    assert choose_template({"default": "D"}, None, has_tools=True) == "D"
    assert choose_template(models, "rag", has_tools=True) == "R"
    assert choose_template(models, "{{ x }}") == load_template("{{ x }}") == "{{ x }}"
    path = tmp_path / "mine.jinja"
    path.write_text("{{ é }}", encoding="utf-8")
    assert choose_template({}, str(path)) == "{{ é }}"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"mine\.jinja: not UTF-8"):
        load_template(str(path))


def test_no_template_and_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no chat template.*pass chat_template"):
        choose_template({}, None)
    with pytest.raises(ValueError, match="must be one of a, b"):
        choose_template({"a": "", "b": ""}, None)
    with pytest.raises(FileNotFoundError, match=r"chat_template is 'nowhere\.jinja'"):
        choose_template({"default": "D"}, "nowhere.jinja")


@pytest.mark.parametrize("kind", ["none", "settings", "named", "file", "files"])
def test_where_a_model_keeps_its_templates(kind: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("llama") / "tokenizer.json", tmp_path)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    settings = {"settings": {"chat_template": "S"}, "named": {"chat_template": named}, "file": {"chat_template": "S"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings.get(kind, {})), encoding="utf-8")
    if kind in ("file", "files"):
        (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    if kind == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U", encoding="utf-8")
    expected = {
        "none": {},
        "settings": {"default": "S"},
        "named": {"default": "D", "tool_use": "T"},
        "file": {"default": "F"},
        "files": {"default": "F", "tool_use": "U"},
    }
    assert load_tokenizer(tmp_path).chat_templates == expected[kind]
