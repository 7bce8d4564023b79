"""Logprobs in OpenAI's two forms: entries of chat completions, columns of completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fissile.v1 import inference_pb2 as pb

# JSON has no infinity; OpenAI writes this for tokens that cannot be chosen.
_LEAST: Final = -9999.0


class LogprobForm:
    """Form of the tokens beside logprobs.

    Args:
        as_ids: True writes `token_id:N` instead of the text, for callers who count in ids.
    """

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids

    def name(self, token: pb.TokenLogprobs | pb.TopLogprob) -> str:
        """The token as a text; a part of a character is U+FFFD."""
        return f"token_id:{token.token_id}" if self._as_ids else token.token_bytes.decode("utf-8", "replace")

    def chat(self, entries: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of a choice of a chat completion."""
        return {
            "content": [{**self._one(e), "top_logprobs": [*map(self._one, e.top)]} for e in entries],
            "refusal": None,
        }

    def _one(self, token: pb.TokenLogprobs | pb.TopLogprob) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": _finite(token.logprob), "bytes": [*token.token_bytes]}

    def columns(
        self, entries: Sequence[pb.TokenLogprobs], start: int, first: str | None = None, *, has_top: bool
    ) -> tuple[dict[str, Any], int]:
        """`logprobs` of a choice of a completion.

        Args:
            entries: of the tokens that follow each other.
            start: characters of the choice's text before them.
            first: text of a token before them that has no logprob: the prompt's first one.
            has_top: False leaves `top_logprobs` empty.

        Returns:
            The columns, and the characters of the text until their end.
        """
        tokens = [] if first is None else [first]
        tokens += map(self.name, entries)
        texts = ["" if first is None else first, *(e.token_bytes.decode("utf-8", "replace") for e in entries)]
        lengths = [*map(len, texts)][first is None :]
        offsets = [start + sum(lengths[:i]) for i in range(len(lengths))]
        missing: list[Any] = [] if first is None else [None]
        top = [*map(self._named, entries)]
        columns = {
            "tokens": tokens,
            "token_logprobs": [*missing, *(_finite(e.logprob) for e in entries)],
            "top_logprobs": [*missing, *top] if has_top else None,
            "text_offset": offsets,
        }
        return columns, start + sum(lengths)

    def _named(self, entry: pb.TokenLogprobs) -> dict[str, float]:
        """Logprobs by text; tokens of one text share the highest, so that a less likely one is not taken for greedy."""
        found: dict[str, float] = {}
        for token in _with_top(entry):
            found.setdefault(self.name(token), _finite(token.logprob))
        return found

    def of_prompt(self, entries: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` as vLLM has them: the first token has none."""
        return [None, *map(self._ranked, entries)]

    def _ranked(self, entry: pb.TokenLogprobs) -> dict[str, Any]:
        ranks = [*range(1, len(entry.top) + 1), entry.rank]
        return {
            str(token.token_id): {
                "logprob": _finite(token.logprob),
                "rank": rank,
                "decoded_token": self.name(token),
            }
            for rank, token in zip(ranks, _with_top(entry), strict=True)
        }


def _with_top(entry: pb.TokenLogprobs) -> list[pb.TokenLogprobs | pb.TopLogprob]:
    """The most likely tokens, and the token itself."""
    return [*entry.top, entry]


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
