"""The response is the answer, to the letter; white space around either does not count."""

from __future__ import annotations

from megarl.data.prompts import Prompt
from megarl.rewards import right_answer


class Exact:
    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == right_answer(prompt).strip())
