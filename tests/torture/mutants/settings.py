"""Configuration files and values of options that no one would write."""

from __future__ import annotations

from random import Random

from tests.torture.mutants.bytes_ import damaged

__all__ = ["config_text", "odd_option"]

_KEYS = (
    "tokenizer", "chat-template", "template-args", "template-arg", "template-seconds", "select", "ignore",
    "fail-on", "max-rate", "require", "format", "map", "rows-at", "messages", "tools", "on", "session", "join",
    "limit", "sample", "max-row-bytes", "report", "jobs", "engine", "extend", "overrides", "severity", "baseline",
    "clock", "worst", "sampled-role", "min-audited", "with", "unknown-key", "template_name", "encoder", "padding",
    "",
)  # fmt: skip
_VALUES = (
    "true", "1", "-1", "0", "1.5", "nan", "inf", "''", '"x"', '"\\u0000"', "[]", "[1]", '["TOK"]', "{}", "{a = 1}",
    "1979-05-27", "07:32:00", '"""\nlong\n"""', "99999999999999999999", '["a", 1, {}]', "[[], [[]]]", '"50%"',
    '"TOK=0.1"', "{TOK = 0.1}", '{TOK = "x"}', '"never"', '"../other.toml"', '["self.toml"]', "1e400",
    '"' + "x" * 5000 + '"', "[" * 50 + "]" * 50, "[" * 2000 + "]" * 2000, '"\\u001b[31m"', "0x_1", "'unclosed",
    '"fixtures/tokenizers/toy_bpe"', '"slime"', "{prompt_ids = 'a.b'}", '"recorded"', '"2024-13-99"', "{'' = 1}",
)  # fmt: skip
_WHOLE = (
    b"\xff\xfe\0", b"", b"[tool]", b"[tool.tito-audit]\n[tool.tito-audit]\n", b"tool = 1",
    b"[[tool.tito-audit]]\n", b"tool.tito-audit = 5\n", b"\xef\xbb\xbfselect = ['TOK']\n",
    b"select = ['TOK']\r\nselect = ['SEQ']\r\n", b"a.b.c.d = 1\na.b = 2\n", b"extend = 'tito-audit.toml'\n",
    b"extend = ['.', '/dev/null', '/no/such']\n", b"[" * 3000, b"x = " + b"{a = " * 1500 + b"1" + b"}" * 1500,
    b"select = 'TOK'\0\n", b"# only a comment",
)  # fmt: skip
_ODD_OPTIONS = (
    ("--map", ("prompt_ids=a", "tokens=", "=", "x", "messages=messages[0]", "prompt_ids=..",
        "token_ids=tokens", "logprobs=rollout_log_probs", "a=b=c", "prompt_ids=a[99999999999999999999]",
        "prompt_ids=a[-1]")),
    ("--rows-at", ("", "a", "rows", "messages", ".", "a..b", "[0]", "tokens", "x" * 3000, "messages[0]", "nodes")),
    ("--session", ("", "id", "a.b", "messages", "\x1b[31m", "x" * 3000, "[0]", "metadata")),
    ("--format", ("slime", "generic", "nemo_gym", "vllm", "tinker", "verl_batch", "nothing", "", "text_only",
        "atif", "verifiers_v1", "harbor", "prime_rl_tokens", "art_group", "openai_chat", "miles_columns", "areal",
        "rllm_episode", "nemo_rl", "miles_session", "agent_lightning_span", "atropos_node", "marin", "sglang")),
    ("--format", ("slime", "generic", "nemo_gym", "vllm", "tinker", "verl_batch", "skyrl_generator",
        "gateway", "verifiers_v1", "harbor", "prime_rl_tokens", "art_group", "openai_chat", "miles_columns",
        "areal", "rllm_episode", "nemo_rl", "miles_session", "agent_lightning_event", "atropos_group",
        "trl_rollout", "nemo_gym_tokens", "nemo_rl_message_log", "verifiers_results", "tito_call",
        "rllm_gateway")),
    ("--select", ("", "TOK", "ZZZ", ",", "TOK101,", "tok", "ALL", "\0".replace("\0", "\x01"), "REC002")),
    ("--ignore", ("", "ALL", "TOK,SEQ", "x" * 2000)),
    ("--clock", ("recorded", "2024-07-26", "9999-99-99", "", "0000-01-01", "now", "9999-12-31")),
    ("--template-arg", ("a=b", "=", "a", "enable_thinking=false", "x=[1", "messages=1", "x=" + "[" * 5000)),
    ("--template-seconds", ("0", "-1", "nan", "inf", "1e400", "0.0001", "x", "1e308")),
    ("--sampled-role", ("assistant", "", "user", "\x1b[31m", "x" * 3000)),
    ("--max-row-bytes", ("0", "-1", "1", "99999999999999999999", "x", "1.5")),
    ("--tool-arguments", ("auto", "object", "string", "none")),
    ("--tools", ("none", "/dev/null", "/no/such", "{in}", "fixtures")),
    ("--messages", ("/dev/null", "/no/such", "{in}/log.jsonl", "{in}")),
    ("--on", ("id", "a=b", "=", "messages", "a=b=c")),
    ("--chat-template", ("/dev/null", "/no/such", "{in}", "{in}/log.jsonl")),
    ("--template-name", ("default", "", "tool_use", "x" * 3000)),
)  # fmt: skip


def odd_option(dice: Random) -> list[str]:
    """An option with an odd value."""
    flag, values = dice.choice(_ODD_OPTIONS)
    return [flag, dice.choice(values)]


def config_text(dice: Random) -> tuple[str, bytes]:
    """The name and text of a configuration file."""
    name = dice.choice(("tito-audit.toml", "tito-audit.toml", "pyproject.toml", "other.toml"))
    if dice.random() < 0.1:
        return name, dice.choice(_WHOLE)
    lines = [f"{_key(dice)} = {dice.choice(_VALUES)}" for _ in range(dice.choice((1, 1, 1, 2, 4)))]
    if dice.random() < 0.25:
        lines += ["[[overrides]]" if name != "pyproject.toml" else "[[tool.tito-audit.overrides]]"]
        lines += ["logs = " + dice.choice(("[1]", '"*"', '["*.jsonl"]', '["**/["]'))] * dice.choice((0, 1, 1))
        lines += [f"{_key(dice)} = {dice.choice(_VALUES)}" for _ in range(dice.choice((1, 2)))]
    if name == "pyproject.toml":
        lines = [dice.choice(("[tool.tito-audit]", "[tool.tito-audit]", "[tool]", "[tool.'tito-audit']")), *lines]
    data = "\n".join(lines).encode() + b"\n"
    return name, damaged(dice, data) if dice.random() < 0.25 else data


def _key(dice: Random) -> str:
    key = dice.choice(_KEYS)
    return dice.choice((key, key, key, f'"{key}"', f"{key}.x", key.upper())) or '""'
