"""Thirty shapes of conversations, as rows of a data set: `messages`, and `tools` where there are.

Reasoning stands in `reasoning_content` and the arguments of calls are objects.
"""

from typing import Any

Message = dict[str, Any]


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, thought: str | None = None, **extra: Any) -> Message:
    reasoning = {} if thought is None else {"reasoning_content": thought}
    return {"role": "assistant", "content": content, **reasoning, **extra}


def call(name: str, thought: str | None = None, content: str = "", **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": "call00001", "function": function}]
    return answer(content, thought, tool_calls=calls)


def result(content: str) -> Message:
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}},
                "required": ["town"],
            },
        },
    }
    for name in ("weather", "population")
]
ROME = call("weather", town="Rome")
ASKED = user("How warm is Rome?")
WARM = result("21 degrees")
LONG = "A line that is rather long, so that it goes over many tokens. " * 12
CAPITAL = user("What is the capital of France?")

SHAPES: dict[str, list[Message]] = {
    "one round": [CAPITAL, answer("It is Paris.")],
    "two rounds": [CAPITAL, answer("It is Paris."), user("Of Italy?"), answer("Rome.")],
    "five rounds": [
        m for i in range(5) for m in (user(f"What is {i} + 1?"), answer(f"That is {i + 1}."))
    ],
    "system": [system("Answer in one word."), CAPITAL, answer("Paris")],
    "system, two rounds": [
        system("Be brief."),
        CAPITAL,
        answer("Paris."),
        user("Really?"),
        answer("Yes."),
    ],
    "developer": [{"role": "developer", "content": "Answer in rhyme."}, CAPITAL, answer("Paris!")],
    "late system": [CAPITAL, answer("Paris."), system("Now in French."), user("?"), answer("Oui.")],
    "one letter": [user("Q"), answer("A")],
    "same answer twice": [user("Say yes"), answer("yes"), user("Say yes again"), answer("yes")],
    "answer is the question": [user("assistant"), answer("assistant")],
    "several lines": [user("A list"), answer("- one\n- two\n\n- three")],
    "spaces around": [user("  Indent? "), answer("  yes, by two ")],
    "newlines around": [user("Code"), answer("\n\ndef f():\n    pass\n\n")],
    "other alphabets": [user("Grüße, 你好?"), answer("Привет! 你好 🙂 é")],
    "markup": [user("<b> & {{ x }}?"), answer("<b>{% raw %} & 'x' \"y\" \\n</b>")],
    "long": [user(LONG), answer(LONG + "End.")],
    "thought": [CAPITAL, answer("Paris.", "France is a country.\nIts capital is Paris.")],
    "thought in every round": [
        CAPITAL,
        answer("Paris.", "I know France."),
        user("Of Italy?"),
        answer("Rome.", "I know Italy."),
    ],
    "thought in the first round": [
        CAPITAL,
        answer("Paris.", "I know France."),
        user("Of Italy?"),
        answer("Rome."),
    ],
    "thought in the content": [CAPITAL, answer("<think>\nI know.\n</think>\n\nParis.")],
    "thought closed in the content": [CAPITAL, answer("I know.\n</think>\n\nParis.")],
    "call": [ASKED, ROME, WARM, answer("It is 21 degrees.")],
    "call at the end": [ASKED, ROME],
    "calls in a chain": [
        ASKED,
        ROME,
        WARM,
        call("population", town="Rome"),
        result("2.8 million"),
        answer("21 degrees for 2.8 million."),
    ],
    "call with thought": [
        ASKED,
        call("weather", "I must look it up.", town="Rome"),
        WARM,
        answer("It is 21 degrees.", "The result says 21."),
    ],
    "call in an earlier round": [ASKED, ROME, WARM, answer("21."), user("Thanks"), answer("Sure.")],
    "call with content": [ASKED, call("weather", content="Let me see.", town="Rome"), WARM],
    "untrained answer": [
        CAPITAL,
        answer("Berlin.", train=False),
        user("Sure?"),
        answer("No: Paris.", weight=1),
    ],
    "question without answer": [CAPITAL, answer("Paris."), user("Of Italy?")],
    "answer first": [answer("Welcome."), CAPITAL, answer("Paris.")],
}
