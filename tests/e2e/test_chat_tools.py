"""`fissile chat --tools`, by a pipe and on a terminal, against a real router with a scripted worker."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.text.tokenizer import Tokenizer
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import Bench, bench
from tests.e2e.test_chat import command, terminal
from tests.unit.router.support import EOS, thinking_files, tool_files

FILES = tool_files()
TOKENIZER = Tokenizer.from_files(FILES)
TOOLS = [
    {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
    {"type": "function", "function": {"name": "wait"}},
]
ARGUMENTS = '{"at": "la"}'
LOOK = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
WAIT = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
UPPER = "import json, sys; print(json.load(sys.stdin)['at'].upper())"


@pytest.fixture
def tools(tmp_path: Path) -> str:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    return str(file)


def worker(*calling: str, **options: object) -> FakeWorker:
    """A model that says each text in turn, then `done` for ever."""
    said = iter(calling)

    def answer(_: wpb.SubmitSequence) -> list[int]:
        return [*TOKENIZER.encode(f"<think>\n</think>\n\n{next(said, 'done')}"), EOS]

    return FakeWorker(FILES, answer=answer, description={"vocab_size": 304}, **options)  # type: ignore[arg-type]


def prompts(b: Bench) -> list[str]:
    return [TOKENIZER.decode(list(one.token_ids)) for one in b.workers[0].submitted]


async def test_piped_line_is_result_of_tool_call(tools: str, tmp_path: Path) -> None:
    """Each call gets one line; the conversation keeps all of it, in a form that routers accept."""
    kept = tmp_path / "kept.json"
    async with bench(worker(f"so {LOOK}\n{WAIT}", LOOK)) as b:
        text = f"first\nsunny\nlate /x\nagain\nsecond\n/save {kept}\n"
        code, out, err = await command("chat", "--address", b.router.server.address, "--tools", tools, text=text)
        assert (code, out) == (0, f"so\nlook({ARGUMENTS})\nwait({{}})\nlook({ARGUMENTS})\ndone\ndone\n"), err
        said = json.loads(kept.read_text())
        assert [one["role"] for one in said] == [
            *("user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user", "assistant")
        ]
        assert [one["content"] for one in said] == [
            *("first", "so", "sunny", "late /x", "", "again", "done", "second", "done")
        ]
        ids = [call["id"] for one in said for call in one.get("tool_calls", ())]
        assert ids == [one["tool_call_id"] for one in said if one["role"] == "tool"]
        assert '"name": "wait"' in prompts(b)[0]
        assert all(
            f"{result}{id}" in prompts(b)[-1] for result, id in zip(("sunny", "late /x", "again"), ids, strict=True)
        )
        await b.empty()


async def test_pipe_chat_ending_at_tool_call_drops_it(tools: str) -> None:
    async with bench(worker(LOOK)) as b:
        code, out, err = await command("chat", "--address", b.router.server.address, "--tools", tools, text="first\n")
        assert (code, out) == (0, f"look({ARGUMENTS})\n")
        assert "the calls are left out" in err


async def test_cut_tool_calls_are_left_out(tools: str) -> None:
    """Routers refuse arguments that are not JSON."""
    async with bench(worker(LOOK)) as b:
        at = ("chat", "--address", b.router.server.address, "--tools", tools, "--max-tokens", "40")
        code, out, err = await command(*at, text="first\nsecond\n")
        assert (code, out.startswith("look("), out.endswith("\ndone\n")) == (0, True, True), (out, err)
        assert "the calls are left out" in err
        assert "because of its length" in err
        assert "first" not in prompts(b)[-1]


async def test_tool_command_gives_result_of_call(tools: str) -> None:
    async with bench(worker(LOOK, WAIT)) as b:
        at = ("chat", "--address", b.router.server.address, "--tools", tools)
        look = f'look={sys.executable} -c "{UPPER}"'
        code, out, err = await command(*at, "--tool-command", look, "--no-confirm", text="first\ntyped\n")
        assert (code, out) == (0, f"look({ARGUMENTS})\nwait({{}})\ndone\n"), err
        assert "tool\nLA" in prompts(b)[1]
        assert "tool\ntyped" in prompts(b)[2]


async def test_environment_commands_may_contain_blanks(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = f'{sys.executable} -c "print(7)"'
    monkeypatch.setenv("FISSILE_TOOL_COMMAND", f"look={shown}\nwait={shown}")
    async with bench(worker(f"{LOOK}\n{WAIT}")) as b:
        at = ("chat", "--address", b.router.server.address, "--tools", tools, "--no-confirm")
        code, out, err = await command(*at, text="first\n")
        assert (code, out) == (0, f"look({ARGUMENTS})\nwait({{}})\ndone\n"), err
        assert prompts(b)[1].count("tool\n7") == 2


async def test_failed_tool_command_ends_piped_chat(tools: str) -> None:
    async with bench(worker(LOOK, LOOK)) as b:
        at = ("chat", "--address", b.router.server.address, "--tools", tools, "--no-confirm")
        failing = f"look={sys.executable} -c \"import sys; sys.exit('no way')\""
        code, out, err = await command(*at, "--tool-command", failing, text="first\nnever\n")
        assert (code, out) == (1, f"look({ARGUMENTS})\n")
        assert "ended with 1: no way" in err
        code, _, err = await command(*at, "--tool-command", "look=/no/such/program", text="first\n")
        assert (code, "/no/such/program cannot be run: No such file" in err) == (1, True), err


async def test_terminal_asks_for_results_and_confirms_tool_commands(tools: str) -> None:
    run = ("--tools", tools, "--tool-command", f'look={sys.executable} -c "{UPPER}"')
    async with bench(worker(LOOK, "done", LOOK, "done", LOOK, WAIT)) as b, terminal(b, *run) as chat:
        for answer, result in (("y\n", ""), ("n\n", "typed\n"), ("\x03", "")):
            chat.type("ask\n")
            await chat.sees(f"look({ARGUMENTS})")
            await chat.sees("with these arguments? [y/N] ")
            chat.type(answer)
            if result:
                await chat.sees("result of look> ")
                chat.type(result)
            await chat.sees("(ended)" if answer == "\x03" else "done")
            await chat.sees("> ")
        chat.type("last\n")
        await chat.sees("wait({})")
        await chat.sees("result of wait> ")
        chat.type("\n")
        await chat.sees("done")
        last = prompts(b)[-1]
        assert (last.count("tool\nLA"), last.count("tool\ntyped"), last.count("user\nask")) == (1, 1, 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read from"),
        ("[", "is not valid JSON"),
        ("{}", "is not a list of tools"),
        ("[]", "is not a list of tools"),
        ('[{"description": "x"}]', "tool 1 has no name"),
        ('[{"name": "a"}, {"name": "b", "schema": {}}]', "tool 2 has 'schema'"),
        ('[{"name": "a", "parameters": "x"}]', "tool 1 has parameters 'x'; it is a JSON Schema"),
        ('[{"name": "a", "strict": 1}]', "tool 1 has strict 1; it is true or false"),
        ('[{"name": "a"}]', "is for 'look', which is not a tool; there are a"),
    ],
)
async def test_bad_tools_file_is_refused_before_first_call(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "tools.json"
    if content is not None:
        file.write_text(content)
    at = ("chat", "--address", "127.0.0.1:1", "--tools", str(file), "--tool-command", "look=true")
    code, _, err = await command(*at, text="first\n")
    assert (code, problem in err) == (2, True), err


async def test_tools_are_refused_for_model_without_tools(tools: str) -> None:
    async with bench(FakeWorker(thinking_files(), description={"vocab_size": 302})) as b:
        code, _, err = await command("chat", "--address", b.router.server.address, "--tools", tools, text="hi\n")
        assert (code, "knows no tools: leave --tools away" in err) == (2, True), err
